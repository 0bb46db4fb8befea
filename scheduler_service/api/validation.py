"""A GenerateRequest checked field by field, once, and turned into a frozen value.

Pure but for the tokenizer it is given. Knows nothing of workers or stores: what
depends on them (the split, the worker's name, memory) is decided later.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitpoint.checkpoint.text import TooManyTokens
from splitpoint.errors import FailedPrecondition, InvalidArgument, NotFound
from splitpoint.keys import SALT_LIMIT
from splitpoint.planning.planner import Residency, RestoreMethod, check_forced_method
from splitpoint.transport.convert import method_from_proto, residency_from_proto
from splitpoint.v1 import scheduler_pb2, types_pb2
from splitpoint.words import counted

REQUEST_ID_LIMIT = 64
DEFAULT_MAX_TOKENS = 128
STOP_LIMIT = 16
STOP_BYTES_LIMIT = 256
STOP_TOKEN_LIMIT = 64
LOGIT_BIAS_LIMIT = 1024
LOGPROBS_LIMIT = 20

# Text to at most so many token ids; raises TooManyTokens beyond them.
Encode = Callable[[str, int], list[int]]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The served model, as far as a request can contradict it."""

    name: str
    vocabulary_size: int
    context_length: int


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """A request that is right in itself."""

    request_id: str
    # Whose request it is; request ids and cached prefixes are its own.
    tenant: str
    # Equal for equal requests, request_id aside.
    body_digest: bytes
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    # For the worker: as sent, with max_tokens and seed filled in. Never changed.
    sampling: types_pb2.SamplingParams
    cache_salt: bytes
    worker_id: str
    # None: as the plan says.
    split_tokens: int | None
    restore_method: RestoreMethod | None
    # None: let the footprint decide.
    residency: Residency | None

    @property
    def token_count(self) -> int:
        """Tokens of the sequence if it runs to max_tokens."""
        return len(self.prompt) + self.max_tokens


def validate_generate(
    request: scheduler_pb2.GenerateRequest,
    model: ModelFacts,
    encode: Encode | None,
    *,
    draw_seed: Callable[[], int],
    draw_request_id: Callable[[], str],
    tenant: str = "",
) -> GenerateInput:
    """Checks everything, tokenizes text, fills in what was left open.

    Args:
        encode: None when the model has no tokenizer.
        draw_seed: a seed in [0, 2**63) for requests without one.
        draw_request_id: a name for requests without one.
        tenant: the caller's.

    Raises InvalidArgument with the field's path, NotFound for another model,
    FailedPrecondition when text needs a tokenizer that is not there.
    """
    check_model(request.model, model)
    if request.request_id:
        _check_request_id(request.request_id)
    if len(request.cache_salt) > SALT_LIMIT:
        raise InvalidArgument(
            f"{len(request.cache_salt)} bytes of salt, at most {SALT_LIMIT}", field="cache_salt"
        )
    residency = optional_residency(request.residency)
    split = request.split_tokens if request.HasField("split_tokens") else None
    if split is not None and split < 0:
        raise InvalidArgument("split_tokens must be at least 0", field="split_tokens")
    method = _restore_method(request.restore_method)
    if method is not None:
        check_forced_method(method, split, residency)
        if method is RestoreMethod.TOKENS:
            residency = Residency.RESIDENT  # a streamed prefix could not be recomputed
    _check_sampling(request.sampling, model, has_tokenizer=encode is not None)
    prompt = _prompt_of(request, model, encode)
    sampling = types_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    room = model.context_length - len(prompt)  # at least 1, or _prompt_of had refused
    if not sampling.HasField("max_tokens"):
        sampling.max_tokens = min(DEFAULT_MAX_TOKENS, room)
    if sampling.max_tokens > room:
        raise InvalidArgument(
            f"{counted(len(prompt), 'prompt token')} and {sampling.max_tokens:,} new ones exceed "
            f"the context of {model.context_length:,}",
            field="sampling.max_tokens",
            reason="CONTEXT_EXCEEDED",
            prompt_tokens=len(prompt),
            context_length=model.context_length,
        )
    if not sampling.HasField("seed"):
        sampling.seed = draw_seed()
    return GenerateInput(
        request_id=request.request_id or draw_request_id(),
        tenant=tenant,
        body_digest=_digest_of(request),
        prompt=prompt,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        seed=sampling.seed,
        stop=tuple(sampling.stop),
        stop_token_ids=frozenset(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        sampling=sampling,
        cache_salt=request.cache_salt,
        worker_id=request.worker_id,
        split_tokens=split,
        restore_method=method,
        residency=residency,
    )


def check_model(name: str, model: ModelFacts) -> None:
    """Empty means the only model. Raises NotFound."""
    if name not in ("", model.name):
        raise NotFound(f"no such model; {model.name!r} is served", reason="MODEL_NOT_FOUND")


def optional_residency(number: int) -> Residency | None:
    """None for unspecified. Raises InvalidArgument for an unknown number."""
    if number == types_pb2.RESIDENCY_UNSPECIFIED:
        return None
    return residency_from_proto(number)


def _restore_method(number: int) -> RestoreMethod | None:
    """None for unspecified. Raises InvalidArgument for an unknown number."""
    if number == types_pb2.RESTORE_METHOD_UNSPECIFIED:
        return None
    try:
        return method_from_proto(number)
    except InvalidArgument as error:
        raise InvalidArgument(error.message, field="restore_method") from error


def check_text(text: str, encode: Encode | None, most: int) -> list[int]:
    """Token ids of a text, at most `most`.

    Raises InvalidArgument (empty), FailedPrecondition (no tokenizer), TooManyTokens.
    """
    if not text:
        raise InvalidArgument("the text is empty", field="text")
    if encode is None:
        raise FailedPrecondition(
            "the model has no tokenizer: send token ids", reason="NO_TOKENIZER"
        )
    return encode(text, most)


def _check_request_id(request_id: str) -> None:
    if len(request_id) > REQUEST_ID_LIMIT or not request_id.isprintable():
        raise InvalidArgument(
            f"a request_id has 1 to {REQUEST_ID_LIMIT} printable characters", field="request_id"
        )


def prompt_exceeds(error: TooManyTokens, field: str, context_length: int) -> InvalidArgument:
    return InvalidArgument(
        f"a prompt of {error} leaves no room in the context of {context_length:,}",
        field=field,
        reason="CONTEXT_EXCEEDED",
        prompt_tokens=error.count,
        context_length=context_length,
    )


def _prompt_of(
    request: scheduler_pb2.GenerateRequest,
    model: ModelFacts,
    encode: Encode | None,
) -> tuple[int, ...]:
    """The prompt's tokens. They are counted before anything is made for each of them."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgument("neither text nor token_ids is set", field="prompt")
    most = model.context_length - 1
    if kind == "text":
        field = "text"
        try:
            ids: Sequence[int] = check_text(request.text, encode, most)
        except TooManyTokens as error:
            raise prompt_exceeds(error, field, model.context_length) from None
    else:
        field, count = "token_ids.ids", len(request.token_ids.ids)
        if count > most:
            too_many = TooManyTokens(count, is_exact=True)
            raise prompt_exceeds(too_many, field, model.context_length)
        ids = tuple(request.token_ids.ids)
    if not ids:
        raise InvalidArgument("the prompt is empty", field=field)
    if kind == "text":
        # A tokenizer may know more tokens than the checkpoint has rows for.
        if max(ids) >= model.vocabulary_size:
            raise InvalidArgument("the text holds a token that the model lacks", field=field)
    else:
        _check_tokens(ids, "token_ids.ids", model)
    return tuple(ids)


def _check_tokens(ids: Sequence[int], field: str, model: ModelFacts) -> None:
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < model.vocabulary_size:
            raise InvalidArgument(
                f"token ids must be in [0, {model.vocabulary_size})", field=f"{field}[{index}]"
            )


def _check_sampling(
    sampling: types_pb2.SamplingParams, model: ModelFacts, *, has_tokenizer: bool
) -> None:
    _check_range(sampling, "temperature", 0, math.inf)
    _check_range(sampling, "top_k", 0, math.inf, integer=True)
    _check_range(sampling, "top_p", 0, 1, above=True)
    _check_range(sampling, "min_p", 0, 1)
    _check_range(sampling, "presence_penalty", -2, 2)
    _check_range(sampling, "frequency_penalty", -2, 2)
    _check_range(sampling, "repetition_penalty", 0, math.inf, above=True)
    _check_range(sampling, "max_tokens", 1, math.inf, integer=True)
    _check_range(sampling, "min_tokens", 0, math.inf, integer=True)
    _check_range(sampling, "logprobs", 0, LOGPROBS_LIMIT, integer=True)
    _check_count(len(sampling.logit_bias), "logit_bias", LOGIT_BIAS_LIMIT)
    for token_id, bias in sampling.logit_bias.items():
        if not 0 <= token_id < model.vocabulary_size:
            raise InvalidArgument(
                f"keys must be in [0, {model.vocabulary_size})",
                field=f"sampling.logit_bias[{token_id}]",
            )
        if not -100 <= bias <= 100:
            raise InvalidArgument(
                "biases must be in [-100, 100]", field=f"sampling.logit_bias[{token_id}]"
            )
    _check_count(len(sampling.stop), "stop", STOP_LIMIT)
    for index, stop in enumerate(sampling.stop):
        if not 1 <= len(stop.encode()) <= STOP_BYTES_LIMIT:
            raise InvalidArgument(
                f"a stop string has 1 to {STOP_BYTES_LIMIT} bytes", field=f"sampling.stop[{index}]"
            )
    if sampling.stop and not has_tokenizer:
        raise FailedPrecondition(
            "the model has no tokenizer: stop strings cannot be found", reason="NO_TOKENIZER"
        )
    _check_count(len(sampling.stop_token_ids), "stop_token_ids", STOP_TOKEN_LIMIT)
    _check_tokens(sampling.stop_token_ids, "sampling.stop_token_ids", model)


def _check_range(
    sampling: types_pb2.SamplingParams,
    name: str,
    least: float,
    most: float,
    *,
    above: bool = False,
    integer: bool = False,
) -> None:
    """Absent optional fields pass; NaN and infinity never do."""
    field = sampling.DESCRIPTOR.fields_by_name[name]
    if field.has_presence and not sampling.HasField(name):
        return
    value = getattr(sampling, name)
    # An infinite `most` means unbounded, not that infinity is allowed.
    if math.isfinite(value) and value <= most and (value > least if above else value >= least):
        return
    kind = "an integer" if integer else "finite and"
    low = f"{'above' if above else 'at least'} {least:g}"
    high = "" if math.isinf(most) else f" and at most {most:g}"
    raise InvalidArgument(f"{name} must be {kind} {low}{high}", field=f"sampling.{name}")


def _check_count(count: int, name: str, limit: int) -> None:
    if count > limit:
        raise InvalidArgument(
            f"{counted(count, 'entry', 'entries')}, at most {limit}", field=f"sampling.{name}"
        )


def _digest_of(request: scheduler_pb2.GenerateRequest) -> bytes:
    body = scheduler_pb2.GenerateRequest()
    body.CopyFrom(request)
    body.ClearField("request_id")
    return hashlib.sha256(body.SerializeToString(deterministic=True)).digest()

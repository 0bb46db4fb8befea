"""Checks a GenerateRequest field by field and turns it into a `Request`.

Pure but for the tokenizer and the chat template. What depends on workers or stores (the worker's
name, the split, memory) is decided later.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from scheduler_service.api.prompts import (
    Encode,
    Render,
    bad_word_tokens,
    prompt_of,
)
from scheduler_service.api.request import FROM_THE_START, Request, Resume
from scheduler_service.limits import LEAST_PRIORITY, MOST_PRIORITY
from splitpoint.config import counted
from splitpoint.errors import FailedPrecondition, InvalidArgument, NotFound
from splitpoint.keys import SALT_LIMIT, request_seed
from splitpoint.planning.plan import RECOMPUTED, ForcedRestore, Residency
from splitpoint.sampling import check as check_sampling
from splitpoint.sampling import check_token_ids
from splitpoint.selection import check_speculation
from splitpoint.shapes import ModelShape
from splitpoint.speculation import PLAIN
from splitpoint.transport.convert import (
    method_from_proto,
    residency_from_proto,
    selection_from_proto,
    speculation_from_proto,
)
from splitpoint.v1 import scheduler_pb2, types_pb2

REQUEST_ID_LIMIT = 64
DEFAULT_MAX_TOKENS = 128


def validate_generate(
    request: scheduler_pb2.GenerateRequest,
    model: ModelShape,
    encode: Encode | None,
    *,
    render: Render | None = None,
    tenant: str = "",
    weight: float = 1.0,
    other_names: Sequence[str] = (),
    server_key: bytes,
) -> Request:
    """Check everything, tokenize text, and fill in what was left open.

    `weight`: the tenant's. `other_names`: of the model, besides its own. `encode` is None if the
    model has no tokenizer, `render` if it has no chat template. A request without a seed gets the
    one that every scheduler of this `server_key` gives it.

    Raises InvalidArgument with the field's path, NotFound for another model, and
    FailedPrecondition if it needs a tokenizer or a template that is not there.
    """
    check_model(request.model, (model.name, *other_names))
    _check_names(request)
    forced, residency = _restore_options(request)
    _check_sampling(request.sampling, model, has_tokenizer=encode is not None)
    speculation = speculation_from_proto(request.speculation)
    selection = selection_from_proto(request.selection if request.HasField("selection") else None)
    # What is open is the worker's, and gives way to the selection.
    check_speculation(selection, speculation.over(PLAIN) if speculation.method else None)
    prompt = prompt_of(request, model, encode, render)
    request_id = request.request_id or secrets.token_hex(16)
    sampling = _complete_sampling(request.sampling, len(prompt), model.context_length)
    if not sampling.HasField("seed"):
        sampling.seed = request_seed(server_key, tenant, request_id)
    return Request(
        client_request_id=request_id,
        tenant=tenant,
        weight=weight,
        priority=request.priority,
        body_digest=_digest_of(request),
        prompt=prompt,
        sampling=sampling,
        bad_words=bad_word_tokens(sampling.bad_words, encode),
        cache_salt=request.cache_salt,
        worker_id=request.worker_id,
        forced=forced,
        residency=residency,
        speculation=speculation,
        selection=selection,
        resume=_resume_of(request, sampling.max_tokens, model),
    )


def check_model(name: str, names: Sequence[str]) -> None:
    """Raise NotFound for a name that is none of the served model's; empty names it, too."""
    if name and name not in names:
        served = ", ".join(map(repr, names))
        verb = "is" if len(names) == 1 else "are"
        raise NotFound(f"no such model; {served} {verb} served", reason="MODEL_NOT_FOUND")


def optional_residency(number: int) -> Residency | None:
    """Return None for unspecified. Raises InvalidArgument for an unknown number."""
    if number == types_pb2.RESIDENCY_UNSPECIFIED:
        return None
    return residency_from_proto(number)


def _check_names(request: scheduler_pb2.GenerateRequest) -> None:
    name, salt = request.request_id, request.cache_salt
    if len(name) > REQUEST_ID_LIMIT or not name.isprintable():
        raise InvalidArgument(
            f"a request_id has 1 to {REQUEST_ID_LIMIT} printable characters", field="request_id"
        )
    if len(salt) > SALT_LIMIT:
        raise InvalidArgument(
            f"{len(salt)} bytes of salt, at most {SALT_LIMIT}", field="cache_salt"
        )
    if not LEAST_PRIORITY <= request.priority <= MOST_PRIORITY:
        raise InvalidArgument(
            f"a priority is from {LEAST_PRIORITY} to {MOST_PRIORITY}, not {request.priority}",
            field="priority",
        )


def _restore_options(
    request: scheduler_pb2.GenerateRequest,
) -> tuple[ForcedRestore | None, Residency | None]:
    """Return the forced restore and the residency; None for what was left open."""
    residency, method = optional_residency(request.residency), None
    if request.restore_method != types_pb2.RESTORE_METHOD_UNSPECIFIED:
        try:
            method = method_from_proto(request.restore_method)
        except InvalidArgument as error:
            raise InvalidArgument(error.message, field="restore_method") from error
    split = request.split_tokens if request.HasField("split_tokens") else None
    forced = ForcedRestore.of(split, method)
    if forced is not None:
        forced.check(residency)
    if forced == RECOMPUTED:
        residency = Residency.RESIDENT  # a streamed prefix could not be recomputed
    return forced, residency


def _complete_sampling(
    asked: types_pb2.SamplingParams, prompt_tokens: int, context_length: int
) -> types_pb2.SamplingParams:
    """Return a copy with max_tokens. Raises InvalidArgument beyond the context."""
    sampling = types_pb2.SamplingParams()
    sampling.CopyFrom(asked)
    room = context_length - prompt_tokens  # at least 1, as prompt_of checked
    if not sampling.HasField("max_tokens"):
        sampling.max_tokens = room if sampling.fills_context else min(DEFAULT_MAX_TOKENS, room)
    if sampling.max_tokens > room:
        raise InvalidArgument(
            f"{counted(prompt_tokens, 'prompt token')} and {sampling.max_tokens:,} new ones exceed "
            f"the context of {context_length:,}",
            field="sampling.max_tokens",
            reason="CONTEXT_EXCEEDED",
            prompt_tokens=prompt_tokens,
            context_length=context_length,
        )
    return sampling


def _resume_of(
    request: scheduler_pb2.GenerateRequest, max_tokens: int, model: ModelShape
) -> Resume:
    """Return where the client goes on reading. Raises InvalidArgument."""
    if not request.HasField("resume"):
        return FROM_THE_START
    index, ids = request.resume.next_index, request.resume.token_ids
    if not request.request_id:
        raise InvalidArgument("resume needs the request_id", field="request_id")
    if not 0 <= index <= max_tokens:
        raise InvalidArgument(
            f"next_index must be in [0, {max_tokens}], the request's max_tokens",
            field="resume.next_index",
        )
    if ids and len(ids) != index:
        raise InvalidArgument(
            f"{counted(len(ids), 'token')} before next_index {index}: send all of them, or none "
            "to attach to a known request",
            field="resume.token_ids",
        )
    check_token_ids(ids, "resume.token_ids", model.vocabulary_size)
    return Resume(index, tuple(ids))


def _check_sampling(
    sampling: types_pb2.SamplingParams, model: ModelShape, *, has_tokenizer: bool
) -> None:
    check_sampling(sampling, model.vocabulary_size)
    if sampling.returns_hidden_state and sampling.max_tokens != 1:
        raise InvalidArgument("needs max_tokens 1", field="sampling.returns_hidden_state")
    for name, texts in (("stop", sampling.stop), ("bad_words", sampling.bad_words)):
        if texts and not has_tokenizer:
            raise FailedPrecondition(
                f"the model has no tokenizer: {name} cannot be found", reason="NO_TOKENIZER"
            )
    if sampling.allowed_token_ids and sampling.HasField("structured_output"):
        raise InvalidArgument(
            "cannot come with structured_output", field="sampling.allowed_token_ids"
        )


def _digest_of(request: scheduler_pb2.GenerateRequest) -> bytes:
    body = scheduler_pb2.GenerateRequest()
    body.CopyFrom(request)
    body.ClearField("request_id")
    body.ClearField("resume")
    return hashlib.sha256(body.SerializeToString(deterministic=True)).digest()

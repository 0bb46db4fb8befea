"""vLLM's requests as the scheduler's. Knows no channel.

What a field means when it is unset is what vLLM's own servers take it for, which differs from
the scheduler's defaults: temperature 1, and max_tokens until the context is full.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable

from smg_grpc_proto.generated import vllm_engine_pb2

from splitpoint.errors import InvalidArgument
from splitpoint.v1 import scheduler_pb2, types_pb2

DEFAULT_TEMPERATURE = 1.0
MOST_ANSWERS = 128
# The scheduler takes ids of 64 characters; -127 may follow.
_MOST_ID_CHARACTERS = 60
_LARGEST = 2**31 - 1
_UNSUPPORTED = (
    "mm_inputs",
    "extra_mm_inputs",
    "media_refs",
    "kv_transfer_params",
    "kv_transfer_params_json",
)
_UNSUPPORTED_SAMPLING = ("prompt_logprobs", "truncate_prompt_tokens", "structural_tag")


def generate_requests(
    request: vllm_engine_pb2.GenerateRequest,
) -> list[scheduler_pb2.GenerateRequest]:
    """Return one request for each of the `n` answers.

    Raises InvalidArgument for what is malformed, and for what Splitpoint does not do: images,
    log-probabilities of the prompt, transfers of caches, structural tags.
    """
    _check_supported(request)
    sampling = _sampling(request.sampling_params)
    count = request.sampling_params.n or 1
    if count > MOST_ANSWERS:
        raise InvalidArgument(f"n is {count}, at most {MOST_ANSWERS}", field="sampling_params.n")
    request_id = scheduler_id(request.request_id)
    return [_one_of(request, sampling, request_id, index, count) for index in range(count)]


def scheduler_id(request_id: str) -> str:
    """Return the id for the scheduler: the router's own unless it is too long or empty."""
    if not request_id:
        return uuid.uuid4().hex
    if len(request_id) <= _MOST_ID_CHARACTERS and request_id.isprintable():
        return request_id
    return hashlib.sha256(request_id.encode()).hexdigest()[:_MOST_ID_CHARACTERS]


def _one_of(
    request: vllm_engine_pb2.GenerateRequest,
    sampling: types_pb2.SamplingParams,
    request_id: str,
    index: int,
    count: int,
) -> scheduler_pb2.GenerateRequest:
    one = scheduler_pb2.GenerateRequest(
        request_id=request_id if count == 1 else f"{request_id}-{index}", sampling=sampling
    )
    if sampling.HasField("seed"):
        one.sampling.seed = sampling.seed + index
    kind = request.WhichOneof("input")
    if kind == "tokenized":
        one.token_ids.SetInParent()  # an empty prompt is not a missing one
        one.token_ids.ids.extend(_ids(request.tokenized.input_ids, "tokenized.input_ids"))
    elif kind == "text":
        one.text = request.text
    else:
        raise InvalidArgument("neither tokens nor a text was sent", field="input")
    return one


def _check_supported(request: vllm_engine_pb2.GenerateRequest) -> None:
    for field, _ in request.ListFields():
        if field.name in _UNSUPPORTED:
            raise InvalidArgument(f"{field.name} is not supported", field=field.name)
    if request.data_parallel_rank:
        raise InvalidArgument("there is one rank: 0", field="data_parallel_rank")
    for field, _ in request.sampling_params.ListFields():
        if field.name in _UNSUPPORTED_SAMPLING:
            path = f"sampling_params.{field.name}"
            raise InvalidArgument(f"{field.name} is not supported", field=path)


def _sampling(sampling: vllm_engine_pb2.SamplingParams) -> types_pb2.SamplingParams:
    result = types_pb2.SamplingParams(
        temperature=(
            sampling.temperature if sampling.HasField("temperature") else DEFAULT_TEMPERATURE
        ),
        top_k=min(sampling.top_k, _LARGEST),
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        min_tokens=min(sampling.min_tokens, _LARGEST),
        ignore_eos=sampling.ignore_eos,
        stop=sampling.stop,
        stop_token_ids=_ids(sampling.stop_token_ids, "sampling_params.stop_token_ids"),
        logit_bias=dict(sampling.logit_bias),
        # Counts for stop strings; the router makes the text by itself.
        keeps_special_tokens=not sampling.skip_special_tokens,
    )
    # Zero means unset for these two.
    if sampling.top_p:
        result.top_p = sampling.top_p
    if sampling.repetition_penalty:
        result.repetition_penalty = sampling.repetition_penalty
    if sampling.HasField("max_tokens"):
        result.max_tokens = min(sampling.max_tokens, _LARGEST)
    else:
        result.fills_context = True
    if sampling.HasField("seed"):
        result.seed = sampling.seed
    if sampling.HasField("logprobs"):
        result.logprobs = sampling.logprobs
    _constrain(result, sampling)
    return result


def _constrain(result: types_pb2.SamplingParams, sampling: vllm_engine_pb2.SamplingParams) -> None:
    """Copy the language that the answer must belong to, if there is one."""
    kind = sampling.WhichOneof("constraint")
    if kind is None:
        return
    wanted = result.structured_output
    if kind == "choice":
        wanted.choice.texts.extend(sampling.choice.choices)
    else:
        setattr(wanted, kind, getattr(sampling, kind))


def _ids(values: Iterable[int], field: str) -> list[int]:
    """Return token ids that the scheduler's field can hold. Raises InvalidArgument."""
    ids = list(values)
    if any(each > _LARGEST for each in ids):
        raise InvalidArgument("a token id is outside the vocabulary", field=field)
    return ids

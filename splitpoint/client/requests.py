"""Requests from the arguments of the clients' methods, and the limit of their size.

Knows no channel and no call.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

from google.protobuf.message import Message

from splitpoint.client import request_values
from splitpoint.config import format_size
from splitpoint.errors import ResourceExhausted
from splitpoint.planning.plan import Objective, Residency, RestoreMethod
from splitpoint.selection import Selection, check_served
from splitpoint.speculation import DraftMethod
from splitpoint.transport import convert
from splitpoint.transport.limits import MESSAGE_LIMIT_BYTES
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

# Text, or token ids.
Prompt = str | Iterable[int]


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`; absent or None keeps the server's default.

    SamplingParams and GenerateRequest in the proto files give ranges and meanings.
    """

    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    # One string or several.
    stop: str | Iterable[str] | None
    stop_token_ids: int | Iterable[int] | None
    min_tokens: int | None
    ignore_eos: bool | None
    # Special tokens are part of the text.
    keeps_special_tokens: bool | None
    logprobs: int | None
    # Served model; needed only when there are several.
    model: str | None
    # Random if absent. The same id with the same body attaches to one generation.
    request_id: str | None
    # Narrows prefix sharing to requests with the same salt; of a str its UTF-8 bytes.
    cache_salt: bytes | str | None
    # Larger first among the tenant's requests, from -10 to 10 (docs/scheduling.md).
    priority: int | None
    # Run on this worker.
    worker: str | None
    # Rebuild this many cached tokens from activations instead of the plan's.
    split: int | None
    # Load everything, or recompute the front from token ids, instead of the plan's.
    restore: RestoreMethod | None
    residency: Residency | None
    # What drafts tokens; the text does not depend on it (docs/speculation.md).
    speculate: DraftMethod | None
    # Most tokens drafted for one step.
    speculative_tokens: int | None
    # Method suffix: fewest tokens that must occur again.
    prompt_lookup_min: int | None
    # Which cached tokens decode steps read, such as "columns:0.1": approximate unless it
    # verifies (docs/selection.md). Absent: all.
    select: Selection | str | None
    # Seconds until DeadlineExceeded; absent: none.
    timeout: float | None


_SAMPLING_FIELDS = frozenset(field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields)
_SELECTION_FIELDS = types_pb2.SelectionParams.DESCRIPTOR.fields
# Arguments of `generate` that have another name on the wire.
_REQUEST_FIELDS = {"worker": "worker_id", "split": "split_tokens"}
_SPECULATION_FIELDS = {"speculate": "method", "speculative_tokens": "num_speculative_tokens"}


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Return the message for a prompt (text or token ids) and options.

    Raises TypeError for a value of the wrong type, InvalidArgument for one that its field
    cannot hold; both name the argument. The scheduler checks the ranges.
    """
    given = _known("generate", options, GenerateOptions)
    given.pop("timeout", None)
    sampling = {name: given.pop(name) for name in _SAMPLING_FIELDS & given.keys()}
    if "residency" in given:
        given["residency"] = _residency(given["residency"])
    if "cache_salt" in given:
        given["cache_salt"] = request_values.text_or_bytes("cache_salt", given["cache_salt"])
    if "restore" in given:
        restore = request_values.choice("restore", given.pop("restore"), RestoreMethod)
        given["restore_method"] = convert.method_to_proto(restore)
    if speculation := _speculation(given):
        given["speculation"] = speculation
    if "select" in given:
        given["selection"] = _selection(given.pop("select"))
    request = request_values.filled(pb.GenerateRequest, given, _REQUEST_FIELDS)
    request.request_id = request.request_id or uuid.uuid4().hex
    request.sampling.CopyFrom(request_values.filled(types_pb2.SamplingParams, sampling))
    if isinstance(prompt, str):
        request.text = request_values.text("prompt", prompt)
    else:
        request.token_ids.SetInParent()  # an empty prompt is not a missing one
        request.token_ids.ids.extend(request_values.token_ids("prompt", prompt))
    return request


def _known(method: str, options: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return the options that are not None. Raises TypeError for one that `kind` lacks."""
    unknown = sorted(options.keys() - kind.__optional_keys__)
    if unknown:
        raise TypeError(f"{method}() got unexpected keyword arguments: {', '.join(unknown)}")
    return {name: value for name, value in options.items() if value is not None}


def _residency(value: Any) -> types_pb2.Residency:
    return convert.residency_to_proto(request_values.choice("residency", value, Residency))


def _speculation(given: dict[str, Any]) -> types_pb2.SpeculativeParams | None:
    """Take the arguments of speculation out of `given`; None if there are none."""
    names = ("speculate", "speculative_tokens", "prompt_lookup_min")
    values = {name: given.pop(name) for name in names if name in given}
    if not values:
        return None
    if "speculate" in values:
        method = request_values.choice("speculate", values["speculate"], DraftMethod)
        values["speculate"] = convert.draft_method_to_proto(method)
    return request_values.filled(types_pb2.SpeculativeParams, values, _SPECULATION_FIELDS)


def _selection(value: Any) -> types_pb2.SelectionParams:
    """Return the message of a selection or of its text. Raises as `filled`."""
    if not isinstance(value, Selection):
        value = Selection.parsed(request_values.text("select", value))
    check_served(value)  # what only `splitpoint eval` knows has no field
    fields = {each.name: getattr(value, each.name) for each in _SELECTION_FIELDS}
    fields["method"] = convert.selection_method_to_proto(value.method)
    return request_values.filled(types_pb2.SelectionParams, fields)


class ExplainOptions(TypedDict, total=False):
    """Keyword arguments of `explain_plan`; the fields of ExplainPlanRequest."""

    max_tokens: int | None
    # Served model; needed only when there are several.
    model: str | None
    residency: Residency | None
    objective: Objective | None
    # Cached tokens in another host's store, and its address: does fetching them pay?
    remote_cached_tokens: int | None
    remote_store_address: str | None


def explain_request(
    cached_tokens: int, new_tokens: int, options: ExplainOptions
) -> pb.ExplainPlanRequest:
    given = _known("explain_plan", options, ExplainOptions)
    if "residency" in given:
        given["residency"] = _residency(given["residency"])
    if "objective" in given:
        objective = request_values.choice("objective", given["objective"], Objective)
        given["objective"] = convert.objective_to_proto(objective)
    counts = {"cached_tokens": cached_tokens, "new_tokens": new_tokens}
    return request_values.filled(pb.ExplainPlanRequest, {**given, **counts})


def tokenize_request(text: str, model: str) -> pb.TokenizeRequest:
    return request_values.filled(pb.TokenizeRequest, {"text": text, "model": model})


def model_request(name: str) -> pb.GetModelRequest:
    return request_values.filled(pb.GetModelRequest, {"name": name}, {"name": "model"})


def resumed(request: pb.GenerateRequest, token_ids: Sequence[int]) -> pb.GenerateRequest:
    """Return the request with the tokens that have come; itself if there are none."""
    if not token_ids:
        return request
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.resume.next_index = len(token_ids)
    again.resume.token_ids.extend(token_ids)
    return again


def fits(request: Message) -> bool:
    """Return True if a scheduler takes a message of this size."""
    return request.ByteSize() <= MESSAGE_LIMIT_BYTES


def check_size(request: Message) -> None:
    """Raise ResourceExhausted for a request that gRPC would refuse with a poorer message."""
    if not fits(request):
        raise ResourceExhausted(
            f"the request has {format_size(request.ByteSize())}, and at most "
            f"{format_size(MESSAGE_LIMIT_BYTES)} can be sent: shorten the prompt",
            reason="MESSAGE_TOO_LARGE",
            limit_bytes=MESSAGE_LIMIT_BYTES,
        )

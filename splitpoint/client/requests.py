"""Requests from the arguments of the clients' methods, and the limit of their size.

Each value's type is checked, and an error names the argument: Protobuf would take a string as
several strings, letter by letter, and True as 1. The types come from the fields' descriptors. The
server checks the ranges. Knows no channel and no call.
"""

from __future__ import annotations

import json
import operator
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from numbers import Real
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from splitpoint.config import format_size
from splitpoint.errors import InvalidArgument, ResourceExhausted
from splitpoint.planning.plan import Objective, Residency, RestoreMethod
from splitpoint.sampling import SamplingOptions
from splitpoint.selection import Selection, check_served
from splitpoint.speculation import DraftMethod
from splitpoint.tiers import Tier
from splitpoint.transport import convert
from splitpoint.transport.limits import MESSAGE_LIMIT_BYTES
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

_Message = TypeVar("_Message", bound=Message)
_Enum = TypeVar("_Enum", bound=Enum)
# Bytes are integers and sets have no order, so they would pass for token ids.
_NO_IDS = (str, bytes, bytearray, memoryview, Mapping, set, frozenset)
_INTEGER_BITS = {FieldDescriptor.CPPTYPE_INT32: 31, FieldDescriptor.CPPTYPE_INT64: 63}


def filled(
    kind: type[_Message], values: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})
) -> _Message:
    """Return a message with these values in the fields of their names; None is left out.

    Repeated fields take one value or an iterable of them, maps any mapping.

    Raises TypeError for a value of the wrong type, InvalidArgument for one that its field
    cannot hold. Both give the argument's name.

    Args:
        names: fields of arguments that have another name.
    """
    fields: Mapping[str, Any] = kind.DESCRIPTOR.fields_by_name
    converted = {}
    for name, value in values.items():
        if value is not None:
            field = fields[names.get(name, name)]
            converted[field.name] = field_value(name, value, field)
    return kind(**converted)


def field_value(name: str, value: Any, field: FieldDescriptor) -> Any:
    """Return the value as `field` holds it. `name`: the argument. Raises as `filled`."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return _mapping(name, value, field)
    convert = _conversion(field)
    # Only repeated fields have the default []. The oldest supported protobuf has no `is_repeated`.
    if field.default_value != []:
        return convert(name, value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping):
        return [convert(f"{name}[{index}]", item) for index, item in enumerate(value)]
    try:
        return [convert(name, value)]
    except TypeError:
        is_text = field.cpp_type == FieldDescriptor.CPPTYPE_STRING
        wanted = "a string or a list of strings" if is_text else "an int or a list of ints"
        raise _wrong_type(name, value, wanted) from None


def checked_token_ids(name: str, value: Any) -> list[int]:
    """Return token ids from any ordered iterable of integers. Raises as `filled`."""
    if isinstance(value, _NO_IDS) or not isinstance(value, Iterable):
        raise _wrong_type(name, value, "text or a sequence of token ids")
    return [_integer(f"{name}[{index}]", item, 31) for index, item in enumerate(value)]


def checked_text(name: str, value: Any) -> str:
    """Return text that UTF-8 can encode. Raises as `filled`."""
    if not isinstance(value, str):
        raise _wrong_type(name, value, "a str")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{name} is not valid UTF-8: character {error.start} is half of a surrogate pair",
            field=name,
        ) from error
    return value


def checked_text_or_bytes(name: str, value: Any) -> bytes:
    """Return bytes as they are, and text in UTF-8. Raises as `filled`."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise _wrong_type(name, value, "bytes or a str")
    return checked_text(name, value).encode()


def checked_choice(name: str, value: Any, kind: type[_Enum]) -> _Enum:
    """Return the member from a member or its value. Raises as `filled`."""
    if not isinstance(value, str | kind):
        raise _wrong_type(name, value, f"a {kind.__name__} or its value")
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(member.value for member in kind)
        raise InvalidArgument(f"{name} {value!r} is not one of {names}", field=name) from None


def checked_seconds(name: str, value: Any) -> float | None:
    """Return a time limit; None: no limit. Raises as `filled`."""
    if value is None:
        return None
    number = _number(name, value)
    if not 0 < number < float("inf"):
        raise InvalidArgument(f"{name} must be finite and above 0 seconds", field=name)
    return number


def _conversion(field: FieldDescriptor) -> Callable[[str, Any], Any]:
    if field.cpp_type in _INTEGER_BITS:
        bits = _INTEGER_BITS[field.cpp_type]
        return lambda name, value: _integer(name, value, bits)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return lambda name, value: _instance(name, value, bytes)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return checked_text
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return lambda name, value: _instance(name, value, bool)
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return _number
    # Messages and numbers of enumerations: the clients made them.
    return lambda name, value: value


def _mapping(name: str, value: Any, field: FieldDescriptor) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_type(name, value, "a mapping")
    entry: Mapping[str, Any] = field.message_type.fields_by_name  # type: ignore[union-attr]
    key_of, value_of = _conversion(entry["key"]), _conversion(entry["value"])
    return {
        key_of(f"a key of {name}", key): value_of(f"{name}[{key!r}]", item)
        for key, item in value.items()
    }


def _integer(name: str, value: Any, bits: int) -> int:
    """Return an int from anything that can be an index, such as NumPy's; never from a bool."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise _wrong_type(name, value, "an int")
    if not -(1 << bits) <= number < 1 << bits:
        raise InvalidArgument(f"{name} does not fit into {bits + 1} bits", field=name)
    return number


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong_type(name, value, "a number")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidArgument(f"{name} does not fit into 64 bits", field=name) from error


def _instance(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise _wrong_type(name, value, f"a {kind.__name__}")
    return value


def _wrong_type(name: str, value: Any, wanted: str) -> TypeError:
    """Return an error that names the type only: a prompt is never shown."""
    article = "an" if type(value).__name__[0].lower() in "aeiou" else "a"
    return TypeError(f"{name} must be {wanted}, not {article} {type(value).__name__}")


# Text, or token ids.
Prompt = str | Iterable[int]
# Messages of a chat, each with `role` and `content`; what else is in them is for the template.
Messages = Iterable[Mapping[str, Any]]


class GenerateOptions(SamplingOptions, total=False):
    """Keyword arguments of `generate`; absent or None keeps the server's default.

    splitpoint/sampling.py and GenerateRequest in the proto files give ranges and meanings.
    """

    # What the answer must look like, at most one of these (docs/openai-api.md): a JSON
    # object; a JSON schema, as a mapping or as text; a regular expression; a grammar; one text
    # of several.
    json_object: bool | None
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | None
    choice: Iterable[str] | None
    # Tokenize a text without the model's special tokens around it.
    omits_special_tokens: bool | None
    # Keep only this many of the prompt's last tokens; -1: as many as fit.
    truncate_prompt_tokens: int | None
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


class TemplateOptions(TypedDict, total=False):
    """Keyword arguments about the text of a chat; ChatPrompt in the proto files says more."""

    # Functions that the model may call, in OpenAI's form.
    tools: Iterable[Mapping[str, Any]] | None
    # Further variables of the chat template, such as {"enable_thinking": False}.
    template_arguments: Mapping[str, Any] | None
    # Absent: True.
    add_generation_prompt: bool | None
    # The answer goes on in the last message, which is the assistant's.
    continue_final_message: bool | None


class ChatOptions(GenerateOptions, TemplateOptions, total=False):
    """Keyword arguments of `chat`: those of `generate`, and those about the chat's text."""


_TEMPLATE_OPTIONS = TemplateOptions.__optional_keys__
_STRUCTURES = ("json_object", "json_schema", "regex", "grammar", "choice")
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
    request = _request(_known("generate", options, GenerateOptions))
    if isinstance(prompt, str):
        request.text = checked_text("prompt", prompt)
    else:
        request.token_ids.SetInParent()  # an empty prompt is not a missing one
        request.token_ids.ids.extend(checked_token_ids("prompt", prompt))
    return request


def chat_request(messages: Messages, options: ChatOptions) -> pb.GenerateRequest:
    """Return the message for a chat and options. Raises as `generate_request`."""
    given = _known("chat", options, ChatOptions)
    about_text = {name: given.pop(name) for name in _TEMPLATE_OPTIONS & given.keys()}
    request = _request(given)
    request.chat.CopyFrom(_chat(messages, about_text))
    return request


def _request(given: dict[str, Any]) -> pb.GenerateRequest:
    """Return the message for options that are not None, without its prompt."""
    given.pop("timeout", None)
    structure = {name: given.pop(name) for name in _STRUCTURES if name in given}
    sampling = {name: given.pop(name) for name in _SAMPLING_FIELDS & given.keys()}
    if "residency" in given:
        given["residency"] = _residency(given["residency"])
    if "cache_salt" in given:
        given["cache_salt"] = checked_text_or_bytes("cache_salt", given["cache_salt"])
    if "restore" in given:
        restore = checked_choice("restore", given.pop("restore"), RestoreMethod)
        given["restore_method"] = convert.method_to_proto(restore)
    if speculation := _speculation(given):
        given["speculation"] = speculation
    if "select" in given:
        given["selection"] = _selection(given.pop("select"))
    if (wanted := _structured_output(structure)) is not None:
        sampling["structured_output"] = wanted
    request = filled(pb.GenerateRequest, given, _REQUEST_FIELDS)
    request.request_id = request.request_id or uuid.uuid4().hex
    request.sampling.CopyFrom(filled(types_pb2.SamplingParams, sampling))
    return request


def _chat(messages: Messages, options: Mapping[str, Any]) -> pb.ChatPrompt:
    """Return the message of a chat. Raises TypeError for what JSON cannot hold."""
    values = dict(options)
    adds = values.pop("add_generation_prompt", True)
    continues = values.pop("continue_final_message", False)
    for name, value in (
        ("add_generation_prompt", adds),
        ("continue_final_message", continues),
    ):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, not a {type(value).__name__}")
    chat = pb.ChatPrompt(
        messages=_json("messages", _listed("messages", messages)),
        omits_generation_prompt=not adds,
        continues_final_message=continues,
    )
    if tools := _listed("tools", values.get("tools") or ()):
        chat.tools = _json("tools", tools)
    arguments = values.get("template_arguments", {})
    if not isinstance(arguments, Mapping):
        raise TypeError(f"template_arguments must be a mapping, not a {type(arguments).__name__}")
    if arguments:
        chat.template_arguments = _json("template_arguments", dict(arguments))
    return chat


def _listed(name: str, value: Any) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a list of mappings, not a {type(value).__name__}")
    return list(value)


def _json(name: str, value: Any) -> str:
    """Return the JSON of an argument. Raises TypeError, which does not show its values."""
    try:
        # With plain characters: they are shorter than their escapes.
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold what JSON can hold: {error}") from None
    return checked_text(name, text)


def _plain(value: Any) -> Any:
    """Return a mapping as a dict: JSON knows no other. Raises TypeError."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"not a {type(value).__name__}")


def _structured_output(given: Mapping[str, Any]) -> types_pb2.StructuredOutput | None:
    """Return what the answer must look like; None if nothing was asked for.

    Raises TypeError, and InvalidArgument for two wishes at once.
    """
    values = dict(given)
    if "json_object" in values and values["json_object"] is False:
        del values["json_object"]
    if len(values) > 1:
        names = ", ".join(sorted(values))
        raise InvalidArgument(f"an answer follows one of {names}", field=max(values))
    if "choice" in values:
        texts = filled(types_pb2.Choices, {"choice": values["choice"]}, {"choice": "texts"})
        return types_pb2.StructuredOutput(choice=texts)
    if isinstance(values.get("json_schema"), Mapping):
        values["json_schema"] = _json("json_schema", dict(values["json_schema"]))
    return filled(types_pb2.StructuredOutput, values) if values else None


def _known(method: str, options: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """Return the options that are not None. Raises TypeError for one that `kind` lacks."""
    unknown = sorted(options.keys() - kind.__optional_keys__)
    if unknown:
        raise TypeError(f"{method}() got unexpected keyword arguments: {', '.join(unknown)}")
    return {name: value for name, value in options.items() if value is not None}


def _residency(value: Any) -> types_pb2.Residency:
    return convert.residency_to_proto(checked_choice("residency", value, Residency))


def _speculation(given: dict[str, Any]) -> types_pb2.SpeculativeParams | None:
    """Take the arguments of speculation out of `given`; None if there are none."""
    names = ("speculate", "speculative_tokens", "prompt_lookup_min")
    values = {name: given.pop(name) for name in names if name in given}
    if not values:
        return None
    if "speculate" in values:
        method = checked_choice("speculate", values["speculate"], DraftMethod)
        values["speculate"] = convert.draft_method_to_proto(method)
    return filled(types_pb2.SpeculativeParams, values, _SPECULATION_FIELDS)


def _selection(value: Any) -> types_pb2.SelectionParams:
    """Return the message of a selection or of its text. Raises as `filled`."""
    if not isinstance(value, Selection):
        value = Selection.parsed(checked_text("select", value))
    check_served(value)
    fields = convert.selection_method_fields(value.method)
    if value.pool is None:
        fields["policy"] = ""
    for each in _SELECTION_FIELDS:
        if each.name not in fields:
            fields[each.name] = getattr(value, each.name)
    return filled(types_pb2.SelectionParams, fields)


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
    # Or in a tier of the worker's own store: DISK or POOL.
    tier: Tier | None


def explain_request(
    cached_tokens: int, new_tokens: int, options: ExplainOptions
) -> pb.ExplainPlanRequest:
    given = _known("explain_plan", options, ExplainOptions)
    if "residency" in given:
        given["residency"] = _residency(given["residency"])
    if "objective" in given:
        objective = checked_choice("objective", given["objective"], Objective)
        given["objective"] = convert.objective_to_proto(objective)
    if "tier" in given:
        given["tier"] = convert.tier_to_proto(checked_choice("tier", given["tier"], Tier))
    counts = {"cached_tokens": cached_tokens, "new_tokens": new_tokens}
    return filled(pb.ExplainPlanRequest, {**given, **counts})


class TokenizeOptions(TemplateOptions, total=False):
    """Keyword arguments of `tokenize`; those of TemplateOptions are for messages."""

    # Without the model's special tokens around a text.
    omits_special_tokens: bool | None
    # Served model; needed only when there are several.
    model: str | None


def tokenize_request(
    text: str | None, messages: Messages | None, options: TokenizeOptions
) -> pb.TokenizeRequest:
    """Return the message for a text or a chat. Raises as `generate_request`."""
    given = _known("tokenize", options, TokenizeOptions)
    about_text = {name: given.pop(name) for name in _TEMPLATE_OPTIONS & given.keys()}
    if (text is None) == (messages is None):
        raise TypeError("tokenize() takes a text or messages")
    if messages is not None:
        return filled(pb.TokenizeRequest, {**given, "chat": _chat(messages, about_text)})
    if about_text:
        raise TypeError(f"tokenize() takes {', '.join(sorted(about_text))} with messages only")
    return filled(pb.TokenizeRequest, {**given, "text": text})


def detokenize_request(
    token_ids: Iterable[int], keeps_special_tokens: bool, model: str
) -> pb.DetokenizeRequest:
    """Return the message for token ids. Raises as `generate_request`."""
    values = {"keeps_special_tokens": keeps_special_tokens, "model": model}
    request = filled(pb.DetokenizeRequest, values)
    request.token_ids.extend(checked_token_ids("token_ids", token_ids))
    return request


def tokenizer_request(model: str) -> pb.GetTokenizerRequest:
    return filled(pb.GetTokenizerRequest, {"model": model})


def model_request(name: str) -> pb.GetModelRequest:
    return filled(pb.GetModelRequest, {"name": name}, {"name": "model"})


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

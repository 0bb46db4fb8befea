"""Fields by which every generation is sampled, scheduled and constrained, and their message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from gateway_service.openai.answers import Form
from gateway_service.openai.fields import (
    BOOLEAN,
    LARGEST_INT32,
    TEXT,
    Field,
    Kind,
    Table,
    array,
    by_token_id,
    check_little,
    extra,
    ignored,
    integer,
    nested,
    number,
    one_of,
    refused,
    text_of,
    text_or_texts,
    wrong,
)
from splitpoint import sampling
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

MOST_CHOICES = 128
MOST_LOGPROBS = int(sampling.FIELDS["logprobs"].most)
_MOST_CONSTRAINT_BYTES = 64 * 1024
_MOST_ALTERNATIVES = 1024
_MOST_ALLOWED = 1 << 18

_CONSTRAINT = text_of(least=1, most=_MOST_CONSTRAINT_BYTES)
_ALTERNATIVES = array(text_of(least=1), least=1, most=_MOST_ALTERNATIVES)


def _read_schema(name: str, value: Any) -> str:
    """Return a JSON schema as text: a schema is an object or a boolean, or such as a string."""
    if isinstance(value, str):
        found: str = _CONSTRAINT.read(name, value)
        return found
    if not isinstance(value, dict | bool):
        raise wrong(name, "must be a JSON schema", reason="INVALID_TYPE")
    check_little(name, value, _MOST_CONSTRAINT_BYTES)
    text = json.dumps(value)
    if len(text) > _MOST_CONSTRAINT_BYTES:
        raise wrong(name, f"has {len(text):,} bytes, at most {_MOST_CONSTRAINT_BYTES:,}")
    return text


JSON_SCHEMA = Kind(_read_schema, {"anyOf": [{"type": "object"}, {"type": "boolean"}, TEXT.schema]})

_STRUCTURED_OUTPUTS = Table(
    [
        Field("json", JSON_SCHEMA, "A JSON schema, as an object or as text."),
        Field("regex", _CONSTRAINT, "A regular expression that matches the whole text."),
        Field("choice", _ALTERNATIVES, "The text is one of these."),
        Field("grammar", _CONSTRAINT, "A grammar in llguidance's variant of Lark."),
        Field("json_object", BOOLEAN, "Any JSON object."),
    ]
)

STREAM_OPTIONS = Table(
    [
        Field("include_usage", BOOLEAN, "End with a chunk that has the usage.", default=False),
        extra(
            "continuous_usage_stats",
            BOOLEAN,
            "With include_usage: give each chunk the usage of its choice so far.",
            False,
        ),
        extra(
            "include_plan",
            BOOLEAN,
            "Give the final chunk the field `splitpoint`: the plan, its reason, and times. Not "
            "vLLM's.",
            False,
        ),
        ignored("include_obfuscation", "No padding is sent."),
    ]
)


def form_of(values: Mapping[str, Any]) -> Form:
    """Return the form of the answer. Raises InvalidArgument."""
    options, is_stream = values.get("stream_options", {}), values.get("stream", False)
    if "stream_options" in values and not is_stream:
        raise wrong("stream_options", "needs stream to be true")
    has_usage = options.get("include_usage", False)
    return Form(
        is_stream=is_stream,
        has_usage=has_usage,
        has_running_usage=has_usage and options.get("continuous_usage_stats", False),
        has_plan=options.get("include_plan", False) or values.get("include_plan", False),
        prompt_logprobs=values.get("prompt_logprobs"),
    )


_JSON_SCHEMA_FORMAT = Table(
    [
        Field("name", text_of(least=1, most=64), "Name of the schema.", is_required=True),
        Field("description", TEXT, "What the answer is for."),
        Field("schema", JSON_SCHEMA, "A JSON schema; absent: any JSON object."),
        Field("strict", BOOLEAN, "The answer follows the schema either way."),
    ]
)
_RESPONSE_FORMAT = Table(
    [
        Field(
            "type",
            one_of("text", "json_object", "json_schema"),
            "Any text, a JSON object, or what a JSON schema allows.",
            is_required=True,
        ),
        Field("json_schema", nested(_JSON_SCHEMA_FORMAT), "For the type json_schema."),
    ]
)


def _read_response_format(name: str, value: Any) -> types_pb2.StructuredOutput | None:
    given = _RESPONSE_FORMAT.read(value, name=name)
    if given["type"] != "json_schema":
        if "json_schema" in given:
            raise wrong(f"{name}.json_schema", "needs the type json_schema")
        is_json = given["type"] == "json_object"
        return types_pb2.StructuredOutput(json_object=True) if is_json else None
    if "json_schema" not in given:
        raise wrong(f"{name}.json_schema", "is missing", reason="MISSING_REQUIRED_PARAMETER")
    schema = given["json_schema"].get("schema")
    if schema is None:
        return types_pb2.StructuredOutput(json_object=True)
    return types_pb2.StructuredOutput(json_schema=schema)


# Fields of the shared table that bodies have under another name, or endpoints by themselves.
_NOT_SAMPLED = {"max_tokens", "fills_context", "keeps_special_tokens", "logprobs"}
# OpenAI has these; the other fields of the table are extensions, named as vLLM's.
_OF_OPENAI = {
    *("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty"),
    "logit_bias",
}
# Chat and completions have these, but not the responses.
_OF_TEXTS = {
    *("seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "prompt_logprobs"),
}
# What OpenAI takes where a client says nothing; the scheduler is greedy.
_DEFAULT_TEMPERATURE = 1.0
# Where the table speaks of the command's options, which are repeated.
_HELP = {
    "top_k": "Sample from the k likeliest tokens; 0 and -1: all.",
    "stop": "Texts that end the answer; they are not returned.",
    "stop_token_ids": "Tokens that end the answer.",
    "logit_bias": "Added to the logits of these token ids.",
    "include_stop_str_in_output": "The text has the stop string or stop token that ended it.",
    "allowed_token_ids": "Only these tokens may be chosen; not with a constraint of the text.",
    "bad_words": "Texts that the answer does not have.",
    "prompt_logprobs": "Log-probabilities of the prompt's tokens, and of this many of the likeliest"
    " at each position; not with stream.",
}
_SAMPLED_TEXT = text_of(least=1, most=sampling.TEXT_BYTES_LIMIT)


def _kind_of(name: str, field: sampling.Field) -> Kind:
    """Return how a field of the shared table is read, by its type in SamplingParams."""
    descriptor = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name]
    kind, most = descriptor.cpp_type, field.most_entries
    match name:
        case "top_k":  # -1 is vLLM's
            return integer(-1)
        case "stop":
            assert most is not None
            return text_or_texts(_SAMPLED_TEXT, most=most)
        case "allowed_token_ids":
            return array(integer(0), least=1, most=_MOST_ALLOWED)
    if descriptor.message_type is not None:  # a map
        assert most is not None
        return by_token_id(number(field.least, field.most), most=most)
    if descriptor.default_value == []:  # the oldest supported protobuf has no `is_repeated`
        is_text = kind == FieldDescriptor.CPPTYPE_STRING
        return array(_SAMPLED_TEXT if is_text else integer(0), most=most)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return BOOLEAN
    if kind == FieldDescriptor.CPPTYPE_DOUBLE:
        return number(field.least, field.most, above=field.is_above)
    largest = 2**63 - 1 if kind == FieldDescriptor.CPPTYPE_INT64 else LARGEST_INT32
    return integer(int(max(field.least, -largest - 1)), int(min(field.most, largest)))


def _sampled(name: str, field: sampling.Field) -> Field:
    return Field(
        name,
        _kind_of(name, field),
        _HELP.get(name, field.help),
        default=_DEFAULT_TEMPERATURE if name == "temperature" else field.default,
        is_extension=name not in _OF_OPENAI,
    )


_SAMPLED = [
    _sampled(name, field) for name, field in sampling.FIELDS.items() if name not in _NOT_SAMPLED
]
# OpenAI's fields of every generating endpoint.
_OPENAI = (
    Field("model", text_of(least=1), "Name of a served model.", is_required=True),
    Field("stream", BOOLEAN, "Send tokens as server-sent events.", default=False),
    ignored("user", "Tenants come from the key."),
    ignored("prompt_cache_key", "Prefixes are always cached; see cache_salt."),
    ignored("prompt_cache_retention", "Prefixes are always cached."),
    ignored("safety_identifier", "Tenants come from the key."),
    ignored("service_tier", "This server has one tier; see priority.", "auto", "default"),
)
# Those that chat and completions have, but not the responses.
_OPENAI_TEXT = (
    Field("n", integer(1, MOST_CHOICES), "Number of answers to each prompt.", default=1),
    Field("stream_options", nested(STREAM_OPTIONS), "What a stream has besides tokens."),
    Field(
        "response_format",
        Kind(_read_response_format, _RESPONSE_FORMAT.schema),
        "Text, a JSON object, or what a JSON schema allows.",
    ),
    ignored("metadata", "Nothing is stored.", {}),
    ignored("store", "Nothing is stored.", False),
    ignored("reasoning_effort", "See chat_template_kwargs, as the model's template says.", "none"),
)
CACHE_SALT = extra(
    "cache_salt",
    text_of(least=1, most=128),
    "Only requests of the tenant with the same salt share cached prefixes.",
)
PRIORITY = extra(
    "priority",
    integer(-10, 10),
    "Among the tenant's requests; smaller ones start first, as in vLLM: the negative of "
    "gRPC's priority.",
    0,
)
# vLLM's, and one of ours.
_EXTENSIONS = (
    CACHE_SALT,
    PRIORITY,
    extra(
        "structured_outputs",
        nested(_STRUCTURED_OUTPUTS),
        "What the text must match: one of json, regex, choice, grammar, json_object.",
    ),
    extra("guided_json", JSON_SCHEMA, "Former name of structured_outputs.json."),
    extra("guided_regex", _CONSTRAINT, "Former name of structured_outputs.regex."),
    extra("guided_choice", _ALTERNATIVES, "Former name of structured_outputs.choice."),
    extra("guided_grammar", _CONSTRAINT, "Former name of structured_outputs.grammar."),
    ignored("guided_decoding_backend", "This server has one backend.", is_extension=True),
    ignored("include_reasoning", "Reasoning stays in the text.", True, is_extension=True),
    ignored("kv_transfer_params", "Prefixes are shared without them.", is_extension=True),
    ignored("mm_processor_kwargs", "The models read text.", is_extension=True),
    ignored("request_id", "The gateway names answers itself.", is_extension=True),
    extra(
        "include_plan",
        BOOLEAN,
        "Give an answer that is not streamed the field `splitpoint`; see stream_options. Not "
        "vLLM's.",
        False,
    ),
    extra("skip_special_tokens", BOOLEAN, "Leave special tokens out of the text.", True),
    extra(
        "truncate_prompt_tokens",
        integer(-1),
        "Keep only this many of the prompt's last tokens; -1: what leaves room for the answer.",
    ),
    ignored(
        "spaces_between_special_tokens",
        "Tokens are put together as they are.",
        True,
        is_extension=True,
    ),
    refused("logits_processors", "use logit_bias or structured_outputs", [], is_extension=True),
    refused("return_token_ids", "answers have texts", False, is_extension=True),
    refused("return_tokens_as_token_ids", "answers have texts", False, is_extension=True),
    refused("use_beam_search", "there is no beam search", False, is_extension=True),
    refused("length_penalty", "there is no beam search", 1, 1.0, is_extension=True),
)
# The tables of endpoints begin with these.
COMMON_FIELDS = (
    *_OPENAI,
    *(field for field in _SAMPLED if field.name not in _OF_TEXTS),
    *_EXTENSIONS,
)
TEXT_FIELDS = (
    *COMMON_FIELDS,
    *(field for field in _SAMPLED if field.name in _OF_TEXTS),
    *_OPENAI_TEXT,
)


def sampling_of(values: Mapping[str, Any]) -> types_pb2.SamplingParams:
    """Return the message of the fields above. max_tokens and logprobs are the endpoint's.

    Raises InvalidArgument if two fields constrain the text, or `prompt_logprobs` come in a stream.
    """
    if "prompt_logprobs" in values and values.get("stream", False):
        raise wrong("prompt_logprobs", "cannot come with stream")
    given = {field.name: values[field.name] for field in _SAMPLED if field.name in values}
    given.setdefault("temperature", _DEFAULT_TEMPERATURE)
    found = types_pb2.SamplingParams(**given)
    found.top_k = max(0, found.top_k)
    found.keeps_special_tokens = not values.get("skip_special_tokens", True)
    constraint = structured_output_of(values)
    if constraint is not None:
        found.structured_output.CopyFrom(constraint)
    return found


_FORMER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


_FIELD = "sampling.structured_output"
_FIELDS = {"json": "json_schema"}


def structured_output_of(values: Mapping[str, Any]) -> types_pb2.StructuredOutput | None:
    """Return what constrains the text; None: nothing. Raises InvalidArgument for two of them."""
    given = {(name, kind): values[name] for name, kind in _FORMER_NAMES.items() if name in values}
    for kind, value in values.get("structured_outputs", {}).items():
        if kind != "json_object" or value:
            given["structured_outputs", kind] = value
    if values.get("response_format") is not None:
        given["response_format", "message"] = values["response_format"]
    if not given:
        return None
    if len(given) > 1:
        raise wrong([*given][1][0], "is given beside another constraint of the text: give one")
    ((_, kind), value), *_ = given.items()
    match kind:
        case "message":
            found: types_pb2.StructuredOutput = value
            return found
        case "json":
            return types_pb2.StructuredOutput(json_schema=value)
        case "choice":
            return types_pb2.StructuredOutput(choice=types_pb2.Choices(texts=value))
        case _:
            return types_pb2.StructuredOutput(**{kind: value})


def constraint_names(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the client's name of what constrains the text, by the scheduler's fields.

    For errors; empty if nothing constrains it, or `structured_outputs` does.
    """
    kinds = {kind: name for name, kind in _FORMER_NAMES.items() if name in values}
    if values.get("response_format") is not None:
        kinds = dict.fromkeys(("json", "json_object"), "response_format")
    # The scheduler's field of a schema says what its text is.
    found = {f"{_FIELD}.{_FIELDS.get(kind, kind)}": name for kind, name in kinds.items()}
    return {_FIELD: next(iter(kinds.values())), **found} if kinds else {}


def generate_request(values: Mapping[str, Any]) -> pb.GenerateRequest:
    """Return a request with what all endpoints have in common; prompt and id are the endpoint's."""
    request = pb.GenerateRequest(model=values["model"], sampling=sampling_of(values))
    # vLLM's smaller ones start first, the scheduler's larger ones.
    request.priority = -values.get("priority", 0)
    if "truncate_prompt_tokens" in values:
        request.truncate_prompt_tokens = values["truncate_prompt_tokens"]
    if "cache_salt" in values:
        request.cache_salt = values["cache_salt"].encode()
    return request


def check_copies(size: int, count: int) -> None:
    """Raise InvalidArgument if `count` copies of requests of `size` bytes are too large."""
    if count > 1 and size * count > _MOST_COPIED_BYTES:
        raise wrong("n", f"times the request is {size * count:,} bytes, at most 16 MiB")


_MOST_COPIED_BYTES = 16 << 20


def choices_of(
    request: pb.GenerateRequest, request_id: str, first: int, count: int
) -> list[pb.GenerateRequest]:
    """Return `count` requests that differ in id and seed only.

    The first has the id of index `first`; seeds count up from the request's, if it has one.
    Raises InvalidArgument if they are too large together.
    """
    check_copies(request.ByteSize(), count)
    found = []
    for index in range(count):
        each = pb.GenerateRequest()
        each.CopyFrom(request)
        each.request_id = request_id if first + index == 0 else f"{request_id}-{first + index}"
        if request.sampling.HasField("seed"):
            each.sampling.seed = _wrapped(request.sampling.seed + index)
        found.append(each)
    return found


def _wrapped(seed: int) -> int:
    """Return a seed behind the largest one as one from the smallest on."""
    return (seed + 2**63) % 2**64 - 2**63

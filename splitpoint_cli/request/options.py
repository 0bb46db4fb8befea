"""Options of `splitpoint generate` and `chat`, and what becomes of their values.

Those of sampling are made of the table in splitpoint/sampling.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.descriptor import FieldDescriptor

from splitpoint.client.requests import GenerateOptions, Prompt
from splitpoint.client.scheduler_attempts import DEFAULT_RETRY_SECONDS
from splitpoint.errors import InvalidArgument
from splitpoint.options.option import Option
from splitpoint.planning.plan import Residency, RestoreMethod
from splitpoint.sampling import FIELDS, Field
from splitpoint.selection import Selection
from splitpoint.speculation import ALIASES, DraftMethod
from splitpoint.v1 import types_pb2
from splitpoint_cli.options import each_of, of

_SAMPLING = "Sampling"
_SPECULATION = "Speculation"
_SELECTION = "Selection"
_STRUCTURE = "Structured output, one of these"
_AUTO = "auto"

# Type and unit of a field's values on the command line; others are texts.
_KINDS: Mapping[int, tuple[type, str]] = {
    FieldDescriptor.CPPTYPE_BOOL: (bool, ""),
    FieldDescriptor.CPPTYPE_INT32: (int, "N"),
    FieldDescriptor.CPPTYPE_INT64: (int, "N"),
    FieldDescriptor.CPPTYPE_DOUBLE: (float, "X"),
    FieldDescriptor.CPPTYPE_MESSAGE: (str, "ID=BIAS"),
}
# Names of options that differ from their field.
_NAMES = {
    "fills_context": "fill-context",
    "keeps_special_tokens": "keep-special-tokens",
    "stop_token_ids": "stop-token-id",
    "include_stop_str_in_output": "include-stop",
    "allowed_token_ids": "allowed-token-id",
    "bad_words": "bad-word",
}


def _option_of(name: str, field: Field) -> Option[Any]:
    """Return the command line's option of a sampling field. A map is given as several texts."""
    descriptor = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name]
    kind, unit = _KINDS.get(descriptor.cpp_type, (str, "TEXT"))
    is_repeatable = descriptor.default_value == []
    return Option(
        _NAMES.get(name, name.replace("_", "-")),
        kind,
        field.default,
        field.help,
        unit="ID" if kind is int and is_repeatable else unit,
        least=field.least if isfinite(field.least) else None,
        most=field.most if isfinite(field.most) else None,
        is_repeatable=is_repeatable,
        is_rare=field.is_rare,
    )


# The commands do not print what `prompt_logprobs` asks for.
SAMPLING = {
    name: _option_of(name, field) for name, field in FIELDS.items() if name != "prompt_logprobs"
}
# What `chat` has otherwise, or not at all.
_OF_GENERATE = ("max_tokens", "fills_context", "logprobs")

JSON_OBJECT = Option("json-object", bool, False, "Answer with a JSON object.", is_rare=True)
JSON_SCHEMA: Option[str | None] = Option(
    "json-schema",
    str,
    None,
    "Answer with JSON of the schema in this file (docs/openai-api.md).",
    unit="FILE",
)
REGEX: Option[str | None] = Option(
    "regex",
    str,
    None,
    "Answer with a text that matches this, from its start to its end.",
    unit="REGEX",
    is_rare=True,
)
GRAMMAR: Option[str | None] = Option(
    "grammar",
    str,
    None,
    "Answer with a text of the grammar in this file.",
    unit="FILE",
    is_rare=True,
)
CHOICE: Option[tuple[str, ...] | None] = Option(
    "choice",
    str,
    None,
    "Answer with this text, or another one that is given so; up to 1,024 times.",
    unit="TEXT",
    is_repeatable=True,
    is_rare=True,
)
PRIORITY: Option[int] = Option(
    "priority",
    int,
    0,
    "Larger ones of the tenant start first; the policy fifo ignores it.",
    least=-10,
    most=10,
    is_rare=True,
)
WORKER: Option[str] = Option(
    "worker", str, "", "Run on this worker; absent: the scheduler chooses.", unit="ID"
)
RESIDENCY: Option[str] = Option(
    "residency",
    str,
    _AUTO,
    "Where the cache lives while decoding.",
    choices=(_AUTO, *(each.value for each in Residency)),
    is_rare=True,
)
SPECULATE: Option[str | None] = Option(
    "speculate",
    str,
    None,
    "What drafts the tokens that a step verifies; the text does not depend on it; vLLM's ngram "
    "means suffix, draft_model means model; absent: as the worker is configured "
    "(docs/speculation.md).",
    unit="|".join(DraftMethod),
    choices=(*DraftMethod, *ALIASES),
)
SPECULATIVE_TOKENS: Option[int | None] = Option(
    "speculative-tokens",
    int,
    None,
    "Draft at most this many tokens for one step; 0 to 32; absent: as the worker measures or is "
    "configured.",
    unit="N",
    is_rare=True,
)
PROMPT_LOOKUP_MIN: Option[int | None] = Option(
    "prompt-lookup-min",
    int,
    None,
    "With suffix: draft only if this many of the newest tokens occurred before; 1 to 64; absent: "
    "as the worker is configured.",
    unit="N",
    is_rare=True,
)
CACHE_SALT: Option[str] = Option(
    "cache-salt",
    str,
    "",
    "Share cached prefixes only with requests of the same salt.",
    unit="TEXT",
    is_rare=True,
)
MODEL: Option[str] = Option("model", str, "", "Served model; absent: the only one.", unit="NAME")
TIMEOUT: Option[float | None] = Option(
    "timeout", float, None, "Give up after this many seconds.", unit="SECONDS"
)
RETRY_SECONDS: Option[float] = Option(
    "retry-seconds",
    float,
    DEFAULT_RETRY_SECONDS,
    "Try to go on for this long after the scheduler was lost. 0: not at all.",
    unit="SECONDS",
    least=0,
    is_rare=True,
)
PROMPT_IDS: Option[str | None] = Option(
    "prompt-ids", str, None, "Token ids instead of text.", unit="1,2,3"
)
SPLIT: Option[str] = Option(
    "split",
    str,
    _AUTO,
    "Cached tokens to rebuild from activations; auto: as planned.",
    unit="N|auto",
)
RESTORE: Option[str] = Option(
    "restore",
    str,
    _AUTO,
    "How the cached prefix comes back; tokens: recomputed from the front while the rest is loaded "
    "from the back; auto: as planned.",
    choices=(_AUTO, RestoreMethod.LOAD.value, RestoreMethod.TOKENS.value),
    is_rare=True,
)
SELECT: Option[str | None] = Option(
    "select",
    str,
    None,
    "Read only the cached tokens that matter, while the cache is streamed: the answer is "
    "approximate; columns:0.1 reads a tenth of them; absent: all (docs/selection.md).",
    unit="METHOD:RATIO",
)
VERIFY = Option(
    "verify",
    bool,
    False,
    "With --select: only draft by the selection, and verify by reading everything: exact.",
)
REQUEST_ID: Option[str | None] = Option(
    "request-id",
    str,
    None,
    "Name of the request, 1 to 64 characters; sent again with the same options it gets the same "
    "answer; absent: drawn.",
    unit="ID",
    is_rare=True,
)
EXPLAIN = Option(
    "explain",
    bool,
    False,
    "Also print on stderr what was done, its time beside the predicted one, and why.",
)

PromptText = Annotated[
    str | None, typer.Argument(help="Absent: read from stdin.", show_default=False)
]


def read_prompt(prompt: str | None, prompt_ids: str | None) -> Prompt:
    """Return the prompt from the argument, the ids, or stdin. Raises InvalidArgument."""
    if prompt_ids is not None:
        if prompt is not None:
            raise InvalidArgument("give a PROMPT or --prompt-ids, not both", field="prompt")
        try:
            return [int(part) for part in prompt_ids.split(",")]
        except ValueError:
            raise InvalidArgument(
                f"--prompt-ids {prompt_ids!r} is not a list of token ids such as 1,2,3",
                field="prompt_ids",
            ) from None
    if prompt is not None:
        return prompt
    if sys.stdin.isatty():
        raise InvalidArgument("no PROMPT was given, and stdin is a terminal", field="prompt")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"the prompt on stdin is not UTF-8 text: the byte at {error.start:,} is none of it",
            field="prompt",
        ) from None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What `generate` and `chat` both offer, besides the length of an answer.

    Attributes:
        sampling: by the fields of SamplingParams.
    """

    sampling: Mapping[str, Any] = each_of(
        {name: each for name, each in SAMPLING.items() if name not in _OF_GENERATE}, _SAMPLING
    )
    json_object: bool = of(JSON_OBJECT, _STRUCTURE)
    json_schema: str | None = of(JSON_SCHEMA, _STRUCTURE)
    regex: str | None = of(REGEX, _STRUCTURE)
    grammar: str | None = of(GRAMMAR, _STRUCTURE)
    choice: tuple[str, ...] | None = of(CHOICE, _STRUCTURE)
    priority: int = of(PRIORITY)
    worker: str = of(WORKER)
    residency: str = of(RESIDENCY)
    speculate: str | None = of(SPECULATE, _SPECULATION)
    speculative_tokens: int | None = of(SPECULATIVE_TOKENS, _SPECULATION)
    prompt_lookup_min: int | None = of(PROMPT_LOOKUP_MIN, _SPECULATION)
    cache_salt: str = of(CACHE_SALT)
    model: str = of(MODEL)
    timeout: float | None = of(TIMEOUT)
    retry_seconds: float = of(RETRY_SECONDS)


@dataclass(frozen=True, slots=True)
class OneRequestOptions(RequestOptions):
    """What only `generate` offers."""

    prompt_ids: str | None = of(PROMPT_IDS)
    length: Mapping[str, Any] = each_of({name: SAMPLING[name] for name in _OF_GENERATE}, _SAMPLING)
    split: str = of(SPLIT)
    restore: str = of(RESTORE)
    select: str | None = of(SELECT, _SELECTION)
    verify: bool = of(VERIFY, _SELECTION)
    request_id: str | None = of(REQUEST_ID)
    explain: bool = of(EXPLAIN)

    def request(self) -> GenerateOptions:
        """Return the request's options. Raises InvalidArgument."""
        fills_context = self.length["fills_context"]
        request = request_of(self, max_tokens=None if fills_context else self.length["max_tokens"])
        request["logprobs"] = self.length["logprobs"]
        request["split"] = parse_split(self.split)
        request["restore"] = None if self.restore == _AUTO else RestoreMethod(self.restore)
        request["select"] = selection_of(self.select, verify=self.verify)
        request["request_id"] = self.request_id
        return request


def request_of(given: RequestOptions, *, max_tokens: int | None) -> GenerateOptions:
    """Return a request's options; no `max_tokens`: until the context is full.

    Raises InvalidArgument.
    """
    request = GenerateOptions(
        max_tokens=max_tokens,
        fills_context=max_tokens is None,
        json_object=given.json_object,
        json_schema=_content("json_schema", given.json_schema),
        regex=given.regex,
        grammar=_content("grammar", given.grammar),
        choice=given.choice,
        priority=given.priority,
        worker=given.worker,
        residency=None if given.residency == _AUTO else Residency(given.residency),
        speculate=None if given.speculate is None else DraftMethod(given.speculate),
        speculative_tokens=given.speculative_tokens,
        prompt_lookup_min=given.prompt_lookup_min,
        cache_salt=os.fsencode(given.cache_salt),
        model=given.model,
        timeout=given.timeout,
    )
    biases = parse_logit_bias(given.sampling["logit_bias"] or [])
    sampling: Any = {**given.sampling, "logit_bias": biases}
    request.update(sampling)
    return request


def _content(name: str, path: str | None) -> str | None:
    """Return the text in a file; None without one. Raises InvalidArgument."""
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidArgument(
            f"--{name.replace('_', '-')} takes a file, and {path} cannot be read: {reason}",
            field=name,
        ) from None


def parse_logit_bias(entries: list[str]) -> dict[int, float] | None:
    """Return biases by token id from ID=BIAS entries; None if empty. Raises InvalidArgument."""
    biases: dict[int, float] = {}
    for entry in entries:
        token_id, _, bias = entry.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise InvalidArgument(
                f"--logit-bias {entry!r} is not ID=BIAS, such as 50=-100", field="logit_bias"
            ) from None
    return biases or None


def selection_of(text: str | None, *, verify: bool) -> Selection | None:
    """Return the selection of both options; None for neither. Raises InvalidArgument."""
    if text is None:
        if verify:
            raise InvalidArgument("--verify needs --select", field="verify")
        return None
    selection = Selection.parsed(text)
    return replace(selection, verify=True) if verify else selection


def parse_split(text: str) -> int | None:
    """Return the count of `--split`; None for `auto`. Raises InvalidArgument."""
    if text == "auto":
        return None
    try:
        split = int(text)
    except ValueError:
        split = -1
    if split < 0:
        raise InvalidArgument(
            f"--split {text!r} is neither auto nor a number of tokens", field="split_tokens"
        )
    return split

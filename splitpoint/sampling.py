"""The table of sampling fields: names, bounds and help; and the one check of a SamplingParams.

`SamplingOptions` is the table: each key is a field of SamplingParams (types.proto) and an argument
of the clients. The scheduler checks requests by it, and the command line makes options of it. A
new field needs an entry here, in types.proto and in the worker's engine/sampling.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypedDict, get_type_hints

from google.protobuf.descriptor import FieldDescriptor

from splitpoint.config import counted
from splitpoint.errors import InvalidArgument
from splitpoint.v1 import types_pb2

# Bound of each text of a list, in UTF-8.
TEXT_BYTES_LIMIT = 256


@dataclass(frozen=True, slots=True)
class Field:
    """What is known of a sampling field besides its type.

    Attributes:
        help: a phrase with a full stop; bounds and default are shown beside it.
        least, most: bounds of a number, or of the values of a map; infinite: no bound.
        is_above: True if `least` itself is out of bounds.
        most_entries: of a list or a map; None: the size of the vocabulary.
        default: value of an absent field; None: `help` says what happens then. Fields without
            presence get theirs from Protobuf.
        is_rare: True if `--help` leaves the option out.
    """

    help: str
    least: float = -math.inf
    most: float = math.inf
    is_above: bool = False
    most_entries: int | None = None
    default: bool | float | None = None
    is_rare: bool = False


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen, and what ends the answer; absent or None: the field's default."""

    max_tokens: Annotated[int | None, Field("Generate at most this many tokens.", 1, default=128)]
    fills_context: Annotated[
        bool | None, Field("Generate until the context is full, whatever --max-tokens says.")
    ]
    min_tokens: Annotated[
        int | None,
        Field(
            "Ignore the end-of-sequence token and stops before this many tokens.", 0, is_rare=True
        ),
    ]
    ignore_eos: Annotated[bool | None, Field("Go on after the end-of-sequence token.")]
    keeps_special_tokens: Annotated[
        bool | None,
        Field("Print special tokens as text, except the one that ends the answer.", is_rare=True),
    ]
    # One string or several.
    stop: Annotated[
        str | Iterable[str] | None,
        Field("End before this text; up to 16 times, each 1 to 256 bytes.", most_entries=16),
    ]
    stop_token_ids: Annotated[
        int | Iterable[int] | None,
        Field("End after this token; up to 64 times.", most_entries=64, is_rare=True),
    ]
    include_stop_str_in_output: Annotated[
        bool | None,
        Field("Print the stop string or stop token that ends the answer, too.", is_rare=True),
    ]
    temperature: Annotated[float | None, Field("0: greedy.", 0, default=0.0)]
    top_k: Annotated[int | None, Field("Keep the k likeliest tokens; 0: all.", 0)]
    top_p: Annotated[
        float | None,
        Field(
            "Keep the likeliest tokens that have this probability together; above 0.",
            0,
            1,
            is_above=True,
            default=1.0,
        ),
    ]
    min_p: Annotated[
        float | None,
        Field(
            "Drop tokens below this share of the likeliest one's probability.", 0, 1, is_rare=True
        ),
    ]
    presence_penalty: Annotated[
        float | None,
        Field("Subtract this from the logits of tokens generated before.", -2, 2, is_rare=True),
    ]
    frequency_penalty: Annotated[
        float | None,
        Field(
            "Subtract this for each time that the token was generated before.", -2, 2, is_rare=True
        ),
    ]
    # Beyond these bounds logits may overflow.
    repetition_penalty: Annotated[
        float | None,
        Field(
            "Divide positive and multiply negative logits of tokens seen before, in the prompt, "
            "too.",
            0.01,
            100,
            default=1.0,
            is_rare=True,
        ),
    ]
    logit_bias: Annotated[
        Mapping[int, float] | None,
        Field(
            "Add this to the logit of one token, -100 to 100; up to 1,024 times.",
            -100,
            100,
            most_entries=1024,
            is_rare=True,
        ),
    ]
    allowed_token_ids: Annotated[
        Iterable[int] | None,
        Field("Choose only this token; repeat it for each token that is allowed.", is_rare=True),
    ]
    bad_words: Annotated[
        Iterable[str] | None,
        Field(
            "Never write this text; up to 128 times, each 1 to 256 bytes.",
            most_entries=128,
            is_rare=True,
        ),
    ]
    seed: Annotated[int | None, Field("Same seed, same draws; absent: drawn by the server.")]
    logprobs: Annotated[
        int | None,
        Field(
            "Report the log-probability of each token and of this many of the likeliest there; "
            "absent: none.",
            0,
            20,
        ),
    ]
    # Completion.prompt_logprobs.
    prompt_logprobs: Annotated[
        int | None,
        Field(
            "Report the log-probability of each token of the prompt and of this many of the "
            "likeliest there; absent: none.",
            0,
            20,
            is_rare=True,
        ),
    ]


def _with_default(name: str, field: Field) -> Field:
    """Return a field with Protobuf's default if an absent one cannot be told from it."""
    descriptor = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name[name]
    if descriptor.has_presence or descriptor.default_value == []:
        return field
    return replace(field, default=descriptor.default_value)


FIELDS: Mapping[str, Field] = {
    name: _with_default(name, hint.__metadata__[0])
    for name, hint in get_type_hints(SamplingOptions, include_extras=True).items()
}


def check(sampling: types_pb2.SamplingParams, vocabulary_size: int) -> None:
    """Raise InvalidArgument for the first value out of bounds; its field is `sampling.NAME`."""
    for name, field in FIELDS.items():
        descriptor = sampling.DESCRIPTOR.fields_by_name[name]
        path = f"sampling.{name}"
        value: Any = getattr(sampling, name)
        if isinstance(value, int | float):
            if not descriptor.has_presence or sampling.HasField(name):
                _check_number(value, field, name)
            continue
        limit = vocabulary_size if field.most_entries is None else field.most_entries
        if len(value) > limit:
            raise InvalidArgument(
                f"{counted(len(value), 'entry', 'entries')}, at most {limit}", field=path
            )
        if descriptor.message_type is not None:
            _check_biases(value, field, path, vocabulary_size)
        elif descriptor.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            _check_texts(value, path)
        else:
            check_token_ids(value, path, vocabulary_size)


def check_token_ids(ids: Sequence[int], path: str, vocabulary_size: int) -> None:
    """Raise InvalidArgument for an id outside the vocabulary."""
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocabulary_size:
            raise InvalidArgument(
                f"token ids must be in [0, {vocabulary_size})", field=f"{path}[{index}]"
            )


def _check_number(value: float, field: Field, name: str) -> None:
    """Raise InvalidArgument for a number out of bounds; NaN and infinity never pass."""
    is_low = value <= field.least if field.is_above else value < field.least
    if math.isfinite(value) and not is_low and value <= field.most:
        return
    kind = "an integer" if isinstance(value, int) else "finite and"
    low = f"{'above' if field.is_above else 'at least'} {field.least:g}"
    high = "" if math.isinf(field.most) else f" and at most {field.most:g}"
    raise InvalidArgument(f"{name} must be {kind} {low}{high}", field=f"sampling.{name}")


def _check_biases(
    biases: Mapping[int, float], field: Field, path: str, vocabulary_size: int
) -> None:
    for token_id, bias in biases.items():
        if not 0 <= token_id < vocabulary_size:
            raise InvalidArgument(
                f"keys must be in [0, {vocabulary_size})", field=f"{path}[{token_id}]"
            )
        if not field.least <= bias <= field.most:
            raise InvalidArgument(
                f"biases must be in [{field.least:g}, {field.most:g}]",
                field=f"{path}[{token_id}]",
            )


def _check_texts(texts: Sequence[str], path: str) -> None:
    for index, text in enumerate(texts):
        if not 1 <= len(text.encode()) <= TEXT_BYTES_LIMIT:
            raise InvalidArgument(
                f"a text here has 1 to {TEXT_BYTES_LIMIT} bytes", field=f"{path}[{index}]"
            )

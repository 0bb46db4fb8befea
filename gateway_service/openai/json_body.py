"""JSON of a body: bounded before it is parsed, and strict."""

from __future__ import annotations

import json
import re
from typing import Any

from gateway_service.openai.fields import MOST_TOKENS
from splitpoint.errors import InvalidArgument

# What a body may have at most: values, as many as the token ids of a prompt and some more; and
# strings, keys, arrays and objects, which take many times as long to read as numbers. While a body
# is read, no stream of the process goes on.
_MOST_VALUES = MOST_TOKENS + 4096
_MOST_PARTS = 1 << 17
# A string to its end, or to that of the text. It matches at every quote: nothing is tried twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)


def parsed(text: bytes) -> Any:
    """Return the JSON value of a body in UTF-8, as RFC 8259 has it. Raises InvalidArgument.

    Not only for bodies of wrong JSON, but also for those with too many values. NaN, Infinity, a
    byte order mark, UTF-16 and UTF-32, which Python would accept, are refused.
    """
    _check_counts(text)
    try:
        return json.loads(text.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise _not_json("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise _not_json("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at character {error.pos}") from None
    except ValueError:  # a constant, or an integer of more digits than Python reads
        raise _not_json("it has a number that JSON cannot have, or one that is too long") from None


def _check_counts(text: bytes) -> None:
    """Raise InvalidArgument if a body has too many values. Counts bytes, since that is cheap."""
    if len(text) < 2 * _MOST_PARTS:
        return
    if _is_little(text, text.count(b'"') // 2):
        return
    # The texts in it may be full of commas and brackets. Before they are taken out: each string
    # has a quote that no backslash precedes.
    if text.count(b'"') - text.count(b'\\"') <= 2 * _MOST_PARTS:
        rest, strings = _STRING.subn(b"", text)
        if _is_little(rest, strings):
            return
    raise InvalidArgument(
        f"the body has too many values: at most {_MOST_VALUES:,}, and at most {_MOST_PARTS:,} "
        "strings, keys, arrays and objects",
        reason="TOO_MANY_VALUES",
    )


def _is_little(text: bytes, strings: int) -> bool:
    parts = strings + text.count(b"[") + text.count(b"{")
    return text.count(b",") < _MOST_VALUES and parts <= _MOST_PARTS


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _not_json(why: str) -> InvalidArgument:
    return InvalidArgument(f"the body is not JSON: {why}", reason="INVALID_JSON")

"""Bodies of some MiB: what is refused, and that none of them stops the streams of others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from gateway_service.openai.chat_completions import read_chat
from gateway_service.openai.completions import read_completion
from gateway_service.openai.json_body import parsed
from gateway_service.openai.tokens import read_detokenize
from splitpoint.errors import InvalidArgument

BYTES = 4 << 20
TOKENS = 1 << 19
PROMPT = b'{"model":"m","prompt":'
CHAT = b'{"model":"m","messages":'
USER = b'{"role":"user","content":"a"}'


def filled(head: bytes, item: bytes, tail: bytes, most: int = BYTES) -> bytes:
    """As many equal items as fit into a body, at most `most`."""
    count = min(most, (BYTES - len(head) - len(tail)) // len(item))
    return head + item * count + tail


def requests_of(body: bytes) -> int:
    """Read a body as the gateway does; return the number of its requests, made and written."""
    value = parsed(body)
    job: Any
    if "messages" in value:
        job = read_chat(value, request_id="i", created=3)
    else:
        job = read_completion(value, request_id="i", created=3)
    return len([request.SerializeToString() for request in job.requests])


# Bodies that are served, and the number of requests.
SERVED = {
    "ids": (filled(PROMPT + b"[", b"12345,", b"1]}", TOKENS - 1), 1),
    "commas": (filled(PROMPT + b'"', b"a,[{", b'"}'), 1),
    "quotes": (filled(PROMPT + b'"', b'\\",[', b'"}'), 1),
    "backslashes": (filled(PROMPT + b'"', b"\\\\,[", b'"}'), 1),
    "escapes": (filled(PROMPT + b'"', b"\\u00e9,[", b'"}'), 1),
    "copies": (PROMPT + b'"' + b"a" * (100 << 10) + b'","n":128}', 128),
    "messages": (CHAT + b"[" + b",".join([USER] * 4096) + b"]}", 1),
    "a message": (filled(CHAT + b'[{"role":"user","content":"', b"\\n", b'"}]}'), 1),
}
# Bodies that are refused, and the error's reason and field.
REFUSED = {
    "too many ids": (filled(PROMPT + b"[", b"1,", b"1]}"), "TOO_MANY_VALUES", ""),
    "an id too many": (filled(PROMPT + b"[", b"1,", b"1]}", TOKENS), "INVALID_VALUE", "prompt"),
    "lists of ids": (
        PROMPT + b"[" + b",".join([b"[" + b"1," * 4095 + b"1]"] * 250) + b"]}",
        "TOO_MANY_VALUES",
        "",
    ),
    "arrays": (filled(PROMPT + b"[", b"[],", b"[]]}"), "TOO_MANY_VALUES", ""),
    "objects": (filled(CHAT + b"[", b"{},", b"{}]}"), "TOO_MANY_VALUES", ""),
    "strings": (filled(PROMPT + b"[", b'"",', b'""]}'), "TOO_MANY_VALUES", ""),
    "backslashes in strings": (
        filled(PROMPT + b"[", b'"\\\\",', b'""]}'),
        "TOO_MANY_VALUES",
        "",
    ),
    "biases": (
        PROMPT + b'"a","logit_bias":{' + b",".join(b'"%d":1' % n for n in range(100_000)) + b"}}",
        "INVALID_VALUE",
        "logit_bias",
    ),
    "a bad id at the end": (
        filled(PROMPT + b"[", b"1,", b"true]}", TOKENS - 1),
        "INVALID_TYPE",
        f"prompt[{TOKENS - 1}]",
    ),
    "a negative id": (filled(PROMPT + b"[", b"1,", b"-1]}", 9), "INVALID_VALUE", "prompt[9]"),
    "a schema": (
        filled(PROMPT + b'"a","guided_json":{"enum":[', b"0.1,", b"1]}}", TOKENS - 9),
        "TOO_MANY_VALUES",
        "guided_json",
    ),
    "variables": (
        filled(
            CHAT + b"[" + USER + b'],"chat_template_kwargs":{"a":[', b"0.1,", b"1]}}", TOKENS - 9
        ),
        "TOO_MANY_VALUES",
        "chat_template_kwargs",
    ),
    "copies": (filled(PROMPT + b'"', b"a", b'","n":128}'), "INVALID_VALUE", "n"),
    "copies of prompts": (
        PROMPT + json.dumps(["a" * (500 << 10)] * 8).encode() + b',"n":32}',
        "INVALID_VALUE",
        "n",
    ),
    "copies of a constraint": (
        PROMPT + json.dumps(["a"] * 256).encode() + b',"guided_choice":["' + b"a" * 99_999 + b'"]}',
        "INVALID_VALUE",
        "n",
    ),
    "copies of a chat": (
        CHAT + b'[{"role":"user","content":"' + b"a" * (1 << 20) + b'"}],"n":32}',
        "INVALID_VALUE",
        "n",
    ),
    "a text without end": (filled(PROMPT + b'"', b'\\",[', b""), "INVALID_JSON", ""),
    "a backslash at the end": (filled(b'{"[', b"\\\\[", b"\\"), "INVALID_JSON", ""),
    "escapes outside of texts": (filled(b"", b'\\",', b""), "INVALID_JSON", ""),
}


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served(name: str) -> None:
    body, count = SERVED[name]
    assert requests_of(body) == count


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    body, reason, field = REFUSED[name]
    with pytest.raises(InvalidArgument) as caught:
        requests_of(body)
    assert (caught.value.reason, caught.value.field) == (reason, field)
    assert len(caught.value.message) < 200  # no part of a body


def test_none_takes_long() -> None:
    """The event loop, and every stream with it, waits meanwhile (docs/gateway.md)."""
    bodies = [body for body, _ in SERVED.values()] + [body for body, *_ in REFUSED.values()]
    for body in bodies:
        assert seconds_of(requests_of, body) < 0.5, body[:64]
    tokens = b'{"tokens":[' + b"1," * (TOKENS - 1) + b"1]}"
    assert seconds_of(lambda body: read_detokenize(parsed(body)), tokens) < 0.5


def seconds_of(read: Callable[[bytes], object], body: bytes) -> float:
    """Return the processor time of reading a body, the least of two tries."""
    best = float("inf")
    for _ in range(2):
        began = time.process_time()
        try:
            read(body)
        except InvalidArgument:
            pass
        best = min(best, time.process_time() - began)
    return best

"""Spans of requests that are not traced, and what is refused before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest

from splitpoint.errors import InvalidArgument, Unavailable
from splitpoint.observe import tracing
from splitpoint.observe.tracing import NO_SPAN, collector_url, name_of, received_parent

ROOT = Path(__file__).resolve().parents[3]
# A service whose installation lacks the extra.
WITHOUT_THE_EXTRA = """
import runpy, sys
sys.modules["opentelemetry.sdk"] = None
sys.argv = ["kvstore_service", "--listen", "127.0.0.1:0", "--model", "x", "--arena", "x",
            "--host-memory", "1MiB", "--otlp-endpoint", "localhost:4317"]
runpy.run_module("kvstore_service", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:4317", "http://localhost:4317"),
        ("[::1]:4317", "http://[::1]:4317"),
        ("http://collector:4317", "http://collector:4317"),
        ("https://collector:4317/", "https://collector:4317/"),
        ("env", None),
    ],
)
def test_where_spans_go(text: str, url: str | None) -> None:
    assert collector_url(text) == url


@pytest.mark.parametrize("text", ["", "collector", "unix:/x", "ftp://x:1", "http://x", "x:99999"])
def test_what_is_no_collector_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        collector_url(text)
    assert caught.value.field == "otlp_endpoint"


def test_a_missing_extra_is_said() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_EXTRA],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "pip install 'splitpoint[tracing]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_a_collector_spans_are_nothing() -> None:
    assert not tracing.is_on()
    span = tracing.begin("generate", "00-" + "1" * 32 + "-" + "2" * 16 + "-01", tokens=3)
    assert span is NO_SPAN
    with span.part("peek") as part:
        assert part is NO_SPAN
        assert tracing.metadata() is None
    span.record("queue", 0.0, 1.0)
    span.set(tokens=4)
    span.end()
    assert (span.traceparent, span.is_recorded) == ("", False)


def test_without_a_collector_spans_cost_next_to_nothing() -> None:
    """A few calls that do nothing (0.3 µs): a hundredth of a token of the fastest stack."""
    calls: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event.endswith("call"):
            calls.append(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        NO_SPAN.record("first token", 0.0, 1.0, worker="0", attempt=1)
    finally:
        sys.setprofile(None)
    # The end of profiling is a call of this very function.
    assert calls[:-1] == ["record", "_begin", "is_recorded", "end", "is_recorded"]


def test_failures_are_named_not_quoted() -> None:
    error = Unavailable("the text 'secret' was not taken", reason="BUSY")
    assert (name_of(error), name_of(ValueError("secret"))) == ("BUSY", "ValueError")


IDS = f"{'ab' * 16}-{'cd' * 8}"


@pytest.mark.parametrize(
    ("values", "parent"),
    [
        ([f"00-{IDS}-01"], f"00-{IDS}-01"),
        ([f" 00-{IDS}-00\t"], f"00-{IDS}-00"),
        # A later version is read as the one that is known here.
        ([f"01-{IDS}-01"], f"00-{IDS}-01"),
        ([f"cc-{IDS}-01-what the future holds"], f"00-{IDS}-01"),
    ],
)
def test_a_callers_trace_goes_on(values: list[str], parent: str) -> None:
    assert received_parent(values) == parent


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        ["x" * 4000],
        [f"00-{IDS}-01", f"00-{IDS}-01"],
        [f"00-{IDS}-01, 00-{IDS}-01"],
        [f"00-{IDS}-01-more"],
        [f"00-{IDS}-01\n"],
        [f"00-{IDS}"],
        [f"00-{IDS}-1"],
        [f"ff-{IDS}-01"],
        [f"01-{IDS}-01more"],
        [f"00-{IDS}-01".upper()],
        [f"00-{'0' * 32}-{'cd' * 8}-01"],
        [f"00-{'ab' * 16}-{'0' * 16}-01"],
        ["00-" + "\u00fc" * 32 + f"-{'cd' * 8}-01"],
    ],
)
def test_a_malformed_traceparent_is_ignored(values: list[str]) -> None:
    assert received_parent(values) == ""

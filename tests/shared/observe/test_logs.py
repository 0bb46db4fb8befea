"""Log lines in both formats: whose they are, what they carry, and that none can be forged."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from typing import Protocol

import pytest

from splitpoint.observe import logs
from splitpoint.observe.logs import (
    LogFormat,
    LogLevel,
    LogOptions,
    for_request,
    level_of,
    message_of,
)


class Setup(Protocol):
    def __call__(self, log_format: LogFormat, level: LogLevel = ...) -> io.StringIO: ...


HEADER = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ store( \[[^\n]*\])?: ")
LOG = logging.getLogger("kvstore_service.store")


@pytest.fixture
def logging_to(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setup]:
    """Sets a service's logging up; what it writes."""
    before = logging.root.handlers[:], logging.root.level

    def start(log_format: LogFormat, level: LogLevel = LogLevel.INFO) -> io.StringIO:
        stream = io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        logs.setup_logging("store", LogOptions(log_format, level))
        return stream

    yield start
    logging.root.handlers, logging.root.level = before
    logging.captureWarnings(False)


def fail(text: str) -> None:
    raise ValueError(text)


@pytest.mark.parametrize("log_format", LogFormat)
def test_lines_cannot_be_forged(logging_to: Setup, log_format: LogFormat) -> None:
    stream = logging_to(log_format)
    # All that ends a line somewhere, and what steers a terminal.
    bad = "a\nb\rc\x0bd\x0ce\x1cf\x1dg\x1eh\x85i\u2028j\u2029k\x1b[2Kl\x00m\x7f"
    with for_request(f"r]\n{bad}"):
        try:
            fail(f"INFO fake\n{bad}")
        except ValueError:
            LOG.exception("bad %s", bad, extra={"facts": {"name": bad}})
    written = stream.getvalue()
    assert all(character.isprintable() or character == "\n" for character in written)
    lines = written.splitlines()
    if log_format is LogFormat.TEXT:
        assert len(lines) > 3
        assert all(HEADER.match(line) for line in lines)
        assert lines[0].count("a\\nb\\rc\\x0bd") == 3  # request, message, fact
    else:
        assert len(lines) == 1
        assert json.loads(lines[0])["message"] == f"bad {bad}"


def test_json_has_what_programs_look_for(logging_to: Setup) -> None:
    stream = logging_to(LogFormat.JSON)
    LOG.debug("not shown")
    LOG.info("plain")
    with for_request("chat-7"):
        try:
            fail("deep down")
        except ValueError:
            LOG.exception("incident %s", "00ff", extra={"incident": "00ff"})
        LOG.warning("ended", extra={"facts": {"ttft_seconds": 0.25, "worker": "0", "none": None}})
    plain, incident, ended = map(json.loads, stream.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", plain.pop("time"))
    logger = "kvstore_service.store"
    assert plain == {"level": "INFO", "service": "store", "logger": logger, "message": "plain"}
    assert (incident["request_id"], incident["incident"]) == ("chat-7", "00ff")
    assert incident["exception"][-1] == "ValueError: deep down"
    assert ended["facts"] == {"ttft_seconds": 0.25, "worker": "0"}


def test_the_level_and_the_facts_in_text(logging_to: Setup) -> None:
    stream = logging_to(LogFormat.TEXT, LogLevel.WARNING)
    LOG.info("not shown")
    with for_request("chat-7"):
        LOG.warning("ended", extra={"facts": {"ttft_seconds": 1 / 3, "outcome": "stop"}})
    assert stream.getvalue().endswith(
        "Z WARNING store [chat-7]: ended ttft_seconds=0.333333 outcome=stop\n"
    )


async def test_requests_keep_their_own_ids(logging_to: Setup) -> None:
    stream = logging_to(LogFormat.JSON)
    meeting = asyncio.Barrier(2)

    async def work() -> None:
        await meeting.wait()
        LOG.info("in a task")

    tasks = []
    for request_id in ("one", "two"):
        with for_request(request_id):
            tasks.append(asyncio.create_task(work()))
    await asyncio.gather(*tasks)
    LOG.info("outside")
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert sorted(r.get("request_id", "") for r in records) == ["", "one", "two"]


@pytest.mark.parametrize("log_format", LogFormat)
def test_the_level_of_a_line_can_be_read_back(logging_to: Setup, log_format: LogFormat) -> None:
    stream = logging_to(log_format)
    LOG.error("x")
    with for_request("{}"):
        LOG.info("y")
    assert [level_of(line) for line in stream.getvalue().splitlines()] == ["ERROR", "INFO"]
    assert [message_of(line) for line in stream.getvalue().splitlines()] == ["x", "y"]


@pytest.mark.parametrize(
    "line", ["", "Traceback:", "{", "{}", '{"level": 3}', "[]", "xZ LOUD s: t"]
)
def test_what_is_no_record_has_no_level(line: str) -> None:
    assert level_of(line) is None
    assert message_of(line) == line

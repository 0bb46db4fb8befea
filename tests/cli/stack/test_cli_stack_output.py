"""What `splitpoint up` says of its services: for people, for programs, on a terminal."""

from __future__ import annotations

import io
import json
import signal
import time
from pathlib import Path

import pytest
from own_names import instance_name
from rich.console import Console
from test_cli_up import SECONDS, stack
from up_process import wait_until_up

from splitpoint.observe.logs import LogFormat
from splitpoint.progress import Progress
from splitpoint_cli.stack.child import LogLine, ServiceExited
from splitpoint_cli.stack.output import LoadingBars, output_of

RECORD = '{"time": "2026-01-31T12:00:00.123Z", "level": "WARNING", "service": "kvstore"}'


def loading(done: int, service: str = "worker 0") -> LogLine:
    return LogLine(service, "", False, Progress("loading", done << 20, 100 << 20))


def test_loading_is_told_in_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with stack(log, instance_name("load"), worker="load") as process:
        wait_until_up(process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    for worker in ("worker 0", "worker 1"):
        lines = [line for line in errors.splitlines() if line.strip().startswith(worker)]
        told = [line for line in lines if "loading:" in line]
        # The first and the last: two seconds lie between any others.
        assert len(told) == 2, errors
        assert "0 B of 100 MiB (0%)" in told[0]
        assert "100 MiB of 100 MiB (100%)" in told[1]
    assert "PROGRESS" not in errors


def test_as_json_every_line_is_an_object(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with stack(
        log, instance_name("json"), worker="load", scheduler="die-later", log_format="json"
    ) as process:
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    records = [json.loads(line) for line in errors.splitlines()]
    assert all(record["time"].endswith("Z") for record in records)
    messages = {(record["service"], record["level"], record["message"]) for record in records}
    # What a child wrote that is no record, what `up` does, and why it ended.
    assert ("worker 0", "WARNING", "a library's own words") in messages
    assert any(service == "up" and "ready after" in text for service, _, text in messages)
    assert any(
        (service, level) == ("up", "ERROR") and "scheduler ended by SIGKILL" in text
        for service, level, text in messages
    )


def test_records_of_services_pass_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    output = output_of(LogFormat.JSON)
    output.line(LogLine("store", RECORD, True))
    output.line(LogLine("store", RECORD.replace("WARNING", "INFO"), False))
    output.line(LogLine("store", '{"not": "a record"}', True))
    output.failure(ServiceExited("store", 1, [LogLine("store", "seen before", True)]))
    first, wrapped, error = capsys.readouterr().err.splitlines()
    assert first == RECORD
    assert json.loads(wrapped)["message"] == '{"not": "a record"}'
    assert json.loads(error)["level"] == "ERROR"


def test_a_terminal_has_a_bar_for_each_that_loads() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    bars = LoadingBars(console)
    for done in (10, 50):
        for service in ("worker 0", "worker 1"):
            progress = loading(done, service).progress
            assert progress is not None
            bars.show(service, progress)
    deadline = time.monotonic() + 30
    while "50.0/100.0 MiB" not in screen.getvalue():  # drawn ten times a second
        assert time.monotonic() < deadline
        time.sleep(0.02)
    console.print("a line above")
    bars.remove("worker 1")
    bars.show("worker 0", Progress("loading", 100, 100))
    bars.close()
    text = screen.getvalue()
    assert "worker 0 loading" in text
    assert "worker 1 loading" in text
    assert "50.0/100.0 MiB" in text
    # The cursor is there again.
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")

"""Trace files: what is written is what ran."""

from __future__ import annotations

from pathlib import Path

import pytest
from trace_files import read_trace

from splitpoint.planning.schedule import (
    Lane,
    RestoreWork,
    Schedule,
    TaskKind,
    restore_tasks,
    simulate,
)
from worker_service.lanes.timeline import Span, Trace

NAMES = {
    TaskKind.SEND: "send X",
    TaskKind.LOAD: "load K,V",
    TaskKind.REBUILD: "rebuild",
    TaskKind.EMBED: "embed",
}
FACTS = {"device": "cpu (2 threads)", "link": "emulated at 184 MB/s"}


def restored() -> list[Span]:
    """Twelve layers of eight tiles, as a simulator would run them."""
    work = RestoreWork(12, 0, 1024, 2048, chunk_tokens=64, tile_tokens=128, slots=4)
    tasks = restore_tasks(work, Schedule.PIPELINED)
    run = simulate(tasks, lambda task: 1e-5 * task.tokens)
    return [
        Span(task.lane, NAMES[task.kind], 7 + start, 7 + end, task.layer, task.tokens, 10.0)
        for task, start, end in zip(tasks, run.starts, run.ends, strict=True)
    ]


def write(path: Path, spans: list[Span]) -> Path:
    trace = Trace(FACTS)
    trace.extend(spans)
    trace.write(path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.json", restored())


def test_what_was_written_is_read_back(file: Path) -> None:
    found = read_trace(file)
    wanted = sorted(restored(), key=lambda span: span.start)
    assert found.facts == FACTS
    assert len(found.spans) == len(wanted) == 12 * 8 * 3
    key = lambda span: (span.start, span.lane.value)  # noqa: E731
    for span, other in zip(sorted(found.spans, key=key), sorted(wanted, key=key), strict=True):
        assert span.start == pytest.approx(other.start - 7, abs=1e-9)
        assert span.seconds == pytest.approx(other.seconds, abs=1e-9)
        assert (span.lane, span.name, span.layer, span.tokens, span.amount) == (
            *(other.lane, other.name, other.layer),
            *(other.tokens, other.amount),
        )


def test_a_trace_keeps_its_end(tmp_path: Path) -> None:
    trace = Trace(limit=3)
    trace.extend(Span(Lane.COMPUTE, str(number), number, number + 1) for number in range(10))
    trace.write(tmp_path / "trace.json")
    assert [span.name for span in read_trace(tmp_path / "trace.json").spans] == ["7", "8", "9"]

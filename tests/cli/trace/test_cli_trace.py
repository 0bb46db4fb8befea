"""`splitpoint trace`: what is read back and what is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from splitpoint.errors import InvalidArgument, NotFound
from splitpoint.planning.schedule import (
    Lane,
    RestoreWork,
    Schedule,
    TaskKind,
    restore_tasks,
    simulate,
)
from splitpoint_cli.main import app
from splitpoint_cli.trace.command import (
    Window,
    lane_uses,
    lines_of,
    merged,
    seconds_in_both,
    table_of,
    window_of,
)
from worker_service.lanes.timeline import Span, Trace, read_trace

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


SPANS = [
    Span(Lane.LINK_IN, "send X", 0.0, 1.0, 0, 4, 100.0),
    Span(Lane.LINK_IN, "load K,V", 1.0, 3.0, 0, 4, 400.0),
    Span(Lane.COMPUTE, "rebuild", 1.0, 2.0, 0, 4, 3e9),
    Span(Lane.COMPUTE, "rebuild", 3.0, 4.0, 1, 4, 3e9),
]


def test_shares_by_hand() -> None:
    link, compute = lane_uses(SPANS, Window(0.0, 4.0))
    assert (link.lane, link.busy_seconds, link.busy_share) == (Lane.LINK_IN, 3.0, 0.75)
    assert (link.amount, link.pieces) == (500.0, 2)
    assert (compute.lane, compute.busy_share, compute.amount) == (Lane.COMPUTE, 0.5, 6e9)
    [link, compute] = lane_uses(SPANS, Window(0.5, 2.5))
    assert (link.busy_share, link.amount) == (1.0, 50.0 + 300.0)
    assert (compute.busy_share, compute.pieces) == (0.5, 1)
    assert [row.lane for row in lane_uses(SPANS, Window(3.5, 4.0))] == [Lane.COMPUTE]


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_the_command_counts(file: Path) -> None:
    code, text = run(file)
    assert code == 0
    assert "link in" in text
    assert "compute" in text
    assert "emulated at 184 MB/s" in text
    assert "GFLOP" in text


@pytest.mark.parametrize(("first", "last"), [(1e6, None), (None, 0.0)], ids=str)
def test_an_empty_window_is_refused(first: float | None, last: float | None) -> None:
    with pytest.raises(InvalidArgument, match="nothing ran"):
        window_of(SPANS, first, last)


@pytest.mark.parametrize(("first", "last"), [(30.0, 20.0), (5.0, 5.0)], ids=str)
def test_a_window_begins_before_it_ends(first: float, last: float) -> None:
    with pytest.raises(InvalidArgument, match=f"--from {first:g} is not before --to {last:g}"):
        window_of(SPANS, first, last)


def test_what_no_lane_alone_shows() -> None:
    work, both = lines_of(SPANS, Window(0.0, 5.0))
    assert work == "work from 0.0 to 4,000.0 ms"
    assert both == "both link and compute busy: 1 s (20.0%)"
    assert lines_of(SPANS, Window(1.5, 2.5)) == [
        "work from 1,500.0 to 2,500.0 ms",
        "both link and compute busy: 500 ms (50.0%)",
    ]
    # Weights come over the same link.
    weights = [Span(Lane.WEIGHTS_IN, "mlp", 0, 1), Span(Lane.COMPUTE, "rebuild", 0, 2)]
    assert "busy: 1 s (50.0%)" in lines_of([*weights, *weights], Window(0.0, 2.0))[1]
    assert "busy: 0 s (0.0%)" in lines_of(SPANS, Window(3.2, 4.0))[1]


def test_work_that_is_not_counted_is_not_zero() -> None:
    table = table_of(lane_uses([Span(Lane.COMPUTE, "decode", 0, 1)], Window(0, 1)), Window(0, 1))
    assert list(table.columns[-1].cells) == ["-"]


def test_stretches_of_time_by_hand() -> None:
    covered = merged([(4, 5), (0, 1), (0.5, 2), (2, 3), (6, 7)])
    assert covered == [(0, 3), (4, 5), (6, 7)]
    assert seconds_in_both(covered, [(2, 4.5), (4.75, 10)]) == 1 + 0.5 + 0.25 + 1
    assert seconds_in_both(covered, []) == 0


def event(**changes: Any) -> dict[str, Any]:
    good = {
        "ph": "X",
        "name": "copy",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 1.0,
        "args": {"tokens": 1, "amount": 0.0},
    }
    return {key: value for key, value in {**good, **changes}.items() if value is not None}


LANE = {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "link in"}}

BAD_EVENTS: tuple[dict[str, Any], ...] = (
    {"dur": -1.0},
    {"dur": None},
    {"ts": float("nan")},
    {"ts": "soon"},
    {"ts": 10**400},
    {"args": {"tokens": 1}},
    {"args": {"tokens": 1, "amount": float("inf")}},
    {"args": {"tokens": 1, "amount": 0, "layer": "x"}},
    {"tid": 9},
    {"tid": []},
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        "3",
        "{}",
        '{"traceEvents": 3}',
        '{"traceEvents": [3]}',
        "[" * 100_000,
        json.dumps({"traceEvents": [event()]}),  # a row that was never named
        json.dumps({"traceEvents": [{**LANE, "args": {"name": "GPU 0"}}]}),
        *(json.dumps({"traceEvents": [LANE, event(**change)]}) for change in BAD_EVENTS),
        json.dumps({"traceEvents": [], "otherData": []}),
    ],
)
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        read_trace(path)
    assert caught.value.field == "file"
    words = caught.value.message.removeprefix(str(path))
    assert not any(word in words for word in ("Error", "NoneType", "float()", "Lane")), words


def test_the_event_that_is_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    for change, said in (
        ({"ph": None}, "in event 1 'ph' is missing"),
        ({"dur": None}, "in event 1 'dur' is missing"),
        ({"ts": "soon"}, "in event 1 'ts' is not a number"),
        ({"tid": 9}, "in event 1 the row 9 was never named"),
    ):
        path.write_text(json.dumps({"traceEvents": [LANE, event(**change)]}))
        with pytest.raises(InvalidArgument, match=said):
            read_trace(path)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    for path, error in (
        (tmp_path / "none", NotFound),
        (tmp_path, InvalidArgument),
        (tmp_path / "binary", InvalidArgument),
    ):
        with pytest.raises(error):
            read_trace(path)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        run(write(tmp_path / "empty.json", []))

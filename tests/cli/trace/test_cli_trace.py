"""`splitpoint trace`: what is read back, what is counted, what is drawn."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
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
from splitpoint_cli.stack.child import child_environment
from splitpoint_cli.trace.command import lines_of, table_of, window_of
from splitpoint_cli.trace.gantt import Window, colours_of, gantt, layer_stretches, rows_of
from splitpoint_cli.trace.intervals import gaps_between, merged, seconds_in_both
from splitpoint_cli.trace.time_axis import TimeAxis
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
    link, compute = rows_of(SPANS, Window(0.0, 4.0))
    assert (link.lane, link.busy_seconds, link.busy_share) == (Lane.LINK_IN, 3.0, 0.75)
    assert (link.amount, len(link.spans)) == (500.0, 2)
    assert (compute.lane, compute.busy_share, compute.amount) == (Lane.COMPUTE, 0.5, 6e9)
    [link, compute] = rows_of(SPANS, Window(0.5, 2.5))
    assert (link.busy_share, link.amount) == (1.0, 50.0 + 300.0)
    assert (compute.busy_share, len(compute.spans)) == (0.5, 1)
    assert [row.lane for row in rows_of(SPANS, Window(3.5, 4.0))] == [Lane.COMPUTE]


def test_a_layer_is_named_wherever_it_goes_on_for_a_while() -> None:
    layers = (1, 1, 0, None, 0, 1)
    spans = [Span(Lane.COMPUTE, "rebuild", n, n + 0.5, each) for n, each in enumerate(layers)]
    assert layer_stretches(spans[::-1]) == [
        (1, 0, 1.5),
        (0, 2, 2.5),
        (0, 4, 4.5),
        (1, 5, 5.5),
    ]


def test_every_kind_has_a_colour_of_its_own() -> None:
    spans = [Span(Lane.COMPUTE, name, 0, 1) for name in ("send X", "rebuild", "W_K", "W_V", "mlp")]
    colours = colours_of([*spans, *spans])
    assert list(colours) == ["send X", "rebuild", "W_K", "W_V", "mlp"]
    assert len(set(colours.values())) == 5


def test_the_picture_has_a_row_per_lane_and_every_bar() -> None:
    spans = restored()
    window = Window.around(spans)
    figure = gantt(spans, window, FACTS)
    [axes] = figure.axes
    rows = rows_of(spans, window)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"{row.lane.value}\n{row.busy_share:.0%} busy" for row in rows]
    assert len(rows) == 2
    assert axes.get_xlim() == (window.first, window.last)
    assert axes.get_title() == "device cpu (2 threads), link emulated at 184 MB/s"
    drawn = sum(len(bars.get_paths()) for bars in axes.collections)
    assert drawn == len(spans)
    # Layer 0 is spread among the others, too thinly for its number.
    assert {int(text.get_text()) for text in axes.texts} == set(range(1, 12))
    [legend] = figure.legends
    assert {text.get_text() for text in legend.get_texts()} == set(NAMES.values())


def test_a_bar_is_where_its_span_is() -> None:
    """The pixel in the middle of each span has the colour of its kind."""
    figure = gantt(SPANS, Window(0.0, 4.0), {})
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())
    height = figure.bbox.height
    rows = {Lane.LINK_IN: 0, Lane.COMPUTE: 1}
    colours = colours_of(SPANS)
    for span in SPANS[:3]:  # the fourth is of an odd layer, in a lighter tone
        middle = ((span.start + span.end) / 2, rows[span.lane])
        x, y = figure.axes[0].transData.transform(middle)
        found = pixels[int(height - y), int(x), :3] / 255
        assert found == pytest.approx(to_rgb(colours[span.name]), abs=0.01), span


def test_an_axis_without_long_waits_is_the_clock() -> None:
    axis = TimeAxis.around([(1.0, 2.0), (2.9, 3.0)])
    assert axis == TimeAxis(1.0, 3.0)
    assert axis.position(2.5) == 2.5
    assert axis.ticks() == pytest.approx([1, 1.5, 2, 2.5, 3])


def test_long_waits_are_cut_and_work_keeps_its_scale() -> None:
    covered = [(10.0, 11.0), (31.0, 32.0), (32.5, 34.0), (95.0, 96.0)]
    axis = TimeAxis.around(covered)
    assert axis.cuts == ((11.0, 31.0), (34.0, 95.0))
    assert axis.cut_width == pytest.approx(0.02 * 5)
    assert axis.width == pytest.approx(5 + 2 * 0.1)
    for begin, end in covered:
        assert axis.position(end) - axis.position(begin) == pytest.approx(end - begin)
    moments = [10.0 + step / 7 for step in range(600)]
    drawn = [axis.position(moment) for moment in moments]
    assert drawn == sorted(drawn)
    assert all(not begin < tick < end for tick in axis.ticks() for begin, end in axis.cuts)
    many = TimeAxis.around([(100.0 * number, 100.0 * number + 1) for number in range(50)])
    assert many.width == pytest.approx(50 * 1.2, rel=0.01)


def test_the_picture_marks_where_it_was_cut() -> None:
    late = [replace(span, start=span.start + 60, end=span.end + 60) for span in SPANS]
    figure = gantt([*SPANS, *late], Window(-5.0, 100.0), {})
    [axes] = figure.axes
    first, last = axes.get_xlim()
    assert (first, last) == pytest.approx((0.0, 8 + 0.16))
    assert "56 s idle, cut" in {text.get_text() for text in axes.texts}
    labels = [float(label.get_text()) for label in axes.get_xticklabels()]
    assert all(0 <= label <= 4 or 60 <= label <= 64 for label in labels)
    assert {0, 2, 4, 60, 62, 64} <= set(labels)


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_the_command_counts_or_draws(file: Path, tmp_path: Path) -> None:
    code, text = run(file)
    assert code == 0
    assert "link in" in text
    assert "compute" in text
    assert "emulated at 184 MB/s" in text
    assert "GFLOP" in text
    picture = tmp_path / "out.png"
    code, text = run(file, "--png", picture, "--from", 5, "--to", 40)
    assert code == 0
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 2000
    assert height >= 400


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


def test_work_that_nobody_counted_is_not_zero() -> None:
    table = table_of(rows_of([Span(Lane.COMPUTE, "decode", 0, 1)], Window(0, 1)), Window(0, 1))
    assert list(table.columns[-1].cells) == ["-"]


def test_stretches_of_time_by_hand() -> None:
    covered = merged([(4, 5), (0, 1), (0.5, 2), (2, 3), (6, 7)])
    assert covered == [(0, 3), (4, 5), (6, 7)]
    assert gaps_between(covered, 0.5) == [(3, 4), (5, 6)]
    assert gaps_between(covered, 1) == []
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


@pytest.mark.parametrize("name", ["out.svg", "no/such/folder.png"])
def test_a_picture_needs_a_place(file: Path, name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        run(file, "--png", tmp_path / name)
    assert caught.value.field == "png"


def test_without_matplotlib_the_error_names_the_extra(file: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text(
        "raise ModuleNotFoundError('hidden by a test', name='matplotlib')\n"
    )
    environment = child_environment({})
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "splitpoint_cli", "trace", file, "--png", tmp_path / "out.png"],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert done.returncode == 2
    assert "needs matplotlib, which is not installed" in done.stderr
    assert "splitpoint[plots]" in done.stderr
    assert not (tmp_path / "out.png").exists()

"""The picture of `splitpoint top` at several widths, with and without colours and signs."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console
from test_cli_top_rates import reading, scheduler, stats
from told_workers import telemetry, worker

from splitpoint.client.answers import Queue, QueuedRequest, RedisStatus, WorkerSpeculation
from splitpoint.speculation import PLAIN as NO_DRAFTS
from splitpoint.speculation import DraftMethod
from splitpoint.v1.types_pb2 import TIER_DISK, TIER_POOL
from splitpoint_cli.output import duration_text
from splitpoint_cli.request.observed import Store
from splitpoint_cli.top.bars import FANCY, PLAIN, amount, bar, cell, flow, stacked_bar
from splitpoint_cli.top.rates import Reading, Readings, first, following
from splitpoint_cli.top.view import Frame


def busy() -> Readings:
    """Two workers, one of them with a GPU's readings, a store, a queue."""
    gpu = {"power_limit_watts": 700.0, "link_ceiling_bytes_per_second": 63e9, "split_tokens": 512}

    def seen(seconds: float, scale: float) -> Readings:
        workers = (
            worker(
                "0",
                telemetry(seconds, scale, split_tokens=2240),
                emulated_link_bytes_per_second=184e6,
                kappa_crit=1.35,
                recent_kappa_ratio=12.0,
                speculation=WorkerSpeculation(NO_DRAFTS, (DraftMethod.SUFFIX,)),
            ),
            worker(
                "1",
                telemetry(seconds, scale * 1000, power_watts=412.0, **gpu),
                loss_count=2,
                advised_power_watts=233.0,
            ),
        )
        return first(
            reading(seconds, *workers, status=scheduler(seconds, int(scale)), store=stats(1))
        )

    later = seen(12.0, 2).latest
    waiting = tuple(
        QueuedRequest(f"request-{n}", n, 1 << 30, 3.5, "no worker has room for " + "it " * 40)
        for n in range(7)
    )
    status = dataclasses.replace(
        later.status,
        queue=Queue(waiting, 256),
        scheduler=dataclasses.replace(
            later.status.scheduler,
            redis=RedisStatus("redis://r:6379/0", False),
            oldest_wait_seconds=75.0,
            resumed_count=3,
        ),
    )
    return following(seen(10.0, 1), dataclasses.replace(later, status=status))


def shown(frame: Frame, width: int, **options: object) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, **options)  # type: ignore[arg-type]
    console.print(frame, soft_wrap=False)
    return file.getvalue()


@pytest.fixture
def readings() -> Readings:
    return busy()


PARTS = (
    "running 2",
    "tokens/s 40",
    "TTFT 500 ms",
    "ITL 50 ms",
    "cached 75%",
    "Redis away",
    "warning: Redis at redis://r:6379/0 does not answer",
    "splitpoint status says what to do",
    "link in ███████░░░░░ 100 MB/s of 184 MB/s (emulated)",
    "100 GB/s of 63 GB/s (ceiling)",
    "busy link 75%, compute 25%",
    "60% loaded, 30% rebuilt, 10% recomputed",
    "split 2,240",
    "measured/predicted 1.1",
    "cached/new 12 (link-bound above 1.35)",
    "tokens/step 103",
    "oldest waits 75 s",
    "resumed 3",
    "drafts accepted 75%",
    "selections read 12%",
    "412 of 700 W, 233 W would do",
    "no reading: no RAPL, no GPU",
    "cache ███░░░░░░░░░ 1 MiB of 4 MiB",
    "lost 2×",
    "leased 5",
    "quarantined 1",
    "7 waiting, at most 256 may",
    "and 2 more",
)


@pytest.mark.parametrize("width", [72, 80, 100, 140, 200])
def test_everything_is_there_whole_at_every_width(readings: Readings, width: int) -> None:
    text = shown(Frame("127.0.0.1:50050", readings), width)
    for part in PARTS:
        assert part in text, text
    assert max(map(len, text.splitlines())) <= width
    assert ("…" in text) == (width < 160)  # reasons of the queue, nothing else
    assert all("request-" in line for line in text.splitlines() if "…" in line)


def test_tiers_behind_the_arena(readings: Readings) -> None:
    def seen(seconds: float, scale: int, *, is_up: bool) -> Reading:
        told = stats(scale)
        told.tiers.add(
            tier=TIER_DISK,
            is_up=is_up,
            capacity_bytes=4 << 20,
            used_bytes=1 << 20,
            chunk_count=12,
            read_bytes=100_000_000 * scale,
            written_bytes=10_000_000 * scale,
            dropped_chunk_count=3,
        )
        told.tiers.add(tier=TIER_POOL, engine="weave", is_up=is_up)
        return reading(seconds, store=told)

    both = following(first(seen(10.0, 1, is_up=True)), seen(12.0, 2, is_up=True))
    for width in (72, 100, 200):
        text = shown(Frame("a:1", both), width)
        for part in (
            "disk tier ███░░░░░░░░░ 1 MiB of 4 MiB",
            "loaded 50 MB/s",
            "written 5 MB/s",
            "chunks 12",
            "dropped 3",
            "Weave pool up",
            "chunks -",
        ):
            assert part in text, text
        assert max(map(len, text.splitlines())) <= width
    away = shown(Frame("a:1", following(both, seen(14.0, 3, is_up=False))), 200)
    assert "Weave pool away" in away
    assert "state away" in away
    # The first reading has no rates; a store without tiers no line.
    assert "loaded -" in shown(Frame("a:1", first(seen(10.0, 1, is_up=True))), 200)
    assert "tier" not in shown(Frame("a:1", readings), 200)


def test_wider_is_shorter(readings: Readings) -> None:
    heights = [len(shown(Frame("a:1", readings), width).splitlines()) for width in (80, 140, 200)]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] > heights[-1]


def test_forty_columns_are_not_enough_for_all_but_nothing_overflows(readings: Readings) -> None:
    lines = shown(Frame("127.0.0.1:50050", readings), 40).splitlines()
    assert max(map(len, lines)) <= 40


def test_a_low_terminal_says_that_lines_are_missing(readings: Readings) -> None:
    whole = shown(Frame("a:1", readings), 80).splitlines()
    frame = Frame("a:1", readings, fills_screen=True)
    low = shown(frame, 80, height=24).splitlines()
    assert low[:-1] == whole[:23]
    assert low[-1].split(":")[0] == f"{len(whole) - 23} more lines"
    assert shown(frame, 80, height=len(whole)).splitlines() == whole
    assert max(map(len, shown(frame, 30, height=5).splitlines())) <= 30


def test_why_a_worker_is_away_is_short() -> None:
    message = "cannot connect to unix:/w: No such file or directory"
    away = dataclasses.replace(worker("0"), ready=False, message=message)
    text = shown(Frame("a:1", first(reading(1.0, away, store=stats()))), 200)
    assert "worker 0  not ready  cpu (1 thread)  cannot connect: No such file or directory" in text


def test_without_colours_and_without_signs(readings: Readings) -> None:
    frame = Frame("a:1", readings)
    plain = shown(frame, 80, force_terminal=True, no_color=True)
    # No colours; bold and dim may stay.
    assert not any(f"\x1b[{code}" in plain for code in ("31", "32", "33", "35", "36"))
    lines = [line.plain for line in frame.lines(80, PLAIN)]
    assert any("link in #######....." in line for line in lines)
    assert not set("".join(lines)) & set("█░▓▒")


def test_before_the_second_reading_there_are_no_rates() -> None:
    only = first(reading(1.0, worker(told=telemetry(5.0)), worker("1"), store=stats()))
    text = shown(Frame("a:1", only), 80)
    assert "steps/s -" in text
    assert "no telemetry yet" in text
    assert "(fitted)" in text


def test_a_scheduler_that_is_away(readings: Readings) -> None:
    text = shown(Frame("a:1", None, (0.0, "UNAVAILABLE"), "q quits"), 80)
    assert "the scheduler is away for 0 s (UNAVAILABLE), trying again" in text
    assert text.splitlines()[0] == "splitpoint top  a:1  q quits"
    text = " ".join(shown(Frame("a:1", readings, (130.0, "UNAVAILABLE")), 80).split())
    assert "away for 2 min (UNAVAILABLE), trying again; as last seen:" in text


def test_a_store_that_does_not_answer() -> None:
    seen = reading(1.0)
    lost = dataclasses.replace(seen.status, stores=(Store("h:1", None, "UNAVAILABLE: gone"),))
    text = shown(Frame("a:1", first(dataclasses.replace(seen, status=lost))), 80)
    assert "store h:1  UNAVAILABLE: gone" in text


# -- bars -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "....."),
        (0.01, "#...."),
        (0.5, "##..."),
        (1.0, "#####"),
        (7.0, "#####"),
        (None, "....."),
    ],
)
def test_bars(share: float | None, text: str) -> None:
    assert bar(share, 5, PLAIN, "red").plain == text


def test_stacked_bars_are_as_wide_as_asked_and_hide_no_part() -> None:
    styles = ("a", "b", "c", "d", "dim")
    for counts in ([0, 0, 0, 0, 10], [1, 1, 1, 1, 10_000], [5, 5, 0, 0, 0], [0, 0, 0, 0, 0]):
        parts = list(zip(counts, styles, strict=True))
        text = stacked_bar(parts, 20, PLAIN).plain
        assert len(text) == 20
        assert all(sign in text for sign, count in zip(PLAIN.parts, counts, strict=True) if count)
    assert stacked_bar([(1, "a"), (1, "b")], 4, FANCY).plain == "██▓▓"


def test_cells_flow_and_stand_below_each_other() -> None:
    cells = [cell("a", "1", 6), cell("bb", "2", 6), cell("c", "3", 6)]
    assert [line.plain for line in flow(cells, 15)] == ["a 1      bb 2", "c 3"]
    assert [line.plain for line in flow(cells, 4)] == ["a 1", "bb 2", "c 3"]


def test_numbers_and_times() -> None:
    assert [amount(v) for v in (None, 0, 0.254, 12.34, 4567.8)] == [
        "-",
        "0",
        "0.254",
        "12.3",
        "4,568",
    ]
    assert [duration_text(s) for s in (5, 300, 9000, 900_000)] == ["5 s", "5 min", "2.5 h", "10 d"]

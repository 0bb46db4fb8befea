"""Restores on lanes: every schedule, split and tile size brings back what was stored."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from long_runs import scaled
from stored_prefix import CPU, StoredPrefix, stored_prefix, tiny_prefix, token_ids
from tiny_models import CASES

from splitpoint.errors import ChunkLost
from splitpoint.planning.schedule import Lane, Schedule, TaskKind
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import EmulatedLink, Lanes, SerialLanes
from worker_service.lanes.timeline import Span
from worker_service.pipeline.executor import RestoreRun, restore
from worker_service.pipeline.task_work import Prefix, Target

CHUNK = 16
TOKENS = 150  # the last chunk is partial
SCHEDULES = (Schedule.SERIAL, Schedule.COLUMN, Schedule.PIPELINED)
SPLITS = (0, 1, CHUNK - 1, CHUNK, 75, 144, 149, TOKENS)
# A grouped-query model, for what does not depend on the checkpoint.
ONE = "llama-3"


@pytest.fixture(scope="module")
def stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoredPrefix]:
    yield from tiny_prefix(request.param, tmp_path_factory, TOKENS)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredPrefix]:
    yield from tiny_prefix(ONE, tmp_path_factory, TOKENS)


@torch.inference_mode()
def restore_and_compare(
    stored: StoredPrefix,
    lanes: Lanes,
    *,
    split: int,
    schedule: Schedule,
    tile_tokens: int,
    first_chunk: int = 0,
    cached: int = TOKENS,
    pages: list[int] | None = None,
    staging_pages: int = 8,
) -> list[Span]:
    chunks = stored.chunks[: -(-cached // CHUNK)]
    pages = pages or [(5 * index) % 17 for index in range(len(chunks))]
    keys, values = stored.empty_cache(17)
    transfer = stored.transfer(staging_pages)
    spans = restore(
        transfer,
        lanes,
        Prefix(
            chunks,
            first_chunk,
            [*([None] * first_chunk), *pages[first_chunk:]],
            stored.token_ids,
            cached,
            split,
        ),
        keys,
        values,
        schedule=schedule,
        tile_tokens=tile_tokens,
    )
    begin = first_chunk * CHUNK
    for layer in range(stored.layout.layer_count):
        for planes, wanted in (
            (keys, stored.computed.keys[layer]),
            (values, stored.computed.values[layer]),
        ):
            found = stored.rows(planes[layer], pages[first_chunk:], cached - begin)
            torch.testing.assert_close(found, wanted[begin:cached], rtol=1e-5, atol=1e-5)
            used = set(pages[first_chunk:])
            spare = [page for page in range(17) if page not in used]
            assert (planes[layer][spare] == 1e4).all(), "a foreign page was written"
    return spans


def is_essential(case: str, split: int, schedule: Schedule) -> bool:
    """Every schedule and split with one checkpoint; both ways of every other checkpoint."""
    return case == ONE or (split in (75, TOKENS) and schedule is Schedule.PIPELINED)


@pytest.mark.parametrize(
    ("stored", "split", "schedule"),
    [
        pytest.param(*each, marks=[] if is_essential(*each) else pytest.mark.chaos)
        for each in itertools.product(CASES, SPLITS, SCHEDULES)
    ],
    indirect=["stored"],
)
def test_every_split_brings_back_what_was_stored(
    stored: StoredPrefix, split: int, schedule: Schedule
) -> None:
    lanes = ThreadLanes(CPU)
    try:
        for tile in (CHUNK, 3 * CHUNK, 8 * CHUNK):
            spans = restore_and_compare(
                stored, lanes, split=split, schedule=schedule, tile_tokens=tile
            )
            # Layer 0's activations come from token ids: they never cross the link.
            sent = [span for span in spans if span.name == "send X"]
            assert bool(sent) == bool(split)
            assert all(span.layer for span in sent)
    finally:
        lanes.close()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_serial_twin_brings_back_the_same_bits(one: StoredPrefix, schedule: Schedule) -> None:
    found = []
    for lanes in (ThreadLanes(CPU), SerialLanes(CPU)):
        keys, values = one.empty_cache(17)
        transfer = one.transfer(8)
        prefix = Prefix(one.chunks, 0, list(range(len(one.chunks))), one.token_ids, TOKENS, 75)
        with torch.inference_mode():
            restore(transfer, lanes, prefix, keys, values, schedule=schedule, tile_tokens=2 * CHUNK)
        found.append((keys, values))
        lanes.close()
    for overlapped, serial in zip(*found, strict=True):
        for mine, other in zip(overlapped, serial, strict=True):
            assert torch.equal(mine, other)


def test_only_the_tail_of_a_streamed_sequence_may_come(one: StoredPrefix) -> None:
    with_lanes = ThreadLanes(CPU)
    for split in (0, 100, 146, TOKENS):
        restore_and_compare(
            one,
            with_lanes,
            split=split,
            schedule=Schedule.PIPELINED,
            tile_tokens=CHUNK,
            first_chunk=9,
        )
    with_lanes.close()


@pytest.mark.scaled
def test_runs_with_delayed_lanes_find_no_race(one: StoredPrefix) -> None:
    """Lanes that fall behind at random: whatever overlaps then must be right."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    lanes = ThreadLanes(CPU)

    def delay(lane: Lane) -> None:
        if rng.random() < 0.3:
            time.sleep(rng.choice([0.0, 1e-4, 4e-4]))

    lanes.before = delay
    for _ in range(scaled(30, chaos=100)):
        cached = rng.randrange(1, TOKENS + 1)
        pages = rng.sample(range(17), -(-cached // CHUNK))
        restore_and_compare(
            one,
            lanes,
            split=rng.randrange(cached + 1),
            schedule=rng.choice(SCHEDULES),
            tile_tokens=CHUNK * rng.randrange(1, 5),
            cached=cached,
            pages=pages,
            staging_pages=rng.choice([2, 3, 8]),
        )
    lanes.close()


def test_on_a_slow_link_copies_and_products_run_side_by_side(one: StoredPrefix) -> None:
    """Rebuilds run while the link is busy, by the spans' clock; copies take turns on the link."""
    lanes = ThreadLanes(CPU, EmulatedLink(2e6))
    spans = restore_and_compare(
        one, lanes, split=96, schedule=Schedule.PIPELINED, tile_tokens=2 * CHUNK
    )
    lanes.close()
    link = sorted((s for s in spans if s.lane is Lane.LINK_IN), key=lambda span: span.start)
    rebuilds = [span for span in spans if span.name == "rebuild"]
    assert all(a.end <= b.start for a, b in itertools.pairwise(link))
    assert any(r.start < s.end and s.start < r.end for r in rebuilds for s in link)
    # No byte crosses faster than the link.
    busy = sum(span.seconds for span in link)
    assert busy >= sum(span.amount for span in link) / 2e6 * (1 - 1e-6)


@pytest.mark.parametrize("lanes", [ThreadLanes(CPU), SerialLanes(CPU)], ids=["threads", "serial"])
def test_a_chunk_lost_on_the_way_is_never_taken_for_a_prefix(
    lanes: Lanes, one: StoredPrefix, tmp_path: Path
) -> None:
    with stored_prefix(one.model, tmp_path, token_ids(90)) as stored:
        copies: list[Lane] = []

        def lose_midway(lane: Lane) -> None:
            if lane is Lane.LINK_IN:
                copies.append(lane)
                if len(copies) == 2:
                    stored.lose(3)

        lanes.before = lose_midway
        with pytest.raises(ChunkLost):
            restore_and_compare(
                stored, lanes, split=32, schedule=Schedule.PIPELINED, tile_tokens=CHUNK, cached=90
            )
        assert len(copies) > 3
        lanes.before = None
    # The lanes go on with other work.
    restore_and_compare(one, lanes, split=32, schedule=Schedule.PIPELINED, tile_tokens=CHUNK)
    lanes.close()


@pytest.mark.parametrize("broken", [Lane.LINK_IN, Lane.COMPUTE])
def test_an_error_in_a_lane_ends_the_restore_and_leaves_no_copy_behind(
    one: StoredPrefix, broken: Lane
) -> None:
    lanes = ThreadLanes(CPU)
    seen = 0

    def fail(lane: Lane) -> None:
        nonlocal seen
        seen += lane is broken
        if seen == 4:
            raise OSError("the bus is gone")

    lanes.before = fail
    with pytest.raises(OSError, match="the bus is gone"):
        restore_and_compare(one, lanes, split=64, schedule=Schedule.PIPELINED, tile_tokens=CHUNK)
    lanes.before = None
    assert lanes.finish() == []
    restore_and_compare(one, lanes, split=64, schedule=Schedule.PIPELINED, tile_tokens=CHUNK)
    lanes.close()


@pytest.mark.parametrize("seed", range(6))
@torch.inference_mode()
def test_what_is_left_is_counted_as_it_is(one: StoredPrefix, seed: int) -> None:
    """While others come and go, counters say what a look at all tasks does."""
    draw = random.Random(seed)
    # Slow enough that copies are left when contention makes products of them, and back.
    lanes = ThreadLanes(CPU, EmulatedLink(3e7))
    keys, values = one.empty_cache(17)
    prefix = Prefix(one.chunks, 0, list(range(len(one.chunks))), one.token_ids, TOKENS, 140)
    run = RestoreRun(
        one.transfer(8), lanes, prefix, Target(keys, values), tile_tokens=2 * CHUNK, piece_bytes=1
    )

    def check() -> None:
        with run.group.changed:
            tasks = run._tasks
            needed = any(
                task.kind is TaskKind.REBUILD and task.slot is not None and index not in run._done
                for index, task in enumerate(tasks)
            )
            left = tuple(
                sum(tasks[index].tokens for index in run._waiting[lane])
                for lane in (Lane.LINK_IN, Lane.COMPUTE)
            )
            # Nothing is drawn between the look and the question: the lock is held.
            assert (run.needs_slots, run.left_tokens) == (needed, left)

    check()
    assert run.needs_slots
    run.begin()
    run.lend_slots()
    try:
        while not run.is_done:
            assert run.group.error is None
            check()
            run.contend(draw.random() < 0.5)
            if draw.random() < 0.5:
                run.compute()
            check()
    finally:
        run.close()
        run.group.wait_quiet()
        lanes.close()
    assert run.left_tokens == (0, 0)
    assert not run.needs_slots
    for layer, wanted in enumerate(one.computed.keys):
        found = one.rows(keys[layer], range(len(one.chunks)), TOKENS)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_the_owner_is_called_when_there_is_something_to_do(one: StoredPrefix) -> None:
    """Not after each piece: its thread would take turns with the one that copies."""
    lanes = SerialLanes(CPU)
    keys, values = one.empty_cache(17)
    pages = list(range(len(one.chunks)))
    prefix = Prefix(one.chunks, 0, pages, one.token_ids, TOKENS, 0)
    calls: list[bool] = []
    began = time.perf_counter()
    run = RestoreRun(
        one.transfer(8),
        lanes,
        prefix,
        Target(keys, values),
        tile_tokens=2 * CHUNK,
        piece_bytes=1,
        on_change=lambda: calls.append(run.is_done),
    )
    run.begin()
    # What else it calls for, once in 10 ms from its construction on, are counters and claims.
    most = 2 + (time.perf_counter() - began) / 0.01
    run.close()
    assert calls[-1]
    assert len(run.group.take_spans()) > len(calls)
    assert len(calls) <= most

"""The task list of a restore: complete, in an order that can run, as long as the formulas say."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitpoint.planning.schedule import (
    Lane,
    RestoreWork,
    Schedule,
    Task,
    TaskKind,
    TileShape,
    restore_tasks,
    simulate,
    step_tasks,
)


@st.composite
def works(draw: st.DrawFn) -> RestoreWork:
    chunk = draw(st.sampled_from([1, 4, 16]))
    cached = draw(st.integers(1, 12 * chunk))
    first = draw(st.integers(0, (cached - 1) // chunk)) * chunk
    return RestoreWork(
        layer_count=draw(st.integers(1, 3)),
        first=first,
        split=draw(st.integers(0, cached)),
        cached=cached,
        chunk_tokens=chunk,
        tile_tokens=chunk * draw(st.integers(1, 4)),
        slots=draw(st.integers(1, 3)),
        embeds=draw(st.booleans()),
    )


@given(works(), st.sampled_from(list(Schedule)))
def test_every_token_of_every_layer_is_rebuilt_or_loaded_exactly_once(
    work: RestoreWork, schedule: Schedule
) -> None:
    tasks = restore_tasks(work, schedule)
    for layer in range(work.layer_count):
        mine = [task for task in tasks if task.layer == layer]
        rebuilt = [p for t in mine if t.kind is TaskKind.REBUILD for p in range(t.first, t.last)]
        loaded = [p for t in mine if t.kind is TaskKind.LOAD for p in range(t.first, t.last)]
        split = max(work.first, work.split)
        assert rebuilt == list(range(work.first, split))
        # The chunk that the split lies in comes whole.
        start = split - split % work.chunk_tokens if split < work.cached else split
        assert loaded == list(range(max(work.first, start), work.cached))


@given(works(), st.sampled_from(list(Schedule)))
def test_tasks_wait_only_for_earlier_ones_and_never_fill_a_slot_that_is_read(
    work: RestoreWork, schedule: Schedule
) -> None:
    tasks = restore_tasks(work, schedule)
    run = simulate(tasks, lambda task: 1.0 + task.tokens)
    for index, task in enumerate(tasks):
        assert all(earlier < index for earlier in task.after)
    fills = {
        slot: [i for i, t in enumerate(tasks) if t.slot == slot and t.kind is not TaskKind.REBUILD]
        for slot in range(work.slots)
    }
    for indices in fills.values():
        for this, following in itertools.pairwise(indices):
            reader = next(
                i
                for i, t in enumerate(tasks)
                if i > this and t.kind is TaskKind.REBUILD and t.slot == tasks[this].slot
            )
            assert run.ends[this] <= run.starts[reader]
            assert run.ends[reader] <= run.starts[following]
    # Rebuilt rows are written over a chunk that was loaded whole, never under it.
    for reader, task in enumerate(tasks):
        for index, load in enumerate(tasks):
            overlap = load.kind is TaskKind.LOAD and load.first < task.last <= load.last
            if task.kind is TaskKind.REBUILD and overlap and load.layer == task.layer:
                assert run.ends[index] <= run.starts[reader]


@given(works(), st.floats(0.1, 5), st.floats(0.1, 5), st.floats(0.1, 5))
def test_serial_is_the_sum_and_column_is_kvprs_equation(
    work: RestoreWork, send: float, load: float, rebuild: float
) -> None:
    # One tile, and a split at a chunk's border, are what Eq. 10 speaks of.
    split = work.split - work.split % work.chunk_tokens
    split = min(max(split, work.first), work.cached)
    whole = RestoreWork(
        work.layer_count,
        work.first,
        split,
        work.cached,
        work.chunk_tokens,
        tile_tokens=max(
            work.chunk_tokens, -(-work.cached // work.chunk_tokens) * work.chunk_tokens
        ),
        embeds=False,
    )
    rate = {
        TaskKind.SEND: send,
        TaskKind.LOAD: load,
        TaskKind.REBUILD: rebuild,
        TaskKind.EMBED: 0.0,
    }

    def seconds(task: Task) -> float:
        return rate[task.kind] * task.tokens

    rebuilt, loaded = split - work.first, work.cached - split
    layers = work.layer_count
    serial = layers * (send * rebuilt + rebuild * rebuilt + load * loaded)
    column = layers * (send * rebuilt + max(rebuild * rebuilt, load * loaded))
    row = layers * max(rebuild * rebuilt, load * loaded)
    for schedule, expected in (
        (Schedule.SERIAL, serial),
        (Schedule.COLUMN, column),
        (Schedule.ROW, row),
    ):
        run = simulate(restore_tasks(whole, schedule), seconds)
        assert run.seconds == pytest.approx(expected)


@given(works(), st.floats(0.1, 5), st.floats(0.1, 5), st.floats(0.1, 5))
def test_pipelined_is_never_slower_than_column_or_serial_and_never_beats_its_bound(
    work: RestoreWork, send: float, load: float, rebuild: float
) -> None:
    rate = {TaskKind.SEND: send, TaskKind.LOAD: load, TaskKind.REBUILD: rebuild}

    def seconds(task: Task) -> float:
        return rate.get(task.kind, 0.0) * task.tokens

    runs = {kind: simulate(restore_tasks(work, kind), seconds) for kind in Schedule}
    pipelined = runs[Schedule.PIPELINED]
    assert pipelined.seconds <= runs[Schedule.COLUMN].seconds * (1 + 1e-9)
    assert runs[Schedule.COLUMN].seconds <= runs[Schedule.SERIAL].seconds * (1 + 1e-9)
    assert pipelined.seconds >= max(pipelined.busy.values(), default=0.0) * (1 - 1e-9)


def test_at_the_crossing_the_pipeline_tends_to_the_greater_of_link_and_compute() -> None:
    work = RestoreWork(
        layer_count=12, first=0, split=1024, cached=2048, chunk_tokens=64, tile_tokens=128
    )
    # Sending X costs half of loading; rebuilding keeps the device just as busy.
    rate = {TaskKind.SEND: 1.0, TaskKind.LOAD: 2.0, TaskKind.REBUILD: 2.9, TaskKind.EMBED: 0.0}
    tasks = restore_tasks(work, Schedule.PIPELINED)
    run = simulate(tasks, lambda task: rate[task.kind] * task.tokens)
    assert run.seconds <= 1.03 * max(run.busy.values())
    column = simulate(
        restore_tasks(work, Schedule.COLUMN), lambda task: rate[task.kind] * task.tokens
    )
    assert column.seconds >= 1.25 * run.seconds


@pytest.mark.parametrize(("split", "rebuild"), [(2000, 14.0), (1856, 18.0), (1600, 23.6)])
def test_products_of_the_first_layer_fill_gaps_and_make_none(split: int, rebuild: float) -> None:
    """OPT-125M at 184 MB/s, in microseconds a token: half of X fits the staging memory."""
    work = RestoreWork(
        layer_count=12,
        first=0,
        split=split,
        cached=2000,
        chunk_tokens=64,
        tile_tokens=128,
        slots=8,
    )
    rate = {TaskKind.SEND: 16.7, TaskKind.LOAD: 33.4, TaskKind.REBUILD: rebuild}
    tasks = restore_tasks(work, Schedule.PIPELINED)
    run = simulate(tasks, lambda task: rate.get(task.kind, 0.0) * task.tokens)
    assert run.seconds <= 1.02 * max(run.busy.values())
    # In order within the layer, and from the first moment to nearly the last.
    first = [index for index, task in enumerate(tasks) if task.layer == 0]
    rebuilt = [tasks[index] for index in first if tasks[index].kind is TaskKind.REBUILD]
    assert [task.first for task in rebuilt] == list(range(0, split, 128))
    assert (first[0], tasks[0].kind) == (0, TaskKind.EMBED)
    assert run.starts[first[-1]] > 0.8 * run.seconds
    assert all(tasks[index].slot is None for index in first)


def test_both_lanes_towards_the_device_share_the_link() -> None:
    assert Lane.WEIGHTS_IN.resource == Lane.LINK_IN.resource
    assert Lane.LINK_OUT.resource != Lane.LINK_IN.resource


@pytest.mark.parametrize(("first", "tile", "slots"), [(3, 4, 2), (0, 6, 2), (0, 4, 0)])
def test_work_that_cannot_be_is_refused(first: int, tile: int, slots: int) -> None:
    with pytest.raises(ValueError, match="a restore"):
        RestoreWork(1, first, 0, 8, chunk_tokens=4, tile_tokens=tile, slots=slots)


# -- streamed steps ---------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> list[list[TileShape]]:
    tiles = st.builds(
        lambda rows, kind: TileShape(rows, *kind),
        st.integers(1, 64),
        # Loaded, rebuilt from X in the store, rebuilt from X on the device, and partly each.
        st.sampled_from([(0, True), (1, False), (1, False, True), (1, True)]),
    )
    return draw(st.lists(st.lists(tiles, max_size=5), min_size=1, max_size=5))


@given(steps(), st.integers(2, 6), st.sampled_from([Schedule.COLUMN, Schedule.PIPELINED]))
def test_a_step_brings_each_tile_once_into_slots_that_nothing_reads_any_more(
    layers: list[list[TileShape]], slots: int, schedule: Schedule
) -> None:
    tasks = list(step_tasks(layers, slots, schedule))
    wanted = [(layer, number) for layer, tiles in enumerate(layers) for number in range(len(tiles))]
    of_kind = {
        kind: [(task.layer, task.tile) for task in tasks if task.kind is kind] for kind in TaskKind
    }
    shape = {place: layers[place[0]][place[1]] for place in wanted}
    assert of_kind[TaskKind.ATTEND] == wanted
    assert of_kind[TaskKind.LOAD] == [place for place in wanted if shape[place].is_loaded]
    rebuilt = [place for place in wanted if shape[place].rebuilt_rows]
    assert of_kind[TaskKind.REBUILD] == rebuilt
    sources = [*of_kind[TaskKind.EMBED], *of_kind[TaskKind.SEND], *of_kind[TaskKind.COPY]]
    assert sorted(sources) == rebuilt
    ended = waited_for(tasks)
    readers: dict[tuple[str, int], list[int]] = {}
    for index, task in enumerate(tasks):
        fills = {TaskKind.LOAD: [("K,V", task.kv_slot)]}
        for source in (TaskKind.SEND, TaskKind.EMBED, TaskKind.COPY):
            fills[source] = [("X", task.slot or 0)]
        if not shape[task.layer, task.tile].is_loaded:
            fills[TaskKind.REBUILD] = [("K,V", task.kv_slot)]
        for slot in fills.get(task.kind, ()):
            assert set(readers.pop(slot, ())) <= ended[index]
        if task.kind is TaskKind.REBUILD:
            readers.setdefault(("X", task.slot or 0), []).append(index)
        if task.kind is TaskKind.ATTEND:
            readers.setdefault(("K,V", task.kv_slot), []).append(index)
            brought = [
                other
                for other in range(index)
                if (tasks[other].layer, tasks[other].tile) == (task.layer, task.tile)
            ]
            assert set(brought) <= ended[index]


def waited_for(tasks: list[Task]) -> list[set[int]]:
    """Return for each task all that has ended when it begins."""
    ended: list[set[int]] = []
    last: dict[Lane, int] = {}
    for index, task in enumerate(tasks):
        before = {*task.after, *([last[task.lane]] if task.lane in last else [])}
        assert all(each < index for each in before)
        ended.append(before.union(*(ended[each] for each in before)))
        last[task.lane] = index
    return ended


@given(steps(), st.integers(2, 6))
def test_column_sends_nothing_of_a_layer_before_the_one_before_is_there(
    layers: list[list[TileShape]], slots: int
) -> None:
    tasks = list(step_tasks(layers, slots, Schedule.COLUMN))
    ended = waited_for(tasks)
    there = (TaskKind.LOAD, TaskKind.REBUILD)
    for index, task in enumerate(tasks):
        if task.lane is Lane.LINK_IN:
            before = {at for at, each in enumerate(tasks[:index]) if each.layer < task.layer}
            assert {at for at in before if tasks[at].kind in there} <= ended[index]


def test_a_step_that_sends_ahead_is_never_slower_than_kvprs_order() -> None:
    layers = [[TileShape(64, 64, False), TileShape(64, 0, True)] for _ in range(8)]

    def time_of(schedule: Schedule, rebuild: float) -> float:
        seconds = {TaskKind.SEND: 1.0, TaskKind.LOAD: 2.0, TaskKind.ATTEND: 0.125}
        seconds[TaskKind.REBUILD] = rebuild
        tasks = list(step_tasks(layers, 4, schedule))
        return simulate(tasks, lambda task: seconds.get(task.kind, 0.0)).seconds

    # The link is never idle, but for the attention of the last tile.
    assert time_of(Schedule.PIPELINED, 1.5) == 8 * 2.0 + 7 * 1.0 + 0.125
    # The link waits for a product that takes longer than the load beside it.
    assert time_of(Schedule.COLUMN, 2.4) > time_of(Schedule.PIPELINED, 2.4)

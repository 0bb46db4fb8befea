"""Weights on the host, on paper: what waits for what, and that pieces never cost time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitpoint.planning.schedule import (
    Lane,
    RestoreWork,
    Schedule,
    TaskKind,
    restore_tasks,
    simulate,
)
from splitpoint.planning.weight_schedule import (
    LAYER_PIECES,
    PassCosts,
    PassKind,
    PassWork,
    WeightOrder,
    WeightPiece,
    pass_tasks,
    simulate_pass,
)

TILED = (PassKind.SEND, PassKind.LOAD, PassKind.REBUILD)
seconds = st.one_of(st.just(0.0), st.floats(0.01, 10.0))


@st.composite
def passes(draw: st.DrawFn) -> PassWork:
    layers = draw(st.integers(1, 9))
    return PassWork(
        layer_count=layers,
        host_layers=frozenset(draw(st.sets(st.integers(0, layers - 1)))),
        rebuilds=draw(st.booleans()),
        loads=draw(st.booleans()),
        slots=draw(st.integers(1, 3)),
        tiles=draw(st.integers(1, 3)),
    )


@st.composite
def costs(draw: st.DrawFn) -> PassCosts:
    return PassCosts(
        {piece: draw(seconds) for piece in LAYER_PIECES},
        {kind: draw(seconds) for kind in PassKind if kind is not PassKind.WEIGHTS},
    )


@given(passes(), costs())
def test_pieces_are_never_slower_than_whole_layers(work: PassWork, cost: PassCosts) -> None:
    fine = simulate_pass(work, cost, WeightOrder.FINE)
    coarse = simulate_pass(work, cost, WeightOrder.COARSE)
    assert fine.seconds <= coarse.seconds * (1 + 1e-9)
    assert sum(fine.busy.values()) == pytest.approx(sum(coarse.busy.values()))


def test_where_rebuilding_is_long_pieces_save_what_comes_behind_the_first() -> None:
    """One layer: W_K W_V and X, then rebuilding hides the other weights."""
    cost = PassCosts(
        {
            WeightPiece.KEY_VALUE: 1.0,
            WeightPiece.QUERY: 1.0,
            WeightPiece.OUTPUT: 1.0,
            WeightPiece.MLP: 4.0,
        },
        {PassKind.SEND: 1.0, PassKind.REBUILD: 5.0, PassKind.MLP: 0.5},
    )
    work = PassWork(1, frozenset({0}), rebuilds=True)
    # 7 of weights, X, rebuild, MLP.
    assert simulate_pass(work, cost, WeightOrder.COARSE).seconds == 7 + 1 + 5 + 0.5
    # W_K W_V, W_Q, X; the MLP has come before the rebuild is done.
    assert simulate_pass(work, cost, WeightOrder.FINE).seconds == 3 + 5 + 0.5


@given(passes(), costs(), st.sampled_from(WeightOrder))
def test_nothing_is_read_before_it_came_or_overwritten_before_it_was_read(
    work: PassWork, cost: PassCosts, order: WeightOrder
) -> None:
    tasks = pass_tasks(work, order)
    run = simulate_pass(work, cost, order)
    assert all(earlier < index for index, task in enumerate(tasks) for earlier in task.after)

    def when(layer: int, kind: PassKind, piece: WeightPiece | None = None) -> tuple[float, float]:
        """From the first start to the last end; a computation of tiles by its first."""
        found = [
            index
            for index, task in enumerate(tasks)
            if (task.layer, task.kind) == (layer, kind) and piece in (None, *task.pieces)
        ]
        assert len(found) == (work.tiles if kind in TILED else 1)
        return run.starts[found[0]], run.ends[found[-1]]

    reads = {
        WeightPiece.KEY_VALUE: [PassKind.PROJECT] + [PassKind.REBUILD] * work.rebuilds,
        WeightPiece.QUERY: [PassKind.PROJECT],
        WeightPiece.OUTPUT: [PassKind.OUTPUT],
        WeightPiece.MLP: [PassKind.MLP],
    }
    host = sorted(work.host_layers)
    for position, layer in enumerate(host):
        arrivals = [when(layer, PassKind.WEIGHTS, piece) for piece in LAYER_PIECES]
        assert arrivals == sorted(arrivals), "W_K and W_V come first, the MLP last"
        for piece, (start, end) in zip(LAYER_PIECES, arrivals, strict=True):
            assert all(end <= when(layer, kind)[0] for kind in reads[piece])
            if position >= work.slots:
                # The layer that had the slot before is done with all of it.
                assert when(host[position - work.slots], PassKind.MLP)[1] <= start
    for layer in range(work.layer_count):
        mine = [index for index, task in enumerate(tasks) if task.layer == layer]
        if work.loads:
            assert when(layer, PassKind.LOAD)[1] <= when(layer, PassKind.ATTEND)[0]
        sent, rebuilt = (
            [index for index in mine if tasks[index].kind is kind]
            for kind in (PassKind.SEND, PassKind.REBUILD)
        )
        assert len(sent) == len(rebuilt) == work.rebuilds * work.tiles
        assert all(run.ends[s] <= run.starts[r] for s, r in zip(sent, rebuilt, strict=True))


# -- restores: only W_K and W_V of each layer ------------------------------------------


@st.composite
def restores(draw: st.DrawFn) -> RestoreWork:
    layers, cached = draw(st.integers(1, 6)), draw(st.integers(1, 12)) * 4
    return RestoreWork(
        layer_count=layers,
        first=0,
        split=draw(st.integers(0, cached)),
        cached=cached,
        chunk_tokens=4,
        tile_tokens=4 * draw(st.integers(1, 4)),
        slots=draw(st.integers(1, 3)),
        host_layers=frozenset(draw(st.sets(st.integers(0, layers - 1)))),
        weight_slots=draw(st.integers(1, 3)),
    )


@given(restores(), st.sampled_from(Schedule), seconds)
def test_a_restore_sends_the_weights_it_rebuilds_with_and_no_slot_too_early(
    work: RestoreWork, schedule: Schedule, weights: float
) -> None:
    tasks = restore_tasks(work, schedule)
    run = simulate(tasks, lambda task: weights if task.kind is TaskKind.WEIGHTS else 1.0)
    sent = [index for index, task in enumerate(tasks) if task.kind is TaskKind.WEIGHTS]
    assert [tasks[index].layer for index in sent] == (
        sorted(work.host_layers) if work.split else []
    )
    assert all(tasks[index].lane is Lane.WEIGHTS_IN for index in sent)
    readers = {
        layer: [i for i, t in enumerate(tasks) if (t.kind, t.layer) == (TaskKind.REBUILD, layer)]
        for layer in work.host_layers
    }
    for index in sent:
        assert all(run.ends[index] <= run.starts[i] for i in readers[tasks[index].layer])
    for slot in range(work.weight_slots):
        fills = [index for index in sent if tasks[index].slot == slot]
        for before, following in itertools.pairwise(fills):
            last = max(run.ends[i] for i in readers[tasks[before].layer])
            assert last <= run.starts[following]

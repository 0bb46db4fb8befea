"""Seconds of every split: against the simulated lanes; the best split: against brute force."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from long_runs import scaled

from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.planning.schedule import (
    RestoreWork,
    Schedule,
    Task,
    TaskKind,
    restore_tasks,
    simulate,
)
from splitpoint.planning.split_costs import PipelineOptions, Scenario, SplitCosts
from splitpoint.planning.split_search import best_pipeline_options, best_split
from splitpoint.shapes import BUILT_IN_SHAPES, Encoding

Seconds = npt.NDArray[np.float64]


def random_costs(rng: random.Random) -> SplitCosts:
    """Six decades of balance between link and compute, overheads present or not."""

    def overhead() -> float:
        return rng.choice([0.0, 10 ** rng.uniform(-7, -3)])

    return SplitCosts(
        layer_count=rng.choice([1, 2, 3, 12, 32, 80]),
        activation=10 ** rng.uniform(-8, -5),
        load=10 ** rng.uniform(-8, -5),
        rebuild=10 ** rng.uniform(-9, -4),
        copy_overhead=overhead(),
        rebuild_overhead=overhead(),
        embeds=rng.random() < 0.8,
        operation=overhead(),
        fixed=overhead(),
    )


def seconds_of_all(
    costs: SplitCosts, splits: Seconds, cached: int, options: PipelineOptions
) -> Seconds:
    """The formulas of the module's text once more, for all splits at once."""
    seconds = _without_overheads(costs, splits, cached, options)
    if options.scenario is not Scenario.RESTORE or not cached:
        return seconds
    sends = costs.layer_count - 1 if costs.embeds else costs.layer_count
    pieces = np.ceil(splits / (options.tile_tokens or cached))
    operations = costs.layer_count * (pieces + np.where(splits < cached, np.maximum(pieces, 1), 0))
    operations += pieces * (sends if options.schedule is not Schedule.ROW else 0)
    operations += pieces if costs.embeds else 0
    operations += options.extra_operations
    last_chunk = costs.copy_overhead + costs.activation * options.chunk_tokens
    seconds = seconds + options.extra_operations * last_chunk
    return seconds + costs.fixed + costs.operation * operations


def _without_overheads(
    costs: SplitCosts, splits: Seconds, cached: int, options: PipelineOptions
) -> Seconds:
    layers, compute_s = costs.layer_count, options.compute_seconds
    sends = layers - 1 if costs.embeds else layers
    tile = options.tile_tokens or max(cached, 1)
    pieces = np.ceil(splits / tile)
    rest = cached - splits
    if options.scenario is not Scenario.DECODE_STEP:
        # The last chunk crosses the link as a whole.
        missing = -cached % options.chunk_tokens
        rest = np.where(rest > 0, rest + missing, 0)
    send_one: Seconds = np.where(pieces > 1, costs.copy_overhead + costs.activation * tile, 0.0)
    sent = splits
    if options.scenario is not Scenario.DECODE_STEP:
        sent = np.ceil(splits / options.chunk_tokens) * options.chunk_tokens
    send_one = np.where(pieces == 1, costs.copy_overhead + costs.activation * sent, send_one)
    rebuild_one = costs.rebuild_overhead + costs.rebuild * tile
    load_layer: Seconds = np.where(
        rest > 0, np.maximum(pieces, 1) * costs.copy_overhead + costs.load * rest, 0.0
    )
    send: Seconds = sends * (pieces * costs.copy_overhead + costs.activation * sent)
    rebuild: Seconds = layers * (pieces * costs.rebuild_overhead + costs.rebuild * splits)
    load: Seconds = layers * load_layer
    if options.schedule is Schedule.SERIAL:
        return send + rebuild + load + compute_s
    if options.schedule is Schedule.COLUMN:
        return send + np.maximum(rebuild, load) + compute_s
    if options.schedule is Schedule.ROW:
        if options.scenario is Scenario.RESTORE:
            return np.maximum(rebuild, load) + compute_s
        # In steps X that lies there is sent for nothing, and never waited for.
        send = 0.0 * send
    if options.scenario is Scenario.SHARED_RESTORE:
        return np.maximum(send + load, rebuild + compute_s)
    link, busy = send + load, rebuild + compute_s
    # The last tile is rebuilt after its X, beside the last load.
    last = costs.rebuild_overhead + costs.rebuild * (splits - (pieces - 1) * tile)
    fill = np.where(splits > 0, last - load_layer / np.maximum(pieces, 1), 0.0)
    if options.schedule is Schedule.ROW:
        fill = 0.0 * fill
    elif costs.embeds and options.scenario is Scenario.RESTORE:
        first = costs.rebuild_overhead + costs.rebuild * np.minimum(splits, tile)
        late = load_layer / np.maximum(pieces, 1) + send_one - first
        busy = busy + np.where((splits > 0) & (sends > 0), np.maximum(late, 0.0), 0.0)
    elif costs.embeds:
        waits = np.maximum(pieces - options.slots + 1, 0) if options.slots else 0 * pieces
        link = np.where(splits > 0, np.maximum(link, link - load_layer + waits * rebuild_one), link)
    else:
        busy = np.where(splits > 0, busy + send_one, busy)
    if options.scenario is Scenario.DECODE_STEP:
        late = compute_s + (1 - options.ahead * (layers - 1) / layers) * (send + load)
        busy = np.maximum(busy, late)
        link = link + compute_s / layers
        busy = np.maximum(busy, load_layer + rebuild * (layers - 1) / layers + compute_s)
    else:
        busy = np.where(splits > 0, busy, 0.0)
    return np.maximum(np.maximum(link, link + fill), busy)


@pytest.mark.scaled
@pytest.mark.parametrize("scenario", list(Scenario))
@pytest.mark.parametrize("schedule", list(Schedule))
def test_closed_form_equals_brute_force_on_random_profiles(
    schedule: Schedule, scenario: Scenario
) -> None:
    rng = random.Random(f"{schedule.value} {scenario.value}")
    interior, profiles = 0, scaled(300, chaos=2000)
    for _ in range(profiles):
        costs = random_costs(rng)
        cached = rng.randint(0, 400)
        quantum = rng.choice([1, 1, 4, 16, 64])
        options = PipelineOptions(
            schedule,
            tile_tokens=rng.choice([0, quantum, 3 * quantum, quantum * rng.randint(1, 40)]),
            slots=rng.choice([0, 2, 3, 8]),
            scenario=scenario,
            compute_seconds=0.0
            if scenario is Scenario.RESTORE
            else rng.choice([0.0, 10 ** rng.uniform(-6, 0)]),
            ahead=rng.choice([1.0, rng.random()]),
            extra_operations=rng.choice([0, costs.layer_count]),
            chunk_tokens=rng.choice([1, quantum]),
        )
        cap = rng.choice([None, None, None, rng.randint(0, 400)])
        limit = cached if cap is None else min(cap, cached)
        grid = np.arange(0, limit + 1, quantum)
        if limit == cached:
            grid = np.unique(np.append(grid, cached))
        everything = seconds_of_all(costs, grid.astype(np.float64), cached, options)
        split = best_split(costs, cached, options, quantum=quantum, cap=cap)
        assert split in grid
        assert costs.seconds(split, cached, options) == pytest.approx(everything.min(), rel=1e-9)
        interior += 0 < split < cached
    if schedule is not Schedule.SERIAL:
        # Without overlap the cost is a straight line in each tile: its ends win.
        assert interior > profiles / 20


def task_seconds(costs: SplitCosts, task: Task) -> float:
    if task.kind is TaskKind.EMBED:
        return 0.0
    overhead = costs.rebuild_overhead if task.kind is TaskKind.REBUILD else costs.copy_overhead
    rates = {
        TaskKind.SEND: costs.activation,
        TaskKind.LOAD: costs.load,
        TaskKind.REBUILD: costs.rebuild,
    }
    return overhead + rates[task.kind] * task.tokens


def simulated(
    costs: SplitCosts, split: int, cached: int, options: PipelineOptions, chunk: int
) -> float:
    """Return the simulated seconds of the tasks that a worker runs."""
    work = RestoreWork(
        layer_count=costs.layer_count,
        first=0,
        split=split,
        cached=cached,
        chunk_tokens=chunk,
        tile_tokens=options.tile_tokens,
        slots=options.slots,
        embeds=costs.embeds,
    )
    tasks = restore_tasks(work, options.schedule)
    return simulate(tasks, lambda task: task_seconds(costs, task)).seconds


def near_balance(rng: random.Random, layers: int) -> SplitCosts:
    load = 10 ** rng.uniform(-7, -5)
    return SplitCosts(
        layer_count=layers,
        activation=load * rng.uniform(0.3, 2),
        load=load,
        rebuild=load * 10 ** rng.uniform(-1.5, 1),
        copy_overhead=rng.choice([0, load * rng.uniform(0, 40)]),
        rebuild_overhead=rng.choice([0, load * rng.uniform(0, 40)]),
        embeds=rng.random() < 0.7,
    )


@pytest.mark.parametrize("schedule", list(Schedule))
def test_the_formula_is_what_the_lanes_take(schedule: Schedule) -> None:
    """Exactly, where tiles and loads are of equal size; but where layer 0 is spread among the
    others, its tiles may use up the slots' slack here and there."""
    rng, chunk = random.Random(schedule.value), 16
    exact = 0
    for _ in range(200):
        costs = near_balance(rng, rng.choice([2, 3, 12]))
        tiles, tile = rng.randint(0, 6), chunk * rng.randint(1, 8)
        split = tiles * tile
        cached = split + chunk * max(tiles, 1) * rng.randint(0 if tiles else 1, 6)
        options = PipelineOptions(schedule, tile, slots=rng.choice([2, 3, 8]))
        expected = simulated(costs, split, cached, options, chunk)
        found = costs.seconds(split, cached, options)
        if schedule is Schedule.PIPELINED and costs.embeds:
            assert expected * 0.96 <= found <= expected * (1 + 1e-9)
        else:
            assert found == pytest.approx(expected, rel=1e-9)
        exact += found == pytest.approx(expected, rel=1e-9)
    assert exact >= 180


@pytest.mark.parametrize("slots", [1, 2, 5, 8, 20])
def test_a_step_is_what_a_feed_with_few_slots_takes(slots: int) -> None:
    """A layer's tiles through the staging slots; each layer computes once it has them all."""
    layers, tiles, tile = 6, 8, 16
    for compute_s in (0.0, 0.002, 0.02, 0.2):
        tasks: list[Task] = []
        readers: list[int] = []
        for layer in range(layers):
            for index in range(tiles):
                after = (readers[-slots],) if len(readers) >= slots else ()
                tasks.append(
                    Task(TaskKind.LOAD, layer, index * tile, (index + 1) * tile, after=after)
                )
                # Attending is over at once here; the slot is free again.
                tasks.append(Task(TaskKind.EMBED, layer, 0, 0, after=(len(tasks) - 1,)))
                readers.append(len(tasks) - 1)
            tasks.append(Task(TaskKind.REBUILD, layer, 0, 1))

        def seconds(task: Task, compute_s: float = compute_s) -> float:
            if task.kind is TaskKind.LOAD:
                return 1e-5 * task.tokens
            return compute_s / layers if task.kind is TaskKind.REBUILD else 0.0

        expected = simulate(tasks, seconds).seconds
        costs = SplitCosts(layers, 1e-5, 1e-5, 1e-6, copy_overhead=0.0, rebuild_overhead=0.0)
        options = PipelineOptions(
            Schedule.PIPELINED,
            tile,
            slots,
            Scenario.DECODE_STEP,
            compute_s,
            ahead=min(1.0, slots / tiles),
        )
        assert costs.seconds(0, tiles * tile, options) == pytest.approx(expected, rel=0.02)


def test_uneven_tiles_and_loads_change_little() -> None:
    """The last tile may be short, a load be a chunk longer than another: on 16 layers most
    predictions are within 1 %, with tiles as a plan has them nearly all within 5 %."""
    rng, chunk = random.Random(7), 16
    errors = []
    for _ in range(200):
        costs = near_balance(rng, 16)
        cached = chunk * rng.randint(4, 60)
        options = best_pipeline_options(
            costs, cached, Schedule.PIPELINED, chunk_tokens=chunk, staging_tokens=16 * chunk
        )
        split = best_split(costs, cached, options, quantum=chunk)
        expected = simulated(costs, split, cached, options, chunk)
        errors.append(abs(costs.seconds(split, cached, options) / expected - 1))
    errors.sort()
    assert errors[len(errors) * 3 // 4] < 0.01
    assert errors[len(errors) * 19 // 20] < 0.05


def test_a_column_split_of_one_tile_is_kvprs_equation() -> None:
    """Eq. 10 there: per layer a l + max(g l, c (s - l)), with an intercept each."""
    costs = SplitCosts(3, 2e-6, 3e-6, 1e-6, copy_overhead=5e-5, rebuild_overhead=7e-5, embeds=False)
    split, cached = 40, 100
    rebuild, load = 7e-5 + 1e-6 * split, 5e-5 + 3e-6 * (cached - split)
    expected = 3 * (5e-5 + 2e-6 * split + max(rebuild, load))
    assert costs.seconds(split, cached, PipelineOptions(Schedule.COLUMN)) == pytest.approx(expected)


@pytest.mark.scaled
def test_tiles_are_whole_chunks_within_the_staging_memory_and_nearly_the_best() -> None:
    rng = random.Random(5)
    ratios = []
    for _ in range(scaled(80, chaos=300)):
        costs = random_costs(rng)
        chunk = rng.choice([1, 4, 16])
        cached = chunk * rng.randint(1, 60) + rng.randint(0, chunk - 1)
        staging = chunk * rng.choice([0, rng.randint(4, 40)])
        chosen = best_pipeline_options(
            costs, cached, Schedule.PIPELINED, chunk_tokens=chunk, staging_tokens=staging
        )
        most = -(-cached // chunk) * chunk
        if staging:
            most = min(most, staging // (2 * chunk) * chunk)
        assert chosen.tile_tokens % chunk == 0
        assert 0 < chosen.tile_tokens <= most
        assert not staging or chosen.slots * chosen.tile_tokens <= staging

        def least(
            tile: int,
            costs: SplitCosts = costs,
            cached: int = cached,
            chunk: int = chunk,
            staging: int = staging,
        ) -> float:
            options = PipelineOptions(Schedule.PIPELINED, tile, staging // tile)
            return costs.seconds(best_split(costs, cached, options, quantum=chunk), cached, options)

        ratios.append(
            least(chosen.tile_tokens) / min(least(tile) for tile in range(chunk, most + 1, chunk))
        )
    ratios.sort()
    assert ratios[len(ratios) * 19 // 20] < 1.03


def test_the_line_follows_the_best_split_of_a_growing_prefix() -> None:
    costs = SplitCosts.of(BUILT_IN_SHAPES["opt-6.7b"], BUILT_IN_PROFILES["a100-80"])
    costs = replace(costs, rebuild=2 * costs.rebuild)
    for schedule in (Schedule.COLUMN, Schedule.PIPELINED):
        options = PipelineOptions(schedule, tile_tokens=256)
        slope = costs.slope(schedule, 256)
        start, end = (best_split(costs, cached, options) for cached in (4096, 8192))
        assert 0 < start < 4096
        assert slope == pytest.approx((end - start) / 4096, abs=0.07)


def test_fewer_bytes_on_the_link_are_fewer_seconds() -> None:
    shape, profile = BUILT_IN_SHAPES["opt-6.7b"], BUILT_IN_PROFILES["h100"]
    native, int8, int4 = (SplitCosts.of(shape, profile, encoding) for encoding in Encoding)
    # 16-bit elements become bytes, and 4.5 bits, beside their groups' parameters.
    assert int8.load / native.load == pytest.approx(130 / 256)
    assert int4.load / native.load == pytest.approx(72 / 256)
    assert int8.activation / native.activation == pytest.approx(130 / 256)
    assert int4.activation / native.activation == pytest.approx(72 / 256)
    assert int8.rebuild == int4.rebuild == native.rebuild


def test_a_partial_last_chunk_is_loaded_whole_and_its_activations_follow() -> None:
    """Chunks of 64: 65 tokens take the link for two chunks; a split counts from its chunk on."""
    costs = SplitCosts(
        2, activation=1e-5, load=2e-5, rebuild=1e-6, copy_overhead=0, rebuild_overhead=0
    )
    options = PipelineOptions(Schedule.SERIAL, chunk_tokens=64)
    assert costs.seconds(0, 65, options) == pytest.approx(2 * 128 * 2e-5)
    assert costs.seconds(0, 65, options) == costs.seconds(0, 128, options)
    tail = replace(options, extra_operations=2)
    # X of the partial chunk: one whole chunk in each of the two layers.
    added = costs.seconds(0, 65, tail) - costs.seconds(0, 65, options)
    assert added == pytest.approx(2 * 64 * 1e-5)
    # [0, 70) is rebuilt in two layers; the chunk in which the split lies comes whole.
    assert options.loaded_tokens(70, 100) == 64
    assert options.loaded_tokens(100, 100) == 0
    assert options.sent_tokens(70) == 128
    # A decode step has the partial chunk on the device.
    step = replace(options, scenario=Scenario.DECODE_STEP)
    assert step.loaded_tokens(0, 65) == 65

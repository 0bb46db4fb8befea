"""Fleets: equal results for equal seeds and any number of processes; how many are needed."""

from __future__ import annotations

import dataclasses

import pytest
from simulated import PROFILE, SHAPE

from scheduler_service.policy.settings import PolicySettings
from splitpoint.costs.profile import MACHINES, Machine
from splitpoint.errors import InvalidArgument
from splitpoint.options.scheduler import Policy
from splitpoint_cli.planning.sizing import Node
from splitpoint_cli.simulate.costs import Run
from splitpoint_cli.simulate.device_types import device_type
from splitpoint_cli.simulate.find import Found, find_devices, least_count
from splitpoint_cli.simulate.options import parse_devices, read_weights
from splitpoint_cli.simulate.outcome import Outcome, jain, water_filled
from splitpoint_cli.simulate.run import Fleet, Load, deal, simulate
from splitpoint_cli.simulate.simulator import SimulatedStore
from splitpoint_cli.traces.arrival import Arrival
from splitpoint_cli.traces.generators import CONVERSATION, generate

KIND = Machine("small", PROFILE, 0, 50, 400, cache_bytes=400 * SHAPE.page_bytes(64))
FIFO = PolicySettings(Policy.FIFO)


def fleet(count: int, *, cell: int = 4) -> Fleet:
    node = Node(PROFILE, 0, max_batch=16, max_batched_tokens=512, chunk_tokens=64)
    return Fleet(SHAPE, node, [(KIND, count)], cell, 1 << 30)


def load(count: int = 200, seed: int = 0) -> Load:
    return Load(CONVERSATION, seed, count, length=1 / 40, output=0.2, tenants=2)


def told(outcome: Outcome) -> dict[str, object]:
    return {
        **dataclasses.asdict(outcome),
        "ttft": sorted(outcome.ttft),
        "tpot": sorted(outcome.tpot),
        "latency": sorted(outcome.latency),
        "waited": sorted(outcome.waited),
        # Sums of floats, in another order.
        "tenants": None,
        "kinds": None,
    }


def test_equal_seeds_give_equal_outcomes_in_any_number_of_processes() -> None:
    one = simulate(fleet(6, cell=2), load(), FIFO)
    assert told(one) == told(simulate(fleet(6, cell=2), load(), FIFO))
    assert told(one) == told(simulate(fleet(6, cell=2), load(), FIFO, processes=2))
    assert told(one) != told(simulate(fleet(6, cell=2), load(seed=1), FIFO))
    assert one.completed_count == 200
    assert one.kinds["small"].device_count == 6
    assert {name: each.count for name, each in one.tenants.items()}.keys() == {
        "tenant-0",
        "tenant-1",
    }


def test_conversations_stay_in_a_cell_and_cells_get_like_work() -> None:
    trace = generate(CONVERSATION, count=3_000)
    dealt = deal(trace.arrivals, [8, 8, 8, 4])
    assert sum(map(len, dealt)) == 3_000
    homes: dict[int, set[int]] = {}
    tokens = [0.0] * 4
    for index, arrivals in enumerate(dealt):
        assert arrivals == sorted(arrivals, key=lambda each: each.seconds)
        for each in arrivals:
            homes.setdefault(each.hash_ids[0], set()).add(index)
            tokens[index] += each.input_length + each.output_length
    assert sum(len(home) > 1 for home in homes.values()) < 0.02 * len(homes)
    per_device = [total / size for total, size in zip(tokens, (8, 8, 8, 4), strict=True)]
    assert max(per_device) < 1.2 * min(per_device)


def test_a_prefix_that_all_share_does_not_end_in_one_cell() -> None:
    arrivals = [Arrival(0.1 * n, 2_000, 1, (7, 100 + n)) for n in range(1_000)]
    dealt = deal(arrivals, [1, 1, 1, 1])
    assert min(map(len, dealt)) > 100


def test_the_least_number_is_found() -> None:
    for answer in (1, 2, 5, 31, 100):

        def enough(count: int, answer: int = answer) -> float:
            return float(count >= answer)

        count, tried = least_count(enough, 0.9, 100)
        assert count == answer
        assert len(tried) <= 15
    count, tried = least_count(lambda n: n / 200, 0.9, 100)
    assert count is None
    assert list(tried) == [100]


def test_how_many_devices_are_needed_or_that_no_number_is_enough() -> None:
    def find(given: Load, ttft: float, most: int = 64) -> tuple[Found, Outcome]:
        tried: list[tuple[int, float]] = []
        return find_devices(
            fleet(1),
            given,
            FIFO,
            {"ttft": ttft},
            wanted=0.9,
            most=most,
            processes=1,
            on_try=lambda count, share: tried.append((count, share)),
        )

    found, outcome = find(load(), 0.2)
    assert found.device_count is not None
    assert 1 < found.device_count < 64
    assert found.shares[found.device_count] >= 0.9
    assert found.shares[found.device_count - 1] < 0.9
    assert outcome.good_share({"ttft": 0.2}) == found.shares[found.device_count]
    none, _ = find(load(20), 1e-4)
    assert none.device_count is None
    assert "no number suffices: one device for each request" in none.reason
    few, _ = find(load(), 0.2, 1)
    assert few.device_count is None
    assert "no number up to 1 suffices" in few.reason


def test_runs_sum_their_steps() -> None:
    run = Run(10, 2.0, 0.5)
    ends = [sum(2.0 + 0.5 * step for step in range(count)) for count in range(11)]
    assert run.seconds == pytest.approx(ends[-1])
    for count in range(1, 11):
        assert run.until(count) == pytest.approx(ends[count])
        assert run.steps_until(ends[count]) == count
        assert run.steps_until(ends[count] - 0.01) == count
    assert run.steps_until(1e9) == 10
    assert run.steps_until(0.0) == 1
    assert Run(7, 0.25).steps_until(0.5) == 2


def test_a_store_keeps_what_was_used_last_and_a_prefix_loses_its_end_first() -> None:
    store = SimulatedStore(6)
    first, second = (b"a", b"b", b"c"), (b"x", b"y")
    store.seal(first, 0, 0)
    store.seal(second, 1, 1)
    assert store.used_count == 6
    store.touch(first)
    store.seal((b"z",), 2, 0)
    assert store.held_count(second) == 2  # the chunk of its own went
    store.seal((b"w",), 3, 0)
    assert store.held_count(second) == 1
    assert store.held_count(first) == 3
    assert store.used_count == 6
    store.seal((), 4, 50)
    assert store.used_count <= 6


def test_fairness_compares_with_the_weighted_share() -> None:
    assert jain([]) == 1
    assert jain([1, 1, 1]) == pytest.approx(1)
    assert jain([1, 0, 0, 0]) == pytest.approx(0.25)
    assert water_filled(10, [2, 100, 100], [1, 1, 3]) == pytest.approx([2, 2, 6])
    assert water_filled(10, [1, 2], [1, 1]) == pytest.approx([1, 2])


def test_devices_have_names_and_memory_that_a_model_may_exceed() -> None:
    assert device_type("h100") is MACHINES["h100"]
    with pytest.raises(InvalidArgument, match="is not one of a100-40"):
        device_type("P4")
    assert parse_devices("H100=8, a100") == [("H100", 8), ("a100", 1)]
    for wrong in ("", "H100=", "H100=x", "H100=0", "=4"):
        with pytest.raises(InvalidArgument, match="is not TYPE=N"):
            parse_devices(wrong)
    assert read_weights(["a=2", "b=0.5"]) == {"a": 2.0, "b": 0.5}
    for wrong in ("a", "a=0", "a=x", "=1", "a=inf"):
        with pytest.raises(InvalidArgument, match="is not TENANT=WEIGHT"):
            read_weights([wrong])


def test_energy_is_known_if_the_power_is() -> None:
    outcome = simulate(fleet(2), load(20), FIFO)
    joules = outcome.joules({"small": KIND})
    assert joules is not None
    assert 2 * 50 * outcome.seconds < joules < 2 * 400 * outcome.seconds
    assert outcome.joules({"small": dataclasses.replace(KIND, full_watts=None)}) is None

"""A cell ends every request once, within its memory, as an engine that is stepped one by one."""

from __future__ import annotations

from random import Random

import pytest
import simulated
from long_runs import scaled
from simulated import CHUNK, SHAPE, cell, requests, worker

from scheduler_service.policy.reservations import Reservations
from splitpoint.options.scheduler import Policy
from splitpoint_cli.simulate.costs import Overheads
from splitpoint_cli.simulate.simulator import Cell
from splitpoint_cli.simulate.workload import SimulatedRequest
from splitpoint_cli.traces.arrival import Arrival


def random_arrivals(seed: int, count: int, *, gap: float = 0.05) -> list[Arrival]:
    """Requests of two tenants, of which many begin alike."""
    random, now = Random(seed), 0.0
    found: list[Arrival] = []
    for _ in range(count):
        now += random.expovariate(1 / gap)
        length = random.randint(1, 1_500)
        family, shared = random.randrange(5), random.randint(0, 12)
        blocks = -(-length // CHUNK)
        ids = [family * 100 + n for n in range(min(shared, blocks))]
        ids += [1_000 + len(found) * 100 + n for n in range(blocks - len(ids))]
        tenant = "ab"[family % 2]
        found.append(
            Arrival(now, length, random.randint(1, 200), tuple(ids), tenant, random.randint(-2, 2))
        )
    return found


class WatchedCell(Cell):
    """Checks memory and time at every event."""

    last = 0.0

    def _happen(self) -> None:
        super()._happen()
        assert self.now >= self.last
        self.last = self.now
        for station in self.stations.values():
            assert station.account.free_pages >= 0
            assert station.account.free_places >= 0
            assert station.account.check_integrity() == []
            assert len(station.kept) <= station.account.free_pages
        assert self.store.used_count <= self.store.slot_count


@pytest.mark.scaled
@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("seed", range(scaled(2, chaos=4)))
def test_every_request_ends_once_and_memory_is_never_exceeded(policy: Policy, seed: int) -> None:
    given = requests(random_arrivals(seed, 150))
    plain = cell([worker(pages=60), worker(pages=30)], policy, store_chunks=80)
    plain.__class__ = WatchedCell
    plain.run(given)
    assert not plain.rejected
    assert len(plain.queue) == 0
    for request in given:
        assert request.arrived <= request.started < request.first_token <= request.ended
        assert (request.first_token == request.ended) == (request.output_tokens == 1)
        assert request.left == 0
    totals = [station.device.totals for station in plain.stations.values()]
    assert sum(each.decoded_tokens for each in totals) == sum(
        each.output_tokens - 1 for each in given
    )
    assert sum(each.prefilled_tokens for each in totals) == sum(
        each.input_tokens - each.restored_tokens for each in given
    )
    assert any(each.restored_tokens for each in given)
    assert all(station.account.charged_pages == 0 for station in plain.stations.values())


def stepped(
    given: list[SimulatedRequest], budget: int, batch: int
) -> dict[int, tuple[float, float]]:
    """Return (first token, end) of each request, by an engine that takes one step at a time.

    For one device with memory for all, no shared prefix, and the first come served first.
    """
    costs = worker(batch=batch, budget=budget).costs
    left = {each.arrival: each.input_tokens for each in given}
    tokens = {each.arrival: 0 for each in given}
    first: dict[int, float] = {}
    ended: dict[int, float] = {}
    running: list[SimulatedRequest] = []
    waiting, now = list(given), 0.0
    while waiting or running:
        while waiting and waiting[0].arrived <= now and len(running) < batch:
            running.append(waiting.pop(0))
        if not running:
            now = waiting[0].arrived
            continue
        decoding = [each for each in running if not left[each.arrival]]
        length = sum(each.input_tokens + tokens[each.arrival] for each in decoding)
        room, flops, pieces = budget, 0.0, []
        for each in running:
            if left[each.arrival] and room:
                count = min(room, left[each.arrival])
                room -= count
                done = each.input_tokens - left[each.arrival]
                flops += SHAPE.prefill_flops(count, done)
                if count < left[each.arrival]:
                    flops -= 2 * SHAPE.vocabulary_size * SHAPE.hidden_size
                pieces.append((each, count))
        now += costs.step(len(decoding), length, flops, 1 if pieces else 0)
        for each, count in pieces:
            left[each.arrival] -= count
            if not left[each.arrival]:
                first[each.arrival] = now
        for each in [*decoding, *(each for each, _ in pieces if not left[each.arrival])]:
            tokens[each.arrival] += 1
            if tokens[each.arrival] == each.output_tokens:
                ended[each.arrival] = now
                running.remove(each)
    return {number: (first[number], ended[number]) for number in first}


@pytest.mark.parametrize("seed", range(6))
def test_many_steps_at_once_are_those_steps_one_by_one(seed: int) -> None:
    random, now, arrivals = Random(seed), 0.0, []
    for _ in range(40):
        now += random.expovariate(random.choice([2.0, 20.0]))
        arrivals.append(Arrival(now, random.randint(1, 3_000), random.randint(1, 90)))
    given = requests(arrivals)
    expected = stepped(given, budget=256, batch=6)
    cell([worker(pages=5_000, batch=6)]).run(given)
    for each in given:
        assert (each.first_token, each.ended) == pytest.approx(expected[each.arrival], rel=1e-6)


def test_fifo_on_one_device_by_hand() -> None:
    """Two requests: the second one's prompt is computed beside the first one's decoding."""
    costs = worker(budget=256).costs
    given = requests([Arrival(0.0, 300, 3), Arrival(0.001, 100, 2)])
    cell([worker(budget=256)]).run(given)
    # 256 tokens; then the other 44, with 100 of the second request in the same step.
    one = costs.step(0, 0, costs.prefill_flops(256, 0, ends=False), 1)
    flops = costs.prefill_flops(44, 256, ends=True) + costs.prefill_flops(100, 0, ends=True)
    two = one + costs.step(0, 0, flops, 1)
    three = two + costs.step(2, 301 + 101)
    four = three + costs.step(1, 302)
    first, second = given
    assert (first.first_token, first.ended) == pytest.approx((two, four))
    assert (second.first_token, second.ended) == pytest.approx((two, three))
    assert one == pytest.approx(SHAPE.prefill_flops(256) / 1e12, rel=0.01)


def test_overheads_add_to_steps_rows_and_starts() -> None:
    """A prompt of two pieces, then two decode steps of one sequence."""
    plain, slow = (requests([Arrival(0.0, 300, 3)]) for _ in range(2))
    cell([worker()]).run(plain)
    overheads = Overheads(step=0.01, row=0.002, start=0.1)
    cell([worker(overheads=overheads)]).run(slow)
    assert slow[0].first_token - plain[0].first_token == pytest.approx(0.1 + 2 * 0.01)
    assert slow[0].ended - plain[0].ended == pytest.approx(0.1 + 4 * 0.01 + 2 * 0.002)


def test_a_prefix_comes_back_from_the_store_while_others_compute() -> None:
    """One page fits beside the second request, so the first one's chunks must come back."""
    ids = tuple(range(8))
    given = requests(
        [
            Arrival(0.0, 8 * CHUNK, 2, ids),
            Arrival(1.0, 12 * CHUNK, 60),
            Arrival(1.1, 8 * CHUNK, 2, ids),
        ]
    )
    made = cell([worker(pages=22)])
    made.run(given)
    third = given[2]
    assert third.restored_tokens == 7 * CHUNK
    totals = made.stations["small-0"].device.totals
    # The second request needs 13 pages, so that 9 remain: the first one's were not overwritten.
    assert totals.restored_tokens == 0
    tight = cell([worker(pages=13)])
    tight.run(
        fresh := requests(
            [
                Arrival(e.arrived, e.input_tokens, e.output_tokens, i)
                for e, i in zip(given, (ids, (), ids), strict=True)
            ]
        )
    )
    assert tight.stations["small-0"].device.totals.restored_tokens == 7 * CHUNK
    assert fresh[2].restored_tokens == 7 * CHUNK
    seconds = worker().costs.restore(7 * CHUNK).predicted_restore_seconds
    assert fresh[2].first_token > fresh[2].started + seconds


def test_without_a_store_nothing_is_restored() -> None:
    ids = tuple(range(8))
    arrivals = [
        Arrival(0.0, 8 * CHUNK, 2, ids),
        Arrival(1.0, 12 * CHUNK, 2, (99,)),
        Arrival(2.0, 8 * CHUNK, 2, ids),
    ]
    given = requests(arrivals)
    cell([worker(pages=13)], store_chunks=0).run(given)
    assert [each.restored_tokens for each in given] == [0, 0, 0]


def test_what_can_never_fit_is_refused_and_streamed_if_it_may_be() -> None:
    arrivals = [Arrival(0.0, 30 * CHUNK, 5), Arrival(0.0, CHUNK, 5)]
    refused = requests(arrivals)
    made = cell([worker(pages=10)], streams=False)
    made.run(refused)
    assert made.rejected == refused[:1]
    assert refused[1].ended > 0
    streamed = requests(arrivals)
    made = cell([worker(pages=10)])
    made.run(streamed)
    assert not made.rejected
    assert streamed[0].is_streamed
    assert not streamed[1].is_streamed
    assert made.stations["small-0"].device.totals.link_seconds > 0


def test_a_request_that_waits_for_ever_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cell([worker()])
    monkeypatch.setattr(made.queue, "next", lambda now: None)
    with pytest.raises(RuntimeError, match="0 running and 1 waiting never end"):
        made.run(requests([Arrival(0.0, CHUNK, 5)]))
    assert not made.rejected


def test_tenants_with_weights_share_a_device_that_is_too_small() -> None:
    arrivals = [Arrival(0.001 * n, 256, 50, (), "ab"[n % 2]) for n in range(400)]
    given = requests(arrivals, a=3.0)
    cell([worker(pages=20)], Policy.FAIR).run(given)
    ended = sorted(given, key=lambda each: each.ended)[:100]
    share = sum(each.tenant == "a" for each in ended) / 100
    assert share == pytest.approx(0.75, abs=0.05)


def test_requests_spread_over_equal_workers() -> None:
    given = requests([Arrival(0.001 * n, 256, 100) for n in range(16)])
    made = cell([simulated.worker(), simulated.worker()])
    made.run(given)
    assert {each.device for each in given[:2]} == {each.device for each in made.stations.values()}


def test_a_request_that_is_named_twice_gets_one_worker() -> None:
    """A tenant's oldest request is compared as the oldest, and as one of the window."""
    made = cell([worker() for _ in range(4)], Policy.UTILISATION)
    (request,) = requests([Arrival(0.0, 64, 10)])
    reservations = Reservations(made.queue.workers, made.queue.settings)
    reservations.renew([(request, 0), (request, 0)], now=1e6)
    assert len(reservations.items()) == 1
    assert reservations.check_integrity() == []

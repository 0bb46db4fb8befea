"""The queue that decides which waiting request starts next: what each policy promises."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from policy_doubles import Devices, Job, drain

from scheduler_service.placement.account import Hold
from scheduler_service.policy.order import Decision
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.policy.tenants import TenantShares, Usage
from splitpoint.options.scheduler import Policy

# (K, T) of the paper's Figure 8: a budget of 5 tokens, memory for 10.
FIGURE_8 = [Job(3, 2), Job(3, 1), Job(5, 1), Job(2, 3)]
BEST = PolicySettings(Policy.UTILISATION)


def test_the_papers_example_takes_two_iterations_instead_of_three() -> None:
    steps = {}
    for policy in Policy:
        devices = Devices(PolicySettings(policy, ahead_steps=1), pages=10, step_tokens=5)
        for job in FIGURE_8:
            devices.push(job)
        steps[policy] = drain(devices)
    assert steps[Policy.FIFO] == steps[Policy.FAIR] == [[0, 1], [2], [3]]
    assert [sorted(step) for step in steps[Policy.UTILISATION]] == [[0, 3], [1, 2]]


# -- starvation --------------------------------------------------------------------------


def large_request_among_small_ones(settings: PolicySettings, steps: int) -> float | None:
    """Return how long a request for most of the memory waits while small ones keep coming.

    None if it has not started. The small ones end at different times.
    """
    devices = Devices(settings, pages=10, step_tokens=20)
    for n in range(8):
        devices.push(Job(0, 2, steps=1 + n % 3))
    devices.start()
    large = devices.push(Job(8, 1))
    for n in range(steps):
        for _ in range(4):
            devices.push(Job(0, 2, steps=1 + n % 3))
        devices.step()
        if large in devices.waited:
            return devices.waited[large]
    return None


def test_without_aging_a_large_request_starves_and_with_it_none_does() -> None:
    assert large_request_among_small_ones(replace(BEST, aging_seconds=0.0), 120) is None
    waited = large_request_among_small_ones(replace(BEST, aging_seconds=5.0), 120)
    assert waited is not None
    assert waited <= 30.0
    for policy in (Policy.FIFO, Policy.FAIR):
        waited = large_request_among_small_ones(PolicySettings(policy), 120)
        assert waited is not None
        assert waited <= 10.0


# -- tenants -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [Policy.FAIR, Policy.UTILISATION])
def test_contending_tenants_get_their_weighted_shares_within_five_percent(policy: Policy) -> None:
    rng = random.Random(3)
    devices = Devices(PolicySettings(policy), pages=100, step_tokens=200, workers=2)
    weights = {"a": 1.0, "b": 2.0, "c": 5.0}
    served: Counter[str] = Counter()
    for _ in range(60):
        for tenant, weight in weights.items():  # each always has more to do
            while sum(w.tenant == tenant for w in devices.queue) < 60:
                cached, steps = rng.choice([0, 0, 20]), rng.randint(1, 4)
                devices.push(Job(cached, rng.randint(2, 10), tenant, weight, steps=steps))
        devices.start()
        for jobs in devices.running.values():
            for job, _ in jobs.values():
                served[job.tenant] += job.pages
        devices.step()
    for tenant, weight in weights.items():
        share = served[tenant] / served.total()
        entitled = weight / sum(weights.values())
        assert share == pytest.approx(entitled, abs=0.05 * max(1.0, entitled)), tenant
        assert abs(share - entitled) <= 0.05
    assert served.total() >= 0.8 * 60 * 200


@pytest.mark.parametrize("policy", [Policy.FAIR, Policy.UTILISATION])
@pytest.mark.parametrize("cached", [0, 30])
def test_one_request_behind_five_hundred_of_another_tenant_starts_soon(
    policy: Policy, cached: int
) -> None:
    devices = Devices(PolicySettings(policy), pages=100, step_tokens=50)
    for _ in range(500):
        devices.push(Job(0, 10, "many"))
    for _ in range(7):
        devices.step()
    one = devices.push(Job(cached, 10, "one"))
    for _ in range(3):
        devices.step()
    assert devices.waited[one] <= 2.0  # steps of a second


def test_a_tenant_that_was_idle_cannot_save_up() -> None:
    devices = Devices(PolicySettings(Policy.FAIR), pages=10, step_tokens=10)
    devices.push(Job(0, 10, "late"))
    devices.step()
    for _ in range(40):
        devices.push(Job(0, 10, "busy"))
    for _ in range(20):
        devices.step()
    late = [devices.push(Job(0, 10, "late")) for _ in range(20)]
    ran = [arrival for _ in range(10) for arrival in devices.step()]
    assert 4 <= len(set(ran) & set(late)) <= 6  # every other one


def test_with_one_tenant_fair_is_fifo() -> None:
    rng = random.Random(5)
    jobs = [Job(rng.randint(0, 6), rng.randint(1, 4), steps=rng.randint(1, 3)) for _ in range(80)]
    histories = []
    for policy in (Policy.FIFO, Policy.FAIR):
        devices = Devices(PolicySettings(policy), pages=12, workers=2)
        for job in jobs:
            devices.push(job)
        histories.append(drain(devices))
    assert histories[0] == histories[1]


def test_fair_prefers_a_cached_prefix_within_the_lead_only() -> None:
    for lead, first in ((4.0, 1), (0.0, 0)):
        settings = PolicySettings(Policy.FAIR, lead_requests=lead)
        devices = Devices(settings, pages=10)
        running = [devices.push(Job(0, 4, "a")), devices.push(Job(0, 6, "b"))]
        assert devices.start() == running
        waiting = [devices.push(Job(0, 10, "a")), devices.push(Job(9, 1, "b"))]
        devices.step()
        assert devices.start() == [waiting[first]]


def test_under_fair_it_is_the_share_or_the_turn_that_holds_a_request() -> None:
    devices = Devices(PolicySettings(Policy.FAIR), pages=10)
    devices.push(Job(0, 6, tenant="a"))
    assert devices.start() == [0]
    waiting = [devices.push(Job(0, 6, tenant=name)) for name in "bab"]
    holds = [devices.queue.hold(each, "0", devices.need(each)) for each in waiting]
    assert holds == [Hold.TURN, Hold.SHARE, Hold.TURN]


# -- late binding, restores, reservations -------------------------------------------------------


@pytest.mark.parametrize("policy", [Policy.FAIR, Policy.UTILISATION])
def test_about_two_steps_of_prefill_are_bound_beforehand(policy: Policy) -> None:
    devices = Devices(PolicySettings(policy), pages=1000, step_tokens=10)
    for _ in range(20):
        devices.push(Job(0, 4))
    assert len(devices.start()) == 5  # 20 tokens
    assert devices.queue.busy_workers() == ["0"]
    waiting = next(iter(devices.queue))
    assert devices.queue.hold(waiting.arrival, "0", devices.need(waiting.arrival)) is Hold.PREFILL
    assert devices.queue.computed("0", 10)
    assert len(devices.start()) == 3


@pytest.mark.parametrize("policy", [Policy.FAIR, Policy.UTILISATION])
def test_a_request_larger_than_two_steps_starts_and_is_computed_in_pieces(policy: Policy) -> None:
    devices = Devices(PolicySettings(policy), pages=1000, step_tokens=10)
    long, short = devices.push(Job(0, 500)), devices.push(Job(0, 1))
    assert long in devices.start()
    later = devices.push(Job(0, 1))
    assert devices.start() == []
    assert not devices.queue.computed("0", 470)
    assert devices.queue.computed("0", 15)
    devices.start()
    assert devices.waited.keys() == {long, short, later}


@pytest.mark.parametrize("policy", [Policy.FAIR, Policy.UTILISATION])
def test_link_bound_requests_in_flight_are_bounded_but_one_is_let_through(policy: Policy) -> None:
    devices = Devices(PolicySettings(policy, restoring_share=0.5), pages=1000)
    for _ in range(6):
        devices.push(Job(150, 1))
    assert len(devices.start()) == 3  # 450 of 500
    waiting = next(iter(devices.queue))
    assert devices.queue.hold(waiting.arrival, "0", devices.need(waiting.arrival)) is Hold.RESTORES
    if policy is Policy.UTILISATION:
        other = devices.push(Job(0, 1))
        assert devices.start() == [other]
    devices = Devices(PolicySettings(policy, restoring_share=0.1), pages=1000)
    devices.push(Job(900, 1))
    assert len(devices.start()) == 1


def test_memory_is_kept_for_the_request_that_waited_longest() -> None:
    devices = Devices(replace(BEST, aging_seconds=5.0), pages=10)
    devices.push(Job(0, 6, steps=50))
    devices.start()
    large = devices.push(Job(0, 8))
    devices.now += 6.0
    small = devices.push(Job(0, 2))
    assert devices.start() == []
    assert devices.queue.is_reserved(large)
    assert devices.queue.hold(small, "0", devices.need(small)) is Hold.RESERVATION
    devices.queue.withdraw(large)
    assert devices.start() == [small]


def test_high_priorities_are_reserved_first_but_low_ones_not_never() -> None:
    devices = Devices(replace(BEST, aging_seconds=5.0), pages=10, workers=8)
    for _ in range(8):
        devices.push(Job(0, 6, steps=50))
    devices.start()
    low = devices.push(Job(0, 8, priority=-1))
    high = devices.push(Job(0, 8, priority=1))
    devices.now += 6.0
    assert devices.start() == []
    assert devices.queue.is_reserved(high)
    assert not devices.queue.is_reserved(low)
    devices.now += 6.0
    assert devices.start() == []
    assert devices.queue.is_reserved(low)


def test_a_pinned_request_holds_up_no_other_worker() -> None:
    for policy in Policy:
        devices = Devices(PolicySettings(policy, window=4), pages=10, workers=2)
        busy = devices.push(Job(0, 10, steps=50, worker_id="0"))
        assert devices.start() == [busy]
        for _ in range(10):
            devices.push(Job(0, 10, worker_id="0"))
        free = devices.push(Job(0, 10))
        assert devices.start() == [free]


# -- what a policy queue tells of itself: why requests started, and what each tenant has had ---


def start_all(devices: Devices, now: float) -> list[int]:
    """Start what can start; return the arrivals."""
    devices.now = now
    return devices.start()


def end(devices: Devices, arrival: int, now: float) -> None:
    del devices.running["0"][arrival]
    devices.queue.ended(arrival, now)


@pytest.mark.parametrize(
    ("policy", "decision"),
    [
        (Policy.FIFO, Decision.TURN),
        (Policy.FAIR, Decision.TURN),
        (Policy.UTILISATION, Decision.SET),
    ],
)
def test_starts_are_counted_by_their_reason(policy: Policy, decision: Decision) -> None:
    devices = Devices(PolicySettings(policy), pages=10, step_tokens=5)
    for _ in range(4):
        devices.push(Job(1, 1))
    assert len(start_all(devices, 0.0)) == 4
    assert devices.queue.decision_counts[decision] == 4
    assert sum(devices.queue.decision_counts.values()) == 4


def test_a_start_on_kept_memory_has_its_own_reason() -> None:
    devices = Devices(
        PolicySettings(Policy.UTILISATION, aging_seconds=1.0), pages=10, step_tokens=5
    )
    devices.push(Job(5, 1))
    assert start_all(devices, 0.0) == [0]
    devices.push(Job(8, 2))
    assert start_all(devices, 5.0) == []
    devices.push(Job(1, 1))
    assert start_all(devices, 5.0) == [], "memory is kept for the one that waited long"
    end(devices, 0, 6.0)
    assert start_all(devices, 6.0) == [1]
    assert devices.queue.decision_counts[Decision.RESERVATION] == 1


@pytest.mark.parametrize("policy", list(Policy))
def test_service_is_memory_times_seconds(policy: Policy) -> None:
    """Pages of one byte. It never falls, and goes on when a tenant was idle."""
    devices = Devices(PolicySettings(policy), pages=10, step_tokens=100)
    devices.push(Job(2, 2, tenant="a"))
    devices.push(Job(0, 3, tenant="b"))
    assert sorted(start_all(devices, 10.0)) == [0, 1]
    assert devices.queue.service(12.0) == {"a": 8.0, "b": 6.0}
    end(devices, 0, 13.0)
    assert devices.queue.service(20.0) == {"a": 12.0, "b": 30.0}
    end(devices, 1, 20.0)
    devices.push(Job(0, 1, tenant="a"))
    start_all(devices, 100.0)
    assert devices.queue.service(101.0) == {"a": 13.0, "b": 30.0}


# -- the link is kept busy beside compute: a link-bound restore overlaps other requests ---

DOCUMENT = Job(50, 1, steps=5)
SHORT = Job(0, 10, steps=3)


def started(devices: Devices) -> list[Job]:
    """Start what can start; return the jobs that run then."""
    devices.start()
    return [job for job, _ in devices.running["0"].values()]


def devices_with(*jobs: Job, pages: int = 100) -> Devices:
    devices = Devices(PolicySettings(Policy.UTILISATION), pages=pages)
    for job in jobs:
        devices.push(job)
    return devices


def test_one_restore_runs_beside_requests_that_fill_the_device_better() -> None:
    running = started(devices_with(*[SHORT] * 20, DOCUMENT, DOCUMENT))
    assert running.count(DOCUMENT) == 1
    assert running.count(SHORT) == 4, "all that fits beside it"


def test_a_second_restore_does_not_come_before_them() -> None:
    running = started(devices_with(DOCUMENT, *[SHORT] * 20, DOCUMENT, pages=200))
    assert running.count(DOCUMENT) == 1
    assert running.count(SHORT) == 14


def test_without_other_requests_all_that_fits_is_restored() -> None:
    assert started(devices_with(DOCUMENT, DOCUMENT, pages=204)) == [DOCUMENT, DOCUMENT]


def test_the_next_restore_begins_when_the_link_is_free() -> None:
    devices = devices_with(*[SHORT] * 40, DOCUMENT, DOCUMENT)
    first = {arrival for arrival in devices.step() if arrival >= 40}
    for _ in range(4):
        devices.step()
    # The first one has ended, and 51 pages are free at once.
    assert {arrival for arrival in devices.step() if arrival >= 40} == {40, 41} - first


# -- what tenants are charged: in the end bytes times seconds, however long requests ran ---


@pytest.mark.parametrize("seed", range(20))
def test_charges_are_what_was_held(seed: int) -> None:
    rng = random.Random(seed)
    shares = TenantShares()
    usage = Usage(shares)
    for tenant in "abc":  # a tenant that is idle is forgotten
        shares.waits(tenant, rng.choice([0.5, 1.0, 3.0]))
    held: dict[int, tuple[str, int]] = {}
    used: dict[str, float] = dict.fromkeys("abc", 0.0)
    now = 0.0
    for arrival in range(300):
        if not held or rng.random() < 0.4:
            tenant, size = rng.choice("abc"), rng.randint(0, 9)
            usage.start(arrival, tenant, "0", size, now)
            held[arrival] = tenant, size
        else:
            chosen = rng.choice(list(held))
            tenant, size = held[chosen]
            if rng.random() < 0.5:
                more = rng.choice([0, 0, 3])
                usage.runs(chosen, more, now)
                held[chosen] = tenant, size + more
            else:
                assert usage.end(chosen, now) == "0"
                assert usage.end(chosen, now) is None
                del held[chosen]
        seconds = rng.choice([0.0, 0.1, 2.0, 30.0])
        for tenant, size in held.values():
            used[tenant] += size * seconds
        now += seconds
        assert shares.check_integrity() == []
    for arrival in list(held):
        usage.end(arrival, now)
    for tenant in "abc":
        assert shares.charged(tenant) == pytest.approx(used[tenant], abs=1e-6)
    assert sum(map(shares.share, "abc")) == pytest.approx(1.0)


def test_a_request_that_runs_longer_than_estimated_is_charged_before_it_ends() -> None:
    shares = TenantShares()
    usage = Usage(shares)
    shares.waits("a", 1.0)
    usage.start(0, "a", "0", 10, 0.0)
    estimated = shares.charged("a")
    usage.runs(0, 0, 100.0)
    assert shares.charged("a") >= 1000.0 > estimated


def test_tenants_with_nothing_to_do_are_forgotten() -> None:
    shares = TenantShares()
    usage = Usage(shares)
    shares.waits("busy", 1.0)
    for n in range(1000):
        shares.waits(f"t{n}", 1.0)
        usage.start(n, f"t{n}", "0", 5, float(n))
        shares.waits_no_more(f"t{n}")
        usage.end(n, n + 0.5)
        shares.charge("busy", 10.0)
        assert shares.check_integrity() == []
    assert len(shares.known()) < 300
    shares.waits_no_more("busy")
    assert shares.known() == []

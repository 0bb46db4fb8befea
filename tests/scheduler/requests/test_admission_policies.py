"""The admission queue under every policy: nothing is lost, miscounted or left to wait."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from long_runs import scaled
from scheduler_doubles import CHUNK_TOKENS, PAGE_BYTES, queued_request, worker_facts

from scheduler_service.api.request import Request
from scheduler_service.placement.account import Need, OthersHold, WorkerAccount
from scheduler_service.placement.waiting import Cause
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.requests.admission import AdmissionQueue, GrantError, Queued
from scheduler_service.requests.attempt import Attempt
from splitpoint.options.scheduler import Policy
from splitpoint.planning.plan import Residency

FACTS = worker_facts(
    10, 8, kvstore_address="unix:/store", store_slot_count=1000, slot_bytes=2 * PAGE_BYTES
)


class History:
    """Random traffic of three tenants over three workers that come, drain and go."""

    def __init__(self, policy: Policy, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.arrivals = 0
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Attempt] = {}
        self.workers: set[str] = set()
        chosen = PolicySettings(
            policy,
            aging_seconds=rng.choice([0.0, 3.0]),
            lead_requests=rng.choice([0.0, 4.0]),
            window=rng.choice([1, 4, 64]),
        )
        self.ages = policy is not Policy.UTILISATION or chosen.aging_seconds > 0
        self.admission = AdmissionQueue(100, policy=chosen, clock=lambda: self.now)

    def step(self) -> None:
        """Let something happen."""
        events = [self.worker_comes, self.time_passes, *[self.request_comes] * 6]
        if self.workers:
            events += [self.worker_drains, self.worker_goes, *[self.others_change] * 3]
        if self.waiting:
            events += [self.reader_pauses, self.request_leaves]
        if self.running:
            events += [*[self.tokens_come] * 4, *[self.request_ends] * 4]
        self.rng.choice(events)()
        self.place()
        self.check()

    def worker_comes(self) -> None:
        worker_id = self.rng.choice("012")
        if worker_id not in self.workers:
            self.workers.add(worker_id)
            self.admission.add_worker(
                replace(
                    FACTS,
                    worker_id=worker_id,
                    cache_capacity_bytes=self.rng.randint(3, 12) * PAGE_BYTES,
                    max_batch_size=self.rng.randint(1, 4),
                    max_batched_tokens=self.rng.choice([0, 1, 4]) * CHUNK_TOKENS,
                )
            )

    def worker_drains(self) -> None:
        self.admission.close_worker(self.rng.choice(sorted(self.workers)))

    def worker_goes(self) -> None:
        worker_id = self.rng.choice(sorted(self.workers))
        self.workers.discard(worker_id)
        self.admission.remove_worker(worker_id)
        for arrival, lost in list(self.running.items()):
            if lost.worker_id == worker_id:
                del self.running[arrival]
                self.admission.resubmit(lost.request)
                self.waiting[arrival] = lost.request

    def others_change(self) -> None:
        """Other schedulers take, want and leave parts of a worker; moments pass."""
        worker_id, rng = self.rng.choice(sorted(self.workers)), self.rng
        account = self.admission.account(worker_id)
        assert account is not None
        for _ in range(rng.choice([0, 4])):
            account.tick()
        others = OthersHold(
            pages=rng.choice([0, 0, 1, 3]),
            request_count=rng.choice([0, 0, 1]),
            slot_count=rng.choice([0, 5]),
            busy_count=rng.choice([0, 1]),
            wanted_pages=rng.choice([0, 1, 2, 5]),
            waited_seconds=rng.choice([0.0, 6.0]),
        )
        self.admission.set_others(worker_id, others)

    def request_comes(self) -> None:
        rng = self.rng
        pin = rng.choice(["", "", "", "0", "1"])
        wish = rng.choice([None, None, *Residency])
        one = queued_request(self.arrivals, rng.randint(1, 11) * CHUNK_TOKENS, wish, pin)
        one.tenant, one.priority = rng.choice("abc"), rng.randint(-1, 1)
        one.weight = 2.0 if one.tenant == "a" else 1.0
        one.cleared_at_tokens = 1 if rng.random() < 0.1 else None
        self.arrivals += 1
        if isinstance(self.admission.submit(one), Queued):
            self.waiting[one.arrival] = one

    def reader_pauses(self) -> None:
        one = self.waiting[self.rng.choice(sorted(self.waiting))]
        one.is_paused = not one.is_paused
        self.admission.resumed(one)

    def tokens_come(self) -> None:
        one = self.running[self.rng.choice(sorted(self.running))]
        one.request.cleared_at_tokens = None
        self.admission.tokens_came(one.request)

    def request_ends(self) -> None:
        self.admission.release(self.running.pop(self.rng.choice(sorted(self.running))).request)

    def request_leaves(self) -> None:
        self.admission.withdraw(self.waiting.pop(self.rng.choice(sorted(self.waiting))))

    def time_passes(self) -> None:
        self.now += self.rng.choice([0.01, 0.2, 5.0])

    def place(self) -> None:
        while (one := self.admission.admit()) is not None:
            assert self.waiting.pop(one.request.arrival) is one.request
            assert one.request.worker_id in ("", one.worker_id)
            assert not one.request.is_paused
            self.running[one.request.arrival] = one
        self.idle_workers_have_nothing_to_do()
        self.streamed_ones_wait_for_residents_only()

    def need(self, one: Request, worker_id: str) -> Need | None:
        return self.admission.policy.workers.need(one, worker_id)

    def idle_workers_have_nothing_to_do(self) -> None:
        """On a worker of our own where nothing runs, whatever waits for it starts."""
        for worker_id in self.workers:
            account = self.admission.account(worker_id)
            assert account is not None
            if account.running_count or account.is_closed or account.others != OthersHold():
                continue
            for one in self.waiting.values():
                need = self.need(one, worker_id)
                # It may lack slots that streamed requests of another worker hold.
                assert need is None or not need.can_start, (one.arrival, worker_id)

    def streamed_ones_wait_for_residents_only(self) -> None:
        """Where all that waits can start and would be streamed, nothing waits."""
        for worker_id in self.workers:
            account = self.admission.account(worker_id)
            assert account is not None
            needs = [
                self.admission.policy.workers.need(one, worker_id) for one in self.waiting.values()
            ]
            here = [need for need in needs if need is not None]
            if all(need.is_streamed and need.can_start for need in here):
                held = [account.hold(need) for need in here]
                assert None not in held, worker_id

    def check(self) -> None:
        """The books are straight."""
        assert self.admission.check_integrity() == []
        assert [waiting.arrival for waiting in self.admission.queue()] == sorted(self.waiting)
        in_turn = [waiting.arrival for waiting in self.admission.in_turn()]
        assert sorted(in_turn) == sorted(self.waiting)
        for one in self.waiting.values():
            explained = self.admission.explain(one)
            assert explained.reason
            assert (explained.place is None) == (
                explained.cause is Cause.WORKER or not self.admission.is_placeable(one)
            )
        for worker_id in self.workers:
            account = self.admission.account(worker_id)
            assert account is not None
            here = [one for one in self.running.values() if one.worker_id == worker_id]
            assert account.running_count == len(here)

    def end(self) -> None:
        """In the end, without other schedulers, all that can run has run."""
        for worker_id in self.workers:
            self.admission.set_others(worker_id, OthersHold())
        for one in self.waiting.values():
            one.is_paused = False
            self.admission.resumed(one)
        self.place()
        while self.running:
            self.now += 1.0
            arrival = min(self.running)
            self.admission.release(self.running.pop(arrival).request)
            self.place()
        assert not any(self.admission.is_placeable(one) for one in self.waiting.values())
        assert self.admission.check_integrity() == []

    def all_stop_reading(self) -> None:
        """Nothing ends any more, yet whatever can run starts: those that are paused make room."""
        for worker_id in self.workers:
            self.admission.set_others(worker_id, OthersHold())
        for one in self.waiting.values():
            one.is_paused = False
            self.admission.resumed(one)
        for _ in range(2 * len(self.waiting)):
            for running in self.running.values():
                running.request.cleared_at_tokens = None
                running.request.is_paused = True
                self.admission.tokens_came(running.request)
            self.now += 5.0
            for paused in self.admission.to_put_back(()):
                self.admission.release(self.running.pop(paused.arrival).request)
            self.place()
        for one in self.waiting.values():
            # Without aging, a policy may hold back what has room.
            needs = [
                self.admission.policy.workers.need(one, worker_id) for worker_id in self.workers
            ]
            here = [need for need in needs if need is not None]
            assert not here or (not self.ages and any(need.can_start for need in here))
        assert self.admission.check_integrity() == []


@pytest.mark.scaled
@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("seed", range(scaled(5, chaos=16)))
def test_random_histories(policy: Policy, seed: int) -> None:
    history = History(policy, random.Random(seed))
    for _ in range(200):
        history.step()
    history.end()


@pytest.mark.scaled
@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("seed", range(scaled(2, chaos=4)))
def test_random_histories_of_readers_that_stop(policy: Policy, seed: int) -> None:
    history = History(policy, random.Random(seed))
    for _ in range(100):
        history.step()
    history.all_stop_reading()


def test_as_few_paused_requests_leave_as_others_need() -> None:
    admission = AdmissionQueue(1, clock=lambda: 0.0)
    admission.add_worker(FACTS)
    running = []
    for arrival, pages in enumerate((2, 3, 3, 2)):
        admission.submit(queued_request(arrival, pages * CHUNK_TOKENS))
        admitted = admission.admit()
        assert admitted is not None
        running.append(admitted.request)

    def put_back(*leaving: int) -> list[int]:
        return [each.arrival for each in admission.to_put_back(leaving)]

    for one in running[:3]:
        one.is_paused = True
    assert not admission.is_waited_for
    assert put_back() == []
    waiting = queued_request(4, 4 * CHUNK_TOKENS)
    admission.submit(waiting)
    assert admission.is_waited_for
    assert put_back() == [2, 1]
    assert put_back(2) == [1]
    assert put_back(2, 1) == []
    # Its own reader is what it waits for; so it takes no place in the queue either.
    waiting.is_paused = True
    assert put_back() == []
    large = queued_request(5, 9 * CHUNK_TOKENS)
    assert isinstance(admission.submit(large), Queued)
    assert not isinstance(admission.submit(queued_request(6, CHUNK_TOKENS)), Queued)
    # All of them together are too few: none leaves in vain.
    assert put_back() == []
    running[3].is_paused = True
    assert put_back() == [3, 2, 1, 0]
    admission.withdraw(large)
    # Another scheduler's request.
    admission.set_others("0", OthersHold(busy_count=1, wanted_pages=2))
    assert put_back() == [3]


def test_no_spare_memory_is_taken_that_other_schedulers_want() -> None:
    admission = AdmissionQueue(100)
    admission.add_worker(FACTS)
    others = OthersHold(pages=1, request_count=1, busy_count=1, wanted_pages=5, waited_seconds=1.0)
    admission.set_others("0", others)
    # It is larger than the device, so it is streamed, and more pages would make it faster.
    admission.submit(queued_request(0, 14 * CHUNK_TOKENS))
    admitted = admission.admit()
    assert admitted is not None
    assert (admitted.grant.residency, admitted.grant.spare_bytes) == (Residency.STREAMED, 0)
    admission.release(admitted.request)
    admission.set_others("0", OthersHold(pages=1, request_count=1, busy_count=1))
    admission.submit(queued_request(1, 14 * CHUNK_TOKENS))
    admitted = admission.admit()
    assert admitted is not None
    assert admitted.grant.spare_bytes == 3 * PAGE_BYTES


@pytest.mark.parametrize("policy", Policy)
def test_a_grant_that_fails_leaves_nothing_behind(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    admission = AdmissionQueue(100, policy=PolicySettings(policy))
    admission.add_worker(FACTS)
    first, second = queued_request(0, CHUNK_TOKENS), queued_request(1, CHUNK_TOKENS)
    for one in (first, second):
        admission.submit(one)
    with monkeypatch.context() as patch:
        patch.setattr(WorkerAccount, "pages_of", lambda *_: 11)
        with pytest.raises(GrantError) as raised:
            admission.admit()
    assert raised.value.request is first
    assert admission.check_integrity() == []
    assert (admission.running_count, admission.queue()) == (0, [second])
    admitted = admission.admit()
    assert admitted is not None
    assert admitted.request is second


def streamed(admission: AdmissionQueue, *arrivals: int) -> None:
    for arrival in arrivals:
        one = queued_request(arrival, 4 * CHUNK_TOKENS, Residency.STREAMED)
        admission.submit(one)


def start_all(admission: AdmissionQueue) -> list[int]:
    started = []
    while (admitted := admission.admit()) is not None:
        started.append(admitted.request.arrival)
    return started


def test_streamed_requests_give_way_to_resident_ones_and_to_no_others() -> None:
    now = [0.0]
    settings = PolicySettings(Policy.UTILISATION, aging_seconds=10.0)
    admission = AdmissionQueue(100, policy=settings, clock=lambda: now[0])
    admission.add_worker(replace(FACTS, cache_capacity_bytes=40 * PAGE_BYTES))
    streamed(admission, 0)
    assert start_all(admission) == [0]
    streamed(admission, 1, 2, 3)
    assert start_all(admission) == [1, 2, 3]
    # One that would be resident waits for memory: 28 of its 30 pages are free.
    large = queued_request(4, 30 * CHUNK_TOKENS)
    admission.submit(large)
    streamed(admission, 5)
    assert start_all(admission) == []
    explained = admission.explain(admission.queue()[1])
    assert explained.cause is Cause.RESIDENTS
    admission.withdraw(large)
    assert start_all(admission) == [5]


def test_the_end_of_a_trial_is_seen_at_once() -> None:
    admission = AdmissionQueue(100, policy=PolicySettings(Policy.UTILISATION), clock=lambda: 0.0)
    admission.add_worker(FACTS)
    suspect, other = queued_request(0, CHUNK_TOKENS), queued_request(1, CHUNK_TOKENS)
    suspect.cleared_at_tokens = 2
    admission.submit(suspect)
    admitted = admission.admit()
    assert admitted is not None
    admission.submit(other)
    assert start_all(admission) == []
    admission.tokens_came(admitted.request)  # the first token
    assert start_all(admission) == []
    suspect.cleared_at_tokens = None
    assert admission.tokens_came(admitted.request)
    assert start_all(admission) == [1]


def test_slots_that_one_worker_frees_are_seen_on_the_others() -> None:
    admission = AdmissionQueue(100, policy=PolicySettings(Policy.UTILISATION), clock=lambda: 0.0)
    for worker_id in "01":
        admission.add_worker(replace(FACTS, worker_id=worker_id, store_slot_count=6))
    for worker_id, arrival in (("0", 0), ("1", 1)):
        admission.submit(queued_request(arrival, 4 * CHUNK_TOKENS, Residency.STREAMED, worker_id))
    first = admission.admit()
    assert first is not None
    assert start_all(admission) == []
    admission.release(first.request)
    assert start_all(admission) == [1]

"""Several schedulers on one worker: what each leaves to the others. About 2 s."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from scheduler_doubles import PAGE_BYTES, started, worker_facts

from scheduler_service.placement.account import OthersHold, StoreAccount, WorkerAccount

PAGES, PLACES = 40, 8
FACTS = worker_facts(PAGES, PLACES)
TICK_SECONDS = 0.1


def test_what_others_hold_is_not_free() -> None:
    account = WorkerAccount(FACTS)
    account.others = OthersHold(pages=30, request_count=7, busy_count=1)
    assert (account.free_pages, account.free_bytes) == (10, 10 * PAGE_BYTES)
    assert account.has_room_for(10)
    assert not account.has_room_for(11)
    started(account, 0, 4)
    assert (account.free_pages, account.free_places) == (6, 0)
    assert not account.has_room_for(1)
    # Two schedulers may have granted the same pages.
    account.others = OthersHold(pages=38, request_count=2, busy_count=1)
    assert account.free_pages == -2
    assert not account.has_room_for(0)
    account.end(0)
    assert account.free_pages == 2


def test_beyond_its_share_a_scheduler_leaves_what_others_wait_for() -> None:
    account = WorkerAccount(FACTS)
    started(account, 0, 15)
    waiting = OthersHold(pages=5, request_count=1, busy_count=1, wanted_pages=10)
    account.others = waiting
    assert account.has_room_for(5)
    # Beyond half of the worker only what leaves the other its 10 pages.
    assert account.has_room_for(10)
    assert not account.has_room_for(11)
    account.others = replace(waiting, wanted_pages=0)
    assert account.has_room_for(20)
    # A large request that has waited long is not overtaken even within the share.
    account.others = replace(waiting, wanted_pages=20, waited_seconds=6.0)
    assert not account.has_room_for(1)


def test_nothing_is_kept_free_where_nothing_runs_for_long() -> None:
    account = WorkerAccount(FACTS)
    started(account, 0, 40)
    account.end(0)
    account.others = OthersHold(busy_count=1, wanted_pages=30, waited_seconds=0.2)
    assert not account.has_room_for(30)
    for _ in range(3):
        account.tick()
    assert account.has_room_for(30)


def test_slots_of_others_count() -> None:
    store = StoreAccount()
    for slot_count in (0, 2):
        WorkerAccount(FACTS, store).others = OthersHold(slot_count=slot_count)
    store.promise(1, 5)
    assert store.has_room(5, 12)
    assert not store.has_room(6, 12)
    assert store.has_room(10, 12, leaving=[1, 2])
    assert store.promised_to([1, 2]) == 5


@dataclass
class Waiting:
    arrival: int
    pages: int
    since: int


@dataclass
class One:
    """A scheduler that starts the first of its queue whenever there is room."""

    account: WorkerAccount
    queue: deque[Waiting] = field(default_factory=deque)
    running: dict[int, tuple[int, int]] = field(default_factory=dict)  # pages, end
    longest_wait: int = 0

    def play(self, now: int, rng: random.Random) -> None:
        for arrival, (_, end) in list(self.running.items()):
            if end <= now:
                self.account.end(arrival)
                del self.running[arrival]
        while self.queue and self.account.has_room_for(self.queue[0].pages):
            first = self.queue.popleft()
            started(self.account, first.arrival, first.pages)
            self.running[first.arrival] = first.pages, now + rng.randint(2, 12)
            self.longest_wait = max(self.longest_wait, now - first.since)
            if self.queue:
                self.queue[0].since = now

    def held(self, now: int) -> OthersHold:
        first = self.queue[0] if self.queue else None
        return OthersHold(
            pages=self.account.charged_pages,
            request_count=len(self.running),
            busy_count=int(bool(self.queue or self.running)),
            wanted_pages=first.pages if first else 0,
            waited_seconds=(now - first.since) * TICK_SECONDS if first else 0.0,
        )


@pytest.mark.parametrize("seed", range(30))
def test_two_schedulers_with_full_queues_share_a_worker(seed: int) -> None:
    """Each is told of the other a tick late, so both may grant the same pages at once."""
    rng = random.Random(seed)
    ones = [One(WorkerAccount(FACTS)), One(WorkerAccount(FACTS))]
    largest = [rng.choice([6, 20, 40]), rng.choice([6, 20, 40])]
    count = [300, 300]
    # The first one has filled the worker before the second one comes.
    for number, one in enumerate(ones):
        for arrival in range(count[number]):
            one.queue.append(Waiting(arrival, rng.randint(1, largest[number]), 20 * number))
    told = [one.held(0) for one in ones]
    shares = [0, 0]
    for now in range(100_000):
        for number, one in enumerate(ones):
            if number and now < 20:
                continue
            one.account.others = told[1 - number] if now >= 20 else OthersHold()
            one.account.tick()
            one.account.waited_seconds = one.held(now).waited_seconds
            one.play(now, rng)
            assert one.account.check_integrity() == []
        told = [one.held(now) for one in ones]
        if now >= 20 and all(one.queue for one in ones):
            shares = [
                share + one.account.charged_pages for share, one in zip(shares, ones, strict=True)
            ]
        if not any(one.queue or one.running for one in ones):
            break
    assert not any(one.queue for one in ones), "requests wait for ever"
    assert max(one.longest_wait for one in ones) * TICK_SECONDS < 12
    # One whose requests take the whole worker has it for less of the time.
    assert min(shares) > (0.3 if 40 not in largest else 0.1) * sum(shares), shares

"""Compares eviction policies with naive ones; tests statistics, watermarks, cache admission."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kvstore_helpers import Bench, store_sequence

from kvstore_service.eviction.cache_admission import SecondUseFilter
from kvstore_service.eviction.policies import (
    MOST_USES,
    POLICIES,
    InstrumentedPolicy,
    LeastOftenUsed,
)
from kvstore_service.eviction.watermarks import BATCH_CHUNKS, WatermarkEvictor, Watermarks
from splitpoint.errors import InvalidArgument

SLOTS = 6


class Naive:
    """A simple form of all three policies: sorts everything at every call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.moments = 0
        self.born: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.offered: set[int] = set()

    def use(self, slot: int) -> None:
        self.moments += 1
        if slot not in self.born:
            counts = sorted(self.counts.values())
            self.born[slot] = self.moments
            self.counts[slot] = counts[(len(counts) - 1) // 2] if counts else 0
        else:
            self.counts[slot] += 1
            if self.counts[slot] == MOST_USES:
                self.counts = {slot: count // 2 for slot, count in self.counts.items()}
        self.used[slot] = self.moments

    def forget(self, slot: int) -> None:
        del self.born[slot], self.used[slot], self.counts[slot]
        self.offered.discard(slot)

    def choose(self, protected: set[int]) -> int | None:
        order: dict[str, Callable[[int], object]] = {
            "fifo": lambda slot: self.born[slot],
            "lru": lambda slot: self.used[slot],
            "counter": lambda slot: (self.counts[slot], self.born[slot]),
        }
        able = [slot for slot in self.offered if slot not in protected]
        return min(able, key=order[self.name], default=None)  # type: ignore[arg-type]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("use"), st.integers(0, SLOTS - 1), st.sampled_from([1, 1, 1, 40, 130])),
        st.tuples(st.just("offer"), st.integers(0, SLOTS - 1), st.just(1)),
        st.tuples(st.just("forget"), st.integers(0, SLOTS - 1), st.just(1)),
        st.tuples(st.just("protect"), st.integers(0, SLOTS - 1), st.just(1)),
        st.tuples(st.just("choose"), st.just(0), st.just(1)),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=100)
@example([*(("use", slot, 1) for slot in (0, 1, 0)), *(("offer", slot, 1) for slot in (0, 1))])
@given(steps=STEPS)
def test_policies_choose_what_naive_ones_choose(
    name: str, steps: list[tuple[str, int, int]]
) -> None:
    policy, naive = POLICIES[name](), Naive(name)
    # The store's rule: a chunk may go once it was offered, until it is protected.
    protected = set(range(SLOTS))
    for step, slot, times in steps:
        if step == "use":
            for _ in range(times):
                policy.use(slot)
                naive.use(slot)
        elif step == "choose":
            victim = policy.choose(lambda slot: slot not in protected)
            assert victim == naive.choose(protected)
            if victim is not None:
                policy.forget(victim)
                naive.forget(victim)
                protected.add(victim)
        elif slot not in naive.born:
            continue
        elif step == "offer":
            protected.discard(slot)
            policy.offer(slot)
            naive.offered.add(slot)
        elif step == "protect":
            protected.add(slot)
        else:
            policy.forget(slot)
            naive.forget(slot)
            protected.add(slot)
    slots_left = set(naive.born)
    for slot in sorted(slots_left):
        policy.offer(slot)
        naive.offered.add(slot)
    while slots_left:
        victim = policy.choose(lambda slot: True)
        assert victim is not None
        assert victim == naive.choose(set())
        policy.forget(victim)
        naive.forget(victim)
        slots_left.remove(victim)
    assert policy.choose(lambda slot: True) is None


def test_counts_saturate_halve_and_begin_at_the_median() -> None:
    policy = LeastOftenUsed()
    for slot, uses in enumerate((1, 11, 101)):
        for _ in range(uses):
            policy.use(slot)
    assert [policy.count_of(slot) for slot in range(3)] == [0, 10, 100]
    policy.use(3)
    assert policy.count_of(3) == 10
    for _ in range(MOST_USES - 100):
        policy.use(2)
    assert [policy.count_of(slot) for slot in range(4)] == [0, 5, 127, 5]


def test_statistics_count_uses_and_ages_of_evicted_chunks() -> None:
    now = 100.0
    policy = InstrumentedPolicy(POLICIES["fifo"](), lambda: now)
    for slot, uses_beyond in enumerate((0, 1, 3, 4, 0)):
        for _ in range(1 + uses_beyond):
            policy.use(slot)
        policy.offer(slot)
    now = 107.5
    for _ in range(4):
        victim = policy.choose(lambda slot: True)
        assert victim is not None
        policy.forget(victim)
    policy.forget(4)  # gone, but not evicted
    assert policy.by_use_count == [1, 1, 1, 1]
    assert policy.age_seconds_sum == 4 * 7.5


# -- in a store ----------------------------------------------------------------------


@pytest.fixture
def bench(shm_folder: Path) -> Iterator[Bench]:
    bench = Bench(shm_folder, 20)
    yield bench
    bench.close()


def test_watermarks_are_fractions_in_order() -> None:
    for above, to in ((0.0, 0.0), (1.1, 0.5), (float("nan"), 0.1), (0.5, 0.5), (0.5, -0.1)):
        with pytest.raises(InvalidArgument):
            Watermarks(above, to)
    marks = Watermarks(0.95, 0.90)
    assert marks.chunks_to_evict(1000, 50, is_evicting=False) == 0
    assert marks.chunks_to_evict(1000, 49, is_evicting=False) == 51
    assert marks.chunks_to_evict(1000, 60, is_evicting=True) == 40
    assert marks.chunks_to_evict(1000, 100, is_evicting=True) == 0
    assert marks.chunks_to_evict(100_000, 0, is_evicting=False) == BATCH_CHUNKS


def test_the_evictor_evicts_down_to_the_lower_mark(bench: Bench) -> None:
    session = bench.attach()
    evictor = WatermarkEvictor(bench.store.pool, Watermarks(0.9, 0.5))
    for start in range(18):
        store_sequence(bench.store, session, b"", [100 * start + i for i in range(4)])
    assert not evictor.step()
    assert evictor.evicted_total == 0
    store_sequence(bench.store, session, b"", [5000, 5001, 5002, 5003])
    while evictor.step():
        pass
    assert bench.states()[0] == 10
    assert evictor.evicted_total == bench.store.pool.evicted_total == 9


def test_the_evictor_rests_when_nothing_can_be_evicted(bench: Bench) -> None:
    session = bench.attach()
    evictor = WatermarkEvictor(bench.store.pool, Watermarks(0.5, 0.1))
    store_sequence(bench.store, session, b"", list(range(72)), keep_leased=True)
    store_sequence(bench.store, session, b"", [900, 901])
    assert not evictor.step()  # one went; what is left is leased
    assert evictor.evicted_total == 1
    assert not evictor.step()
    assert evictor.evicted_total == 1


@pytest.mark.parametrize("name", POLICIES)
def test_any_policy_evicts_leaves_first(name: str, shm_folder: Path) -> None:
    bench = Bench(shm_folder, 8, policy=POLICIES[name]())
    session = bench.attach()
    store_sequence(bench.store, session, b"", list(range(32)))
    for left in range(28, 0, -4):
        assert bench.store.pool.evict(1) == 1
        assert bench.store.peek(b"", list(range(32))).cached_tokens == left
        bench.states()
    bench.close()


# -- second use ------------------------------------------------------------------------


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(8, "little") * 4 for number in numbers]


def test_a_chunk_is_admitted_the_second_time() -> None:
    filter_ = SecondUseFilter(100)
    assert filter_.admit(keys(1, 2, 3)) == 0
    assert filter_.admit(keys(1, 2, 4)) == 2
    assert filter_.admit(keys(1, 2, 4)) == 3
    assert filter_.admit(keys(9, 1)) == 0  # nothing behind a new chunk
    assert filter_.kept_out_total == 3 + 1 + 0 + 2


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 30), max_size=6, unique=True), max_size=40))
def test_the_filter_remembers_between_one_and_two_capacities(sequences: list[list[int]]) -> None:
    capacity = 5
    filter_ = SecondUseFilter(capacity)
    asked: list[int] = []
    for sequence in sequences:
        admitted = filter_.admit(keys(*sequence))
        for place, number in enumerate(sequence):
            since = set(asked[-asked[::-1].index(number) :]) if number in asked else None
            if place < admitted:
                assert since is not None
            elif place == admitted:
                # The first one refused is new, or that number of others came since.
                assert since is None or len(since - {number}) >= capacity
        asked += sequence
        assert len(filter_) <= 2 * capacity


def test_one_shot_sequences_are_not_wanted_and_second_ones_are(shm_folder: Path) -> None:
    bench = Bench(shm_folder, 16, admission=SecondUseFilter(100))
    store, session = bench.store, bench.attach()
    tokens = list(range(10))  # two full chunks and a tail
    assert store.peek(b"", tokens).storable_tokens is None  # a peek neither counts nor tells
    assert store.match(session, b"", tokens).storable_tokens == 0
    assert store.match(session, b"other", tokens).storable_tokens == 0  # another tenant's keys
    assert store.match(session, b"", tokens).storable_tokens is None
    longer = [*range(8), 90, 91, 92, 93, 94]
    assert store.match(session, b"", longer).storable_tokens == 8
    store_sequence(store, session, b"", longer[:8])
    found = store.match(session, b"", [*range(8), 70, 71])
    assert (found.cached_tokens, found.storable_tokens) == (8, 8)
    found = store.match(session, b"", [*range(6), 60])  # ends inside a stored chunk
    assert (found.cached_tokens, found.storable_tokens) == (6, 4)
    store.sessions.release(session, [found.lease_id], [])
    bench.close()

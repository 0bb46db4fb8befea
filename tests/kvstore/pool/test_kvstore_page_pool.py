"""Pages in the store: identity, leases, eviction, salts, recovery; and against a dictionary."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kvstore_helpers import SLOTS, Bench, granted_slots
from long_runs import scaled
from own_names import shared_memory_folder
from page_helpers import (
    PAGES,
    bytes_at,
    found_pages,
    key_of,
    keys_of,
    matched_pages,
    store_pages,
    written_chunks,
)

from kvstore_service.pool.prefix_index import Entry
from splitpoint.arena.format import RECORD_BYTES, RECORDS_OFFSET
from splitpoint.arena.records import CHUNK_OFFSET, BadParent, BadTokenCount, SlotRecord
from splitpoint.errors import DataLoss, ResourceExhausted

SALTS = (b"", b"n" * 32)

numbers = st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True)


@pytest.fixture
def bench(shm_folder: Path) -> Iterator[Bench]:
    bench = Bench(shm_folder, SLOTS, layout=PAGES)
    yield bench
    bench.close()


def test_pages_come_back_under_their_keys(bench: Bench) -> None:
    session = bench.attach()
    store_pages(bench.store, session, keys_of(1, 2, 3))
    assert found_pages(bench.store, session, keys_of(3, 9, 1, 2)) == [True, False, True, True]
    counters = bench.store.counters
    assert (counters.matches, counters.match_hits) == (1, 1)
    assert (counters.query_tokens, counters.hit_tokens) == (4, 3)
    assert found_pages(bench.store, session, keys_of(9)) == [False]
    assert (counters.matches, counters.match_hits) == (2, 1)
    assert bench.states() == (SLOTS - 3, 0, 3, 0)


def test_a_page_is_stored_once(bench: Bench) -> None:
    session = bench.attach()
    slots = store_pages(bench.store, session, keys_of(1, 2))
    assert store_pages(bench.store, session, keys_of(2, 3))[0] == slots[1]
    assert bench.store.counters.duplicates == 1
    assert bench.states() == (SLOTS - 3, 0, 3, 0)


def test_equal_keys_of_two_salts_are_two_pages(bench: Bench) -> None:
    session = bench.attach()
    one, two = SALTS
    store_pages(bench.store, session, keys_of(1), one)
    assert found_pages(bench.store, session, keys_of(1), two) == [False]
    store_pages(bench.store, session, keys_of(1), two)
    assert found_pages(bench.store, session, keys_of(1), one) == [True]
    assert found_pages(bench.store, session, keys_of(1), two) == [True]


def test_slots_are_zeroed_between_salts(bench: Bench) -> None:
    session = bench.attach()
    store_pages(bench.store, session, keys_of(*range(SLOTS)), b"one")
    [slot, *_] = store_pages(bench.store, session, keys_of(1), b"one")  # a duplicate
    assert any(bytes_at(bench.arena, slot))
    for slot, _ in granted_slots(bench.store.reserve(session, SLOTS, b"two")):
        assert not any(bytes_at(bench.arena, slot))


def test_the_last_page_of_a_sequence_is_evicted_first(bench: Bench) -> None:
    session = bench.attach()
    keys = keys_of(*range(SLOTS))
    store_pages(bench.store, session, keys)
    bench.store.reserve(session, 1)
    assert found_pages(bench.store, session, keys) == [True] * (SLOTS - 1) + [False]
    bench.crash()  # the order survives
    session = bench.attach()
    assert found_pages(bench.store, session, keys[3:5]) == [True, True]
    bench.store.reserve(session, 2)
    expected = [True, True, True, True, True, False, False, False]
    assert found_pages(bench.store, session, keys) == expected


def test_leased_pages_stay(bench: Bench) -> None:
    session = bench.attach()
    keys = keys_of(*range(SLOTS))
    store_pages(bench.store, session, keys)
    lease = matched_pages(bench.store, session, keys[:2]).lease_id
    bench.store.reserve(session, SLOTS - 2)
    with pytest.raises(ResourceExhausted):
        bench.store.reserve(session, 1)
    assert found_pages(bench.store, session, keys[:2]) == [True, True]
    bench.store.sessions.release(session, [lease], [])
    bench.store.reserve(session, 2)
    assert found_pages(bench.store, session, keys) == [False] * SLOTS


def test_a_page_with_another_checksum_is_not_sealed(bench: Bench) -> None:
    session = bench.attach()
    granted = granted_slots(bench.store.reserve(session, 1))
    [chunk] = written_chunks(bench.arena, granted, keys_of(1))
    bench.arena.plane(0, "P")[chunk.slot, PAGES.page_bytes - 1] ^= 1
    with pytest.raises(DataLoss):
        bench.store.seal(session, b"", [chunk], bench.store.verify([chunk]))
    assert found_pages(bench.store, session, keys_of(1)) == [False]
    assert bench.states() == (SLOTS, 0, 0, 0)


def test_pages_survive_a_crash(bench: Bench) -> None:
    session = bench.attach()
    store_pages(bench.store, session, keys_of(1, 2, 3), b"one")
    writing = granted_slots(bench.store.reserve(session, 2, b"one"))
    bench.crash()
    assert bench.store.recovered_state.damages == []
    assert bench.states() == (SLOTS - 5, 0, 3, len(writing))
    session = bench.attach()
    assert len(bench.store.pool.unverified) == 3
    found = found_pages(bench.store, session, keys_of(1, 2, 4), b"one")
    assert found == [True, True, False]
    assert len(bench.store.pool.unverified) == 1
    assert found_pages(bench.store, session, keys_of(1, 2, 3), b"two") == [False] * 3


@pytest.mark.parametrize("where", ["payload", "last byte", "key", "record"])
def test_a_damaged_page_is_dropped_and_the_others_are_served(bench: Bench, where: str) -> None:
    session = bench.attach()
    slots = store_pages(bench.store, session, keys_of(1, 2, 3))
    geometry, slot = bench.arena.geometry, slots[1]
    if where in ("payload", "last byte"):
        bench.arena.plane(0, "P")[slot, -1 if where == "last byte" else 7] ^= 4
    else:
        offset = {
            "key": geometry.tokens_offset + slot * 32 + 31,
            "record": RECORDS_OFFSET + slot * RECORD_BYTES + CHUNK_OFFSET + 20,
        }[where]
        bench.arena.metadata[offset] ^= 4
    bench.crash()
    session = bench.attach()
    assert found_pages(bench.store, session, keys_of(1, 2, 3)) == [True, False, True]
    assert bench.states() == (SLOTS - 2, 0, 2, 0)


def test_the_scrubber_finds_a_changed_page(bench: Bench) -> None:
    session = bench.attach()
    slots = store_pages(bench.store, session, keys_of(1, 2))
    bench.arena.metadata[bench.arena.geometry.tokens_offset + slots[0] * 32] ^= 1
    entries = list(bench.store.pool.chunks().values())
    damages = bench.store.inspection.inspect(entries)
    assert [damage is None for damage in damages] == [entry.slot != slots[0] for entry in entries]


def test_records_that_are_no_pages_are_refused(bench: Bench) -> None:
    session = bench.attach()
    [slot] = store_pages(bench.store, session, keys_of(1))
    record, row = bench.arena.record(slot), bench.arena.token_row(slot)
    sealed = SlotRecord.decode(record, row, PAGES)
    assert sealed.chunk is not None
    assert row == key_of(1)

    def changed(**fields: Any) -> bytes:
        assert sealed.chunk is not None
        return record[:CHUNK_OFFSET] + replace(sealed.chunk, **fields).encode()

    with pytest.raises(BadTokenCount):
        SlotRecord.decode(changed(token_count=7), row, PAGES)
    with pytest.raises(BadParent):
        SlotRecord.decode(changed(parent_key=b"p" * 32), row, PAGES)
    with pytest.raises(BadParent):
        SlotRecord.decode(changed(parent_key=b"p" * 32, chunk_index=1), row, PAGES)


# -- against a dictionary -----------------------------------------------------------------


@dataclass
class Stored:
    """A page in the model."""

    last_use: int
    seal_number: int
    # A bit of its payload flipped. The next look-up must detect it.
    is_damaged: bool = False


class PageMachine(RuleBasedStateMachine):
    """Random histories of two salts: seals, look-ups, leases, evictions, crashes, flipped bits."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = shared_memory_folder()
        self.folder.mkdir(mode=0o700)
        self.bench = Bench(self.folder, SLOTS, layout=PAGES)
        self.pages: dict[bytes, Stored] = {}  # by the keys of their chunks
        self.leases: dict[int, set[bytes]] = {}
        self.uses = self.seals = 0

    @initialize()
    def begin(self) -> None:
        self.session = self.bench.attach()

    def teardown(self) -> None:
        self.bench.close()
        shutil.rmtree(self.folder)

    def use(self, name: bytes) -> None:
        self.uses += 1
        self.pages[name].last_use = self.uses

    def make_room(self, count: int) -> bool:
        """Evict as the store must. Return False, and change nothing, if that is impossible."""
        leased = set().union(*self.leases.values())
        victims = sorted(self.pages.keys() - leased, key=lambda name: self.pages[name].last_use)
        missing = count - (SLOTS - len(self.pages))
        if missing > len(victims):
            return False
        for name in victims[: max(0, missing)]:
            del self.pages[name]
        return True

    @rule(salt=st.sampled_from(SALTS), numbers=numbers)
    def seal(self, salt: bytes, numbers: list[int]) -> None:
        keys, store = keys_of(*numbers), self.bench.store
        try:
            granted = granted_slots(store.reserve(self.session, len(keys), salt))
        except ResourceExhausted:
            assert not self.make_room(len(keys))
            return
        assert self.make_room(len(keys))
        chunks = written_chunks(store.arena, granted, keys, salt)
        self.settle(store.recovered.in_seal(salt, chunks))
        outcome = store.seal(self.session, salt, chunks, store.verify(chunks))
        names = store.pool.name_pages(salt, keys).keys
        for name, sealed in reversed(list(zip(names, outcome.chunks, strict=True))):
            assert sealed.is_duplicate == (name in self.pages)
            if name not in self.pages:
                self.seals += 1
                self.pages[name] = Stored(0, self.seals)
            self.use(name)

    def settle(self, entries: list[Entry]) -> None:
        """Verify recovered pages. The model loses only the damaged ones."""
        recovered = self.bench.store.recovered
        damages = recovered.check(entries)
        recovered.settle(entries, damages)
        for entry, damage in zip(entries, damages, strict=True):
            assert bool(damage) == self.pages[entry.key].is_damaged
            if damage is not None:
                del self.pages[entry.key]

    @rule(salt=st.sampled_from(SALTS), numbers=numbers, keeps=st.booleans())
    def match(self, salt: bytes, numbers: list[int], keeps: bool) -> None:
        store, keys = self.bench.store, keys_of(*numbers)
        names = store.pool.name_pages(salt, keys)
        self.settle(store.recovered.in_pages(names))
        found = matched_pages(store, self.session, keys, salt)
        hits = [name for name in names.keys if name in self.pages]
        assert [entry.key for entry in found.entries if entry is not None] == hits
        assert bool(found.lease_id) == bool(hits)
        for name in reversed(hits):
            self.use(name)
        if keeps and hits:
            self.leases[found.lease_id] = set(hits)
        else:
            store.sessions.release(self.session, [found.lease_id], [])

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(list(self.leases)))
        released = self.bench.store.sessions.release(self.session, [lease_id], [])
        assert released.lease_count == 1
        del self.leases[lease_id]

    @rule(slots=st.lists(st.integers(0, SLOTS - 1), max_size=2, unique=True))
    def crash(self, slots: list[int]) -> None:
        """The store dies, and bits of payloads flip."""
        for slot in slots:
            entry = self.bench.store.pool.find(slot)
            if entry is not None:
                self.bench.arena.plane(0, "P")[slot, 5] ^= 1
                self.pages[entry.key].is_damaged ^= True
        self.bench.crash()
        self.session = self.bench.attach()
        self.leases.clear()
        for page in self.pages.values():
            page.last_use = page.seal_number
        self.uses = self.seals = max((page.seal_number for page in self.pages.values()), default=0)

    @invariant()
    def everything_agrees(self) -> None:
        assert self.bench.states() == (SLOTS - len(self.pages), 0, len(self.pages), 0)
        assert self.pages.keys() == {entry.key for entry in self.bench.store.pool.index}
        assert len(self.bench.store.pool.leases) == len(self.leases)


@pytest.mark.scaled
def test_pages_against_a_dictionary() -> None:
    run_state_machine_as_test(
        PageMachine,
        settings=settings(
            max_examples=scaled(30, chaos=300),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )

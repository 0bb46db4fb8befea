"""The store against a dictionary: random histories of sessions that write, read, fail and die,
of stores that are killed, and of bits that flip.

The model knows exactly which chunks must be cached, eviction order included,
and which bytes they must hold. Every invariant is checked after every step.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
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
from kvstore_helpers import (
    LAYOUT,
    Bench,
    payload_of,
    read_payload,
    seed_of,
    write_payload,
)
from long_runs import scaled
from own_names import shared_memory_folder

from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.sessions import ProcessIdentity
from kvstore_service.store import KvStore
from splitpoint.arena.format import RECORD_BYTES, RECORDS_OFFSET
from splitpoint.arena.records import CHUNK_OFFSET
from splitpoint.errors import DataLoss, FailedPrecondition, NotFound, ResourceExhausted
from splitpoint.keys import chunk_key

# Histories, unless SPLITPOINT_STORE_EXAMPLES says how many.
EXAMPLES = scaled(50, chaos=500)
SLOTS = 9
LEASE_SECONDS = 10.0
SALTS = (b"", b"tenant")
SIZE = LAYOUT.chunk_tokens

# Few different beginnings, so that sequences meet.
tokens = st.builds(
    lambda name, length, last: [name] * (length - 1) + [last],
    st.integers(0, 2),
    st.integers(1, 3 * SIZE),
    st.integers(0, 2),
)


@dataclass
class Holder:
    """A session in the model."""

    process: ProcessIdentity
    deadline: float
    is_gone: bool = False
    is_orphaned: bool = False
    granted: dict[int, int] = field(default_factory=dict)
    leases: dict[int, set[bytes]] = field(default_factory=dict)


@dataclass
class Stored:
    """A chunk in the model."""

    salt: bytes
    parent: bytes
    tokens: tuple[int, ...]
    last_use: int
    seal_number: int
    # A bit of its payload flipped. The next read must detect it.
    is_damaged: bool = False


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = shared_memory_folder()
        self.folder.mkdir(mode=0o700)
        self.bench = Bench(self.folder, SLOTS, lease_seconds=LEASE_SECONDS)
        self.holders: dict[bytes, Holder] = {}
        self.chunks: dict[bytes, Stored] = {}
        self.last_salt: dict[int, bytes] = {}  # by slot: whose bytes it may hold
        self.uses = 0
        self.seals = 0
        self.has_crashed = False

    @property
    def store(self) -> KvStore:
        return self.bench.store

    def teardown(self) -> None:
        self.bench.close()
        shutil.rmtree(self.folder)

    # -- the model ------------------------------------------------------------------

    def live(self) -> list[bytes]:
        return [
            name
            for name, holder in self.holders.items()
            if not holder.is_orphaned and holder.deadline > self.bench.clock.now
        ]

    def over(self) -> list[bytes]:
        live = self.live()
        return [name for name in self.holders if name not in live]

    def free_count(self) -> int:
        granted = sum(len(holder.granted) for holder in self.holders.values())
        return SLOTS - granted - len(self.chunks)

    def use(self, key: bytes) -> None:
        self.uses += 1
        self.chunks[key].last_use = self.uses

    def leased(self) -> set[bytes]:
        return {
            key
            for holder in self.holders.values()
            for keys in holder.leases.values()
            for key in keys
        }

    def evictable(self) -> list[bytes]:
        kept = self.leased() | {chunk.parent for chunk in self.chunks.values()}
        return [key for key in self.chunks if key not in kept]

    def make_room(self, count: int) -> bool:
        """Evict as the store must. Return False, and change nothing, if that is impossible."""
        before = dict(self.chunks)
        while self.free_count() < count:
            victims = self.evictable()
            if not victims:
                self.chunks = before
                return False
            del self.chunks[min(victims, key=lambda key: self.chunks[key].last_use)]
        return True

    def forget_if_empty(self, name: bytes) -> None:
        holder = self.holders[name]
        if holder.is_orphaned and not holder.granted and not holder.leases:
            del self.holders[name]

    def orphan(self, name: bytes) -> None:
        self.holders[name].is_orphaned = True
        self.forget_if_empty(name)

    def sweep(self) -> None:
        for name, holder in list(self.holders.items()):
            if not holder.is_orphaned and holder.deadline <= self.bench.clock.now:
                self.orphan(name)
        for name, holder in list(self.holders.items()):
            if holder.is_orphaned and holder.is_gone:
                del self.holders[name]

    def sequence_of(self, key: bytes) -> list[int]:
        held: list[int] = []
        while key:
            held = [*self.chunks[key].tokens, *held]
            key = self.chunks[key].parent
        return held

    def longest_prefix(self, salt: bytes, sequence: list[int]) -> int:
        best = 0
        for key, chunk in self.chunks.items():
            if chunk.salt != salt:
                continue
            held = self.sequence_of(key)
            same = 0
            while same < min(len(held), len(sequence)) and held[same] == sequence[same]:
                same += 1
            best = max(best, same)
        return best

    # -- sessions -----------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        for _ in range(3):
            self.attach()

    @precondition(lambda self: len(self.holders) < 6)
    @rule()
    def attach(self) -> None:
        name = self.bench.attach()
        deadline = self.bench.clock.now + LEASE_SECONDS
        self.holders[name] = Holder(self.bench.process(), deadline)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def attach_again(self, data: st.DataObject) -> None:
        previous = data.draw(st.sampled_from(list(self.holders)))
        process = self.holders.pop(previous).process
        session = self.store.sessions.attach("again", process, previous_session_id=previous)
        self.holders[session.session_id] = Holder(process, self.bench.clock.now + LEASE_SECONDS)

    @precondition(lambda self: len(self.live()) > 2)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.live()))
        self.store.sessions.end(name)
        self.orphan(name)

    @precondition(lambda self: self.over())
    @rule(data=st.data())
    def process_dies(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.over()))
        self.holders[name].is_gone = True
        self.bench.presence.gone.add(name)

    # -- the store dies ---------------------------------------------------------------

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Crash the store: leases are gone, and all else is unchanged."""
        flips = data.draw(
            st.lists(
                st.tuples(
                    st.integers(0, SLOTS - 1), st.sampled_from(["payload", "record", "tokens"])
                ),
                max_size=2,
                unique_by=lambda flip: flip[0],
            )
        )
        lost = [key for slot, where in flips if (key := self.flip(slot, where)) is not None]
        self.bench.crash()
        self.has_crashed = True
        for key in lost:
            self.lose(key)
        for chunk in self.chunks.values():
            chunk.last_use = chunk.seal_number
        self.uses = self.seals = max(
            (chunk.seal_number for chunk in self.chunks.values()), default=0
        )
        for name, holder in list(self.holders.items()):
            holder.leases.clear()
            holder.is_orphaned = True
            if not holder.granted or holder.is_gone:
                del self.holders[name]

    def flip(self, slot: int, where: str) -> bytes | None:
        """Flip a bit of a sealed slot. Return the chunk's key if its record is damaged."""
        arena = self.bench.arena
        entry = self.store.pool.chunks().get(slot)
        if entry is None:
            return None
        if where == "payload":
            arena.plane(0, "K")[slot, 0] ^= 0x10
            self.chunks[entry.key].is_damaged ^= True
            return None
        geometry = arena.geometry
        offset = {
            "record": RECORDS_OFFSET + slot * RECORD_BYTES + CHUNK_OFFSET + 20,
            "tokens": geometry.tokens_offset + slot * geometry.token_row_bytes,
        }[where]
        arena.metadata[offset] ^= 0x04
        return entry.key

    def lose(self, key: bytes) -> None:
        """Remove a chunk and all below it."""
        if self.chunks.pop(key, None) is not None:
            for child in [name for name, chunk in self.chunks.items() if chunk.parent == key]:
                self.lose(child)

    def settle(self, entries: list[Entry]) -> None:
        """Verify recovered chunks. The model loses only the damaged ones."""
        damages = self.store.recovered.check(entries)
        for entry, damage in zip(entries, damages, strict=True):
            assert bool(damage) == self.chunks[entry.key].is_damaged
        self.store.recovered.settle(entries, damages)
        for entry, damage in zip(entries, damages, strict=True):
            if damage is not None:
                self.lose(entry.key)

    def settle_match(self, salt: bytes, sequence: list[int]) -> None:
        while entries := self.store.recovered.in_match(salt, sequence):
            self.settle(entries)

    @rule(limit=st.integers(1, 4))
    def verify_in_the_background(self, limit: int) -> None:
        self.settle(self.store.recovered.some(limit))

    @rule(seconds=st.sampled_from([1.0, 4.0, 9.0]), data=st.data())
    def time_passes(self, seconds: float, data: st.DataObject) -> None:
        silent = data.draw(st.sampled_from([None, *self.live()]))
        for name in self.live():
            if name != silent:
                assert self.store.sessions.keep_alive(name) == LEASE_SECONDS
                self.holders[name].deadline = self.bench.clock.now + LEASE_SECONDS
        self.bench.clock.now += seconds
        self.store.sessions.sweep()
        self.sweep()

    @precondition(lambda self: self.over())
    @rule(data=st.data())
    def the_expired_may_start_nothing(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.over()))
        for call in (
            lambda: self.store.match(name, b"", [1]),
            lambda: self.store.reserve(name, 1),
            lambda: self.store.seal(name, b"", [], []),
            lambda: self.store.sessions.keep_alive(name),
        ):
            with pytest.raises((FailedPrecondition, NotFound)):
                call()

    # -- writing ------------------------------------------------------------------------

    @precondition(lambda self: self.live())
    @rule(data=st.data(), count=st.integers(1, SLOTS + 1), salt=st.sampled_from(SALTS))
    def reserve(self, data: st.DataObject, count: int, salt: bytes) -> None:
        self.reserve_for(data.draw(st.sampled_from(self.live())), count, salt)

    def reserve_for(self, name: bytes, count: int, salt: bytes) -> None:
        self.sweep()
        try:
            runs = self.store.reserve(name, count, salt)
        except ResourceExhausted as error:
            can_retry = error.retry_after_seconds is not None
            assert can_retry == (count <= SLOTS), error  # noqa: PT017
            assert not self.make_room(count)
            return
        assert self.make_room(count)
        counts = [len(run.generations) for run in runs]
        assert sum(counts) == count
        assert counts == sorted(counts, reverse=True)
        for run in runs:
            for offset, generation in enumerate(run.generations):
                slot = run.first_slot + offset
                self.holders[name].granted[slot] = generation
                if self.last_salt.get(slot, salt) != salt:
                    assert not any(map(any, read_payload(self.bench.arena, slot).values()))
                self.last_salt[slot] = salt

    def granted_for(self, holder: Holder, salt: bytes) -> list[tuple[int, int]]:
        return sorted(item for item in holder.granted.items() if self.last_salt[item[0]] == salt)

    @precondition(lambda self: self.live())
    @rule(
        data=st.data(),
        salt=st.sampled_from(SALTS),
        sequence=tokens,
        is_damaged=st.sampled_from([False, False, False, True]),
        keep_leased=st.booleans(),
        joins=st.booleans(),
    )
    def write_and_seal(
        self,
        data: st.DataObject,
        salt: bytes,
        sequence: list[int],
        is_damaged: bool,
        keep_leased: bool,
        joins: bool,
    ) -> None:
        """Write the uncached part of a sequence in one session, as workers do."""
        name = data.draw(st.sampled_from(self.live()))
        holder = self.holders[name]
        if (own := len(self.granted_for(holder, salt))) < 3:
            self.reserve_for(name, 3 - own, salt)
        self.settle_match(salt, sequence)
        found = self.store.peek(salt, sequence)
        start = data.draw(st.sampled_from([0, found.cached_tokens // SIZE * SIZE]))
        parent = found.entries[start // SIZE - 1].key if start else b""
        pieces = [tuple(sequence[i : i + SIZE]) for i in range(start, len(sequence), SIZE)]
        slots = self.granted_for(holder, salt)[: len(pieces)]
        chunks = []
        for piece, (slot, generation) in zip(pieces, slots, strict=False):
            checksum = write_payload(self.bench.arena, slot, seed_of(parent, piece), len(piece))
            chunks.append(WrittenChunk(slot, generation, parent, piece, checksum))
            parent = chunk_key(LAYOUT.layout_hash, salt, parent, piece)
        if not chunks:
            return
        self.settle(self.store.recovered.in_seal(salt, chunks))
        bad = data.draw(st.integers(0, len(chunks) - 1)) if is_damaged else len(chunks)
        if is_damaged:
            layer = data.draw(st.integers(0, LAYOUT.layer_count - 1))
            self.bench.arena.plane(layer, "V")[chunks[bad].slot, 0] ^= 0x40
        lease_id = next(iter(holder.leases), 0) if joins else 0
        damages = self.store.verify(chunks)
        arguments: dict[str, Any] = {"lease_id": lease_id, "keep_leased": keep_leased}
        try:
            outcome = self.store.seal(name, salt, chunks, damages, **arguments)
        except DataLoss:
            assert is_damaged
        else:
            assert not is_damaged
            assert bool(outcome.lease_id) == bool(lease_id or keep_leased)
            if outcome.lease_id:
                holder.leases.setdefault(outcome.lease_id, set())
            lease_id = outcome.lease_id
        for index, chunk in enumerate(chunks[: bad + 1]):
            del holder.granted[chunk.slot]
            if index == bad:
                break
            key = chunk_key(LAYOUT.layout_hash, salt, chunk.parent_key, chunk.token_ids)
            if key not in self.chunks:
                self.seals += 1
                self.chunks[key] = Stored(
                    salt, chunk.parent_key, chunk.token_ids, 0, seal_number=self.seals
                )
            self.use(key)
            if lease_id:
                holder.leases[lease_id].add(key)

    # -- reading -----------------------------------------------------------------------

    @precondition(lambda self: self.chunks)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), max_size=SIZE))
    def match_what_was_stored(self, data: st.DataObject, more: list[int]) -> None:
        key = data.draw(st.sampled_from(list(self.chunks)))
        salt = self.chunks[key].salt
        self.match(data, salt, [*self.sequence_of(key), *more], peeks=False)

    @rule(data=st.data(), salt=st.sampled_from(SALTS), sequence=tokens, peeks=st.booleans())
    def match(self, data: st.DataObject, salt: bytes, sequence: list[int], peeks: bool) -> None:
        names = self.live()
        self.settle_match(salt, sequence)
        if peeks or not names:
            found = self.store.peek(salt, sequence)
        else:
            name = data.draw(st.sampled_from(names))
            found = self.store.match(name, salt, sequence)
            for entry in reversed(found.entries):
                self.use(entry.key)
            if found.entries:
                keys = {entry.key for entry in found.entries}
                self.holders[name].leases[found.lease_id] = keys
            else:
                assert found.lease_id == 0
        assert found.cached_tokens == self.longest_prefix(salt, sequence)
        parent = b""
        for entry in found.entries:
            stored = self.chunks[entry.key]
            assert (stored.salt, stored.parent) == (salt, parent)
            assert self.bench.arena.is_current([entry.slot], [entry.generation])
            assert read_payload(self.bench.arena, entry.slot) == payload_of(
                LAYOUT, seed_of(parent, stored.tokens), len(stored.tokens)
            )
            parent = entry.key

    # -- giving up ----------------------------------------------------------------------

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.holders)))
        holder = self.holders[name]
        leases = data.draw(st.lists(st.sampled_from([0, 999, *holder.leases]), unique=True))
        slots = data.draw(
            st.lists(st.sampled_from([(0, 1), *sorted(holder.granted.items())]), unique=True)
        )
        released = self.store.sessions.release(name, leases, slots)
        held = [lease_id for lease_id in leases if lease_id in holder.leases]
        given = [slot for slot, generation in slots if holder.granted.get(slot) == generation]
        assert (released.lease_count, released.slot_count) == (len(held), len(given))
        for lease_id in held:
            del holder.leases[lease_id]
        for slot in given:
            del holder.granted[slot]
        self.forget_if_empty(name)

    # -- after every step ---------------------------------------------------------------

    @invariant()
    def everything_agrees(self) -> None:
        free, writing, sealed, quarantined = self.bench.states()
        assert set(self.chunks) == {entry.key for entry in self.store.pool.index}
        assert (free, sealed) == (self.free_count(), len(self.chunks))
        assert writing == sum(len(h.granted) for h in self.holders.values() if not h.is_orphaned)
        assert quarantined == sum(len(h.granted) for h in self.holders.values() if h.is_orphaned)
        assert {s.session_id for s in self.store.sessions} == set(self.holders)
        assert len(self.store.pool.leases) == sum(len(h.leases) for h in self.holders.values())
        if not self.has_crashed:
            assert self.store.pool.sealed_total - self.store.pool.evicted_total == sealed


@pytest.mark.scaled
def test_the_store_against_a_dictionary() -> None:
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=int(os.environ.get("SPLITPOINT_STORE_EXAMPLES", EXAMPLES)),
            stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
        ),
    )

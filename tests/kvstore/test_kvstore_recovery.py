"""Recovery of an adopted arena: crashes between any two writes, damage, dead writers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from kvstore_helpers import (
    LAYOUT,
    SLOTS,
    Bench,
    assert_payloads,
    granted_slots,
    read_payload,
    store_sequence,
)

from kvstore_service.integrity.checker import IntegrityChecker
from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.pool.recovered_state import UNKNOWN_WRITER
from kvstore_service.pool.slot_table import MappedMetadata
from kvstore_service.sessions import ProcessIdentity
from kvstore_service.store import KvStore
from splitpoint.arena.format import (
    RECORD_BYTES,
    RECORDS_OFFSET,
    SUPERBLOCK_BYTES,
    Superblock,
    choose_superblock,
)
from splitpoint.arena.owner import open_or_create_arena
from splitpoint.arena.records import CHUNK_OFFSET, GRANT_OFFSET, SlotState
from splitpoint.errors import FailedPrecondition
from splitpoint.keys import chunk_key

SALT = b"tenant"


# -- every prefix of every write ---------------------------------------------------------


@dataclass(frozen=True)
class Write:
    offset: int
    data: bytes
    is_commit: bool


class LoggingWriter(MappedMetadata):
    """Writes metadata, and records each write in order."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.arena)
        self.log: list[Write] = []

    def write(self, offset: int, data: bytes) -> None:
        self.log.append(Write(offset, data, is_commit=False))
        super().write(offset, data)

    def store_word(self, offset: int, word: int) -> None:
        self.log.append(Write(offset, word.to_bytes(8, "little"), is_commit=True))
        super().store_word(offset, word)


@dataclass(frozen=True)
class Seen:
    """Return what must be equal in two recovered stores."""

    chunks: frozenset[tuple[int, int, bytes, tuple[bytes, ...]]]
    held: frozenset[tuple[bytes, int]]
    free: frozenset[int]


def seen(store: KvStore) -> Seen:
    pool = store.pool
    while entries := store.recovered.some(SLOTS):
        store.recovered.settle(entries, store.recovered.check(entries))
    return Seen(
        chunks=frozenset(
            (slot, entry.generation, entry.key, tuple(read_payload(store.arena, slot).values()))
            for slot, entry in pool.chunks().items()
        ),
        held=frozenset((s.session_id, slot) for s in store.sessions for slot in s.granted),
        free=frozenset(pool.slots.in_state(SlotState.FREE)),
    )


class Crashes:
    """Recovers from given images of the metadata, in a copy of the arena."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self.bench = bench
        self.path = folder / "copy" / "arena"
        self.path.parent.mkdir(mode=0o700)
        self.generations = 0

    def recover(self, metadata: bytes) -> Seen:
        """Return what a store recovers from this image of the metadata."""
        image = metadata + self.bench.arena.payload.tobytes()
        self.path.write_bytes(image)
        self.path.chmod(0o600)
        opened = open_or_create_arena(self.path, LAYOUT, SLOTS)
        assert opened.is_adopted
        store = KvStore(
            opened.arena,
            clock=self.bench.clock,
            lease_seconds=10,
            is_present=self.bench.presence.is_present,
        )
        assert IntegrityChecker(store.pool, store.sessions).check_integrity() == []
        assert not store.recovered_state.damages  # a crash is no damage
        found = seen(store)
        store.close()
        opened.owner.remove()
        self.path.parent.mkdir(mode=0o700)
        return found


def check_every_crash(bench: Bench, folder: Path, operate: object) -> int:
    """Run an operation; each torn prefix of its writes recovers to the state before or after
    the commit word that follows. Return the number of crashes."""
    writer = LoggingWriter(bench)
    bench.store.pool.slots._writer = writer
    before = bytes(bench.arena.metadata)
    operate()  # type: ignore[operator]
    crashes = Crashes(bench, folder)
    image = bytearray(before)
    state = crashes.recover(bytes(image))
    count = 0
    for write in writer.log:
        borders = range(8, len(write.data), 8) if not write.is_commit else range(0)
        for border in borders:
            torn = bytearray(image)
            torn[write.offset : write.offset + border] = write.data[:border]
            assert crashes.recover(bytes(torn)) == state, (write, border)
            count += 1
        image[write.offset : write.offset + len(write.data)] = write.data
        after = crashes.recover(bytes(image))
        if write.is_commit:
            assert after != state
            state = after
        else:
            assert after == state, write
        count += 1
    assert bytes(image) == bytes(bench.arena.metadata)
    return count


def test_a_crash_while_reserving(bench: Bench, tmp_path: Path) -> None:
    session = bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 6)
    assert check_every_crash(bench, tmp_path, lambda: bench.store.reserve(session, 3, SALT)) > 20


def test_a_crash_while_sealing(bench: Bench, tmp_path: Path) -> None:
    session = bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 4)
    operate = lambda: store_sequence(bench.store, session, SALT, [2] * 10)  # noqa: E731
    assert check_every_crash(bench, tmp_path, operate) > 80


def test_a_crash_while_evicting(bench: Bench, tmp_path: Path) -> None:
    session = bench.attach()
    for name in range(SLOTS):
        store_sequence(bench.store, session, SALT, [name] * 4)
    assert check_every_crash(bench, tmp_path, lambda: bench.store.reserve(session, 3, SALT)) > 20


def test_a_crash_while_releasing_and_quarantining(bench: Bench, tmp_path: Path) -> None:
    session, other = bench.attach(), bench.attach()
    granted = granted_slots(bench.store.reserve(session, 3, SALT))
    bench.store.reserve(other, 2, SALT)

    def operate() -> None:
        bench.store.sessions.release(session, [], granted[:2])

    assert check_every_crash(bench, tmp_path, operate) == 2


def test_a_crash_while_adopting(bench: Bench) -> None:
    """At least one superblock is intact, whenever the writer dies."""
    now = bench.arena.superblock
    image = bytearray(bytes(bench.arena.metadata[: 2 * SUPERBLOCK_BYTES]))
    later = now
    for _ in range(2):
        later = replace(later, epoch=now.epoch + 1, sequence=later.sequence + 1)
        data = later.encode()
        for border in range(8, SUPERBLOCK_BYTES, 8):
            torn = bytearray(image)
            torn[later.offset : later.offset + border] = data[:border]
            found = choose_superblock(
                bytes(torn[:SUPERBLOCK_BYTES]), bytes(torn[SUPERBLOCK_BYTES:])
            )
            assert found.instance_id == now.instance_id
            assert found.epoch in (now.epoch, now.epoch + 1)
        image[later.offset : later.offset + SUPERBLOCK_BYTES] = data
    for offset in (0, SUPERBLOCK_BYTES):
        block = bytes(image[offset : offset + SUPERBLOCK_BYTES])
        assert Superblock.decode(block).epoch == now.epoch + 1


# -- what survives ----------------------------------------------------------------------


def test_sealed_chunks_are_served_again_and_verified_first(bench: Bench) -> None:
    session = bench.attach()
    tokens = [1, 2, 3, 4, 5, 6]
    store_sequence(bench.store, session, SALT, tokens, keep_leased=True)
    bench.crash()
    assert bench.store.epoch == 2
    assert len(bench.store.recovered.some(9)) == 2
    again = bench.attach()
    found = bench.store.match(again, SALT, tokens)
    assert found.cached_tokens == 6
    assert bench.store.recovered.some(9) == []
    slots = [entry.slot for entry in found.entries]
    keys = assert_payloads(bench.arena, slots, tokens, salt=SALT)
    assert keys == [entry.key for entry in found.entries]


def test_a_handle_of_the_old_epoch_names_the_same_bytes_or_nothing(bench: Bench) -> None:
    session = bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 4)
    entry = next(iter(bench.store.pool.index))
    bench.crash()
    assert bench.arena.is_current([entry.slot], [entry.generation])
    bench.store.pool.evict_all()
    again = bench.attach()
    runs = bench.store.reserve(again, SLOTS, SALT)
    assert not bench.arena.is_current([entry.slot], [entry.generation])
    generations = [g for run in runs for g in run.generations]
    assert min(generations) > entry.generation
    assert min(generations) >= 2 << 32  # of the new epoch, whatever was there before


def test_unsealed_slots_wait_for_their_writer(bench: Bench) -> None:
    session = bench.attach()
    process = bench.process()
    bench.store.reserve(session, 3, SALT)
    bench.crash()
    assert bench.states() == (5, 0, 0, 3)
    with pytest.raises(FailedPrecondition, match="expired"):
        bench.store.reserve(session, 1, SALT)
    bench.crash()  # and wait again
    assert bench.states() == (5, 0, 0, 3)
    again = bench.store.sessions.attach("again", process, previous_session_id=session)
    assert bench.states() == (8, 0, 0, 0)
    assert again.session_id != session


def test_unsealed_slots_of_dead_writers_are_free(bench: Bench) -> None:
    session = bench.attach()
    bench.store.reserve(session, 3, SALT)
    bench.presence.gone.add(session)
    bench.crash()
    assert bench.states() == (8, 0, 0, 0)


def test_age_survives(bench: Bench) -> None:
    session = bench.attach()
    for name in (1, 2, 3):
        store_sequence(bench.store, session, SALT, [name] * 4)
    bench.crash()
    again = bench.attach()
    bench.store.reserve(again, 6, SALT)
    assert bench.store.peek(SALT, [1] * 4).cached_tokens == 0
    assert bench.store.peek(SALT, [2] * 4).cached_tokens == 4


def test_released_and_evicted_slots_stay_free(bench: Bench) -> None:
    session = bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 4)
    bench.store.pool.evict_all()
    bench.crash()
    assert bench.states() == (8, 0, 0, 0)
    assert bench.store.peek(SALT, [1] * 4).cached_tokens == 0


# -- damage --------------------------------------------------------------------------------


def record_offset(slot: int) -> int:
    return RECORDS_OFFSET + slot * RECORD_BYTES


@pytest.mark.parametrize("where", ["grant", "chunk", "generation", "state", "tokens"])
def test_a_damaged_record_is_a_miss_and_is_counted(bench: Bench, where: str) -> None:
    session = bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 12)
    store_sequence(bench.store, session, SALT, [2] * 4)
    middle = next(e for e in bench.store.pool.index if e.chunk_index == 1)
    offset = {
        "grant": record_offset(middle.slot) + GRANT_OFFSET + 3,
        "chunk": record_offset(middle.slot) + CHUNK_OFFSET + 30,
        "generation": record_offset(middle.slot) + 5,
        "state": record_offset(middle.slot),
        "tokens": bench.arena.geometry.tokens_offset + middle.slot * 16,
    }[where]
    bench.arena.metadata[offset] ^= 0x40
    bench.crash()
    assert len(bench.store.recovered_state.damages) == 1
    assert bench.store.peek(SALT, [1] * 12).cached_tokens == 4
    assert bench.store.peek(SALT, [2] * 4).cached_tokens == 4
    # If its state is unknown a client may be writing there: the slot stays unused.
    assert bench.states() == ((5, 0, 2, 1) if where == "state" else (6, 0, 2, 0))
    bench.presence.gone.add(session)
    bench.store.sessions.sweep()
    assert bench.states() == (6, 0, 2, 0)


def test_a_slot_of_an_unknown_writer_is_never_used(bench: Bench) -> None:
    session = bench.attach()
    bench.store.reserve(session, 1, SALT)
    bench.arena.metadata[record_offset(0)] = 0x77
    bench.arena.metadata[record_offset(0) + GRANT_OFFSET] ^= 1
    for _ in range(2):
        bench.crash()
        bench.presence.gone.add(session)
        bench.store.sessions.sweep()
        assert bench.states() == (7, 0, 0, 1)


def test_a_damaged_payload_is_a_miss_with_all_below_it(bench: Bench) -> None:
    session = bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 12)
    middle = next(e for e in bench.store.pool.index if e.chunk_index == 1)
    bench.arena.plane(1, "V")[middle.slot, 7] ^= 1
    bench.crash()
    again = bench.attach()
    assert bench.store.match(again, SALT, [1] * 12).cached_tokens == 4
    assert bench.store.counters.checksum_failures == 1
    assert bench.states() == (7, 0, 1, 0)


def test_a_damaged_duplicate_or_parent_is_noticed_by_a_seal(bench: Bench) -> None:
    session = bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 8)
    for entry in bench.store.pool.index:
        bench.arena.plane(0, "K")[entry.slot, 0] ^= 1
    bench.crash()
    again = bench.attach()
    parent = chunk_key(LAYOUT.layout_hash, SALT, b"", [1] * 4)
    (run,) = bench.store.reserve(again, 1, SALT)
    chunk = WrittenChunk(run.first_slot, run.generations[0], parent, (1, 1, 1, 1), 0)
    with pytest.raises(FailedPrecondition, match="parent"):
        bench.store.seal(again, SALT, [chunk], [None])
    store_sequence(bench.store, again, SALT, [1] * 8)  # new, not a duplicate of damage
    assert bench.store.counters.duplicates == 0
    assert bench.store.match(again, SALT, [1] * 8).cached_tokens == 8


def test_a_chunk_that_proves_damaged_under_leases_is_not_served(bench: Bench) -> None:
    session, other = bench.attach(), bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 12)
    found = bench.store.match(other, SALT, [1] * 12)
    middle = found.entries[1]
    handles = [(entry.slot, entry.generation) for entry in found.entries]
    bench.store.drop_damaged(middle)
    bench.store.drop_damaged(middle)  # again: it is known
    assert bench.store.counters.checksum_failures == 1
    assert bench.store.match(session, SALT, [1] * 12).cached_tokens == 4
    # The reader finds out, and its slots are not used by others before it is done.
    assert bench.arena.is_current(*zip(handles[0], strict=True))
    assert not bench.arena.is_current(*zip(handles[1], strict=True))
    assert not bench.arena.is_current(*zip(handles[2], strict=True))
    assert bench.states() == (5, 0, 1, 2)
    assert len([*bench.store.reserve(session, 5, SALT)]) >= 1
    bench.store.sessions.release(other, [found.lease_id], [])
    assert bench.states() == (2, 5, 1, 0)


def test_a_damaged_leased_slot_survives_a_crash_as_quarantined(bench: Bench) -> None:
    session, other = bench.attach(), bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 4)
    found = bench.store.match(other, SALT, [1] * 4)
    bench.store.drop_damaged(found.entries[0])
    bench.crash()
    assert bench.states() == (7, 0, 0, 1)
    bench.presence.gone.add(session)
    bench.store.sessions.sweep()
    assert bench.states() == (8, 0, 0, 0)


def test_no_client_can_acknowledge_unknown_writers(bench: Bench) -> None:
    session = bench.attach()
    bench.store.reserve(session, 1, SALT)
    bench.arena.metadata[record_offset(0)] = 0x77
    bench.arena.metadata[record_offset(0) + GRANT_OFFSET] ^= 1
    bench.crash()
    for process in (ProcessIdentity(0, 0), ProcessIdentity(5, 5)):
        bench.store.sessions.attach("x", process, previous_session_id=UNKNOWN_WRITER)
        assert bench.states() == (7, 0, 0, 1)


# -- tenants ---------------------------------------------------------------------------


def test_slots_are_zeroed_when_the_tenant_changes(bench: Bench) -> None:
    session = bench.attach()
    store_sequence(bench.store, session, b"a", [1] * 4 * SLOTS)
    for salt, is_zero in ((b"a", False), (b"b", True)):
        bench.store.pool.evict_all()
        (run,) = bench.store.reserve(session, SLOTS, salt)
        for slot in range(SLOTS):
            assert any(map(any, read_payload(bench.arena, slot).values())) is not is_zero
        handles = [(slot, run.generations[slot]) for slot in range(SLOTS)]
        bench.store.sessions.release(session, [], handles)


def test_slots_of_an_earlier_epoch_are_zeroed_before_use(bench: Bench) -> None:
    session = bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 4)
    bench.store.pool.evict_all()
    bench.crash()
    again = bench.attach()
    bench.store.reserve(again, SLOTS, SALT)
    assert not any(any(map(any, read_payload(bench.arena, s).values())) for s in range(SLOTS))

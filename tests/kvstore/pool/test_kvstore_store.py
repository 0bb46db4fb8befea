"""The store's operations: grants, seals, leases, sessions, eviction."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from kvstore_helpers import (
    LAYOUT,
    SLOTS,
    Bench,
    granted_slots,
    read_payload,
    store_sequence,
    write_chunks,
    write_payload,
)

from kvstore_service.eviction.policies import LeastRecentlyUsed
from kvstore_service.pool import prefix_index
from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.pool.leases import LeaseTable
from kvstore_service.store import SealOutcome
from splitpoint.arena.records import SlotState, commit_word, first_generation
from splitpoint.errors import DataLoss, FailedPrecondition, NotFound, ResourceExhausted
from splitpoint.keys import chunk_key

SALT = b"salt"


def grant(
    bench: Bench, session: bytes, count: int = 1, salt: bytes = SALT
) -> list[tuple[int, int]]:
    return granted_slots(bench.store.reserve(session, count, salt))


def written(
    bench: Bench,
    granted: tuple[int, int],
    token_ids: tuple[int, ...],
    parent_key: bytes = b"",
) -> WrittenChunk:
    [chunk] = write_chunks(bench.arena, [granted], [token_ids], parent=parent_key)
    return chunk


def seal(bench: Bench, session: bytes, *chunks: WrittenChunk, **options: Any) -> SealOutcome:
    damages = bench.store.verify(chunks)
    return bench.store.seal(session, SALT, chunks, damages, **options)


# -- reserve and seal -----------------------------------------------------------------


def test_reserve_write_seal_match(bench: Bench) -> None:
    session = bench.attach()
    keys, lease_id = store_sequence(bench.store, session, SALT, list(range(10)))
    assert len(keys) == 3
    assert lease_id == 0
    assert bench.states() == (5, 0, 3, 0)
    found = bench.store.match(session, SALT, [*range(10), 99])
    assert found.cached_tokens == 10
    assert [entry.token_count for entry in found.entries] == [4, 4, 2]
    assert [entry.key for entry in found.entries] == keys
    assert found.lease_id > 0
    for entry in found.entries:
        assert bench.arena.is_current([entry.slot], [entry.generation])
        assert bench.arena.checksum(entry.slot) == entry.checksum
    assert bench.store.match(session, b"other", list(range(10))).cached_tokens == 0


def test_generations_begin_with_the_epoch_and_grow(bench: Bench) -> None:
    session = bench.attach()
    [(slot, first)] = grant(bench, session)
    assert first == first_generation(1)
    bench.store.sessions.release(session, [], [(slot, first)])
    granted = dict(grant(bench, session, SLOTS))
    assert granted[slot] == first + 1
    for each, generation in granted.items():
        assert bench.arena.commit_word(each) == commit_word(generation, SlotState.WRITING)


def test_grants_are_all_or_nothing(bench: Bench) -> None:
    session = bench.attach()
    store_sequence(bench.store, session, SALT, list(range(12)))
    grant(bench, session, 4)
    with pytest.raises(ResourceExhausted, match="the arena has 8") as never:
        grant(bench, session, 9)
    assert never.value.retry_after_seconds is None
    with pytest.raises(ResourceExhausted, match="1 are free and 3 can be evicted") as later:
        grant(bench, session, 5)
    assert later.value.retry_after_seconds is not None
    # Neither refusal evicted a cached chunk.
    assert bench.states() == (1, 4, 3, 0)
    grant(bench, session, 4)
    assert bench.states() == (0, 8, 0, 0)


def test_sealing_a_duplicate_frees_the_slot(bench: Bench) -> None:
    session = bench.attach()
    other = bench.attach()
    [first] = grant(bench, session)
    [second] = grant(bench, other)
    seal(bench, session, written(bench, first, (1, 2, 3, 4)))
    outcome = seal(bench, other, written(bench, second, (1, 2, 3, 4)), keep_leased=True)
    assert outcome.chunks[0].is_duplicate
    assert outcome.chunks[0].entry.slot == first[0]
    assert bench.store.counters.duplicates == 1
    assert bench.states() == (7, 0, 1, 0)
    with pytest.raises(ResourceExhausted):  # the existing chunk is leased
        grant(bench, session, SLOTS)
    assert bench.store.sessions.release(other, [outcome.lease_id], []).lease_count == 1
    grant(bench, session, SLOTS)


def test_a_full_chunk_lives_beside_partial_siblings(bench: Bench) -> None:
    """Copy on write: a tail that grows is written again, to another slot."""
    session = bench.attach()
    head, _ = store_sequence(bench.store, session, SALT, [1, 2, 3, 4, 5, 6])
    tail_slot = bench.store.peek(SALT, [1, 2, 3, 4, 5, 6]).entries[1].slot
    tail = read_payload(bench.arena, tail_slot)
    [granted] = grant(bench, session)
    seal(bench, session, written(bench, granted, (5, 6, 7, 8), parent_key=head[0]))
    [granted] = grant(bench, session)
    seal(bench, session, written(bench, granted, (5, 9), parent_key=head[0]))
    assert bench.states() == (4, 0, 4, 0)
    assert bench.store.peek(SALT, [1, 2, 3, 4, 5, 6]).cached_tokens == 6
    assert bench.store.peek(SALT, [1, 2, 3, 4, 5, 6, 7, 8, 0]).cached_tokens == 8
    assert bench.store.peek(SALT, [1, 2, 3, 4, 5, 9, 7]).cached_tokens == 6
    assert bench.store.peek(SALT, [1, 2, 3, 4, 5, 6, 7, 0]).cached_tokens == 7
    assert read_payload(bench.arena, tail_slot) == tail


def test_a_payload_that_differs_is_never_published(bench: Bench) -> None:
    session = bench.attach()
    first, second, third = grant(bench, session, 3)
    good = written(bench, first, (1, 2, 3, 4))
    parent = chunk_key(LAYOUT.layout_hash, SALT, b"", good.token_ids)
    bad = dataclasses.replace(written(bench, second, (5, 6), parent), checksum=1)
    behind = written(bench, third, (7,), parent)
    with pytest.raises(DataLoss, match="differs from its checksum"):
        seal(bench, session, good, bad, behind, keep_leased=True)
    # What came before is sealed, the damaged slot is free, the rest still granted.
    assert bench.states() == (6, 1, 1, 0)
    assert bench.store.peek(SALT, [1, 2, 3, 4, 5, 6]).cached_tokens == 4
    assert bench.store.counters.checksum_failures == 1
    assert len(bench.store.pool.leases) == 0
    seal(bench, session, behind)


def test_rows_behind_the_tokens_must_be_zero(bench: Bench) -> None:
    session = bench.attach()
    [(slot, generation)] = grant(bench, session)
    checksum = write_payload(bench.arena, slot, seed=1, token_count=3)
    with pytest.raises(DataLoss, match="rows past its 2 tokens"):
        seal(bench, session, WrittenChunk(slot, generation, b"", (1, 2), checksum))
    assert bench.states() == (8, 0, 0, 0)


def test_only_the_holder_seals_and_only_its_generation(bench: Bench) -> None:
    session, other = bench.attach(), bench.attach()
    [granted] = grant(bench, session)
    chunk = written(bench, granted, (1, 2, 3, 4))
    with pytest.raises(FailedPrecondition, match="not granted"):
        seal(bench, other, chunk)
    with pytest.raises(FailedPrecondition, match="not granted"):
        seal(bench, session, dataclasses.replace(chunk, generation=chunk.generation + 1))
    with pytest.raises(FailedPrecondition, match="not granted"):
        seal(bench, session, dataclasses.replace(chunk, slot=chunk.slot + 1))
    seal(bench, session, chunk)
    with pytest.raises(FailedPrecondition, match="not granted"):
        seal(bench, session, chunk)


def test_parents_must_be_sealed_full_and_of_the_same_tenant(bench: Bench) -> None:
    session = bench.attach()
    keys, _ = store_sequence(bench.store, session, SALT, [1, 2, 3, 4, 5])
    foreign, _ = store_sequence(bench.store, session, b"other", [1, 2, 3, 4])
    [granted] = grant(bench, session)
    for parent, text in ((b"x" * 32, "not sealed"), (foreign[0], "not sealed"), (keys[1], "tail")):
        with pytest.raises(FailedPrecondition, match=text):
            seal(bench, session, written(bench, granted, (9,), parent))
    assert bench.states() == (4, 1, 3, 0)
    seal(bench, session, written(bench, granted, (9,), keys[0]))


def test_a_lease_of_another_session_is_not_joined(bench: Bench) -> None:
    session, other = bench.attach(), bench.attach()
    store_sequence(bench.store, session, SALT, [1, 2, 3, 4])
    lease_id = bench.store.match(session, SALT, [1, 2, 3, 4]).lease_id
    [granted] = grant(bench, other)
    chunk = written(bench, granted, (5,))
    with pytest.raises(FailedPrecondition, match="lease"):
        seal(bench, other, chunk, lease_id=lease_id)
    [granted] = grant(bench, session)
    chunk = written(bench, granted, (5,))
    assert seal(bench, session, chunk, lease_id=lease_id).lease_id == lease_id
    assert bench.store.pool.leases.leased_slot_count == 2


def test_equal_hashes_of_different_contents_are_told_apart(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constant hash does not mix up chunks: tokens, parents and tenants differ."""
    monkeypatch.setattr(prefix_index, "packed_chunk_key", lambda *_: b"k" * 32)
    session = bench.attach()
    [first] = grant(bench, session)
    seal(bench, session, written(bench, first, (1, 2, 3, 4)))
    assert bench.store.match(session, SALT, [1, 2, 3, 4]).cached_tokens == 4
    assert bench.store.match(session, SALT, [1, 2, 3, 4, 1, 2, 3, 4]).cached_tokens == 4
    assert bench.store.match(session, SALT, [5, 6, 7, 8]).cached_tokens == 0
    assert bench.store.match(session, b"another tenant", [1, 2, 3, 4]).cached_tokens == 0
    [second] = grant(bench, session)
    with pytest.raises(FailedPrecondition, match="another chunk has this key"):
        seal(bench, session, written(bench, second, (5, 6, 7, 8)))
    assert bench.states() == (6, 1, 1, 0)


# -- eviction ------------------------------------------------------------------------


def test_guarded_chunks_and_those_before_them_stay(bench: Bench) -> None:
    """Guards may overlap; the chunks can be evicted when the last one ends."""
    session = bench.attach()
    tokens = list(range(3 * LAYOUT.chunk_tokens))
    keys, _ = store_sequence(bench.store, session, b"", tokens)
    pool = bench.store.pool
    with pool.guard([keys[1]]):
        with pool.guard([keys[1], b"unknown"]):
            assert pool.reclaimable_count() == 1
            assert [entry.key for entry in pool.next_victims(3)] == [keys[2]]
        assert pool.evict_all() == 1
        assert pool.evict_all() == 0
    assert pool.evict_all() == 2


def test_the_least_recently_used_leaf_goes_first(bench: Bench) -> None:
    session = bench.attach()
    for name in (1, 2, 3, 4):
        store_sequence(bench.store, session, SALT, [name] * 8)
    bench.store.sessions.release(session, [bench.store.match(session, SALT, [1] * 8).lease_id], [])
    granted = grant(bench, session, 3)
    # 2 goes from its end on, then 3 begins to go; 1 was used last, 4 after 3.
    cached = [bench.store.peek(SALT, [name] * 8).cached_tokens for name in (1, 2, 3, 4)]
    assert cached == [8, 0, 4, 8]
    assert bench.store.pool.evicted_total == 3
    bench.store.sessions.release(session, [], granted)
    assert bench.states() == (3, 0, 5, 0)


def test_leases_and_children_protect(bench: Bench) -> None:
    session = bench.attach()
    keys, lease_id = store_sequence(bench.store, session, SALT, [1] * 12, keep_leased=True)
    store_sequence(bench.store, session, SALT, [2] * 12)
    with pytest.raises(ResourceExhausted):
        grant(bench, session, 6)
    grant(bench, session, 5)
    assert bench.store.peek(SALT, [1] * 12).cached_tokens == 12
    bench.store.sessions.release(session, [lease_id], [])
    grant(bench, session, 3)
    assert bench.states() == (0, 8, 0, 0)
    assert len(keys) == 3


def test_a_parent_stays_while_its_child_is_being_sealed(bench: Bench) -> None:
    session = bench.attach()
    keys, _ = store_sequence(bench.store, session, SALT, [1, 2, 3, 4])
    [granted] = grant(bench, session)
    chunk = written(bench, granted, (5,), keys[0])
    with bench.store.protect_parents([chunk]):
        with pytest.raises(ResourceExhausted):
            grant(bench, session, 7)
        damages = bench.store.verify([chunk])
        bench.store.seal(session, SALT, [chunk], damages)
    grant(bench, session, SLOTS)


def test_a_parent_without_child_goes_after_all(bench: Bench) -> None:
    session = bench.attach()
    keys, _ = store_sequence(bench.store, session, SALT, [1, 2, 3, 4])
    chunk = WrittenChunk(5, 1, keys[0], (5,), 0)
    with bench.store.protect_parents([chunk]), bench.store.protect_parents([chunk]):
        assert bench.store.pool.reclaimable_count() == 0
    assert bench.store.pool.reclaimable_count() == 1
    grant(bench, session, SLOTS)


def test_least_recently_used_alone() -> None:
    policy = LeastRecentlyUsed()
    for slot in (1, 2, 3):
        policy.use(slot)
        policy.offer(slot)
    policy.use(1)
    assert policy.choose(lambda slot: slot != 2) == 3
    policy.forget(3)
    assert policy.choose(lambda _: True) == 1
    policy.forget(1)
    assert policy.choose(lambda _: True) is None  # 2 was refused: it must be offered again
    policy.offer(2)
    policy.offer(2)
    assert policy.choose(lambda _: True) == 2
    policy.forget(2)
    assert policy.choose(lambda _: True) is None


def test_leases_alone() -> None:
    table = LeaseTable()
    first = table.create(b"a", [1, 2])
    second = table.create(b"b", [2, 3])
    table.extend(first, [2, 4])
    assert sorted(table.leased_slots) == [1, 2, 3, 4]
    assert sorted(table.end(first)) == [1, 4]
    assert table.is_leased(2)
    assert not table.is_leased(1)
    assert table.check_integrity({2, 3}) == []
    assert "without a chunk: [3]" in table.check_integrity({2})[0]
    assert sorted(table.end(second)) == [2, 3]
    assert table.create(b"a", []).lease_id == 3


# -- sessions ------------------------------------------------------------------------


def test_sessions_expire_unless_kept_alive(bench: Bench) -> None:
    session = bench.attach()
    bench.clock.now += 9.9
    assert bench.store.sessions.keep_alive(session) == 10
    bench.clock.now += 9.9
    bench.store.sessions.sweep()
    grant(bench, session)
    bench.clock.now += 0.2
    for call in (
        lambda: grant(bench, session),
        lambda: bench.store.match(session, SALT, [1]),
        lambda: bench.store.sessions.keep_alive(session),
        lambda: bench.store.seal(session, SALT, [], []),
    ):
        with pytest.raises(FailedPrecondition, match="expired"):
            call()
    assert bench.states() == (7, 1, 0, 0)
    bench.store.sessions.sweep()
    assert bench.states() == (7, 0, 0, 1)


def test_what_an_ended_session_held_waits_for_its_process(bench: Bench) -> None:
    session = bench.attach()
    _, lease_id = store_sequence(bench.store, session, SALT, [1] * 8, keep_leased=True)
    granted = grant(bench, session, 2)
    bench.store.sessions.end(session)
    bench.store.sessions.end(session)
    assert bench.states() == (4, 0, 2, 2)
    for slot, generation in granted:
        assert bench.arena.commit_word(slot) != commit_word(generation, SlotState.WRITING)
    other = bench.attach()
    with pytest.raises(ResourceExhausted):
        grant(bench, other, 5)
    bench.clock.now += 10_000  # however long it takes
    bench.store.sessions.sweep()
    assert bench.states() == (4, 0, 2, 2)
    assert lease_id in [lease.lease_id for lease in bench.store.pool.leases]
    bench.presence.gone.add(session)
    bench.store.sessions.sweep()
    assert bench.states() == (6, 0, 2, 0)
    assert len(bench.store.pool.leases) == 0
    with pytest.raises(NotFound, match="attach again"):
        grant(bench, session)


def test_reserving_finds_the_slots_of_dead_clients(bench: Bench) -> None:
    session, other = bench.attach(), bench.attach()
    grant(bench, other, SLOTS)
    bench.store.sessions.end(other)
    with pytest.raises(ResourceExhausted):
        grant(bench, session)
    bench.presence.gone.add(other)
    grant(bench, session, SLOTS)


def test_attaching_again_acknowledges(bench: Bench) -> None:
    session = bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 8, keep_leased=True)
    grant(bench, session, 2)
    bench.store.sessions.end(session)
    with pytest.raises(FailedPrecondition, match="another process"):
        bench.store.sessions.attach(
            "thief",
            dataclasses.replace(bench.process(), process_id=9),
            previous_session_id=session,
        )
    bench.store.sessions.attach("test", bench.process(), previous_session_id=session)
    assert bench.states() == (6, 0, 2, 0)
    assert len(bench.store.sessions) == 1
    bench.store.sessions.attach(
        "test", bench.process(), previous_session_id=session
    )  # unknown: fine


def test_an_orphan_may_still_give_back(bench: Bench) -> None:
    session = bench.attach()
    _, lease_id = store_sequence(bench.store, session, SALT, [1] * 8, keep_leased=True)
    granted = grant(bench, session, 2)
    bench.store.sessions.end(session)
    released = bench.store.sessions.release(
        session, [lease_id, lease_id, 77], [*granted, granted[0]]
    )
    assert (released.lease_count, released.slot_count) == (1, 2)
    assert bench.states() == (6, 0, 2, 0)
    assert len(bench.store.sessions) == 0


def test_a_session_that_holds_nothing_goes_at_once(bench: Bench) -> None:
    session = bench.attach()
    bench.store.sessions.end(session)
    assert len(bench.store.sessions) == 0
    with pytest.raises(NotFound):
        bench.store.sessions.release(session, [], [])


def test_releasing_is_for_holders(bench: Bench) -> None:
    session, other = bench.attach(), bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 4)
    lease_id = bench.store.match(session, SALT, [1] * 4).lease_id
    [(slot, generation)] = grant(bench, session)
    for who, slots in ((other, [(slot, generation)]), (session, [(slot, generation + 1)])):
        released = bench.store.sessions.release(who, [lease_id] if who == other else [], slots)
        assert (released.lease_count, released.slot_count) == (0, 0)
    assert bench.states() == (6, 1, 1, 0)


def test_layouts_must_agree(bench: Bench) -> None:
    with pytest.raises(FailedPrecondition, match="another layout"):
        bench.store.sessions.attach("test", bench.process(), layout_hash=bytes(16))
    bench.store.sessions.attach("test", bench.process(), layout_hash=LAYOUT.layout_hash)


def test_too_many_sessions(bench: Bench) -> None:
    for _ in range(1024):
        bench.attach()
    with pytest.raises(ResourceExhausted, match="1024 sessions"):
        bench.attach()


# -- the checker itself ------------------------------------------------------------------


def test_the_integrity_check_sees_damage(bench: Bench) -> None:
    session = bench.attach()
    keys, _ = store_sequence(bench.store, session, SALT, [1, 2, 3, 4, 5])
    [head, tail] = (bench.store.pool.index.get(key) for key in keys)
    assert head is not None
    assert tail is not None

    def damage(offset: int, value: int) -> list[str]:
        before = bench.arena.metadata[offset]
        bench.arena.metadata[offset] = value
        found = bench.integrity.check_integrity()
        bench.arena.metadata[offset] = before
        assert bench.integrity.check_integrity() == []
        return found

    record = 8192 + 256 * tail.slot
    assert any("commit word" in line for line in damage(record + 1, 0xFF))
    assert any("BadGrantChecksum" in line for line in damage(record + 20, 0xFF))
    assert any("BadChunkChecksum" in line for line in damage(record + 80, 0xFF))
    row = bench.arena.geometry.tokens_offset + tail.slot * 16
    assert any("FingerprintMismatch" in line for line in damage(row, 0xFF))
    assert any("BadTokenRow" in line for line in damage(row + 12, 0xFF))
    bench.store.pool.grants.allocator.free(head.slot)
    assert any("free runs" in line for line in bench.integrity.check_integrity())
    bench.store.pool.grants.allocator.allocate(7)
    assert any("free" in line for line in bench.integrity.check_integrity())
    for slot in range(8):
        if slot not in (head.slot, tail.slot):
            bench.store.pool.grants.allocator.free(slot)
    lease = bench.store.pool.leases.create(b"no session", [7])
    found = bench.integrity.check_integrity()
    assert any("without a chunk: [7]" in line for line in found)
    assert any("has no session" in line for line in found)
    bench.store.pool.leases.end(lease)
    assert bench.integrity.check_integrity() == []

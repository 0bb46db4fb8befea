"""The chunks of one arena: publish, find, protect, evict.

Keeps slot table, prefix index, leases and eviction policy consistent; `slot_grants` keeps
the free slots. The pool knows sessions only by their ids, no clock and no gRPC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvstore_service.eviction.policies import InstrumentedPolicy
from kvstore_service.pool.leases import Lease, LeaseTable, Protection
from kvstore_service.pool.prefix_index import (
    ChunkIdentity,
    Entry,
    PageNames,
    PrefixIndex,
    PrefixMatch,
)
from kvstore_service.pool.recovered_state import RecoveredState
from kvstore_service.pool.slot_grants import Preparation, SlotGrants
from kvstore_service.pool.slot_table import MetadataWriter, SlotTable
from splitpoint.arena.mapping import Arena
from splitpoint.arena.records import NO_PARENT, ChunkBlock, SlotState, encode_token_row
from splitpoint.errors import FailedPrecondition, ResourceExhausted

# Retry delay while other sessions hold leases: about the length of a decode.
_RETRY_SECONDS = 0.25
# Reason of a refused reservation that a larger or less busy arena would have granted.
ARENA_FULL = "ARENA_FULL"


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """A granted slot and the chunk that its session wrote there."""

    slot: int
    generation: int
    parent_key: bytes
    token_ids: tuple[int, ...]
    checksum: int


class Demotions(Protocol):
    """Takes chunks that are being evicted to the tiers. Its methods return at once."""

    def has_room(self) -> bool:
        """Return False if eviction should wait until a tier has copied earlier chunks."""

    def coming_count(self) -> int:
        """Count evicted chunks whose slots will be free soon."""

    def evicting(self, entry: Entry, *, may_wait: bool) -> None:
        """Note that a chunk is about to leave its slot.

        A slot for which `SlotGrants.begin_copy` is called here keeps its bytes until `end_copy`.
        Without `may_wait` the slot is needed at once.
        """


class ChunkPool:
    """All slots of one arena.

    Args:
        recovered: what the arena held at start.

    Attributes:
        listener: is called with every chunk that is published or removed, on the hot path: it must
            return at once.
        demotions: is told about every chunk before it is evicted. None without tiers.
        slots, index, leases: for reading and for integrity checks.
        grants: free and granted slots.
        unverified: slots of recovered chunks whose payload was not verified yet.
        damaged_leased: leased slots whose chunk proved damaged.
        sealed_total, evicted_total: counts since start.
    """

    def __init__(
        self,
        arena: Arena,
        policy: InstrumentedPolicy,
        recovered: RecoveredState,
        *,
        writer: MetadataWriter | None = None,
    ) -> None:
        self.arena = arena
        self.layout = arena.layout
        self.slots = SlotTable(arena, recovered.states, recovered.generations, writer)
        self._layout_hash = self.layout.layout_hash
        self.index = PrefixIndex(
            self._layout_hash,
            self.layout.chunk_tokens,
            has_sequences=not self.layout.page_bytes,
        )
        self.leases = LeaseTable()
        self.unverified: set[int] = set()
        self.damaged_leased: set[int] = set()
        self.sealed_total = 0
        self.evicted_total = 0
        self.listener: Callable[[Entry], None] | None = None
        self.demotions: Demotions | None = None
        self._policy = policy
        self._chunks: dict[int, Entry] = {}  # slot -> sealed chunk
        self._protection = Protection(self.index, self.leases, self._chunks, self._offer)
        self._seal_number = recovered.last_seal_number
        self._adopt(recovered)
        self.grants = SlotGrants(self.slots, recovered)

    def close(self) -> None:
        self.slots.close()

    def _adopt(self, recovered: RecoveredState) -> None:
        """Serve, quarantine or free every slot that an earlier store used."""
        for slot, state in enumerate(recovered.states):
            if state is SlotState.WRITING:
                self.slots.quarantine(slot)
        for chunk in recovered.chunks:
            entry = chunk.entry
            self.index.add(entry)
            self._chunks[entry.slot] = entry
            self.unverified.add(entry.slot)
        for slot, state in enumerate(recovered.states):
            if state is SlotState.SEALED and slot not in self._chunks:
                self.slots.free(slot)  # damaged or unreachable
        # Oldest first, so that age survives the restart.
        for chunk in sorted(recovered.chunks, key=lambda chunk: chunk.seal_number):
            self._policy.use(chunk.entry.slot)
        for slot in self._chunks:
            self._offer(slot)

    # -- grants ------------------------------------------------------------------------

    def prepare(self, count: int, tag: bytes) -> Preparation:
        """Set slots aside for the tenant with this salt tag; evict chunks if needed.

        The slots form as few runs as possible, longest first. Raises ResourceExhausted, and
        evicts nothing, if there are not enough slots. It names a retry delay unless the arena
        could never hold as many.
        """
        self._make_room(count)
        return self.grants.prepare(count, tag)

    def quarantine(self, slot: int) -> None:
        self.slots.quarantine(slot)

    # -- chunks ------------------------------------------------------------------------

    def identify(self, salt: bytes, parent_key: bytes, token_ids: Sequence[int]) -> ChunkIdentity:
        return ChunkIdentity.of(self._layout_hash, salt, parent_key, token_ids)

    def sealed_like(self, identity: ChunkIdentity) -> Entry | None:
        """Return the sealed chunk with this identity, if there is one.

        Raises FailedPrecondition if another chunk has its key.
        """
        entry = self.index.get(identity.key)
        if entry is not None and not identity.is_that_of(entry):
            raise FailedPrecondition("another chunk has this key", reason="KEY_COLLISION")
        return entry

    def publish(self, slot: int, identity: ChunkIdentity, checksum: int) -> Entry:
        """Seal a granted slot whose payload was verified, and add it to the index.

        Raises FailedPrecondition if the parent is not sealed, not full, or of another salt.
        """
        entry = Entry(
            slot=slot,
            generation=self.slots.generation(slot),
            key=identity.key,
            parent_key=identity.parent_key,
            salt_tag=identity.salt_tag,
            packed=identity.packed,
            fingerprint=identity.fingerprint,
            checksum=checksum,
            chunk_index=self._chunk_index(identity),
        )
        self.sealed_total += 1
        self._seal_number += 1
        self.slots.seal(
            slot,
            self._chunk_block(entry, seal_number=self._seal_number),
            encode_token_row(identity.packed_tokens, self.layout.chunk_tokens),
        )
        self.grants.sealed(slot)
        self.index.add(entry)
        self._chunks[slot] = entry
        self._policy.use(slot)
        self._offer(slot)
        if self.listener is not None:
            self.listener(entry)
        return entry

    def _chunk_index(self, identity: ChunkIdentity) -> int:
        """Return the chunk's place in its sequence. Raises FailedPrecondition; see `publish`."""
        if not identity.parent_key:
            return 0
        parent = self.index.get(identity.parent_key)
        if parent is None or parent.salt_tag != identity.salt_tag:
            raise FailedPrecondition("the parent chunk is not sealed", reason="NO_PARENT")
        if parent.token_count < self.layout.chunk_tokens:
            raise FailedPrecondition(
                "the parent chunk is a partial tail: nothing can follow it",
                reason="PARTIAL_PARENT",
            )
        return parent.chunk_index + 1

    def _chunk_block(self, entry: Entry, seal_number: int) -> ChunkBlock:
        return ChunkBlock(
            generation=entry.generation,
            key=entry.key,
            parent_key=entry.parent_key or NO_PARENT,
            layout_hash=self._layout_hash,
            salt_tag=entry.salt_tag,
            fingerprint=entry.fingerprint,
            checksum=entry.checksum,
            seal_number=seal_number,
            token_count=entry.token_count,
            chunk_index=entry.chunk_index,
        )

    def match(self, salt: bytes, token_ids: Sequence[int]) -> PrefixMatch:
        """Return the longest cached prefix. This is no use of its chunks, and protects nothing."""
        return self.index.match(salt, token_ids)

    def name_pages(self, salt: bytes, page_keys: Sequence[bytes]) -> PageNames:
        """Return the names of distinct pages, in the order of their keys."""
        return PageNames.of(self._layout_hash, salt, list(dict.fromkeys(page_keys)))

    def use(self, entries: Sequence[Entry]) -> None:
        """Record a use of a sequence's chunks, given in order."""
        # Back to front: the beginning of a sequence stays longest.
        for entry in reversed(entries):
            self._policy.use(entry.slot)

    # -- protection --------------------------------------------------------------------

    def lease(self, session_id: bytes, entries: Iterable[Entry]) -> Lease:
        return self.leases.create(session_id, (entry.slot for entry in entries))

    def unlease(self, lease: Lease) -> None:
        for slot in self.leases.end(lease):
            if slot in self.damaged_leased:
                self.damaged_leased.discard(slot)
                self.grants.give_back(slot)
            else:
                self._offer(slot)

    def guard(self, keys: Iterable[bytes]) -> AbstractContextManager[None]:
        """Protect chunks from eviction inside the block, by their keys."""
        return self._protection.guard(keys)

    # -- eviction ----------------------------------------------------------------------

    def _make_room(self, count: int) -> None:
        if count > self.slot_count:
            raise ResourceExhausted(
                f"{count} slots were asked for; the arena has {self.slot_count}",
                reason="ARENA_TOO_SMALL",
                slot_count=self.slot_count,
            )
        missing = count - self.free_count
        reclaimable = self.reclaimable_at_once() if missing > 0 else 0
        if missing > reclaimable:
            raise ResourceExhausted(
                f"{count} slots were asked for; {self.free_count} are free and "
                f"{reclaimable} can be evicted, the rest is leased or being written",
                retry_after_seconds=_RETRY_SECONDS,
                reason=ARENA_FULL,
                free_slot_count=self.free_count,
                evictable_slot_count=reclaimable,
            )
        while self.free_count < count:
            slot = self._policy.choose(self._protection.is_evictable)
            if slot is None:
                raise RuntimeError("the eviction policy lost sight of an evictable chunk")
            if self.demotions is not None:
                self.demotions.evicting(self._chunks[slot], may_wait=False)
            self._evict(slot)

    def reclaimable_count(self) -> int:
        """Count the chunks that eviction could free: nothing at or below them is protected."""
        return len(self._chunks) - len(self._protection.kept())

    def reclaimable_at_once(self) -> int:
        """Count the same chunks without those whose slots a tier copies."""
        kept = self._protection.kept()
        copied = sum(slot in self._chunks and slot not in kept for slot in self.grants.copied)
        return len(self._chunks) - len(kept) - copied

    def next_victims(self, limit: int) -> list[Entry]:
        """Return up to `limit` chunks that eviction would remove next, in order."""
        passed: set[bytes] = set()

        def is_next(slot: int) -> bool:
            entry = self._chunks.get(slot)
            return (
                entry is not None
                and not self._protection.has(entry)
                and passed.issuperset(self.index.children(entry.key))
            )

        def leave(slot: int) -> int | None:
            entry = self._chunks[slot]
            passed.add(entry.key)
            parent = self.index.get(entry.parent_key)
            return None if parent is None else parent.slot

        return [self._chunks[slot] for slot in self._policy.upcoming(limit, is_next, leave)]

    def _offer(self, slot: int) -> None:
        # The policy asks `Protection` before it chooses a slot. A slot is offered again
        # whenever something that protected it is gone.
        if slot in self._chunks:
            self._policy.offer(slot)

    def evict_all(self) -> int:
        """Evict every unprotected chunk, without a copy in a tier. Return their number."""
        for count in range(self.slot_count):
            slot = self._policy.choose(self._protection.is_evictable)
            if slot is None:
                return count
            self._evict(slot)
        return self.slot_count

    def evict(self, limit: int) -> int:
        """Evict up to `limit` unprotected chunks. Return their number.

        Slots that a tier copies become free later. Fewer are evicted if the tiers are busy.
        """
        for count in range(limit):
            if self.awaits_tiers:
                return count
            slot = self._policy.choose(self._protection.is_evictable)
            if slot is None:
                return count
            if self.demotions is not None:
                self.demotions.evicting(self._chunks[slot], may_wait=True)
            self._evict(slot)
        return limit

    def _evict(self, slot: int) -> None:
        self._remove(slot)
        self.evicted_total += 1

    def discard(self, entry: Entry) -> int:
        """Remove a damaged chunk and all below it. Return their number.

        A leased chunk stays in its slot, but is no longer SEALED, which readers notice. The
        slot is freed when its last lease ends.
        """
        below = self.index.subtree(entry.key)
        for child in reversed(below):
            self._remove(child.slot)
        return len(below)

    def _remove(self, slot: int) -> None:
        entry = self.index.remove(self._chunks.pop(slot).key)
        self.unverified.discard(slot)
        self._policy.forget(slot)
        if self.leases.is_leased(slot):
            self.slots.quarantine(slot)
            self.damaged_leased.add(slot)
        else:
            self.grants.give_back(slot)
        if self.listener is not None:
            self.listener(entry)
        parent = self.index.get(entry.parent_key)
        if parent is not None:
            self._offer(parent.slot)

    @property
    def awaits_tiers(self) -> bool:
        """True if eviction should wait until a tier has copied earlier chunks."""
        return self.demotions is not None and not self.demotions.has_room()

    # -- lookup by slot ------------------------------------------------------------------

    @property
    def slot_count(self) -> int:
        return self.arena.slot_count

    @property
    def free_count(self) -> int:
        """Slots that can be granted at once."""
        return self.grants.allocator.free_count

    @property
    def soon_free_count(self) -> int:
        """Free slots, and evicted ones that a tier will have copied soon.

        A tier without an answer may keep slots for long: they do not count.
        """
        coming = 0 if self.demotions is None else self.demotions.coming_count()
        return self.free_count + coming

    def find(self, slot: int) -> Entry | None:
        """Return the sealed chunk in a slot, if there is one."""
        return self._chunks.get(slot)

    def holds(self, entry: Entry) -> bool:
        """Return True if this chunk is still in its slot."""
        return self._chunks.get(entry.slot) is entry

    def chunks(self) -> dict[int, Entry]:
        """Return every sealed chunk by its slot."""
        return dict(self._chunks)

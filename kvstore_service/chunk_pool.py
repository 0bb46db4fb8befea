"""Slots and the chunks in them: grant, publish, protect, evict, find.

Joins slot table, allocator, prefix index, leases and eviction so that they
always agree. Knows no sessions beyond their ids, no clock and no gRPC.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore_service.allocator import Run, RunAllocator
from kvstore_service.eviction import EvictionPolicy
from kvstore_service.leases import Lease, LeaseTable
from kvstore_service.prefix_index import Entry, PrefixIndex, PrefixMatch, pack, unpack
from kvstore_service.processes import ProcessIdentity
from kvstore_service.records import SlotTable
from splitpoint.arena import Arena
from splitpoint.arena_records import (
    NO_PARENT,
    ChunkBlock,
    encode_token_row,
    salt_tag,
)
from splitpoint.errors import FailedPrecondition, ResourceExhausted
from splitpoint.keys import chunk_key, fingerprint

# How long a caller should wait for others to release: about a decode's length.
_RETRY_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class GrantedRun:
    """Slots [first, first + len(generations)), granted for writing."""

    first: int
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a chunk is, wherever it lies: equal contents, equal chunk."""

    key: bytes
    parent_key: bytes  # empty for the first chunk of a sequence
    salt_tag: bytes
    packed: bytes  # tokens, see prefix_index.pack
    fingerprint: int


class ChunkPool:
    """All slots of one arena. Starts with every slot free.

    Attributes:
        slots, allocator, index, leases: for reading and for integrity checks.
        sealed_total, evicted_total: since start.
    """

    def __init__(self, arena: Arena, policy: EvictionPolicy) -> None:
        self.arena = arena
        self.layout = arena.layout
        self.slots = SlotTable(arena)
        self.allocator = RunAllocator(arena.slot_count)
        self.index = PrefixIndex(self.layout.layout_hash, self.layout.chunk_tokens)
        self.leases = LeaseTable()
        self.sealed_total = 0
        self.evicted_total = 0
        self._policy = policy
        self._chunks: dict[int, Entry] = {}  # slot -> its sealed chunk
        self._guarded: Counter[bytes] = Counter()  # keys of chunks about to get children

    def close(self) -> None:
        self.slots.close()

    # -- grants ------------------------------------------------------------------------

    def grant(self, count: int, session_id: bytes, process: ProcessIdentity) -> list[GrantedRun]:
        """Slots for writing in as few runs as there are, longest first; evicts if needed.

        All or nothing: nothing is evicted unless the grant succeeds. Raises
        ResourceExhausted, to be retried unless the arena could never hold as many.
        """
        self._make_room(count)
        return [
            GrantedRun(run.first, tuple(self._grant(slot, session_id, process) for slot in run))
            for run in self.allocator.allocate(count)
        ]

    def _grant(self, slot: int, session_id: bytes, process: ProcessIdentity) -> int:
        return self.slots.grant(slot, session_id, process.process_id, process.start_ticks)

    def give_back(self, slot: int) -> None:
        """Free a slot that was granted and not published."""
        self.slots.free(slot)
        self.allocator.free(slot)

    def quarantine(self, slot: int) -> None:
        self.slots.quarantine(slot)

    # -- chunks ------------------------------------------------------------------------

    def contents(self, salt: bytes, parent_key: bytes, token_ids: Sequence[int]) -> Contents:
        """What a chunk of these tokens after this parent is, and its key."""
        return Contents(
            key=chunk_key(self.layout.layout_hash, salt, parent_key, token_ids),
            parent_key=parent_key,
            salt_tag=salt_tag(salt),
            packed=pack(token_ids),
            fingerprint=fingerprint(token_ids),
        )

    def sealed_like(self, contents: Contents) -> Entry | None:
        """The sealed chunk with these very contents, if there is one.

        Raises FailedPrecondition when another chunk has its key: equal hashes
        of different contents are told apart, never mixed up.
        """
        entry = self.index.get(contents.key)
        if entry is None:
            return None
        if (
            entry.parent_key != contents.parent_key
            or entry.salt_tag != contents.salt_tag
            or entry.fingerprint != contents.fingerprint
            or entry.packed != contents.packed
        ):
            raise FailedPrecondition("another chunk has this key", reason="KEY_COLLISION")
        return entry

    def publish(self, slot: int, contents: Contents, checksum: int) -> Entry:
        """Seal a granted slot whose payload was verified, and make it findable.

        Raises FailedPrecondition when the parent is not sealed, not full, or not
        of this salt (another tenant's chunk is no parent, like one that is not there).
        """
        entry = Entry(
            slot=slot,
            generation=self.slots.generation(slot),
            key=contents.key,
            parent_key=contents.parent_key,
            salt_tag=contents.salt_tag,
            packed=contents.packed,
            fingerprint=contents.fingerprint,
            checksum=checksum,
            chunk_index=self._chunk_index(contents),
        )
        self.sealed_total += 1
        self.slots.seal(
            slot,
            self._chunk_block(entry, seal_number=self.sealed_total),
            encode_token_row(unpack(contents.packed), self.layout.chunk_tokens),
        )
        self.index.add(entry)
        self._chunks[slot] = entry
        self._policy.use(slot)
        self._offer(slot)
        return entry

    def _chunk_index(self, contents: Contents) -> int:
        """Place in the sequence; raises FailedPrecondition when the parent cannot be one."""
        if not contents.parent_key:
            return 0
        parent = self.index.get(contents.parent_key)
        if parent is None or parent.salt_tag != contents.salt_tag:
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
            layout_hash=self.layout.layout_hash,
            salt_tag=entry.salt_tag,
            fingerprint=entry.fingerprint,
            checksum=entry.checksum,
            seal_number=seal_number,
            token_count=entry.token_count,
            chunk_index=entry.chunk_index,
        )

    def match(self, salt: bytes, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest cached prefix. Counts as no use and protects nothing."""
        return self.index.match(salt, token_ids)

    def use(self, entries: Sequence[Entry]) -> None:
        """The chunks of a sequence, first one first, are wanted again."""
        # Back to front: of one sequence the beginning stays longest.
        for entry in reversed(entries):
            self._policy.use(entry.slot)

    # -- protection --------------------------------------------------------------------

    def lease(self, session_id: bytes, entries: Iterable[Entry]) -> Lease:
        return self.leases.take(session_id, (entry.slot for entry in entries))

    def unlease(self, lease: Lease) -> None:
        for slot in self.leases.drop(lease):
            self._offer(slot)

    @contextmanager
    def guard(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Keep chunks from eviction for a moment: something is being sealed below them."""
        guarded = [key for key in keys if key]
        self._guarded.update(guarded)
        try:
            yield
        finally:
            self._guarded.subtract(guarded)
            for key in guarded:
                if self._guarded[key] <= 0:
                    del self._guarded[key]
                entry = self.index.get(key)
                if entry is not None:
                    self._offer(entry.slot)

    # -- eviction ----------------------------------------------------------------------

    def _make_room(self, count: int) -> None:
        if count > self.arena.slot_count:
            raise ResourceExhausted(
                f"{count} slots were asked for; the arena has {self.arena.slot_count}",
                reason="ARENA_TOO_SMALL",
                slot_count=self.arena.slot_count,
            )
        missing = count - self.allocator.free_count
        if missing > 0 and missing > (reclaimable := self.reclaimable_count()):
            raise ResourceExhausted(
                f"{count} slots were asked for; {self.allocator.free_count} are free and "
                f"{reclaimable} can be evicted, the rest is leased or being written",
                retry_after_seconds=_RETRY_SECONDS,
                reason="ARENA_FULL",
                free_slot_count=self.allocator.free_count,
                evictable_slot_count=reclaimable,
            )
        while self.allocator.free_count < count:
            slot = self._policy.choose(self._is_evictable)
            if slot is None:
                raise RuntimeError("the eviction policy lost sight of an evictable chunk")
            self._evict(slot)

    def reclaimable_count(self) -> int:
        """Chunks that eviction could free: those with nothing protected at or below them."""
        kept: set[int] = set()
        guarded = (self.index.get(key) for key in self._guarded)
        slots = [*self.leases.leased_slots, *(entry.slot for entry in guarded if entry)]
        for slot in slots:
            entry: Entry | None = self._chunks[slot]
            while entry is not None and entry.slot not in kept:
                kept.add(entry.slot)
                entry = self.index.get(entry.parent_key)
        return len(self._chunks) - len(kept)

    def _is_evictable(self, slot: int) -> bool:
        entry = self._chunks.get(slot)
        return (
            entry is not None
            and not self.leases.is_leased(slot)
            and not self.index.has_children(entry.key)
            and entry.key not in self._guarded
        )

    def _offer(self, slot: int) -> None:
        if self._is_evictable(slot):
            self._policy.offer(slot)

    def _evict(self, slot: int) -> None:
        entry = self.index.remove(self._chunks.pop(slot).key)
        self._policy.forget(slot)
        self.slots.free(slot)
        self.allocator.free(slot)
        self.evicted_total += 1
        parent = self.index.get(entry.parent_key)
        if parent is not None:
            self._offer(parent.slot)

    # -- integrity ---------------------------------------------------------------------

    def chunks(self) -> dict[int, Entry]:
        """Every sealed chunk by its slot."""
        return dict(self._chunks)

    def free_runs(self) -> list[Run]:
        return self.allocator.runs()

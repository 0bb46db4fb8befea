"""Slots and the chunks in them: grant, publish, protect, evict, find.

Joins slot table, allocator, prefix index, leases and eviction so that they
always agree. Knows no sessions beyond their ids, no clock and no gRPC.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from kvstore_service.eviction.policies import EvictionPolicy
from kvstore_service.pool.allocator import Run, RunAllocator
from kvstore_service.pool.contents import Contents, keys_behind
from kvstore_service.pool.leases import Lease, LeaseTable
from kvstore_service.pool.prefix_index import Entry, PrefixIndex, PrefixMatch
from kvstore_service.pool.records import MetadataWriter, SlotTable
from kvstore_service.pool.tenant_tags import TenantTags
from kvstore_service.recovery.recovery import Findings, read_arena
from kvstore_service.sessions import ProcessIdentity
from splitpoint.arena.mapping import Arena
from splitpoint.arena.records import NO_PARENT, ChunkBlock, SlotState, encode_token_row
from splitpoint.errors import FailedPrecondition, ResourceExhausted

# How long a caller should wait for others to release: about a decode's length.
_RETRY_SECONDS = 0.25
# Why a reservation is refused that a larger or less busy arena would have granted.
ARENA_FULL = "ARENA_FULL"


@dataclass(frozen=True, slots=True)
class GrantedRun:
    """Slots [first, first + len(generations)), granted for writing."""

    first: int
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """A granted slot and what its session says it wrote there."""

    slot: int
    generation: int
    parent_key: bytes
    token_ids: tuple[int, ...]
    checksum: int


@dataclass(frozen=True, slots=True)
class Preparation:
    """Slots taken from the free ones that are not granted yet.

    `dirty_slots` held bytes of another tenant, or of nobody knows whom: they are
    zeroed before anybody is granted them.
    """

    runs: tuple[Run, ...]
    tag: bytes  # salt tag of the tenant they are for
    dirty_slots: tuple[int, ...]


class PoolListener(Protocol):
    """Who wants to hear what comes and goes. Called on the hot path: note it, and return."""

    def published(self, entry: Entry) -> None: ...

    def evicted(self, entry: Entry) -> None: ...


class ChunkPool:
    """All slots of one arena, with what it held when it was mapped.

    Attributes:
        listener: hears of every chunk that becomes findable or stops being so.
        slots, allocator, index, leases: for reading and for integrity checks.
        findings: what the arena held at the start.
        unverified: slots of adopted chunks whose payload was not compared yet.
        condemned: leased slots whose chunk proved damaged.
        prepared: slots between `prepare` and `grant` or `abandon`.
        sealed_total, evicted_total: since start.
    """

    def __init__(
        self, arena: Arena, policy: EvictionPolicy, *, writer: MetadataWriter | None = None
    ) -> None:
        self.arena = arena
        self.layout = arena.layout
        self.findings = read_arena(arena)
        self.slots = SlotTable(arena, self.findings.states, self.findings.generations, writer)
        self._layout_hash = self.layout.layout_hash
        self.index = PrefixIndex(self._layout_hash, self.layout.chunk_tokens)
        self.leases = LeaseTable()
        self.unverified: set[int] = set()
        self.condemned: set[int] = set()
        self.prepared: set[int] = set()
        self.sealed_total = 0
        self.evicted_total = 0
        self.listener: PoolListener | None = None
        self._policy = policy
        self._chunks: dict[int, Entry] = {}  # slot -> its sealed chunk
        self._guarded: Counter[bytes] = Counter()  # keys of chunks about to get children
        self._seal_number = self.findings.last_seal_number
        self._tags = TenantTags(
            slot for slot, generation in enumerate(self.findings.generations) if generation
        )
        self._adopt(self.findings)
        self.allocator = RunAllocator(arena.slot_count, self.slots.in_state(SlotState.FREE))

    def close(self) -> None:
        self.slots.close()

    # -- the start -----------------------------------------------------------------------

    def _adopt(self, findings: Findings) -> None:
        """Take over what an earlier store left: serve, quarantine or free every slot."""
        for slot, state in enumerate(findings.states):
            if state is SlotState.WRITING:
                self.slots.quarantine(slot)
        for chunk in findings.chunks:
            entry = chunk.entry
            self.index.add(entry)
            self._chunks[entry.slot] = entry
            self._tags.set(entry.slot, entry.salt_tag)
            self.unverified.add(entry.slot)
        for slot, state in enumerate(findings.states):
            if state is SlotState.SEALED and slot not in self._chunks:
                self.slots.free(slot)  # damaged, or nothing leads to it
        # Oldest first, so that age survives the restart.
        for chunk in sorted(findings.chunks, key=lambda chunk: chunk.seal_number):
            self._policy.use(chunk.entry.slot)
        for slot in self._chunks:
            self._offer(slot)

    # -- grants ------------------------------------------------------------------------

    def prepare(self, count: int, tag: bytes) -> Preparation:
        """Slots for the tenant of this salt tag, in as few runs as there are, longest
        first; evicts if needed.

        All or nothing: nothing is evicted unless there will be room. Raises
        ResourceExhausted, to be retried unless the arena could never hold as many.
        """
        self._make_room(count)
        runs = tuple(self.allocator.allocate(count))
        slots = [slot for run in runs for slot in run]
        self.prepared.update(slots)
        return Preparation(runs, tag, self._tags.foreign(slots, tag))

    def grant(
        self, preparation: Preparation, session_id: bytes, process: ProcessIdentity
    ) -> list[GrantedRun]:
        """Grant prepared slots for writing; the dirty ones were zeroed."""
        return [
            GrantedRun(
                run.first,
                tuple(self._grant(slot, preparation.tag, session_id, process) for slot in run),
            )
            for run in preparation.runs
        ]

    def _grant(self, slot: int, tag: bytes, session_id: bytes, process: ProcessIdentity) -> int:
        self.prepared.discard(slot)
        self._tags.set(slot, tag)
        return self.slots.grant(slot, session_id, process.process_id, process.start_ticks)

    def tag_of(self, slot: int) -> bytes:
        """Salt tag of the tenant that a slot was granted for."""
        return self._tags.of(slot)

    def abandon(self, preparation: Preparation) -> None:
        """Prepared slots are free again; nobody was granted them."""
        for run in preparation.runs:
            for slot in run:
                self.prepared.discard(slot)
                self.allocator.free(slot)

    def give_back(self, slot: int) -> None:
        """Free a slot that was granted and not published."""
        self.slots.free(slot)
        self.allocator.free(slot)

    def quarantine(self, slot: int) -> None:
        self.slots.quarantine(slot)

    # -- chunks ------------------------------------------------------------------------

    def contents(self, salt: bytes, parent_key: bytes, token_ids: Sequence[int]) -> Contents:
        """What a chunk of these tokens after this parent is, and its key."""
        return Contents.of(self._layout_hash, salt, parent_key, token_ids)

    def sealed_like(self, contents: Contents) -> Entry | None:
        """The sealed chunk with these very contents, if there is one.

        Raises FailedPrecondition when another chunk has its key: equal hashes
        of different contents are told apart, never mixed up.
        """
        entry = self.index.get(contents.key)
        if entry is not None and not contents.are_those_of(entry):
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
        self._seal_number += 1
        self.slots.seal(
            slot,
            self._chunk_block(entry, seal_number=self._seal_number),
            encode_token_row(contents.packed_tokens, self.layout.chunk_tokens),
        )
        self.index.add(entry)
        self._chunks[slot] = entry
        self._policy.use(slot)
        self._offer(slot)
        if self.listener is not None:
            self.listener.published(entry)
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
            layout_hash=self._layout_hash,
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

    def keys_behind(
        self, salt: bytes, entries: Sequence[Entry], token_ids: Sequence[int]
    ) -> list[bytes]:
        """See `contents.keys_behind`."""
        return keys_behind(self._layout_hash, self.layout.chunk_tokens, salt, entries, token_ids)

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
            if slot in self.condemned:
                self.condemned.discard(slot)
                self.give_back(slot)
            else:
                self._offer(slot)

    @contextmanager
    def guard(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Keep chunks from eviction for a moment: something is being sealed below them."""
        guarded = [key for key in keys if self.index.get(key) is not None]
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
                reason=ARENA_FULL,
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
            entry = self._chunks.get(slot)  # none: condemned
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
        # Whether it may go is asked when it would, and it is offered again whenever
        # something that protected it is gone.
        if slot in self._chunks:
            self._policy.offer(slot)

    def evict_all(self) -> int:
        """Evict whatever nothing protects; how many chunks that was."""
        return self.evict(self.arena.slot_count)

    def evict(self, limit: int) -> int:
        """Evict up to `limit` chunks that nothing protects; how many went."""
        for count in range(limit):
            slot = self._policy.choose(self._is_evictable)
            if slot is None:
                return count
            self._evict(slot)
        return limit

    def _evict(self, slot: int) -> None:
        self._remove(slot)
        self.evicted_total += 1

    def discard(self, entry: Entry) -> int:
        """Take a chunk that proved damaged out, with all below it; how many that were.

        What somebody leases stays where it is, but is SEALED no more: readers find
        out, and the slot is free once the last lease of it ended.
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
            self.condemned.add(slot)
        else:
            self.slots.free(slot)
            self.allocator.free(slot)
        if self.listener is not None:
            self.listener.evicted(entry)
        parent = self.index.get(entry.parent_key)
        if parent is not None:
            self._offer(parent.slot)

    # -- integrity ---------------------------------------------------------------------

    def find(self, slot: int) -> Entry | None:
        """The sealed chunk in a slot, if there is one."""
        return self._chunks.get(slot)

    def holds(self, entry: Entry) -> bool:
        """Whether this very chunk is still where it was."""
        return self._chunks.get(entry.slot) is entry

    def chunks(self) -> dict[int, Entry]:
        """Every sealed chunk by its slot."""
        return dict(self._chunks)

    def free_runs(self) -> list[Run]:
        return self.allocator.runs()

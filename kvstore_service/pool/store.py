"""The store's rules: sessions reserve, seal, match and release; everything else follows.

One thread calls it (the event loop's). It does no I/O except the metadata
writes of the slot table and never waits: reading payload back is `verify` and
`check`, zeroing it is `zero`; any thread may run these. Knows no gRPC.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore_service.eviction.policies import EvictionPolicy, LeastRecentlyUsed
from kvstore_service.eviction.record import RecordedPolicy
from kvstore_service.eviction.second_use import SecondUse
from kvstore_service.integrity.inspection import Inspection
from kvstore_service.pool.chunk_pool import (
    ARENA_FULL,
    ChunkPool,
    GrantedRun,
    Preparation,
    WrittenChunk,
)
from kvstore_service.pool.holders import Holders
from kvstore_service.pool.prefix_index import Entry, PrefixMatch
from kvstore_service.pool.records import MetadataWriter
from kvstore_service.recovery.adopted import AdoptedChunks, damage_of
from kvstore_service.sessions import Session, SessionTable
from splitpoint.arena import presence
from splitpoint.arena.format import ArenaFormatError
from splitpoint.arena.mapping import Arena
from splitpoint.arena.records import salt_tag
from splitpoint.errors import DataLoss, FailedPrecondition, ResourceExhausted, SplitpointError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Matched:
    """`entries` hold `cached_tokens`, the last one perhaps in part. `lease_id` 0: none.

    `storable_tokens`: how far the sequence may be stored, a multiple of a chunk's
    tokens; None: to its end and beyond.
    """

    entries: tuple[Entry, ...]
    cached_tokens: int
    lease_id: int = 0
    storable_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Sealed:
    entry: Entry
    is_duplicate: bool


@dataclass(frozen=True, slots=True)
class SealOutcome:
    """`lease_id` 0: the chunks are under no lease."""

    chunks: tuple[Sealed, ...]
    lease_id: int


@dataclass(slots=True)
class Counters:
    """Since start.

    Attributes:
        refused_reservations: for lack of chunks that may be evicted, not for being wrong.
        evicted_on_request: chunks that went because somebody said so.
    """

    matches: int = 0
    match_hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    duplicates: int = 0
    checksum_failures: int = 0
    remote_read_bytes: int = 0
    remote_written_bytes: int = 0
    refused_reservations: int = 0
    evicted_on_request: int = 0


class KvStore(Holders):
    """One arena and the sessions that use it, those of an earlier store included.

    Args:
        clock: monotonic seconds.
        lease_seconds: how long a session lives without a sign of life.
        policy: orders evictions; least recently used first, if none is given.
        admission: keeps out what nobody asked for twice; None: store everything.
        is_present: whether the holder of a session may still touch the arena; the
            default asks for the lock that `Arena.attach` takes.
        writer: how metadata gets into the arena; the default is the mapping.

    Attributes:
        adopted: chunks of an earlier store, until they were compared with their checksums.
        inspection: reads chunks back that were sealed or compared once.
        evictions: the policy at work, with its account.
        recovery_seconds: how long it took to read what the arena held.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        clock: Callable[[], float],
        lease_seconds: float,
        policy: EvictionPolicy | None = None,
        admission: SecondUse | None = None,
        is_present: Callable[[bytes], bool] | None = None,
        writer: MetadataWriter | None = None,
    ) -> None:
        began = clock()
        self.arena = arena
        self.admission = admission
        self.evictions = RecordedPolicy(policy or LeastRecentlyUsed(), clock)
        self.counters = Counters()
        self._clock = clock
        self._last_refused_at: float | None = None
        super().__init__(
            ChunkPool(arena, self.evictions, writer=writer),
            SessionTable(clock, lease_seconds),
            is_present or (lambda id_: presence.is_held(arena.fd, id_)),
        )
        self.adopted = AdoptedChunks(self.pool, self._count_damage)
        self.inspection = Inspection(self.pool, clock)
        self.recovery_seconds = clock() - began

    def _count_damage(self) -> None:
        self.counters.checksum_failures += 1

    @property
    def epoch(self) -> int:
        return self.arena.superblock.epoch

    def close(self) -> None:
        """End every session and let go of the arena. No thread may use it any more.

        What was being written stays quarantined in the file: its writers live on,
        and whoever adopts a kept arena has to ask about them.
        """
        for session in self.sessions:
            self.end(session.session_id)
        for session in self.sessions:
            self.sessions.remove(session)
        self.pool.close()
        self.arena.close()

    # -- reading -------------------------------------------------------------------------

    def peek(self, salt: bytes, token_ids: Sequence[int]) -> Matched:
        """The longest cached prefix right now: a hint, since nothing protects it."""
        found = self.pool.match(salt, token_ids)
        return Matched(found.entries, found.cached_tokens)

    def match(self, session_id: bytes, salt: bytes, token_ids: Sequence[int]) -> Matched:
        """The longest cached prefix, leased to the session."""
        session = self._user(session_id)
        while unverified := self.adopted.in_match(salt, token_ids):
            self.adopted.settle(unverified, self.adopted.check(unverified))
        found = self.pool.match(salt, token_ids)
        self.counters.matches += 1
        self.counters.query_tokens += len(token_ids)
        storable = self._storable_tokens(salt, found, token_ids)
        if not found.entries:
            return Matched((), 0, storable_tokens=storable)
        self.counters.match_hits += 1
        self.counters.hit_tokens += found.cached_tokens
        self.pool.use(found.entries)
        lease = self._lease(session, found.entries)
        return Matched(found.entries, found.cached_tokens, lease.lease_id, storable)

    def _storable_tokens(
        self, salt: bytes, found: PrefixMatch, token_ids: Sequence[int]
    ) -> int | None:
        if self.admission is None:
            return None
        missing = self.pool.keys_behind(salt, found.entries, token_ids)
        admitted = self.admission.admit(missing)
        if admitted == len(missing):
            return None
        size = self.arena.layout.chunk_tokens
        return (-(-len(token_ids) // size) - len(missing) + admitted) * size

    def leased_chunk(self, session_id: bytes, slot: int, generation: int) -> Entry:
        """The sealed chunk in a slot. Raises FailedPrecondition unless the session leased it."""
        session = self.sessions.live(session_id)
        entry = self.pool.find(slot)
        if entry is None or entry.generation != generation:
            raise FailedPrecondition(
                f"slot {slot} holds no sealed chunk of generation {generation}",
                reason="CHUNK_LOST",
            )
        leases = (self.pool.leases.get(lease_id) for lease_id in session.lease_ids)
        if not any(lease is not None and slot in lease.slots for lease in leases):
            raise FailedPrecondition(
                f"slot {slot} is not under a lease of this session", reason="NOT_LEASED"
            )
        return entry

    def found_damaged(self, entry: Entry) -> None:
        """A chunk's payload differs from its checksum: it is served to nobody any more."""
        if self.pool.holds(entry):
            self.counters.checksum_failures += 1
            lost = self.pool.discard(entry)
            _log.error(
                "slot %d is damaged: it and %d chunks below it are gone", entry.slot, lost - 1
            )

    # -- writing -------------------------------------------------------------------------

    def reserve(self, session_id: bytes, slot_count: int, salt: bytes = b"") -> list[GrantedRun]:
        """Grant slots for writing at once: `prepare`, `zero` and `grant`."""
        preparation = self.prepare(session_id, slot_count, salt)
        self.zero(preparation)
        return self.grant(session_id, preparation)

    def prepare(self, session_id: bytes, slot_count: int, salt: bytes = b"") -> Preparation:
        """Take slots for the salt's chunks from the free ones. Raises ResourceExhausted.

        They are nobody's until `grant` or `abandon`, one of which must follow.
        """
        self._user(session_id)
        self.sweep()  # what the dead held is room
        try:
            return self.pool.prepare(slot_count, salt_tag(salt))
        except ResourceExhausted as error:
            if error.reason == ARENA_FULL:
                self.counters.refused_reservations += 1
                self._last_refused_at = self._clock()
            raise

    def seconds_since_refusal(self) -> float | None:
        """Since the last reservation that found no room; None: there was none."""
        at = self._last_refused_at
        return None if at is None else self._clock() - at

    def zero(self, preparation: Preparation) -> None:
        """Wipe what another tenant left in prepared slots. Slow, for any thread."""
        for slot in preparation.dirty_slots:
            self.arena.zero(slot)

    def grant(self, session_id: bytes, preparation: Preparation) -> list[GrantedRun]:
        """Grant prepared slots; they are free again when the session ended meanwhile."""
        try:
            session = self._user(session_id)
        except SplitpointError:
            self.pool.abandon(preparation)
            raise
        runs = self.pool.grant(preparation, session.session_id, session.process)
        for run in runs:
            for offset, generation in enumerate(run.generations):
                session.granted[run.first + offset] = generation
        return runs

    def evict_all(self) -> int:
        """Evict whatever nothing protects, because somebody asked; how many chunks that was."""
        evicted = self.pool.evict_all()
        self.counters.evicted_on_request += evicted
        return evicted

    @contextmanager
    def sealing(self, chunks: Sequence[WrittenChunk]) -> Iterator[None]:
        """Keeps the chunks' parents from eviction while the payloads are verified."""
        with self.pool.guard(chunk.parent_key for chunk in chunks):
            yield

    def verify(self, chunks: Sequence[WrittenChunk]) -> list[ArenaFormatError | None]:
        """What is wrong with each payload, read back; None: nothing. Slow, for any thread."""
        return [
            damage_of(self.arena, chunk.slot, len(chunk.token_ids), chunk.checksum)
            for chunk in chunks
        ]

    def seal(
        self,
        session_id: bytes,
        salt: bytes,
        chunks: Sequence[WrittenChunk],
        damages: Sequence[ArenaFormatError | None],
        *,
        lease_id: int = 0,
        keep_leased: bool = False,
    ) -> SealOutcome:
        """Publish written chunks in order; see the contract of Seal in kvstore.proto.

        `damages` is what `verify` said of each chunk.

        Raises FailedPrecondition or DataLoss at the first chunk that cannot be
        sealed; those before it stay sealed, those behind it stay granted.
        """
        session = self.sessions.live(session_id)
        while unverified := self.adopted.in_seal(salt, chunks):
            self.adopted.settle(unverified, self.adopted.check(unverified))
        lease = self._lease_of(session, lease_id)
        if lease is not None and not lease.slots.isdisjoint(self.pool.condemned):
            # Computed from it, perhaps: sealed, its bytes would pass every later check.
            raise FailedPrecondition("a chunk under this lease proved damaged", reason="CHUNK_LOST")
        is_new_lease = lease is None and keep_leased
        if is_new_lease:
            lease = self._lease(session, ())
        sealed: list[Sealed] = []
        try:
            for chunk, damage in zip(chunks, damages, strict=True):
                sealed.append(self._seal(session, salt, chunk, damage))
                if lease is not None:
                    self.pool.leases.extend(lease, [sealed[-1].entry.slot])
        except Exception:
            # The caller never learns the new lease's id, so nobody could release it.
            if is_new_lease and lease is not None:
                self._release_lease(session, lease.lease_id)
            raise
        return SealOutcome(tuple(sealed), lease.lease_id if lease is not None else 0)

    def _seal(
        self, session: Session, salt: bytes, chunk: WrittenChunk, damage: ArenaFormatError | None
    ) -> Sealed:
        if session.granted.get(chunk.slot) != chunk.generation:
            raise FailedPrecondition(
                f"slot {chunk.slot} is not granted to this session in generation "
                f"{chunk.generation}",
                reason="NOT_GRANTED",
            )
        if self.pool.tag_of(chunk.slot) != salt_tag(salt):
            raise FailedPrecondition(
                f"slot {chunk.slot} was reserved for another tenant salt", reason="OTHER_TENANT"
            )
        if damage is not None:
            self._free(session, chunk.slot)
            self.counters.checksum_failures += 1
            raise DataLoss(f"not sealed: {damage.message}", reason=damage.reason) from damage
        contents = self.pool.contents(salt, chunk.parent_key, chunk.token_ids)
        existing = self.pool.sealed_like(contents)
        if existing is not None:
            self._free(session, chunk.slot)
            self.counters.duplicates += 1
            self.pool.use([existing])
            return Sealed(existing, is_duplicate=True)
        entry = self.pool.publish(chunk.slot, contents, chunk.checksum)
        del session.granted[chunk.slot]
        return Sealed(entry, is_duplicate=False)

"""The store's operations: sessions match, reserve, seal and release chunks.

Only the event loop's thread calls the store, except `verify`, `zero` and
`RecoveredChunks.check`, which read or zero payloads and may run in any thread. The store
does no I/O except the slot table's metadata writes, never waits, and knows no gRPC.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from kvstore_service.eviction.cache_admission import SecondUseFilter
from kvstore_service.eviction.policies import EvictionPolicy, InstrumentedPolicy, LeastRecentlyUsed
from kvstore_service.integrity.inspection import Inspection
from kvstore_service.pool.chunk_pool import (
    ARENA_FULL,
    ChunkPool,
    WrittenChunk,
)
from kvstore_service.pool.prefix_index import Entry, PageNames, PrefixMatch
from kvstore_service.pool.slot_grants import GrantedRun, Preparation
from kvstore_service.pool.slot_table import MetadataWriter
from kvstore_service.recovery import RecoveredChunks, damage_of, read_arena
from kvstore_service.session_manager import SessionManager
from kvstore_service.sessions import Session
from splitpoint.arena import presence
from splitpoint.arena.format import ArenaFormatError
from splitpoint.arena.mapping import Arena
from splitpoint.arena.records import salt_tag
from splitpoint.errors import DataLoss, FailedPrecondition, ResourceExhausted, SplitpointError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Matched:
    """The longest cached prefix of a sequence.

    Attributes:
        entries: chunks of the prefix. The prefix may end inside the last chunk.
        lease_id: 0 if the chunks are not leased.
        storable_tokens: number of leading tokens that may be stored, a multiple of a chunk's
            tokens. None if there is no limit.
    """

    entries: tuple[Entry, ...]
    cached_tokens: int
    lease_id: int = 0
    storable_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class MatchedPages:
    """Pages by name: None where the arena has none. `lease_id` is 0 if it has none of them."""

    entries: tuple[Entry | None, ...]
    lease_id: int


@dataclass(frozen=True, slots=True)
class Sealed:
    entry: Entry
    is_duplicate: bool


@dataclass(frozen=True, slots=True)
class SealOutcome:
    """Sealed chunks in order. `lease_id` is 0 if they are not leased."""

    chunks: tuple[Sealed, ...]
    lease_id: int


@dataclass(slots=True)
class Counters:
    """Counts since start.

    Attributes:
        query_tokens, hit_tokens: of matches; pages in an arena of pages.
        refused_reservations: reservations that found no evictable chunks.
        evicted_on_request: chunks evicted by the Evict call.
    """

    matches: int = 0
    match_hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    duplicates: int = 0
    checksum_failures: int = 0
    remote_read_bytes: int = 0
    refused_reservations: int = 0
    evicted_on_request: int = 0


class KvStore:
    """The chunks and sessions of one arena, including those that an earlier store left in it.

    Args:
        clock: monotonic seconds.
        lease_seconds: seconds without a keep-alive after which a session expires.
        policy: eviction policy; the default evicts the least recently used chunk.
        admission: selects the chunks worth storing. None: store everything.
        is_present: returns True if the client of a session may still touch the arena. The
            default checks the lock that `Arena.attach` takes.
        writer: writes metadata to the arena; the default is the mapping.

    Attributes:
        pool: slots and chunks.
        sessions: sessions with their grants and leases.
        recovered_state: what the arena held at start.
        recovered: chunks of an earlier store whose payload is still to be verified.
        inspection: reads chunks back that were sealed or verified before.
        evictions: the policy with its eviction statistics.
        recovery_seconds: time that reading the arena at start took.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        clock: Callable[[], float],
        lease_seconds: float,
        policy: EvictionPolicy | None = None,
        admission: SecondUseFilter | None = None,
        is_present: Callable[[bytes], bool] | None = None,
        writer: MetadataWriter | None = None,
    ) -> None:
        began = clock()
        self.arena = arena
        self.admission = admission
        self.evictions = InstrumentedPolicy(policy or LeastRecentlyUsed(), clock)
        self.counters = Counters()
        self._clock = clock
        self._last_refused_at: float | None = None
        self.recovered_state = read_arena(arena)
        self.pool = ChunkPool(arena, self.evictions, self.recovered_state, writer=writer)
        self.sessions = SessionManager(
            self.pool,
            self.recovered_state.sessions,
            clock=clock,
            lease_seconds=lease_seconds,
            is_present=is_present or (lambda id_: presence.is_held(arena.fd, id_)),
        )
        self.recovered = RecoveredChunks(self.pool, self._count_damage)
        self.inspection = Inspection(self.pool, clock)
        self.recovery_seconds = clock() - began

    def _count_damage(self) -> None:
        self.counters.checksum_failures += 1

    @property
    def epoch(self) -> int:
        return self.arena.superblock.epoch

    def close(self) -> None:
        """End every session and close the arena. No thread may use it any more."""
        self.sessions.close()
        self.pool.close()
        self.arena.close()

    # -- reading -------------------------------------------------------------------------

    def peek(self, salt: bytes, token_ids: Sequence[int]) -> Matched:
        """Return the longest cached prefix: a hint, since nothing protects it from eviction."""
        found = self.pool.match(salt, token_ids)
        return Matched(found.entries, found.cached_tokens)

    def match(self, session_id: bytes, salt: bytes, token_ids: Sequence[int]) -> Matched:
        """Return the longest cached prefix, leased to the session."""
        session = self.sessions.arena_user(session_id)
        while unverified := self.recovered.in_match(salt, token_ids):
            self.recovered.settle(unverified, self.recovered.check(unverified))
        found = self.pool.match(salt, token_ids)
        self._count_match(session, len(token_ids), found.cached_tokens)
        storable = self._storable_tokens(salt, found, token_ids)
        if not found.entries:
            return Matched((), 0, storable_tokens=storable)
        self.pool.use(found.entries)
        lease = self.sessions.lease(session, found.entries)
        return Matched(found.entries, found.cached_tokens, lease.lease_id, storable)

    def match_pages(self, session_id: bytes, names: PageNames) -> MatchedPages:
        """Return the pages of these names, in the order of a sequence, leased to the session."""
        session = self.sessions.arena_user(session_id)
        while unverified := self.recovered.in_pages(names):
            self.recovered.settle(unverified, self.recovered.check(unverified))
        entries = self.pool.index.pages(names)
        found = [entry for entry in entries if entry is not None]
        self._count_match(session, len(entries), len(found))
        self.pool.use(found)
        lease_id = self.sessions.lease(session, found).lease_id if found else 0
        return MatchedPages(tuple(entries), lease_id)

    def _count_match(self, session: Session, query_count: int, hit_count: int) -> None:
        """Count a match of this many tokens or pages."""
        self.counters.matches += 1
        self.counters.match_hits += bool(hit_count)
        self.counters.query_tokens += query_count
        self.counters.hit_tokens += hit_count
        session.query_count += query_count
        session.hit_count += hit_count

    def _storable_tokens(
        self, salt: bytes, found: PrefixMatch, token_ids: Sequence[int]
    ) -> int | None:
        if self.admission is None:
            return None
        missing = self.pool.index.missing_keys(salt, found.entries, token_ids)
        admitted = self.admission.admit(missing)
        if admitted == len(missing):
            return None
        size = self.arena.layout.chunk_tokens
        chunk_count = -(-len(token_ids) // size)
        return (chunk_count - len(missing) + admitted) * size

    def leased_chunk(self, session_id: bytes, slot: int, generation: int) -> Entry:
        """Return the sealed chunk in a slot.

        Raises FailedPrecondition unless the session leased it.
        """
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

    def drop_damaged(self, entry: Entry) -> None:
        """Drop a chunk whose payload differs from its checksum."""
        if self.pool.holds(entry):
            self.counters.checksum_failures += 1
            lost = self.pool.discard(entry)
            _log.error(
                "slot %d is damaged: the chunk and %d below it are dropped", entry.slot, lost - 1
            )

    # -- writing -------------------------------------------------------------------------

    def reserve(self, session_id: bytes, slot_count: int, salt: bytes = b"") -> list[GrantedRun]:
        """Prepare, zero and grant slots for writing."""
        preparation = self.prepare(session_id, slot_count, salt)
        self.zero(preparation)
        return self.grant(session_id, preparation)

    def prepare(self, session_id: bytes, slot_count: int, salt: bytes = b"") -> Preparation:
        """Set free slots aside for the tenant with this salt. Raises ResourceExhausted.

        `grant` or `abandon` must follow.
        """
        self.sessions.arena_user(session_id)
        self.sessions.sweep()  # frees the slots of dead clients
        try:
            return self.pool.prepare(slot_count, salt_tag(salt))
        except ResourceExhausted as error:
            if error.reason == ARENA_FULL:
                self.counters.refused_reservations += 1
                self._last_refused_at = self._clock()
            raise

    def seconds_since_refusal(self) -> float | None:
        """Return the seconds since a reservation found no room. None if none did."""
        at = self._last_refused_at
        return None if at is None else self._clock() - at

    def zero(self, preparation: Preparation) -> None:
        """Zero what another tenant left in prepared slots. Slow; any thread may call it."""
        for slot in preparation.dirty_slots:
            self.arena.zero(slot)

    def grant(self, session_id: bytes, preparation: Preparation) -> list[GrantedRun]:
        """Grant prepared slots. They are freed if the session ended meanwhile."""
        try:
            session = self.sessions.arena_user(session_id)
        except SplitpointError:
            self.pool.grants.abandon(preparation)
            raise
        runs = self.pool.grants.grant(preparation, session.session_id, session.process)
        for run in runs:
            session.granted.update(enumerate(run.generations, run.first_slot))
        return runs

    def evict_all(self) -> int:
        """Evict every unprotected chunk on request. Return their number."""
        evicted = self.pool.evict_all()
        self.counters.evicted_on_request += evicted
        return evicted

    def protect_parents(self, chunks: Sequence[WrittenChunk]) -> AbstractContextManager[None]:
        """Protect the chunks' parents from eviction while the payloads are verified."""
        return self.pool.guard(chunk.parent_key for chunk in chunks)

    def verify(self, chunks: Sequence[WrittenChunk]) -> list[ArenaFormatError | None]:
        """Compare each payload with its checksum. Return None for an intact one.

        Slow; any thread may call it.
        """
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

        `damages` is the result of `verify`. Raises FailedPrecondition or DataLoss at the first
        chunk that cannot be sealed. Chunks before it stay sealed, those after it granted; of pages,
        which are sealed from the last to the first, the other way round.
        """
        session = self.sessions.live(session_id)
        while unverified := self.recovered.in_seal(salt, chunks):
            self.recovered.settle(unverified, self.recovered.check(unverified))
        lease = self.sessions.lease_of(session, lease_id)
        if lease is not None and not lease.slots.isdisjoint(self.pool.damaged_leased):
            # The new chunks may be computed from the damaged one. No later check would detect that.
            raise FailedPrecondition("a chunk under this lease proved damaged", reason="CHUNK_LOST")
        is_new_lease = lease is None and keep_leased
        if is_new_lease:
            lease = self.sessions.lease(session, ())
        sealed: list[Sealed] = []
        # A sequence's last page first, so that it is evicted first. Chunks need their parents.
        step = -1 if self.arena.layout.page_bytes else 1
        try:
            for chunk, damage in list(zip(chunks, damages, strict=True))[::step]:
                sealed.append(self._seal(session, salt, chunk, damage))
                if lease is not None:
                    self.pool.leases.extend(lease, [sealed[-1].entry.slot])
        except Exception:
            # The caller never learns the new lease's id and could not release it.
            if is_new_lease and lease is not None:
                self.sessions.release_lease(session, lease.lease_id)
            raise
        return SealOutcome(tuple(sealed[::step]), lease.lease_id if lease is not None else 0)

    def _seal(
        self, session: Session, salt: bytes, chunk: WrittenChunk, damage: ArenaFormatError | None
    ) -> Sealed:
        if session.granted.get(chunk.slot) != chunk.generation:
            raise FailedPrecondition(
                f"slot {chunk.slot} is not granted to this session in generation "
                f"{chunk.generation}",
                reason="NOT_GRANTED",
            )
        if self.pool.grants.tag_of(chunk.slot) != salt_tag(salt):
            raise FailedPrecondition(
                f"slot {chunk.slot} was reserved for another tenant salt", reason="OTHER_TENANT"
            )
        if damage is not None:
            self.sessions.free(session, chunk.slot)
            self.counters.checksum_failures += 1
            raise DataLoss(f"not sealed: {damage.message}", reason=damage.reason) from damage
        identity = self.pool.identify(salt, chunk.parent_key, chunk.token_ids)
        existing = self.pool.sealed_like(identity)
        if existing is not None:
            self.sessions.free(session, chunk.slot)
            self.counters.duplicates += 1
            self.pool.use([existing])
            return Sealed(existing, is_duplicate=True)
        entry = self.pool.publish(chunk.slot, identity, chunk.checksum)
        del session.granted[chunk.slot]
        return Sealed(entry, is_duplicate=False)

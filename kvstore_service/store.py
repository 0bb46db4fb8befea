"""The store's rules: sessions reserve, seal, match and release; everything else follows.

One thread calls it (the event loop's). It does no I/O except the metadata
writes of the slot table and never waits: reading payload back is `verify` and
`check`, zeroing it is `zero`; any thread may run these. Knows no gRPC.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore_service.admission import SecondUse
from kvstore_service.adopted import AdoptedChunks, damage_of
from kvstore_service.chunk_pool import ChunkPool, GrantedRun, Preparation, WrittenChunk
from kvstore_service.eviction import EvictionPolicy, LeastRecentlyUsed
from kvstore_service.eviction_record import RecordedPolicy
from kvstore_service.leases import Lease
from kvstore_service.prefix_index import Entry, PrefixMatch
from kvstore_service.records import MetadataWriter
from kvstore_service.recovery import UNKNOWN_WRITER
from kvstore_service.sessions import ProcessIdentity, Session, SessionTable
from splitpoint import presence
from splitpoint.arena import Arena
from splitpoint.arena_format import ArenaFormatError
from splitpoint.arena_records import salt_tag
from splitpoint.errors import DataLoss, FailedPrecondition, SplitpointError

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


@dataclass(frozen=True, slots=True)
class Released:
    lease_count: int
    slot_count: int


@dataclass(slots=True)
class Counters:
    """Since start."""

    matches: int = 0
    match_hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    duplicates: int = 0
    checksum_failures: int = 0
    remote_read_bytes: int = 0
    remote_written_bytes: int = 0


class KvStore:
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
        self.pool = ChunkPool(arena, self.evictions, writer=writer)
        self.sessions = SessionTable(clock, lease_seconds)
        self.counters = Counters()
        self.adopted = AdoptedChunks(self.pool, self._count_damage)
        self._is_present = is_present or (lambda id_: presence.is_held(arena.fd, id_))
        for session_id, holder in self.pool.findings.holders.items():
            self.sessions.restore(session_id, holder.process, dict(holder.granted))
        self.sweep()
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

    # -- sessions ------------------------------------------------------------------------

    def attach(
        self,
        client_name: str,
        process: ProcessIdentity,
        *,
        layout_hash: bytes = b"",
        previous_session_id: bytes = b"",
    ) -> Session:
        """Open a session; what the caller's previous one held is freed.

        Raises FailedPrecondition when the layout differs, or when the previous
        session belongs to another process, for which nobody else can speak.
        """
        if layout_hash and layout_hash != self.arena.layout.layout_hash:
            raise FailedPrecondition(
                "the store's arena has another layout than the caller was built for",
                reason="LAYOUT_MISMATCH",
                layout=self.arena.layout.to_json(),
            )
        # Nobody can speak for writers that nobody knows.
        known = previous_session_id != UNKNOWN_WRITER
        previous = self.sessions.find(previous_session_id) if known else None
        if previous is not None:
            if previous.process != process:
                raise FailedPrecondition(
                    "previous_session_id belongs to another process",
                    reason="FOREIGN_SESSION",
                )
            self._clear(previous)
        return self.sessions.open(client_name, process)

    def keep_alive(self, session_id: bytes) -> float:
        """A sign of life; returns the seconds until the next one is due."""
        session = self.sessions.live(session_id)
        self.sessions.keep_alive(session)
        return self.sessions.seconds_left(session)

    def end(self, session_id: bytes) -> None:
        """The session's stream ended: it may start nothing more. Unknown ones are ignored."""
        session = self.sessions.find(session_id)
        if session is not None and not session.is_orphaned:
            self._orphan(session)

    def sweep(self) -> None:
        """Expire silent sessions, and free what belonged to processes that are gone."""
        for session in self.sessions.expired():
            self._orphan(session)
        for session in self.sessions.orphans():
            if session.session_id != UNKNOWN_WRITER and not self._is_present(session.session_id):
                self._clear(session)

    def _user(self, session_id: bytes) -> Session:
        """A session that may use the arena.

        Its holder must be provably there, or nobody could tell later that it is gone.
        A remote one touches nothing itself, so its session's end is proof enough.
        """
        session = self.sessions.live(session_id)
        if not session.is_remote and not self._is_present(session_id):
            raise FailedPrecondition(
                "the session's presence lock on the arena file is not held", reason="NOT_PRESENT"
            )
        return session

    def _orphan(self, session: Session) -> None:
        """Its holder may still read and write, so nothing of it is used again yet.

        A remote one cannot: what it held is free at once.
        """
        session.is_orphaned = True
        for slot in session.granted:
            self.pool.quarantine(slot)
        if session.is_remote or session.holds_nothing:
            self._clear(session)

    def _clear(self, session: Session) -> None:
        """Free all a session held and forget it: every exit of a session ends here.

        Only when the holder touches nothing any more: it said so, its process
        is gone, or it holds nothing.
        """
        for slot in list(session.granted):
            self._free(session, slot)
        for lease_id in list(session.lease_ids):
            self._release_lease(session, lease_id)
        self.sessions.remove(session)

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
        return self.pool.prepare(slot_count, salt_tag(salt))

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

    # -- giving up -----------------------------------------------------------------------

    def release(
        self,
        session_id: bytes,
        lease_ids: Sequence[int],
        slots: Sequence[tuple[int, int]],
    ) -> Released:
        """End leases and give back unsealed slots (slot, generation) of the session.

        What is not held is passed over. An orphaned session may do this too: it
        is its holder's word that these are not touched any more.
        """
        session = self.sessions.known(session_id)
        lease_count = sum(self._release_lease(session, lease_id) for lease_id in lease_ids)
        slot_count = 0
        for slot, generation in slots:
            # What a remote session is granted, its WriteChunks are filling: only
            # they know when a slot is out of use.
            if session.granted.get(slot) == generation and not session.is_remote:
                self._free(session, slot)
                slot_count += 1
        if session.is_orphaned and session.holds_nothing:
            self._clear(session)
        return Released(lease_count, slot_count)

    def give_up_writing(self, session_id: bytes, slots: Iterable[tuple[int, int]]) -> None:
        """Free granted slots that are not to be sealed; those that are gone are passed over."""
        session = self.sessions.find(session_id)
        for slot, generation in slots:
            if session is not None and session.granted.get(slot) == generation:
                self._free(session, slot)

    def _free(self, session: Session, slot: int) -> None:
        del session.granted[slot]
        self.pool.give_back(slot)

    def _lease(self, session: Session, entries: Sequence[Entry]) -> Lease:
        lease = self.pool.lease(session.session_id, entries)
        session.lease_ids.add(lease.lease_id)
        return lease

    def _lease_of(self, session: Session, lease_id: int) -> Lease | None:
        """The session's own lease of this id; None for id 0. Raises FailedPrecondition."""
        if lease_id == 0:
            return None
        lease = self.pool.leases.get(lease_id)
        if lease is None or lease.session_id != session.session_id:
            raise FailedPrecondition(
                f"lease {lease_id} is not held by this session", reason="NO_LEASE"
            )
        return lease

    def _release_lease(self, session: Session, lease_id: int) -> bool:
        if lease_id not in session.lease_ids:
            return False
        session.lease_ids.discard(lease_id)
        lease = self.pool.leases.get(lease_id)
        if lease is None:
            raise RuntimeError(f"lease {lease_id} of a session is not in the lease table")
        self.pool.unlease(lease)
        return True

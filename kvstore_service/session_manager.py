"""Sessions with their grants and leases, from attach to release.

A session ends when its client is silent or says so. What it held is reused only after its
client provably touches nothing any more. This module knows no tokens and no payload.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvstore_service.pool.chunk_pool import ChunkPool
from kvstore_service.pool.leases import Lease
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.pool.recovered_state import UNKNOWN_WRITER, EarlierSession
from kvstore_service.sessions import ProcessIdentity, Session
from splitpoint.arena.format import ID_BYTES
from splitpoint.config import format_size
from splitpoint.errors import FailedPrecondition, NotFound, ResourceExhausted

SESSION_LIMIT = 1024
# Most names of outcomes that are told apart, each a label of a metric; and the name of all others.
OUTCOME_NAMES = 64
OTHER_OUTCOME = "other"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Released:
    lease_count: int
    slot_count: int


class SessionManager:
    """All sessions of one pool that are open or still hold something.

    Args:
        earlier: sessions of an earlier store. They start as orphans, since their clients
            may still be writing.
        clock: monotonic seconds.
        lease_seconds: seconds without a keep-alive after which a session expires.
        is_present: returns True if the client of a session may still touch the arena.

    Attributes:
        outcomes: sums over all sessions since the start, by name.
    """

    def __init__(
        self,
        pool: ChunkPool,
        earlier: Mapping[bytes, EarlierSession],
        *,
        clock: Callable[[], float],
        lease_seconds: float,
        is_present: Callable[[bytes], bool],
    ) -> None:
        self.outcomes = Counter({OTHER_OUTCOME: 0})
        self.lease_seconds = lease_seconds
        self._pool = pool
        self._clock = clock
        self._is_present = is_present
        self._sessions = {
            session_id: Session(
                session_id=session_id,
                client_name="of an earlier store",
                process=writer.process,
                deadline=clock(),
                is_orphaned=True,
                granted=dict(writer.granted),
            )
            for session_id, writer in earlier.items()
        }
        self.sweep()

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    # -- lookup --------------------------------------------------------------------------

    def known(self, session_id: bytes) -> Session:
        """Return an open or orphaned session. Raises NotFound."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound("unknown session: attach again", reason="UNKNOWN_SESSION")
        return session

    def live(self, session_id: bytes) -> Session:
        """Return an open session. Raises NotFound, and FailedPrecondition if it expired."""
        session = self.known(session_id)
        if session.is_orphaned or self.seconds_left(session) <= 0:
            raise FailedPrecondition("the session expired: attach again", reason="SESSION_EXPIRED")
        return session

    def arena_user(self, session_id: bytes) -> Session:
        """Return an open session that may use the arena.

        Its client must hold its presence lock, or the store could not tell later that the
        client is gone. A remote client touches nothing itself and needs none.
        """
        session = self.live(session_id)
        if not session.is_remote and not self._is_present(session_id):
            raise FailedPrecondition(
                "the session's presence lock on the arena file is not held", reason="NOT_PRESENT"
            )
        return session

    def seconds_left(self, session: Session) -> float:
        return session.deadline - self._clock()

    # -- from attach to the end ----------------------------------------------------------

    def attach(
        self,
        client_name: str,
        process: ProcessIdentity,
        *,
        layout_hash: bytes = b"",
        previous_session_id: bytes = b"",
        page_bytes: int = 0,
    ) -> Session:
        """Open a session, and free what the caller's previous session held.

        Raises FailedPrecondition if the layout differs, if pages of `page_bytes` do not fit, or if
        the previous session belongs to another process; ResourceExhausted if there are too many
        sessions.
        """
        if layout_hash and layout_hash != self._pool.layout.layout_hash:
            raise FailedPrecondition(
                "the store's arena has another layout than the caller was built for",
                reason="LAYOUT_MISMATCH",
                layout=self._pool.layout.to_json(),
            )
        if page_bytes > self._pool.layout.page_bytes:
            wanted, slots = format_size(page_bytes), format_size(self._pool.layout.page_bytes)
            _log.warning("%r is refused: its pages have %s, slots %s", client_name, wanted, slots)
            raise FailedPrecondition(
                f"pages of {wanted} do not fit into the store's slots of {slots}: give this engine "
                "a store of its own, or start the store anew with --page-size",
                reason="PAGES_DO_NOT_FIT",
                page_bytes=self._pool.layout.page_bytes,
            )
        # No caller can acknowledge the end of unknown writers.
        is_known = previous_session_id != UNKNOWN_WRITER
        previous = self._sessions.get(previous_session_id) if is_known else None
        if previous is not None:
            if previous.process != process:
                raise FailedPrecondition(
                    "previous_session_id belongs to another process",
                    reason="FOREIGN_SESSION",
                )
            self._clear(previous)
        if len(self._sessions) >= SESSION_LIMIT:
            raise ResourceExhausted(
                f"{SESSION_LIMIT} sessions are open already",
                retry_after_seconds=self.lease_seconds,
                reason="TOO_MANY_SESSIONS",
            )
        session = Session(
            session_id=secrets.token_bytes(ID_BYTES),
            client_name=client_name,
            process=process,
            deadline=self._clock() + self.lease_seconds,
        )
        self._sessions[session.session_id] = session
        return session

    def keep_alive(self, session_id: bytes) -> float:
        """Extend a session; return the seconds until the next keep-alive is due."""
        session = self.live(session_id)
        session.deadline = self._clock() + self.lease_seconds
        return self.seconds_left(session)

    def note_outcomes(self, session: Session, outcomes: dict[str, int]) -> None:
        """Note what a client counted since its session began, by name. Empty: nothing new."""
        if not outcomes:
            return
        for name, count in outcomes.items():
            is_label = name in self.outcomes or len(self.outcomes) < OUTCOME_NAMES
            new = max(0, count - session.outcomes.get(name, 0))
            self.outcomes[name if is_label else OTHER_OUTCOME] += new
        session.outcomes = outcomes

    def end(self, session_id: bytes) -> None:
        """Orphan a session whose stream ended. Unknown sessions are ignored."""
        session = self._sessions.get(session_id)
        if session is not None and not session.is_orphaned:
            self._orphan(session)

    def sweep(self) -> None:
        """Expire silent sessions, and free what belonged to processes that are gone."""
        for session in self:
            if not session.is_orphaned and self.seconds_left(session) <= 0:
                self._orphan(session)
        for session in self:
            if not session.is_orphaned or session.session_id == UNKNOWN_WRITER:
                continue
            if not self._is_present(session.session_id):
                self._clear(session)

    def close(self) -> None:
        """End every session. Slots that are being written stay quarantined in the file: their
        writers live on, and a store that adopts the arena has to check for them."""
        for session in self:
            self.end(session.session_id)
        self._sessions.clear()

    def _orphan(self, session: Session) -> None:
        """Keep what the session holds until its client touches nothing any more.

        A remote client cannot touch the arena: what it held is free at once.
        """
        session.is_orphaned = True
        for slot in session.granted:
            self._pool.quarantine(slot)
        if session.is_remote or session.holds_nothing:
            self._clear(session)

    def _clear(self, session: Session) -> None:
        """Free all that a session holds, and remove it. Every session but those of a closed
        store ends here.

        Call it only if the client touches nothing any more: it said so, its process is gone,
        or the session holds nothing.
        """
        for slot in list(session.granted):
            self.free(session, slot)
        for lease_id in list(session.lease_ids):
            self.release_lease(session, lease_id)
        del self._sessions[session.session_id]

    # -- grants and leases ---------------------------------------------------------------

    def release(
        self,
        session_id: bytes,
        lease_ids: Sequence[int],
        slots: Sequence[tuple[int, int]],
        used: Sequence[tuple[int, int]] = (),
    ) -> Released:
        """End leases and give back unsealed slots (slot, generation) of the session.

        Chunks of these leases in `used` slots count as used once more.

        Ids that the session does not hold are ignored. An orphaned session may release,
        too: its client says that it does not touch these any more.
        """
        session = self.known(session_id)
        self._use(session, lease_ids, used)
        lease_count = sum(self.release_lease(session, lease_id) for lease_id in lease_ids)
        slot_count = 0
        for slot, generation in slots:
            if session.granted.get(slot) == generation:
                self.free(session, slot)
                slot_count += 1
        if session.is_orphaned and session.holds_nothing:
            self._clear(session)
        return Released(lease_count, slot_count)

    def _use(
        self, session: Session, lease_ids: Sequence[int], used: Sequence[tuple[int, int]]
    ) -> None:
        leases = (self._pool.leases.get(each) for each in session.lease_ids.intersection(lease_ids))
        leased = {slot for lease in leases if lease is not None for slot in lease.slots}
        found = [self._pool.find(slot) for slot, _ in used if slot in leased]
        generations = dict(used)
        self._pool.use(
            [each for each in found if each and each.generation == generations[each.slot]]
        )

    def give_up_writing(self, session_id: bytes, slots: Iterable[tuple[int, int]]) -> None:
        """Free slots that will not be sealed. Slots that are no longer granted are ignored."""
        session = self._sessions.get(session_id)
        for slot, generation in slots:
            if session is not None and session.granted.get(slot) == generation:
                self.free(session, slot)

    def free(self, session: Session, slot: int) -> None:
        """Free a granted slot that will not be sealed."""
        del session.granted[slot]
        self._pool.grants.give_back(slot)

    def lease(self, session: Session, entries: Sequence[Entry]) -> Lease:
        """Protect chunks from eviction until the session releases the lease, or ends."""
        lease = self._pool.lease(session.session_id, entries)
        session.lease_ids.add(lease.lease_id)
        return lease

    def lease_of(self, session: Session, lease_id: int) -> Lease | None:
        """Return the session's lease of this id. None for id 0. Raises FailedPrecondition."""
        if lease_id == 0:
            return None
        lease = self._pool.leases.get(lease_id)
        if lease is None or lease.session_id != session.session_id:
            raise FailedPrecondition(
                f"lease {lease_id} is not held by this session", reason="NO_LEASE"
            )
        return lease

    def release_lease(self, session: Session, lease_id: int) -> bool:
        """Release a lease. Return True if the session held it."""
        if lease_id not in session.lease_ids:
            return False
        session.lease_ids.discard(lease_id)
        lease = self._pool.leases.get(lease_id)
        if lease is None:
            raise RuntimeError(f"lease {lease_id} of a session is not in the lease table")
        self._pool.unlease(lease)
        return True

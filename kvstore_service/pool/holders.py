"""Who holds what of the pool: sessions with their grants and leases, from attach to release.

A session ends when it is silent or says so; what it held is used again only once its
holder provably touches nothing any more. Knows no tokens and no payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore_service.pool.chunk_pool import ChunkPool
from kvstore_service.pool.leases import Lease
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.recovery.recovery import UNKNOWN_WRITER
from kvstore_service.sessions import ProcessIdentity, Session, SessionTable
from splitpoint.errors import FailedPrecondition


@dataclass(frozen=True, slots=True)
class Released:
    lease_count: int
    slot_count: int


class Holders:
    """The sessions of one pool, those of an earlier store included: what a store is built on.

    Args:
        is_present: whether the holder of a session may still touch the arena.
    """

    def __init__(
        self, pool: ChunkPool, sessions: SessionTable, is_present: Callable[[bytes], bool]
    ) -> None:
        self.pool = pool
        self.sessions = sessions
        self._is_present = is_present
        for session_id, holder in pool.findings.holders.items():
            sessions.restore(session_id, holder.process, dict(holder.granted))
        self.sweep()

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
        if layout_hash and layout_hash != self.pool.layout.layout_hash:
            raise FailedPrecondition(
                "the store's arena has another layout than the caller was built for",
                reason="LAYOUT_MISMATCH",
                layout=self.pool.layout.to_json(),
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

    # -- what they hold ------------------------------------------------------------------

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
        """A granted slot is not to be sealed."""
        del session.granted[slot]
        self.pool.give_back(slot)

    def _lease(self, session: Session, entries: Sequence[Entry]) -> Lease:
        """Protect chunks from eviction until the session gives the lease up, or ends."""
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
        """Whether the session held it."""
        if lease_id not in session.lease_ids:
            return False
        session.lease_ids.discard(lease_id)
        lease = self.pool.leases.get(lease_id)
        if lease is None:
            raise RuntimeError(f"lease {lease_id} of a session is not in the lease table")
        self.pool.unlease(lease)
        return True

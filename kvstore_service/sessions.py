"""Sessions of the store's clients. What a session holds in the arena is `SessionManager`'s work."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore_service.idempotency import AnswerCache


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Process id and start time in clock ticks since boot, as the client gave them."""

    process_id: int
    start_ticks: int


# Stands for a client on another host, which maps nothing.
REMOTE = ProcessIdentity(0, 0)


@dataclass(slots=True, eq=False)
class Session:
    """One client.

    Attributes:
        deadline: clock value at which the session expires without a keep-alive.
        is_orphaned: the session may start nothing more, but what it holds stays protected
            until its client provably touches nothing any more.
        granted: unsealed slots and their generations.
        query_count, hit_count: tokens or pages that its matches asked for, and found.
        outcomes: what the client counted, by name, as it last told.
    """

    session_id: bytes
    client_name: str
    process: ProcessIdentity
    deadline: float
    is_orphaned: bool = False
    has_keep_alive: bool = False
    granted: dict[int, int] = field(default_factory=dict)
    lease_ids: set[int] = field(default_factory=set)
    answers: AnswerCache = field(default_factory=AnswerCache)
    query_count: int = 0
    hit_count: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)

    @property
    def is_remote(self) -> bool:
        """True if the client maps nothing: only the store touches slots for it."""
        return self.process == REMOTE

    @property
    def holds_nothing(self) -> bool:
        return not self.granted and not self.lease_ids

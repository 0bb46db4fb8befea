"""Sessions: who may use the store, until when, and what each was answered.

Open sessions expire unless they are kept alive; the clock is injected and
monotonic. An orphaned session may start nothing, but what it holds stays
protected until its holder is known to be done. What a session holds in the
arena is the store's business.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from splitpoint.arena.format import ID_BYTES
from splitpoint.errors import (
    AlreadyExists,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    SplitpointError,
)

SESSION_LIMIT = 1024
# Retries come within seconds; a busy worker makes some hundred calls a second.
ANSWER_LIMIT = 2048
ANSWER_BYTES_LIMIT = 8 << 20

Answer = bytes | SplitpointError


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Process id and start time in clock ticks since boot, as the client gave them."""

    process_id: int
    start_ticks: int


# Stands for a client on another host, which maps nothing.
REMOTE = ProcessIdentity(0, 0)


class AnswerBook:
    """What a session was answered, by request id: the newest calls, in bounded memory."""

    def __init__(self, limit: int = ANSWER_LIMIT, bytes_limit: int = ANSWER_BYTES_LIMIT) -> None:
        self._limit = limit
        self._bytes_limit = bytes_limit
        self._bytes = 0
        self._answers: OrderedDict[bytes, tuple[bytes, Answer]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def recall(self, request_id: bytes, digest: bytes) -> Answer | None:
        """The first answer to this request, None if it is new.

        `digest` stands for the request's content: the same id with other
        content raises AlreadyExists.
        """
        known = self._answers.get(request_id)
        if known is None:
            return None
        if known[0] != digest:
            raise AlreadyExists("this request_id was used for another request")
        return known[1]

    def remember(self, request_id: bytes, digest: bytes, answer: Answer) -> None:
        replaced = self._answers.get(request_id)
        if replaced is not None:
            self._bytes -= _size(replaced[1])
        self._answers[request_id] = (digest, answer)
        self._bytes += _size(answer)
        while len(self._answers) > self._limit or (
            self._bytes > self._bytes_limit and len(self._answers) > 1
        ):
            _, (_, oldest) = self._answers.popitem(last=False)
            self._bytes -= _size(oldest)


def _size(answer: Answer) -> int:
    return len(answer) if isinstance(answer, bytes) else 0


@dataclass(slots=True, eq=False)
class Session:
    """One client. `granted` are its unsealed slots with their generations.

    `ended` is set when the session is forgotten.
    """

    session_id: bytes
    client_name: str
    process: ProcessIdentity
    deadline: float
    is_orphaned: bool = False
    has_keep_alive: bool = False
    granted: dict[int, int] = field(default_factory=dict)
    lease_ids: set[int] = field(default_factory=set)
    answers: AnswerBook = field(default_factory=AnswerBook)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_remote(self) -> bool:
        """Whether its client maps nothing: only the store touches slots for it."""
        return self.process == REMOTE

    @property
    def holds_nothing(self) -> bool:
        return not self.granted and not self.lease_ids


class SessionTable:
    """All sessions that are open or still hold something."""

    def __init__(
        self,
        clock: Callable[[], float],
        lease_seconds: float,
    ) -> None:
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._sessions: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def open(self, client_name: str, process: ProcessIdentity) -> Session:
        """Raises ResourceExhausted when there are too many."""
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

    def restore(
        self, session_id: bytes, process: ProcessIdentity, granted: dict[int, int]
    ) -> Session:
        """A session of an earlier store, orphaned: its holder may still be writing."""
        session = Session(
            session_id=session_id,
            client_name="of an earlier store",
            process=process,
            deadline=self._clock(),
            is_orphaned=True,
            granted=granted,
        )
        self._sessions[session_id] = session
        return session

    def find(self, session_id: bytes) -> Session | None:
        return self._sessions.get(session_id)

    def known(self, session_id: bytes) -> Session:
        """Open or orphaned. Raises NotFound."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NotFound("unknown session: attach again", reason="UNKNOWN_SESSION")
        return session

    def live(self, session_id: bytes) -> Session:
        """Raises NotFound, and FailedPrecondition when it ended or its time is over."""
        session = self.known(session_id)
        if session.is_orphaned or self.seconds_left(session) <= 0:
            raise FailedPrecondition("the session expired: attach again", reason="SESSION_EXPIRED")
        return session

    def keep_alive(self, session: Session) -> None:
        session.deadline = self._clock() + self.lease_seconds

    def seconds_left(self, session: Session) -> float:
        return session.deadline - self._clock()

    def expired(self) -> list[Session]:
        """Sessions whose time is over but that are not orphaned yet."""
        return [s for s in self if not s.is_orphaned and self.seconds_left(s) <= 0]

    def orphans(self) -> list[Session]:
        return [s for s in self if s.is_orphaned]

    def remove(self, session: Session) -> None:
        del self._sessions[session.session_id]
        session.ended.set()

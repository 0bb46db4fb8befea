"""A request between its worker and its readers: one transcript, many cursors.

Clients choose request ids, so an id means something within its tenant only: no
tenant can attach to, collide with or find out about the request of another.

Knows neither gRPC nor workers. Who produces calls `append`, `complete`, `fail`;
who consumes attaches a `Reader`. A reader that falls behind makes `is_paused`
true, the last one to leave an unfinished request makes it abandoned; what
follows from either is its owner's business.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from scheduler_service.api.output import Transcript
from scheduler_service.api.validation import GenerateInput
from scheduler_service.limits import Limits
from splitpoint.errors import AlreadyExists, ResourceExhausted, SplitpointError
from splitpoint.observe.tracing import NO_SPAN, Span
from splitpoint.v1 import scheduler_pb2
from splitpoint.words import counted


class Owner(Protocol):
    """Who runs a request, and is told what its readers do."""

    def on_pause(self, request: Request, paused: bool) -> None: ...

    def on_abandoned(self, request: Request) -> None: ...


@dataclass(slots=True, eq=False)
class Times:
    """Seconds on the scheduler's monotonic clock. None: not yet."""

    arrived: float
    dispatched: float | None = None
    first_token: float | None = None
    # Of a reader that keeps up: a pause that it caused is no gap between tokens.
    last_token: float | None = None
    # Since when it waits for a place.
    queued: float | None = None
    # When the store was last asked for its prefix.
    peeked: float | None = None
    # Since when it waits without any worker that could run it.
    unplaceable: float | None = None

    def tokens_came(self, now: float) -> None:
        self.first_token = now if self.first_token is None else self.first_token
        self.last_token = now


# Characters of a client's id that stay readable in the name of a tenant's request;
# with `~` and 24 random digits that makes 64, as many as an id may have.
_READABLE_CHARACTERS = 39


class Request:
    """One request that is known by its id within its tenant."""

    def __init__(
        self,
        request: GenerateInput,
        transcript: Transcript,
        owner: Owner,
        *,
        arrival: int,
        now: float,
        lag_tokens: int,
        span: Span = NO_SPAN,
    ) -> None:
        self.input = request
        # From its arrival to its end; whoever runs it ends it.
        self.span = span
        # What workers and logs call it: no two tenants' requests share it, and
        # nobody can choose an id that becomes another's.
        self.request_id = _name_of(request)
        self.transcript = transcript
        self.arrival = arrival
        self.times = Times(arrived=now)
        self.losses = 0
        self.is_paused = False
        self.ended_at: float | None = None
        self._complete: scheduler_pb2.GenerateComplete | None = None
        self._error: SplitpointError | None = None
        self._owner = owner
        self._lag_tokens = lag_tokens
        self._readers: set[Reader] = set()

    @property
    def key(self) -> tuple[str, str]:
        """Tenant, and the id that its client chose."""
        return self.input.tenant, self.input.request_id

    @property
    def has_ended(self) -> bool:
        return self.ended_at is not None

    @property
    def has_completed(self) -> bool:
        """Ended well, so that whoever attaches gets the same answer."""
        return self._complete is not None

    # -- the producing side ---------------------------------------------------------

    def produced(self) -> None:
        """The transcript grew."""
        self._wake_readers()
        self._update_pause()

    def complete(self, message: scheduler_pb2.GenerateComplete, now: float) -> None:
        self._complete = message
        self.ended_at = now
        self._wake_readers()

    def fail(self, error: SplitpointError, now: float) -> None:
        self._error = error
        self.ended_at = now
        self._wake_readers()

    # -- the consuming side ---------------------------------------------------------

    @contextmanager
    def attach(self) -> Iterator[Reader]:
        """A reader from token 0 on, for the length of the context."""
        reader = Reader(self)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)
            if not self.has_ended:
                if self._readers:
                    self._update_pause()
                else:
                    self._owner.on_abandoned(self)

    def reader_moved(self) -> None:
        self._update_pause()

    def next_response(self, cursor: int) -> scheduler_pb2.GenerateResponse | None:
        """What a reader at `cursor` gets next; None: nothing yet. Raises the request's error."""
        if cursor < len(self.transcript):
            return scheduler_pb2.GenerateResponse(chunk=self.transcript.chunk(cursor))
        if self._error is not None:
            raise self._error
        if self._complete is not None:
            return scheduler_pb2.GenerateResponse(complete=self._complete)
        return None

    def _wake_readers(self) -> None:
        for reader in self._readers:
            reader.wake()

    def _update_pause(self) -> None:
        """Pause beyond the lag bound, go on at half of it."""
        slowest = min((reader.cursor for reader in self._readers), default=len(self.transcript))
        lag = len(self.transcript) - slowest
        limit = self._lag_tokens // 2 if self.is_paused else self._lag_tokens
        paused = lag > limit and not self.has_ended
        if paused != self.is_paused:
            self.is_paused = paused
            self.times.last_token = None
            self._owner.on_pause(self, paused)


def _name_of(request: GenerateInput) -> str:
    if not request.tenant:
        return request.request_id
    return f"{request.request_id[:_READABLE_CHARACTERS]}~{secrets.token_hex(12)}"


class Reader:
    """One client's place in a request. Iterate it: messages, the last one `complete`."""

    def __init__(self, request: Request) -> None:
        self.cursor = 0
        self._taken = 0  # tokens of the message handed out last
        self._is_done = False
        self._request = request
        self._news = asyncio.Event()

    def wake(self) -> None:
        self._news.set()

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> scheduler_pb2.GenerateResponse:
        """Asking for more says that the message before was taken. Raises the request's error."""
        if self._is_done:
            raise StopAsyncIteration
        if self._taken:
            self.cursor += self._taken
            self._taken = 0
            self._request.reader_moved()
        while True:
            self._news.clear()
            response = self._request.next_response(self.cursor)
            if response is not None:
                self._taken = len(response.chunk.token_ids)
                self._is_done = response.HasField("complete")
                return response
            await self._news.wait()


@dataclass(slots=True)
class RequestTable:
    """Requests by tenant and id: those that run, and for a while those that completed."""

    limits: Limits
    _known: dict[tuple[str, str], Request] = field(default_factory=dict)
    # Completed ones, the oldest first.
    _completed: OrderedDict[tuple[str, str], Request] = field(default_factory=OrderedDict)
    # Those that have not ended, by tenant.
    _unended: dict[str, set[Request]] = field(default_factory=dict)

    def find(self, request: GenerateInput) -> Request | None:
        """The request of this id, if its body is the same. Raises AlreadyExists."""
        known = self._known.get((request.tenant, request.request_id))
        if known is not None and known.input.body_digest != request.body_digest:
            raise AlreadyExists(
                "this request_id belongs to a request with another body", reason="REQUEST_ID_TAKEN"
            )
        return known

    def check_quota(self, tenant: str) -> None:
        """Raises ResourceExhausted when the tenant has as many requests as it may."""
        most = self.limits.tenant_requests
        if most is not None and len(self._unended.get(tenant, ())) >= most:
            run = counted(most, "request runs or waits", "requests run or wait")
            raise ResourceExhausted(
                f"{run} already of this tenant's, its most",
                reason="TENANT_QUOTA",
                retry_after_seconds=self.limits.retry_seconds,
                tenant_requests=most,
            )

    def add(self, request: Request) -> None:
        self._known[request.key] = request
        self._unended.setdefault(request.input.tenant, set()).add(request)

    def ended(self, request: Request) -> None:
        """Remember what completed; forget what did not, so that it may be tried again."""
        unended = self._unended.get(request.input.tenant, set())
        unended.discard(request)
        if not unended:
            self._unended.pop(request.input.tenant, None)
        if request.has_completed:
            self._completed[request.key] = request
        elif self._known.get(request.key) is request:
            del self._known[request.key]

    def expire(self, now: float) -> None:
        """Forget completed requests that are too old or too many."""
        while self._completed:
            oldest = next(iter(self._completed.values()))
            age = now - (oldest.ended_at or now)
            if (
                age < self.limits.remember_seconds
                and len(self._completed) <= self.limits.remember_count
            ):
                break
            self._completed.popitem(last=False)
            del self._known[oldest.key]

    def running(self) -> list[Request]:
        return [request for request in self._known.values() if not request.has_ended]

    def __len__(self) -> int:
        return len(self._known)

"""One HTTP exchange: the request's headers and body, and its answer, whole or as a stream.

The bytes of all bodies that are being read at a time are bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from gateway_service.openai.answers import dumped, error_frame
from gateway_service.openai.errors import ErrorAnswer, HttpError
from gateway_service.openai.json_body import parsed
from gateway_service.settings import Limits
from splitpoint.config import format_size
from splitpoint.errors import ResourceExhausted
from splitpoint.tasks import FileThread


class ByteBudget:
    """A number of bytes that requests share."""

    def __init__(self, most: int, retry_seconds: float) -> None:
        self._most = most
        self._retry_seconds = retry_seconds
        self.used = 0

    @contextmanager
    def taking(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes bytes; they are given back at the end of the block.

        It raises ResourceExhausted if there are too few.
        """
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self.used + size > self._most:
                raise ResourceExhausted(
                    "too many large bodies are being read",
                    reason="BODIES_TOO_LARGE",
                    retry_after_seconds=self._retry_seconds,
                )
            self.used += size
            taken += size

        try:
            yield take
        finally:
            self.used -= taken


Headers = list[tuple[bytes, bytes]]

WARNING = b"x-splitpoint-warning"
_JSON = (b"content-type", b"application/json")
STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    # Proxies such as nginx would collect the events.
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client has left, so nothing can be sent."""


class Exchange:
    """A request that is being answered.

    Attributes:
        status: of the answer; 0 until it began.
        error: why it failed, also after its head was sent with status 200; None if it did not.
        request_id: of the answer, for its header and the log; empty if it has none.
        owner: the owner of what the exchange leaves in the gateway; empty without keys.
        ignored: fields of the body that changed nothing; the header of WARNING names them.
    """

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, limits: Limits, budget: ByteBudget
    ) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._limits = limits
        self._budget = budget
        self.status = 0
        self.error: ErrorAnswer | None = None
        self.request_id = ""
        self.owner = ""
        self.ignored: Sequence[str] = ()
        # For errors of the scheduler; None until the body is read (`errors.error_answer`).
        self.parameter_names: Mapping[str, str] | None = None
        self.is_gone = False
        self.is_ended = False
        self._failed: Callable[[Mapping[str, Any]], bytes] = error_frame
        # On the monotonic clock; and how much later the first event of a stream was sent.
        self.began = time.monotonic()
        self.first_event_seconds: float | None = None

    # -- the request ---------------------------------------------------------------------------

    def headers(self, name: bytes) -> list[str]:
        """Return the values of a header, whose name is in lower case."""
        return [value.decode("latin-1") for key, value in self.scope["headers"] if key == name]

    async def json(self) -> Any:
        """Return the body's JSON value.

        Raises InvalidArgument, HttpError (408, 411 to 415), ResourceExhausted, ClientGone.
        """
        kinds = self.headers(b"content-type")
        # A page of another site can send other kinds without asking this server first.
        kind = kinds[0].partition(";")[0].strip().lower() if kinds else ""
        if kind != "application/json":
            raise HttpError(
                415, "the content-type must be application/json", reason="UNSUPPORTED_MEDIA_TYPE"
            )
        if self.headers(b"content-encoding") not in ([], ["identity"]):
            raise HttpError(415, "bodies must not be compressed", reason="UNSUPPORTED_ENCODING")
        lengths = self.headers(b"content-length")
        if lengths and lengths[0].isdigit():
            self._check_size(int(lengths[0]))
        with self._budget.taking() as take:
            try:
                async with asyncio.timeout(self._limits.body_seconds):
                    body = await self._body(take)
            except TimeoutError:
                raise HttpError(
                    408,
                    f"the body did not arrive completely within {self._limits.body_seconds:g} s",
                    reason="BODY_TIMEOUT",
                ) from None
            return parsed(body)

    async def _body(self, take: Callable[[int], None]) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_gone = True
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            self._check_size(size)
            take(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body of an upload as it comes; its size is the caller's to bound.

        Raises HttpError (408), ClientGone.
        """
        loop, limits = asyncio.get_running_loop(), self._limits
        end = loop.time() + limits.upload_seconds
        has_more = True
        while has_more:
            try:
                async with asyncio.timeout_at(min(end, loop.time() + limits.body_seconds)):
                    message = await self._receive()
            except TimeoutError:
                raise HttpError(
                    408, "the body did not arrive in time", reason="BODY_TIMEOUT"
                ) from None
            if message["type"] == "http.disconnect":
                self.is_gone = True
                raise ClientGone
            has_more = message.get("more_body", False)
            if part := message.get("body", b""):
                yield part

    def _check_size(self, size: int) -> None:
        most = self._limits.body_bytes
        if size > most:
            raise HttpError(
                413, f"the body has more than {format_size(most)}", reason="BODY_TOO_LARGE"
            )

    @asynccontextmanager
    async def while_connected(self) -> AsyncIterator[None]:
        """Cancel this block when the client leaves, and raise ClientGone then.

        The body must have been read, or there is none.
        """
        task = asyncio.current_task()
        assert task is not None
        watching = asyncio.create_task(self._watch(task))
        try:
            yield
        except asyncio.CancelledError:
            if self.is_gone:
                task.uncancel()
                raise ClientGone from None
            raise
        finally:
            watching.cancel()

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        message: Message = {"type": ""}
        while message["type"] != "http.disconnect":
            message = await self._receive()
        if not self.is_ended:
            self.is_gone = True
            task.cancel()

    # -- the answer ----------------------------------------------------------------------------

    async def respond(
        self, value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a JSON value as the whole answer."""
        await self.respond_bytes(dumped(value), _JSON[1], status=status, headers=headers)

    async def respond_bytes(
        self,
        body: bytes,
        content_type: bytes,
        *,
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send the whole answer."""
        more = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        length = (b"content-length", str(len(body)).encode())
        await self._begin(status, [(b"content-type", content_type), length, *more])
        await self.end(body)

    async def respond_pieces(self, pieces: Iterator[bytes], size: int) -> None:
        """Send a file of this many bytes; a thread reads its pieces as the client takes them."""
        head = [
            (b"content-type", b"application/octet-stream"),
            (b"x-content-type-options", b"nosniff"),
            (b"content-length", str(size).encode()),
        ]
        await self._begin(200, head)
        async with FileThread() as files:
            # The last piece ends the answer: the client may ask again as soon as it has all of it.
            while (piece := await files.run(lambda: next(pieces, b""))) and len(piece) < size:
                await self.write(piece)
                size -= len(piece)
        await self.end(piece)

    async def fail(self, error: ErrorAnswer) -> None:
        """Send an error, as the answer or, once a stream has begun, as its last event."""
        if self.is_gone or self.is_ended:
            return
        self.error = error
        if not self.status:
            await self.respond(error.body, status=error.status, headers=error.headers)
        else:
            await self.end(self._failed(error.error))

    async def begin_stream(self, failed: Callable[[Mapping[str, Any]], bytes]) -> None:
        """Send the head of a stream of events.

        `failed`: returns its last event if the stream fails, for OpenAI's object of the error.
        """
        self._failed = failed
        self.first_event_seconds = time.monotonic() - self.began
        await self._begin(200, STREAM_HEADERS)

    async def write(self, body: bytes) -> None:
        """Send a part of a stream; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        """Send the last part."""
        self.is_ended = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def _begin(self, status: int, headers: Headers) -> None:
        self.status = status
        if self.request_id:
            headers = [*headers, (b"x-request-id", self.request_id.encode())]
        if self.ignored:
            headers = [*headers, (WARNING, f"ignored: {', '.join(self.ignored)}".encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

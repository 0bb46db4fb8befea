"""The schedulers that a client may call, and the calls of one generation on them.

A generation is its first call, and those that go on after a scheduler was lost. Waits for nothing
and knows neither API of gRPC: the clients read the calls and wait between them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2_grpc

from splitpoint.client import caller_spans, requests
from splitpoint.client.answers import Completion, CompletionBuilder, Tokens
from splitpoint.client.caller_spans import Metadata
from splitpoint.config import counted
from splitpoint.errors import Cancelled, DeadlineExceeded, Retryable, SplitpointError, Unavailable
from splitpoint.transport.statuses import error_of
from splitpoint.transport.tls import Identity
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import scheduler_pb2_grpc

INFERENCE: Any = scheduler_pb2_grpc.InferenceServiceStub
ADMIN: Any = scheduler_pb2_grpc.AdminServiceStub
HEALTH: Any = health_pb2_grpc.HealthStub

# Is told the error of a scheduler that was lost or is full, and the address that is tried next.
OnRetry = Callable[[Retryable, str], None]


class Schedulers:
    """One or several schedulers, by index. Threads may share them.

    Calls go to the one that answered last; several are tried in turn.

    Args:
        retry_seconds: how long a generation tries to go on. 0: no call is ever repeated elsewhere.
        on_retry: is called before a generation goes on.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        open_channel: Callable[..., Any],
        identity: Identity,
        *,
        retry_seconds: float,
        on_retry: OnRetry | None,
    ) -> None:
        self.addresses = tuple(addresses)
        self.retry_seconds = retry_seconds
        self.on_retry = on_retry
        self.current = 0
        # The message of its last call's error by address, of those that did not answer it.
        self.away: dict[str, str] = {}
        self._is_closed = False
        # With several addresses, one that hangs is left within 3 s.
        has_others = len(self.addresses) > 1
        self._channels = [
            open_channel(each, identity, is_watched=has_others) for each in self.addresses
        ]
        self._stubs = [
            {stub: stub(channel) for stub in (INFERENCE, ADMIN, HEALTH)}
            for channel in self._channels
        ]

    def leave(self, index: int) -> int:
        """Return the scheduler to try after one that failed. Later calls begin there, too."""
        if self.current == index:  # else another call has left it already
            self.current = (index + 1) % len(self.addresses)
        return self.current

    def generate(
        self,
        index: int,
        request: pb.GenerateRequest,
        timeout: float | None,
        metadata: Metadata = (),
    ) -> Any:
        """Start a Generate call. Raises Cancelled if the client was closed."""
        if self._is_closed:
            raise Cancelled("the client was closed")
        method = self.stub(index, INFERENCE, "Generate")
        return caller_spans.generate(method, request, timeout, metadata)

    def stub(self, index: int, service: Any, method: str) -> Any:
        """Return the callable of one method."""
        return getattr(self._stubs[index][service], method)

    def closing(self) -> list[Any]:
        """Return the channels to close; no call starts from now on."""
        self._is_closed = True
        return self._channels


class Round:
    """One unary call: at each scheduler once, until one answers."""

    def __init__(
        self,
        schedulers: Schedulers,
        service: Any,
        name: str,
        request: Message,
        timeout: float,
        metadata: Metadata = (),
    ) -> None:
        self._schedulers = schedulers
        self._metadata = metadata
        self._service = service
        self._name = name
        self._request = request
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._others = len(schedulers.addresses) - 1 if schedulers.retry_seconds > 0 else 0
        self._index = schedulers.current

    def send(self) -> Any:
        """Start the call at the scheduler whose turn it is."""
        stub = self._schedulers.stub(self._index, self._service, self._name)
        timeout = max(0.0, self._deadline - time.monotonic())
        return stub(self._request, timeout=timeout, metadata=self._metadata or None)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Await the call in this block. Translate its error; swallow it if others are left."""
        address = self._schedulers.addresses[self._index]
        try:
            yield
            self._schedulers.away.pop(address, None)
        except grpc.RpcError as error:
            result = error_of(error, address)
            if is_late(result):
                raise DeadlineExceeded(
                    f"{address} did not answer within {self._timeout:g} s"
                ) from error
            if not isinstance(result, Unavailable) or not self._others:
                raise result from error
            self._others -= 1
            self._schedulers.away[address] = result.message
            self._index = self._schedulers.leave(self._index)


def is_late(error: SplitpointError) -> bool:
    """Return True if a call ended by its own deadline, with no word of the server."""
    # gRPC's own text contains these words; the scheduler's texts do not.
    return isinstance(error, DeadlineExceeded) and "deadline exceeded" in error.message.lower()


DEFAULT_RETRY_SECONDS = 10.0
# Pauses between rounds over all addresses: the first, and the longest.
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
# How often a single address that has not answered yet is asked again.
_FIRST_REPEATS = 2
# After this many rounds a pause is the longest.
_DOUBLINGS = 10
# The reason of an UNAVAILABLE that no scheduler sent.
_NO_ANSWER = Unavailable("").reason
# UNAVAILABLE for these reasons is about the request: other schedulers would find the same.
_FINAL_REASONS = frozenset({"TOO_MANY_MOVES"})


def pause_after(rounds: int, hint_seconds: float = 0.0) -> float:
    """Return the seconds to wait after this many rounds over all addresses.

    Random, so that clients of one scheduler do not come back together. `hint_seconds`: of a
    scheduler that is full.
    """
    seconds = _FIRST_PAUSE_SECONDS * 2.0 ** min(rounds - 1, _DOUBLINGS)
    return min(_LONGEST_PAUSE_SECONDS, max(seconds, hint_seconds)) * random.uniform(0.5, 1.0)


class Received(Protocol):
    """What of an answer has come: its tokens, and whether its final message has."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def is_complete(self) -> bool: ...


class Tries:
    """One generation. At most one of its calls is open.

    `tokens_of` numbers the tokens through all calls, so each index comes once.

    Args:
        metadata: sent with each call.
        received: what has come. A caller that does not use `tokens_of` keeps it by itself, and
            calls `progressed` instead.
    """

    def __init__(
        self,
        schedulers: Schedulers,
        request: pb.GenerateRequest,
        timeout: float | None,
        *,
        metadata: Metadata = (),
        received: Received | None = None,
    ) -> None:
        self._schedulers = schedulers
        self._request = request
        self._timeout = timeout
        self._metadata = metadata
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._builder = CompletionBuilder()
        self._received: Received = self._builder if received is None else received
        self._is_closed = False
        # The first call ended early, and others have followed.
        self._goes_on = False
        # Failures since the last message, and when they are too many. None: no failure yet.
        self._failures = 0
        self._give_up_at: float | None = None
        self.is_over = False
        self.pause_seconds = 0.0
        self._index = schedulers.current
        self.call = schedulers.generate(self._index, request, timeout, metadata)

    def progressed(self) -> None:
        """Note that a message came: the failures before it do not count any more."""
        self._failures, self._give_up_at = 0, None

    def tokens_of(self, message: pb.GenerateResponse) -> Tokens | None:
        """Return the tokens or the text of one message; None if it has none.

        Raises Internal for a gap in the token indices.
        """
        self.progressed()
        return self._builder.tokens_of(message)

    def completion(self) -> Completion:
        """Return the whole answer. Raises Internal if the final message is missing."""
        return self._builder.completion()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Read `call` in this block. Then `is_over` is set, or `restart` after `pause_seconds`.

        Raises the call's error if no other scheduler may help, or the time for it is over.
        """
        try:
            yield
            self.is_over = True
        except grpc.RpcError as error:
            self._failed(error)

    def restart(self) -> None:
        """Start the next call. Raises Cancelled after `close`, DeadlineExceeded."""
        if self._is_closed:
            raise Cancelled("the generation was closed")
        remaining = self._remaining()
        if remaining is not None and remaining <= 0:
            raise self._too_late()
        request = requests.resumed(self._request, self._received.token_ids)
        self.call = self._schedulers.generate(self._index, request, remaining, self._metadata)
        if self._is_closed:  # by another thread meanwhile, which saw only the call before
            self.call.cancel()

    def close(self) -> None:
        """Cancel the call, and start no other. Any thread may call this."""
        self._is_closed = True
        self.call.cancel()

    def _failed(self, error: grpc.RpcError) -> None:
        """Choose the next address, or raise the error of the call."""
        result = error_of(error, self._schedulers.addresses[self._index])
        if is_late(result):
            raise self._too_late() from error
        if not isinstance(result, Retryable) or not self._may_pass(result):
            raise result from error
        if self._received.is_complete:
            self.is_over = True  # only the end of the call was lost
            return
        if self._is_closed or not self._may_retry(result):
            raise result from error
        now = time.monotonic()
        if self._give_up_at is None:
            self._give_up_at = now + self._schedulers.retry_seconds
        self.pause_seconds = self._pause(result)
        if now + self.pause_seconds >= self._give_up_at:
            raise self._given_up(result) from error
        if (remaining := self._remaining()) is not None:
            self.pause_seconds = min(self.pause_seconds, max(0.0, remaining))
        self._index = self._schedulers.leave(self._index)
        self._failures += 1
        if not self._is_known:
            return
        self._goes_on = True
        if self._schedulers.on_retry is not None:
            self._schedulers.on_retry(result, self._schedulers.addresses[self._index])

    def _may_pass(self, error: Retryable) -> bool:
        """Return True if the error is not about the request.

        When a scheduler dies, all that it served comes to the others at once. One that is full
        then says when to come again. A request that was never taken is left to the caller.
        """
        if isinstance(error, Unavailable):
            return error.reason not in _FINAL_REASONS
        is_taken = self._goes_on or bool(self._received.token_ids)
        return is_taken and error.retry_after_seconds is not None

    @property
    def _is_known(self) -> bool:
        """True if a scheduler has answered, or there are others."""
        return len(self._schedulers.addresses) > 1 or bool(self._received.token_ids)

    def _may_retry(self, error: Retryable) -> bool:
        """Return True if another call may help.

        A single address that never answered may be a wrong one: it is asked again only a few
        times, and not if a scheduler refused without a time to come again.
        """
        is_final = error.reason != _NO_ANSWER and error.retry_after_seconds is None
        return (
            self._schedulers.retry_seconds > 0
            and (self._is_known or (self._failures < _FIRST_REPEATS and not is_final))
            and requests.fits(requests.resumed(self._request, self._received.token_ids))
        )

    def _pause(self, error: Retryable) -> float:
        """Return the seconds before the next call: none until all addresses were tried."""
        rounds, place = divmod(self._failures + 1, len(self._schedulers.addresses))
        if place or not rounds:
            return 0.0
        # With several, the hint of one that is away does not say when another is back.
        is_heeded = not isinstance(error, Unavailable) or len(self._schedulers.addresses) == 1
        return pause_after(rounds, (error.retry_after_seconds or 0.0) if is_heeded else 0.0)

    def _remaining(self) -> float | None:
        """Return the seconds until the deadline; None if there is none."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the generation did not end within {self._timeout or 0:g} s")

    def _given_up(self, error: Retryable) -> Retryable:
        count = counted(len(self._schedulers.addresses), "scheduler was", "schedulers were")
        return type(error)(
            f"{count} tried for {self._schedulers.retry_seconds:g} s: {error.message}",
            reason=error.reason,
            retry_after_seconds=error.retry_after_seconds,
            **error.metadata,
        )

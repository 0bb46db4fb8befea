"""The schedulers that a client may call: their channels, and which of them comes next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2_grpc

from splitpoint.client import caller_spans
from splitpoint.client.caller_spans import Metadata
from splitpoint.errors import (
    Cancelled,
    DeadlineExceeded,
    Retryable,
    SplitpointError,
    Unavailable,
)
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
        # Of several, one that hangs is left within 3 s.
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

"""What every endpoint does around its own work: the key, bounds, errors and the log."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import ipaddress
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from gateway_service.batch.batches import Batches
from gateway_service.batch.folder import Folder
from gateway_service.endpoints.kept_responses import KeptResponses
from gateway_service.http.exchange import ByteBudget, ClientGone, Exchange
from gateway_service.openai.errors import error_answer
from gateway_service.settings import Limits
from gateway_service.upstream import Models, Upstream
from splitpoint.client.caller_spans import Metadata
from splitpoint.config import is_local_address
from splitpoint.errors import (
    Internal,
    PermissionDenied,
    ResourceExhausted,
    SplitpointError,
    Unauthenticated,
    Unavailable,
)
from splitpoint.observe.logs import for_request
from splitpoint.observe.meters import Meters
from splitpoint.observe.tracing import TRACEPARENT, received_parent
from splitpoint.transport.access import METADATA_KEY, Access

_log = logging.getLogger(__name__)

# nginx's status for a client that left before its answer; only the log and metrics show it.
GONE = 499
_LONGEST_KEY = 4096
# Clients that may call it may generate.
GENERATE = "/splitpoint.v1.InferenceService/Generate"
# Every path without an endpoint.
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Ended:
    """One request that was answered: for the metrics.

    Attributes:
        status: of the error of a stream that failed, although its head had status 200.
        first_event_seconds: None of no stream.
    """

    endpoint: str
    status: int
    seconds: float
    first_event_seconds: float | None = None


class Gateway:
    """What the endpoints share. Of ended requests it keeps `responses` and `batches` only.

    Attributes:
        responses: conversations that clients may go on with.
        batches: files and batches of clients; None: it keeps none.
        access: permitted keys; None: the scheduler alone checks them.
        checks_host: refuse requests for other hosts than this one by name: without keys a page of
            another site could come here through a name of its own that leads to loopback.
        on_ended: called with each request that was answered.
        created: seconds since 1970 at which it started.
        open_count: requests that are being answered.
        is_leaving: it was told to stop, and takes requests until it drains.
    """

    def __init__(
        self,
        upstream: Upstream,
        limits: Limits,
        access: Access | None,
        meters: Meters,
        *,
        checks_host: bool,
    ) -> None:
        self.upstream = upstream
        self.models = Models(upstream)
        self.limits = limits
        self.access = access
        self.meters = meters
        self.checks_host = checks_host
        self.created = int(time.time())
        self.responses = KeptResponses(limits.response_bytes, limits.response_seconds)
        self.batches: Batches | None = None
        self.budget = ByteBudget(limits.all_bodies_bytes, limits.retry_seconds)
        self.open_count = 0
        self.is_leaving = False
        self.is_draining = False
        self.on_ended: Callable[[Ended], None] = lambda ended: None
        self._tasks: set[asyncio.Task[None]] = set()

    def admit(self, exchange: Exchange, method: str) -> Metadata:
        """Return the metadata by which a call is made for the client of an exchange.

        The exchange learns the owner of what it leaves: the tenant; a client without a tenant, or
        one whose key only the scheduler knows, owns it alone. The metadata has the client's key
        and, if the client traces the request, its traceparent.

        Raises Unauthenticated, PermissionDenied, Unavailable, as the scheduler would.
        """
        keys = exchange.headers(b"authorization")
        # gRPC would refuse them in words of its own.
        for key in keys:
            if len(key) > _LONGEST_KEY or not key.isascii() or not key.isprintable():
                raise Unauthenticated("the key is malformed", reason="TOKEN_MALFORMED")
        metadata = tuple((METADATA_KEY, key) for key in keys)
        exchange.owner = self.owner_of(method, metadata)
        parent = received_parent(exchange.headers(TRACEPARENT.encode()))
        return (*metadata, (TRACEPARENT, parent)) if parent else metadata

    def owner_of(self, method: str, metadata: Metadata) -> str:
        """Return the owner of what a client leaves here. Raises as `admit`."""
        if self.access is None:
            keys = [key for _, key in metadata]
            return hashlib.sha256(json.dumps(keys).encode()).hexdigest() if keys else ""
        caller = self.access.admit(method, metadata)
        return f"tenant/{caller.tenant}" if caller.tenant else f"name/{caller.name}"

    def keep_batches(self, folder: Folder) -> None:
        """Serve the files and batches of a folder from now on."""
        owner_of = functools.partial(self.owner_of, GENERATE)
        self.batches = Batches(folder, self.upstream, self.limits, owner_of)
        self.batches.start()

    def check_host(self, exchange: Exchange) -> None:
        """Raise PermissionDenied for a host by another name."""
        hosts = exchange.headers(b"host")
        if self.checks_host and not (len(hosts) == 1 and _is_own_host(hosts[0])):
            raise PermissionDenied(
                "without keys this gateway answers requests for localhost and addresses only",
                reason="HOST_NOT_ALLOWED",
            )

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count a request in this block. Raises Unavailable, ResourceExhausted."""
        if self.is_draining:
            raise Unavailable(
                "the gateway is stopping",
                reason="DRAINING",
                retry_after_seconds=self.limits.retry_seconds,
            )
        if self.open_count >= self.limits.requests:
            raise ResourceExhausted(
                f"{self.limits.requests} requests are being answered",
                reason="TOO_MANY_REQUESTS",
                retry_after_seconds=self.limits.retry_seconds,
            )
        self.open_count += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)
            self.open_count -= 1

    async def leave(self) -> None:
        """Say at /health that no more requests should come, and wait until balancers know."""
        self.is_leaving = True
        await asyncio.sleep(self.limits.drain_seconds)

    async def drain(self) -> None:
        """Take no more requests, and wait until none runs; those that run too long are ended."""
        self.is_leaving = self.is_draining = True
        if self._tasks:
            await asyncio.wait([*self._tasks], timeout=self.limits.grace_seconds)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait([*self._tasks], timeout=self.limits.grace_seconds + 5)


def _is_own_host(host: str) -> bool:
    """Return True for localhost and for an IP address, with or without a port."""
    host = host.lower()
    name, _, port = host.rpartition(":")
    if not port.isdigit() or (":" in name and not name.startswith("[")):
        name = host
    return is_local_address(f"{name}:0") or _is_ip_address(name.strip("[]"))


def _is_ip_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


# Answers an exchange with the metadata of its client.
Handle = Callable[[Gateway, Exchange, Metadata], Awaitable[None]]


class Endpoint:
    """An ASGI application for one path. Starlette calls it directly, without a Request.

    Args:
        name: in the log and the metrics.
        method: the gRPC method that stands for what it does, "/package.Service/Method": clients
            a client that may call that may call this. Empty: every client may.
        is_counted: one of the requests that `Limits.requests` bounds.
    """

    def __init__(
        self,
        gateway: Gateway,
        name: str,
        handle: Handle,
        *,
        method: str = "",
        is_counted: bool = True,
    ) -> None:
        self._gateway = gateway
        self._name = name
        self._handle = handle
        self._method = method
        self._is_counted = is_counted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        exchange = Exchange(scope, receive, send, gateway.limits, gateway.budget)
        try:
            await self._answer(exchange)
        except ClientGone:
            exchange.status = exchange.status or GONE
        except SplitpointError as error:
            await exchange.fail(error_answer(error, exchange.parameter_names))
        except asyncio.CancelledError:
            # `drain` does this: nothing else cancels the task of an exchange.
            await exchange.fail(error_answer(_stopped()))
        except Exception as error:
            await exchange.fail(error_answer(_incident(self._name, error)))
        finally:
            self._end(exchange)

    async def _answer(self, exchange: Exchange) -> None:
        gateway = self._gateway
        gateway.check_host(exchange)
        metadata = gateway.admit(exchange, self._method) if self._method else ()
        if not self._is_counted:
            await self._handle(gateway, exchange, metadata)
            return
        with gateway.place():
            await self._handle(gateway, exchange, metadata)

    def _end(self, exchange: Exchange) -> None:
        seconds = time.monotonic() - exchange.began
        status, code = exchange.status, {}
        if exchange.is_gone:
            status = GONE
        elif exchange.error is not None:
            # Streams, too, whose head has told their client 200.
            status, code = exchange.error.status, {"error": exchange.error.error["code"]}
        self._gateway.on_ended(Ended(self._name, status, seconds, exchange.first_event_seconds))
        if self._is_counted:
            facts = {"endpoint": self._name, "status": status, "seconds": seconds, **code}
            with for_request(exchange.request_id):
                _log.info("request ended", extra={"facts": facts})


def _stopped() -> Unavailable:
    return Unavailable("the gateway is stopping", reason="DRAINING")


def _incident(name: str, error: Exception) -> Internal:
    incident = secrets.token_hex(8)
    _log.error("incident %s in %s", incident, name, exc_info=error, extra={"incident": incident})
    return Internal(f"internal error, incident {incident}", incident=incident)

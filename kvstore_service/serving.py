"""The gRPC server of a store, and what answers it before a store of pages has an arena.

A store of pages that was started without their size has no arena until the first engine attaches
and names it. The server keeps its port meanwhile: only the servicer behind it is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from kvstore_service import validation
from kvstore_service.server import SERVICE_NAME, KvStoreServicer
from splitpoint.errors import NotFound, Unavailable
from splitpoint.observe.meters import Meters
from splitpoint.service import OnReady, Setup
from splitpoint.shapes import ArenaLayout
from splitpoint.transport.guard import count_calls
from splitpoint.transport.servers import HealthReporter, create_server, enable_reflection, listen
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc

MOST_CONCURRENT_CALLS = 1024
STOP_SECONDS = 5.0
# Smallest slots of an arena that the first Attach decides: pages of one byte would make tables of
# many millions of slots.
LEAST_SLOT_BYTES = 64 << 10

_Context = Any  # grpc.aio.ServicerContext; the generated base class is untyped


class StoreServer:
    """The server of one store. Call `stop` at the end, also if it never served.

    Attributes:
        address: what clients connect to. Empty until it serves.
    """

    def __init__(
        self, arguments: argparse.Namespace, setup: Setup, meters: Meters, on_ready: OnReady
    ) -> None:
        self.address = ""
        self._arguments = arguments
        self._setup = setup
        self._meters = meters
        self._on_ready = on_ready
        self._calls = _Calls()
        self._server: grpc.aio.Server | None = None

    async def serve(self, servicer: Servicer) -> None:
        """Let a servicer answer all calls from now on. The first one starts the server.

        Raises Unavailable if the address cannot be bound.
        """
        before, self._calls.servicer = self._calls.servicer, servicer
        if before is None:
            await self._start()
        elif isinstance(before, FirstAttach):
            before.replaced_by(servicer)

    async def _start(self) -> None:
        server = create_server(
            max_concurrent_rpcs=MOST_CONCURRENT_CALLS,
            access=self._setup.access,
            on_answer=count_calls(self._meters, [SERVICE_NAME]),
        )
        kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(self._calls, server)
        self._health = HealthReporter(server)
        await self._health.set("", True)
        await self._health.set(SERVICE_NAME, True)
        if self._arguments.reflection:
            enable_reflection(server, [SERVICE_NAME])
        self.address = listen(server, self._arguments.listen, self._setup.identity)
        await server.start()
        self._server = server
        self._on_ready(self.address)

    async def stop(self) -> None:
        """Answer no more calls. Those that run have STOP_SECONDS."""
        server, self._server = self._server, None
        if server is None:
            return
        await self._health.shut_down()
        if self._calls.servicer is not None:
            self._calls.servicer.stop()
        await server.stop(STOP_SECONDS)


class _Calls:
    """Passes each call on to the servicer of the moment.

    Its methods are neither coroutines nor generators; the guard around them awaits or iterates
    what they return.
    """

    def __init__(self) -> None:
        self.servicer: Servicer | None = None

    def __getattr__(self, name: str) -> Callable[[Any, _Context], Any]:
        return lambda request, context: getattr(self.servicer, name)(request, context)


class FirstAttach:
    """The servicer of a store of pages without an arena.

    Args:
        check: raises InvalidArgument if the store can have no arena of a layout.
    """

    def __init__(self, check: Callable[[ArenaLayout], object]) -> None:
        self._check = check
        loop = asyncio.get_running_loop()
        self._layout: asyncio.Future[ArenaLayout] = loop.create_future()
        self._servicer: asyncio.Future[Servicer] = loop.create_future()

    async def layout(self, stop: asyncio.Event) -> ArenaLayout | None:
        """Return the layout for the first Attach that names a size. None if `stop` comes first."""
        stopping = asyncio.ensure_future(stop.wait())
        either: set[asyncio.Future[Any]] = {self._layout, stopping}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
        return self._layout.result() if self._layout.done() else None

    def replaced_by(self, servicer: Servicer) -> None:
        """Let the servicer of the new arena answer the calls that wait for it."""
        self._servicer.set_result(servicer)

    def stop(self) -> None:
        if not self._servicer.done():
            self._servicer.set_exception(Unavailable("the store is stopping", reason="STOPPING"))
            self._servicer.exception()  # so that asyncio does not report it

    async def Attach(self, request: pb.AttachRequest, context: _Context) -> pb.AttachResponse:
        """Wait for the arena. The first Attach with a size decides its layout."""
        validation.check_attach(request)
        if not request.page_bytes:
            raise _no_arena()
        if not self._layout.done():
            layout = ArenaLayout.of_pages(max(request.page_bytes, LEAST_SLOT_BYTES))
            self._check(layout)
            self._layout.set_result(layout)
        servicer = await asyncio.shield(self._servicer)
        return await servicer.Attach(request, context)

    def __getattr__(self, name: str) -> Callable[[Any, _Context], Any]:
        return self._refuse

    async def _refuse(self, request: Any, context: _Context) -> None:
        """Refuse every other call. KeepAlive has a stream of requests, which name a session."""
        if isinstance(request, Message) and not getattr(request, "session_id", b""):
            raise _no_arena()
        raise NotFound("unknown session: attach again", reason="UNKNOWN_SESSION")


# What answers the calls of a store.
Servicer = FirstAttach | KvStoreServicer


def _no_arena() -> Unavailable:
    return Unavailable(
        "this store makes its arena at the first Attach that says how large pages are",
        reason="NO_ARENA_YET",
    )

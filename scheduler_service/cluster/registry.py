"""The workers: who is ready, what each one is, and its Run stream.

Each address has one connection: it asks for GetInfo, opens the Run stream,
watches the worker's health for a drain, and starts over when the stream ends.
gRPC itself reconnects with back-off. Addresses given at the start stay for
good; one that was discovered goes once nobody advertises it any more and its
stream is down, for the stream is the truth and Redis a hint. Decides nothing
else: it tells its listener.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_service.cluster.losses import LossBook
from scheduler_service.cluster.run_stream import RunStream
from scheduler_service.placement.footprint import WorkerFacts
from scheduler_service.prefixes.lookup import PlacedWorker
from scheduler_service.prefixes.stores import StoreCatalog
from splitpoint.discovery.entries import ModelName, WorkerEntry
from splitpoint.errors import FailedPrecondition, SplitpointError
from splitpoint.shapes import ModelShape
from splitpoint.transport import channels, statuses
from splitpoint.transport.convert import (
    layout_from_proto,
    profile_from_proto,
    schedule_from_proto,
    shape_from_proto,
)
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import types_pb2, worker_pb2, worker_pb2_grpc

_log = logging.getLogger(__name__)

WORKER_SERVICE = "splitpoint.v1.WorkerService"
_INFO_SECONDS = 5.0
# Between attempts at a worker that answers but is not ready: loading, or still
# busy with the stream of a scheduler that died.
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
# A worker found in Redis that was lost stays in the lists this long.
_MISSED_SECONDS = 600.0


class Listener(Protocol):
    """Who places requests on workers."""

    def on_worker_ready(self, worker: WorkerConnection) -> None: ...

    def on_worker_draining(self, worker: WorkerConnection) -> None: ...

    def on_worker_lost(self, worker: WorkerConnection) -> None: ...

    def on_step(self, worker: WorkerConnection, response: worker_pb2.RunResponse) -> None: ...


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A worker between the opening and the end of one Run stream."""

    info: worker_pb2.GetInfoResponse
    facts: WorkerFacts
    stream: RunStream


class WorkerConnection:
    """One address. `ready` is None while nothing can be sent there."""

    def __init__(
        self,
        address: str,
        model: ModelShape,
        peeker: StoreCatalog,
        identity: Identity = PLAIN,
        *,
        is_static: bool = True,
    ) -> None:
        self.address = address
        self.is_static = is_static
        self._identity = identity
        # Name given at the worker's start; empty until it was reached once.
        self.worker_id = ""
        self.ready: ReadyWorker | None = None
        # As it was before its stream ended, and whether that came unannounced.
        self.former: ReadyWorker | None = None
        self.was_lost = False
        self.is_draining = False
        # The latest that came. None: none yet, or it is lost.
        self.telemetry: types_pb2.Telemetry | None = None
        # Why it is not ready.
        self.message = "connecting"
        self._model = model
        self._peeker = peeker
        self._advertised_store = b""

    @property
    def takes_requests(self) -> bool:
        return self.ready is not None and not self.is_draining

    def learn_store(self, instance_id: bytes) -> None:
        """What the worker advertises as its store's instance; empty: it does not know."""
        if not instance_id or instance_id == self._advertised_store:
            return
        self._advertised_store = instance_id
        if self.ready is not None:
            facts = replace(self.ready.facts, store_instance_id=instance_id)
            self.ready = replace(self.ready, facts=facts)

    async def run(self, registry: Registry) -> None:
        """Connect, serve, reconnect; until cancelled."""
        pause = _FIRST_PAUSE_SECONDS
        async with channels.open_channel(self.address, self._identity) as channel:
            while True:
                was_ready = False
                try:
                    was_ready = await self._serve(channel, registry)
                except SplitpointError as error:
                    self._note(error.message)
                except Exception:
                    _log.exception("the connection to %s failed", self.address)
                    self._note("internal error, see the log")
                pause = (
                    _FIRST_PAUSE_SECONDS if was_ready else min(2 * pause, _LONGEST_PAUSE_SECONDS)
                )
                await asyncio.sleep(pause)

    async def _serve(self, channel: grpc.aio.Channel, registry: Registry) -> bool:
        """One Run stream from beginning to end; whether it was ever open."""
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        stream = RunStream(stub)
        health = asyncio.create_task(self._watch_health(channel, registry))
        was_ready = has_ended = False
        try:
            info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=_INFO_SECONDS)
            facts = await self._facts_of(info)
            registry.claim_name(self, info.worker_id)

            def opened() -> None:
                nonlocal was_ready
                was_ready = True
                self.was_lost = False
                self.is_draining = info.draining
                self.message = ""
                self.ready = ReadyWorker(info, facts, stream)
                _log.info("worker %s at %s is ready", self.worker_id, self.address)
                registry.listener.on_worker_ready(self)
                if self.is_draining:
                    registry.listener.on_worker_draining(self)

            def stepped(response: worker_pb2.RunResponse) -> None:
                self._take_news(response)
                registry.listener.on_step(self, response)

            await stream.serve(opened, stepped)
            has_ended = True
            self._note("the worker ended its stream")
        except grpc.RpcError as error:
            self._note(statuses.error_of(error).message)
        except asyncio.CancelledError:
            has_ended = True  # by us: the scheduler stops
            raise
        finally:
            health.cancel()
            if self.ready is not None:
                self.former, self.ready, self.telemetry = self.ready, None, None
                self.was_lost = not (has_ended or self.is_draining)
                if self.was_lost:
                    registry.note_loss(self.worker_id)
                registry.listener.on_worker_lost(self)
        return was_ready

    async def _facts_of(self, info: worker_pb2.GetInfoResponse) -> WorkerFacts:
        """What policy needs. Raises SplitpointError for a worker that cannot be used."""
        shape, layout = shape_from_proto(info.shape), layout_from_proto(info.layout)
        for name in ("layer_count", "hidden_size", "vocabulary_size", "context_length"):
            theirs, ours = getattr(shape, name), getattr(self._model, name)
            if theirs != ours:
                raise FailedPrecondition(
                    f"serves another model: its {name} is {theirs}, ours {ours}"
                )
        if not info.worker_id or info.page_bytes < 1 or info.max_batch_size < 1:
            raise FailedPrecondition("its GetInfo lacks worker_id, page_bytes or max_batch_size")
        store = None
        if info.kvstore_address:
            store = await self._peeker.facts(info.kvstore_address)
        return WorkerFacts(
            worker_id=info.worker_id,
            shape=shape,
            profile=profile_from_proto(info.profile),
            chunk_tokens=layout.chunk_tokens,
            has_activations=layout.has_activations and bool(info.kvstore_address),
            cache_capacity_bytes=info.cache_capacity_bytes,
            page_bytes=info.page_bytes,
            streamed_page_count=info.streamed_page_count,
            max_batch_size=info.max_batch_size,
            kvstore_address=info.kvstore_address,
            layout_hash=layout.layout_hash,
            # What the worker itself says comes first: its address may name another
            # store on this host.
            store_instance_id=self._advertised_store or (store.instance_id if store else b""),
            store_slot_count=store.slot_count if store else None,
            slot_bytes=layout.chunk_bytes,
            schedule=schedule_from_proto(info.schedule),
            staging_tokens=info.staging_tokens,
            max_batched_tokens=info.max_batched_tokens,
            encoding=layout.encoding,
        )

    async def _watch_health(self, channel: grpc.aio.Channel, registry: Registry) -> None:
        """NOT_SERVING on an open stream is a drain."""
        request = health_pb2.HealthCheckRequest(service=WORKER_SERVICE)
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the type stubs know no Watch
        call = stub.Watch(request, wait_for_ready=True)
        try:
            async for response in call:
                not_serving = response.status == health_pb2.HealthCheckResponse.NOT_SERVING
                if not_serving and self.ready is not None and not self.is_draining:
                    self.is_draining = True
                    _log.info("worker %s is draining", self.worker_id)
                    registry.listener.on_worker_draining(self)
        except grpc.RpcError as error:
            # The stream's own end tells whether the worker is gone.
            _log.info("no health from %s: %s", self.address, statuses.error_of(error).message)
        finally:
            call.cancel()

    def _take_news(self, response: worker_pb2.RunResponse) -> None:
        """What the worker says of itself: counts, and costs that it measured anew."""
        if response.HasField("telemetry"):
            self.telemetry = response.telemetry
        if self.ready is not None and response.HasField("profile"):
            facts = replace(self.ready.facts, profile=profile_from_proto(response.profile))
            self.ready = replace(self.ready, facts=facts)

    def _note(self, message: str) -> None:
        if message != self.message:
            _log.warning("worker %s at %s: %s", self.worker_id or "?", self.address, message)
        self.message = message


class Registry:
    """All connections. `start` them once there is a listener, `close` at the end."""

    def __init__(
        self,
        addresses: Sequence[str],
        model: ModelShape,
        peeker: StoreCatalog,
        identity: Identity = PLAIN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.losses = LossBook(clock)
        self.connections = [
            WorkerConnection(address, model, peeker, identity) for address in addresses
        ]
        self.listener: Listener
        self._model = model
        self._peeker = peeker
        self._identity = identity
        self._tasks: dict[WorkerConnection, asyncio.Task[None]] = {}
        self._dropped: set[asyncio.Task[None]] = set()

    def start(self, listener: Listener) -> None:
        self.listener = listener
        for connection in self.connections:
            self._run(connection)

    def _run(self, connection: WorkerConnection) -> None:
        self._tasks[connection] = asyncio.create_task(
            connection.run(self), name=f"worker {connection.address}"
        )

    async def close(self) -> None:
        """Ends every Run stream; the workers cancel what was admitted through them."""
        tasks = [*self._tasks.values(), *self._dropped]
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                _log.error("a worker's connection failed", exc_info=result)

    def discovered(self, entries: Sequence[WorkerEntry]) -> None:
        """Everybody who is advertised at the moment. Only for a Redis that answered."""
        ours = ModelName(
            self._model.layer_count,
            self._model.hidden_size,
            self._model.vocabulary_size,
            self._model.context_length,
        )
        # A worker that was named by another of its addresses is there already.
        addresses = {c.address for c in self.connections if c.is_static}
        static = {c.ready.info.instance_id for c in self.connections if c.ready and c.is_static}
        advertised = {
            entry.address: entry
            for entry in entries
            if entry.model == ours
            and (entry.instance_id not in static or entry.address in addresses)
        }
        for connection in list(self.connections):
            if connection.is_static or connection.address in advertised:
                continue
            if connection.ready is None and not self._is_missed(connection):
                self._drop(connection)
        known = {connection.address: connection for connection in self.connections}
        for address, entry in advertised.items():
            connection = known.get(address) or self._add(entry)
            connection.learn_store(entry.store_instance_id)

    def _is_missed(self, connection: WorkerConnection) -> bool:
        """Lost a while ago, and not back: whoever looks must see that one is missing."""
        if not connection.was_lost:
            return False
        ago = self.losses.of(connection.worker_id).seconds_ago
        return ago is not None and ago < _MISSED_SECONDS

    def _add(self, entry: WorkerEntry) -> WorkerConnection:
        _log.info("found worker %s at %s", entry.worker_id, entry.address)
        connection = WorkerConnection(
            entry.address, self._model, self._peeker, self._identity, is_static=False
        )
        self.connections.append(connection)
        self._run(connection)
        return connection

    def _drop(self, connection: WorkerConnection) -> None:
        _log.info("worker %s at %s is gone", connection.worker_id or "?", connection.address)
        self.connections.remove(connection)
        task = self._tasks.pop(connection)
        self._dropped.add(task)
        task.add_done_callback(self._dropped.discard)
        task.cancel()

    def placed(self) -> list[PlacedWorker]:
        """Those that have a stream, draining ones included."""
        return [PlacedWorker(c.ready.facts, c.address) for c in self.connections if c.ready]

    def ready(self) -> list[WorkerConnection]:
        """Those that take new requests."""
        return [c for c in self.connections if c.takes_requests]

    def find(self, worker_id: str) -> WorkerConnection | None:
        """By name, ready or not."""
        return next((c for c in self.connections if c.worker_id == worker_id), None)

    def note_loss(self, worker_id: str) -> None:
        """Its stream broke, and no drain had announced that."""
        self.losses.note(worker_id, {connection.worker_id for connection in self.connections})

    @property
    def all_names_known(self) -> bool:
        return all(connection.worker_id for connection in self.connections)

    def claim_name(self, connection: WorkerConnection, worker_id: str) -> None:
        """Raises FailedPrecondition when another address has this name."""
        holder = self.find(worker_id)
        if holder is not None and holder is not connection:
            if holder.is_static or not holder.was_lost:
                raise FailedPrecondition(
                    f"worker id {worker_id} is already that of the worker at {holder.address}"
                )
            self._drop(holder)  # it came back at another address
        connection.worker_id = worker_id

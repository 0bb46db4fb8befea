"""The connection to one worker: GetInfo, then a Run stream; both again when it ends.

`RunStream` is the scheduler's end of one stream: commands out, one message per engine step in.

It also watches the worker's health, which announces a drain. gRPC itself reconnects
with back-off.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_service.prefixes.stores import StoreCatalog
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.errors import FailedPrecondition, SplitpointError
from splitpoint.shapes import ModelShape
from splitpoint.speculation import Speculation
from splitpoint.transport import channels, statuses
from splitpoint.transport.convert import (
    known_draft_methods,
    layout_from_proto,
    numerics_from_proto,
    profile_from_proto,
    schedule_from_proto,
    selection_supports_from_proto,
    shape_from_proto,
    speculation_from_proto,
    weight_format_from_proto,
)
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import types_pb2, worker_pb2, worker_pb2_grpc

_log = logging.getLogger(__name__)

WORKER_SERVICE = "splitpoint.v1.WorkerService"
_INFO_SECONDS = 5.0
# Pause before connecting again to a worker that is not ready: it is loading its model, or
# it still serves the stream of an earlier scheduler.
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 1.0
# A worker accepts the stream by sending its headers. One that has sent neither headers nor
# an error after this long is treated as if it had accepted.
_ACCEPT_SECONDS = 0.5


class RunStream:
    """An open stream. Its commands are sent in order."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._commands: asyncio.Queue[worker_pb2.RunRequest] = asyncio.Queue()
        # The charge command that is queued; None: none is.
        self._charge: worker_pb2.RunRequest | None = None

    def admit(self, command: worker_pb2.AdmitCommand) -> None:
        self._commands.put_nowait(worker_pb2.RunRequest(admit=command))

    def cancel(self, request_id: str, attempt: int) -> None:
        command = worker_pb2.CancelCommand(request_id=request_id, attempt=attempt)
        self._commands.put_nowait(worker_pb2.RunRequest(cancel=command))

    def set_paused(self, request_id: str, paused: bool) -> None:
        if paused:
            request = worker_pb2.RunRequest(pause=worker_pb2.PauseCommand(request_id=request_id))
        else:
            request = worker_pb2.RunRequest(resume=worker_pb2.ResumeCommand(request_id=request_id))
        self._commands.put_nowait(request)

    def charge(self, charges: worker_pb2.Charges) -> None:
        """Say what is charged on the worker. Replaces what was not sent yet."""
        if self._charge is None:
            self._charge = worker_pb2.RunRequest()
            self._commands.put_nowait(self._charge)
        self._charge.charge.charges.CopyFrom(charges)

    def responses(self) -> AsyncIterator[worker_pb2.RunResponse]:
        """Iterate until the worker ends the stream. Raises grpc.RpcError if it breaks."""
        responses: AsyncIterator[worker_pb2.RunResponse] = aiter(self._call)
        return responses

    async def wait_accepted(self) -> None:
        """Raises grpc.RpcError if the worker refuses the stream."""
        headers = asyncio.ensure_future(self._call.initial_metadata())
        try:
            await asyncio.wait({headers}, timeout=_ACCEPT_SECONDS)
        finally:
            headers.cancel()
        if self._call.done():
            await self._call.read()  # raises the reason

    async def send_commands(self) -> None:
        """Send until the stream ends.

        gRPC's own sending of an iterator would be left waiting when a call is refused.
        """
        while True:
            command = await self._commands.get()
            if command is self._charge:
                self._charge = None
            try:
                await self._call.write(command)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # reading the stream raises the reason


@asynccontextmanager
async def open_run_stream(stub: worker_pb2_grpc.WorkerServiceStub) -> AsyncIterator[RunStream]:
    """Open a stream for the length of the context. Raises grpc.RpcError if it is refused."""
    call: Any = stub.Run()
    stream = RunStream(call)
    sending = asyncio.create_task(stream.send_commands())
    try:
        await stream.wait_accepted()
        yield stream
    finally:
        call.cancel()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


class WorkerListener(Protocol):
    """Receives the events of workers. The request manager implements it."""

    def on_worker_ready(self, worker: WorkerConnection) -> None: ...

    def on_worker_draining(self, worker: WorkerConnection) -> None: ...

    def on_worker_lost(self, worker: WorkerConnection) -> None: ...

    def on_step(self, worker: WorkerConnection, response: worker_pb2.RunResponse) -> None: ...


class ConnectionOwner(Protocol):
    """What a connection needs of the registry."""

    listener: WorkerListener

    def claim_name(self, connection: WorkerConnection, worker_id: str) -> None: ...

    def note_loss(self, worker_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A worker while its Run stream is open."""

    info: worker_pb2.GetInfoResponse
    facts: WorkerFacts
    stream: RunStream


class WorkerConnection:
    """One address. `ready` is None while nothing can be sent there."""

    def __init__(
        self,
        address: str,
        model: ModelShape,
        stores: StoreCatalog,
        identity: Identity = PLAIN,
        *,
        is_static: bool = True,
    ) -> None:
        self.address = address
        # Given at the start, not discovered.
        self.is_static = is_static
        self._identity = identity
        # From the worker's GetInfo; empty until it was reached once.
        self.worker_id = ""
        self.ready: ReadyWorker | None = None
        # The value of `ready` before the last stream ended; whether it ended without a drain.
        self.last_ready: ReadyWorker | None = None
        self.was_lost = False
        # It was given up since it did not answer: it hangs, or is cut off.
        self.is_silent = False
        self.is_draining = False
        # The latest telemetry. None: none yet, or the worker is lost.
        self.telemetry: types_pb2.Telemetry | None = None
        # Why the worker is not ready.
        self.message = "connecting"
        self._model = model
        self._stores = stores
        self._advertised_store = b""

    @property
    def takes_requests(self) -> bool:
        return self.ready is not None and not self.is_draining

    def set_store_instance(self, instance_id: bytes) -> None:
        """Note the store instance that the worker advertises; empty: it advertises none."""
        if not instance_id or instance_id == self._advertised_store:
            return
        self._advertised_store = instance_id
        self._update_facts(store_instance_id=instance_id)

    async def run(self, owner: ConnectionOwner) -> None:
        """Connect, serve, reconnect; until cancelled."""
        pause = _FIRST_PAUSE_SECONDS
        async with channels.open_channel(self.address, self._identity, is_watched=True) as channel:
            while True:
                was_ready = False
                try:
                    was_ready = await self._serve(channel, owner)
                except SplitpointError as error:
                    self._note(error.message)
                except Exception:
                    _log.exception("the connection to %s failed", self.address)
                    self._note("internal error, see the log")
                pause = (
                    _FIRST_PAUSE_SECONDS if was_ready else min(2 * pause, _LONGEST_PAUSE_SECONDS)
                )
                await asyncio.sleep(pause)

    async def _serve(self, channel: grpc.aio.Channel, owner: ConnectionOwner) -> bool:
        """Serve one Run stream to its end. Return True if it was ever open."""
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        health = asyncio.create_task(self._watch_health(channel, owner))
        was_ready = ended_cleanly = False
        try:
            info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=_INFO_SECONDS)
            self._check_model(info)
            facts = await self._facts_of(info)
            owner.claim_name(self, info.worker_id)
            async with open_run_stream(stub) as stream:
                was_ready = True
                self._became_ready(ReadyWorker(info, facts, stream), owner)
                async for response in stream.responses():
                    self._keep_measurements(response)
                    owner.listener.on_step(self, response)
            ended_cleanly = True
            self._note("the worker ended its stream")
        except grpc.RpcError as error:
            message = statuses.error_of(error).message
            self.is_silent = message == statuses.NO_ANSWER
            self._note(message)
        except asyncio.CancelledError:
            ended_cleanly = True  # the scheduler stops
            raise
        finally:
            health.cancel()
            if self.ready is not None:
                self.last_ready, self.ready, self.telemetry = self.ready, None, None
                self.was_lost = not (ended_cleanly or self.is_draining)
                if self.was_lost:
                    owner.note_loss(self.worker_id)
                owner.listener.on_worker_lost(self)
        return was_ready

    def _became_ready(self, ready: ReadyWorker, owner: ConnectionOwner) -> None:
        self.was_lost = self.is_silent = False
        self.is_draining = ready.info.draining
        self.message = ""
        self.ready = ready
        _log.info("worker %s at %s is ready", self.worker_id, self.address)
        owner.listener.on_worker_ready(self)
        if self.is_draining:
            owner.listener.on_worker_draining(self)

    def _check_model(self, info: worker_pb2.GetInfoResponse) -> None:
        """Raise FailedPrecondition if the worker cannot be used."""
        for name in ("layer_count", "hidden_size", "vocabulary_size", "context_length"):
            theirs, ours = getattr(info.shape, name), getattr(self._model, name)
            if theirs != ours:
                hint = " (--max-model-len)" if name == "context_length" else ""
                raise FailedPrecondition(
                    f"serves another model: its {name} is {theirs}, ours {ours}{hint}"
                )
        if not info.worker_id or info.page_bytes < 1 or info.max_batch_size < 1:
            raise FailedPrecondition("its GetInfo lacks worker_id, page_bytes or max_batch_size")

    async def _facts_of(self, info: worker_pb2.GetInfoResponse) -> WorkerFacts:
        """Return the facts that the scheduling policy needs.

        Raises SplitpointError for a malformed message.
        """
        layout = layout_from_proto(info.layout)
        store = None
        if info.kvstore_address:
            store = await self._stores.stats(info.kvstore_address)
        return WorkerFacts(
            worker_id=info.worker_id,
            address=self.address,
            shape=shape_from_proto(info.shape),
            profile=profile_from_proto(info.profile),
            chunk_tokens=layout.chunk_tokens,
            has_activations=layout.has_activations and bool(info.kvstore_address),
            cache_capacity_bytes=info.cache_capacity_bytes,
            page_bytes=info.page_bytes,
            streamed_page_count=info.streamed_page_count,
            max_batch_size=info.max_batch_size,
            kvstore_address=info.kvstore_address,
            layout_hash=layout.layout_hash,
            # Prefer the instance that the worker advertises: on this host, its store's address may
            # reach another store.
            store_instance_id=self._advertised_store or (store.instance_id if store else b""),
            store_slot_count=store.slot_count if store else None,
            slot_bytes=layout.chunk_bytes,
            schedule=schedule_from_proto(info.schedule),
            staging_tokens=info.staging_tokens,
            max_batched_tokens=info.max_batched_tokens,
            encoding=layout.encoding,
            shares_pages=info.shares_pages,
            speculation=speculation_from_proto(info.speculation.defaults).over(Speculation()),
            draft_methods=frozenset(known_draft_methods(info.speculation.methods)),
            selections=selection_supports_from_proto(info.selections),
            has_structured_output=info.has_structured_output,
            numerics=numerics_from_proto(info.numerics),
            numerics_digest=info.numerics_digest,
            weight_format=weight_format_from_proto(info.weight_format),
        )

    async def _watch_health(self, channel: grpc.aio.Channel, owner: ConnectionOwner) -> None:
        """Watch for NOT_SERVING: on an open stream it announces a drain."""
        request = health_pb2.HealthCheckRequest(service=WORKER_SERVICE)
        stub: Any = health_pb2_grpc.HealthStub(channel)  # the type stubs know no Watch
        call = stub.Watch(request, wait_for_ready=True)
        try:
            async for response in call:
                not_serving = response.status == health_pb2.HealthCheckResponse.NOT_SERVING
                if not_serving and self.takes_requests:
                    self.is_draining = True
                    _log.info("worker %s is draining", self.worker_id)
                    owner.listener.on_worker_draining(self)
        except grpc.RpcError as error:
            # Not a lost worker: only the end of its stream says that.
            _log.info("no health from %s: %s", self.address, statuses.error_of(error).message)
        finally:
            call.cancel()

    def _keep_measurements(self, response: worker_pb2.RunResponse) -> None:
        """Keep the telemetry and the newly measured profile of a message, if any."""
        if response.HasField("telemetry"):
            self.telemetry = types_pb2.Telemetry()
            self.telemetry.CopyFrom(response.telemetry)
            # Up to 32 KiB that only routing reads.
            self.telemetry.ClearField("device_chunk_marks")
        if response.HasField("profile"):
            self._update_facts(profile=profile_from_proto(response.profile))

    def _update_facts(self, **changes: Any) -> None:
        if self.ready is not None:
            self.ready = replace(self.ready, facts=replace(self.ready.facts, **changes))

    def _note(self, message: str) -> None:
        if message != self.message:
            _log.warning("worker %s at %s: %s", self.worker_id or "?", self.address, message)
        self.message = message

"""WorkerService: the gRPC server of a runtime. Validates and converts messages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from splitpoint.errors import (
    Aborted,
    Internal,
    InvalidArgument,
    SplitpointError,
    Unavailable,
)
from splitpoint.transport.convert import (
    draft_method_to_proto,
    layout_to_proto,
    numerics_to_proto,
    profile_to_proto,
    schedule_to_proto,
    selection_method_fields,
    shape_to_proto,
    speculation_to_proto,
    weight_format_to_proto,
)
from splitpoint.transport.servers import HealthReporter
from splitpoint.v1 import types_pb2, worker_pb2_grpc
from splitpoint.v1 import worker_pb2 as pb
from worker_service.engine.messages import StepOutput
from worker_service.profiling.profiler import measure
from worker_service.retrieval.selector import ScreenSource
from worker_service.runtime import ENGINE_FAILED
from worker_service.startup.drafting import WorkerSpeculation
from worker_service.startup.worker import LoadedWorker
from worker_service.streams import Listener
from worker_service.telemetry import TELEMETRY_SECONDS, Telemeter
from worker_service.wire import (
    admission_from,
    charges_from_proto,
    others_to_proto,
    prompt_responses,
    refusal,
    response_from,
)

log = logging.getLogger(__name__)

SERVICE_NAME = "splitpoint.v1.WorkerService"
DRAIN_SECONDS = 30.0
LONGEST_DRAIN_SECONDS = 3600.0

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one worker. Calls fail with UNAVAILABLE until `worker` is set after loading."""

    worker: LoadedWorker | None = None
    health: HealthReporter | None = None
    draining: bool = False
    _closing: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def GetInfo(self, request: pb.GetInfoRequest, context: _Context) -> pb.GetInfoResponse:
        worker = self._loaded()
        plan, lanes = worker.engine.memory_plan, worker.engine.lanes
        pinning = worker.store.pinning if worker.store is not None else None
        return pb.GetInfoResponse(
            worker_id=worker.worker_id,
            instance_id=worker.instance_id,
            shape=shape_to_proto(worker.engine.model.shape),
            layout=layout_to_proto(worker.engine.cache.layout),
            kvstore_address=worker.store.address if worker.store is not None else "",
            device=worker.device_description,
            device_memory_bytes=plan.budget_bytes,
            weight_bytes=plan.weight_bytes,
            cache_capacity_bytes=plan.cache_capacity_bytes,
            page_bytes=plan.page_bytes,
            streamed_page_count=plan.streamed_page_count,
            max_batch_size=worker.engine.max_batch_size,
            max_batched_tokens=worker.engine.max_batched_tokens,
            batch_reason=worker.batch.reason,
            profile=profile_to_proto(worker.profile),
            draining=self.draining,
            eos_token_ids=worker.engine.eos_token_ids,
            model_path=str(worker.model_folder),
            pinned_bytes=pinning.pinned_bytes if pinning is not None else 0,
            pinning=pinning.description if pinning is not None else "",
            schedule=schedule_to_proto(lanes.schedule),
            staging_tokens=worker.engine.staging.page_count * worker.engine.chunk_tokens,
            weights=worker.weights,
            weight_format=weight_format_to_proto(worker.engine.model.weights),
            numerics=numerics_to_proto(worker.numerics.numerics),
            numerics_reason=worker.numerics.reason,
            numerics_digest=worker.numerics.digest,
            has_structured_output=worker.runtime.grammars is not None,
            shares_pages=worker.engine.page_manager.shared is not None,
            speculation=_speculation_message(worker.speculation),
            selections=_selections_message(worker.screens),
            emulated_link_bytes_per_second=lanes.link.bytes_per_second if lanes.link else 0.0,
        )

    async def Profile(self, request: pb.ProfileRequest, context: _Context) -> pb.ProfileResponse:
        worker = self._loaded()
        if request.refresh:
            await worker.runtime.calls.run(lambda: _measure(worker))
            worker.runtime.emit(StepOutput(profile=worker.profile))
        return pb.ProfileResponse(profile=profile_to_proto(worker.profile))

    async def Run(
        self, request_iterator: AsyncIterator[pb.RunRequest], context: _Context
    ) -> AsyncIterator[pb.RunResponse]:
        worker = self._loaded()
        if self.draining:
            raise Unavailable("the worker is draining", reason="DRAINING")
        if worker.runtime.failed.is_set():
            raise Unavailable(ENGINE_FAILED, reason="ENGINE_FAILED")
        listener = worker.runtime.streams.open()
        ends = [
            asyncio.create_task(self._read_commands(worker, listener, request_iterator)),
            asyncio.create_task(self._closing.wait()),
            asyncio.create_task(_closed(listener)),
        ]
        try:
            # The scheduler learns at once that the stream was accepted.
            await context.send_initial_metadata(())
            step = 0
            timer, telemeter = _TelemetryTimer(), Telemeter(worker)
            async for output in _outputs_until(listener.outputs, ends, timer):
                if worker.runtime.failed.is_set():
                    # To the scheduler the worker is lost, and its requests go on elsewhere.
                    raise Internal(ENGINE_FAILED, reason="ENGINE_FAILED")
                if output is None:
                    output = worker.runtime.idle_output()
                for message in prompt_responses(output):
                    step += 1
                    message.step = step
                    yield message
                step += 1
                response = response_from(
                    output, step, telemeter.message() if timer.restart_if_due() else None
                )
                others = worker.runtime.streams.others_to_tell(listener)
                if others is not None:
                    now = worker.runtime.streams.clock()
                    response.others.CopyFrom(others_to_proto(others, now))
                yield response
        finally:
            # A killed scheduler cancels this call at any moment, so nothing is awaited before
            # its requests are cancelled. No command is read any more.
            for end in ends:
                end.cancel()
            worker.runtime.end_stream(listener)
            # _outputs_until has raised their errors.
            await asyncio.gather(*ends, return_exceptions=True)

    async def Drain(self, request: pb.DrainRequest, context: _Context) -> pb.DrainResponse:
        grace = DRAIN_SECONDS
        if request.HasField("grace_duration"):
            grace = request.grace_duration.ToTimedelta().total_seconds()
            if not 0 <= grace <= LONGEST_DRAIN_SECONDS:
                raise InvalidArgument(
                    f"must be in [0, {LONGEST_DRAIN_SECONDS:g}] s", field="grace_duration"
                )
        return pb.DrainResponse(cancelled_count=await self.drain(grace))

    async def drain(self, grace_seconds: float) -> int:
        """Refuse new requests and let running ones end; return how many were cancelled."""
        self.draining = True
        if self.health is not None:
            # The scheduler watches it.
            await self.health.set(SERVICE_NAME, False)
        if self.worker is None:
            return 0
        runtime = self.worker.runtime
        if await runtime.wait_idle(grace_seconds):
            return 0
        cancelled = len(runtime.live)
        runtime.cancel_all()
        await runtime.wait_idle(DRAIN_SECONDS)
        return cancelled

    def close(self) -> None:
        """End the Run streams; after `drain`, right before the server stops."""
        self._closing.set()

    # -- below the calls ------------------------------------------------------------

    def _loaded(self) -> LoadedWorker:
        if self.worker is None:
            raise Unavailable("the model is loading", reason="LOADING", retry_after_seconds=1.0)
        return self.worker

    async def _read_commands(
        self, worker: LoadedWorker, listener: Listener, requests: AsyncIterator[pb.RunRequest]
    ) -> None:
        """Carry out commands in order until the scheduler closes its side."""
        runtime, stream = worker.runtime, listener.stream
        async for request in requests:
            match request.WhichOneof("command"):
                case "admit":
                    self._admit(worker, request.admit, stream)
                case "cancel":
                    runtime.cancel((request.cancel.request_id, request.cancel.attempt, stream))
                case "pause":
                    runtime.set_paused(request.pause.request_id, stream, True)
                case "resume":
                    runtime.set_paused(request.resume.request_id, stream, False)
                case "charge":
                    now = runtime.streams.clock()
                    runtime.streams.charge(
                        listener, charges_from_proto(request.charge.charges, now)
                    )
                case _:
                    raise InvalidArgument("no command is set", field="command")

    def _admit(self, worker: LoadedWorker, command: pb.AdmitCommand, stream: int) -> None:
        """Admit a request, or finish it with its error; the stream goes on."""
        try:
            if self.draining:
                raise Unavailable("the worker is draining", reason="DRAINING")
            layout = worker.engine.cache.layout
            admission = admission_from(
                command,
                worker.engine.model.shape,
                has_activations=layout.has_activations,
                numerics_digest=worker.numerics.digest,
                stream=stream,
            )
            if admission.key in worker.runtime.live:
                raise InvalidArgument("this attempt is running already", field="admit.request_id")
        except SplitpointError as error:
            worker.runtime.emit(StepOutput(finishes=[refusal(command, stream, error)]))
        else:
            worker.runtime.admit(admission)


def _selections_message(screens: ScreenSource | None) -> list[types_pb2.SelectionSupport]:
    """Return what the worker can select by: nothing without a store, where nothing is streamed."""
    if screens is None:
        return []
    return [
        types_pb2.SelectionSupport(**selection_method_fields(method), columns=columns)
        for method, columns in screens.columns.items()
    ]


def _speculation_message(speculation: WorkerSpeculation) -> types_pb2.Speculation:
    return types_pb2.Speculation(
        defaults=speculation_to_proto(speculation.defaults),
        methods=[draft_method_to_proto(method) for method in speculation.methods],
        draft_model=speculation.draft_model,
    )


def _measure(worker: LoadedWorker) -> None:
    """Measure the worker's costs anew; on the engine's thread."""
    engine = worker.engine
    measured = measure(
        engine.model, engine.cache.device, worker.device_description, lanes=engine.lanes
    )
    # Restores are only measured as they come: their trials need free pages.
    present = engine.profile
    engine.watch_costs(
        replace(
            measured,
            restore_overhead_seconds=present.restore_overhead_seconds,
            operation_overhead_seconds=present.operation_overhead_seconds,
        )
    )


async def _closed(listener: Listener) -> None:
    """Raise Aborted once the listener was given up."""
    await listener.closed.wait()
    raise Aborted("step outputs were not taken", reason="SLOW_SCHEDULER")


class _TelemetryTimer:
    """Says when telemetry is due: a second after the stream began, or after the last."""

    def __init__(self) -> None:
        self._due = time.monotonic() + TELEMETRY_SECONDS

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._due - time.monotonic())

    def restart_if_due(self) -> bool:
        """Return whether telemetry is due, and then restart."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + TELEMETRY_SECONDS
        return True


async def _outputs_until(
    outputs: asyncio.Queue[StepOutput], ends: Sequence[asyncio.Task[Any]], timer: _TelemetryTimer
) -> AsyncIterator[StepOutput | None]:
    """Yield step outputs, and None if telemetry is due without one, until a task ends.

    Raises the task's error.
    """
    while True:
        getter = asyncio.ensure_future(outputs.get())
        try:
            await asyncio.wait(
                {getter, *ends},
                timeout=timer.seconds_left,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            if not getter.done():
                getter.cancel()
        if getter.done() and not getter.cancelled():
            yield getter.result()
            continue
        for end in ends:
            if end.done():
                end.result()
                return
        if not timer.seconds_left:  # timers may be a little early
            yield None

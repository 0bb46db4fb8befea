"""`python -m worker_service`: one worker process, from arguments to a drained stop."""

from __future__ import annotations

from splitpoint.extras import need_for_program

need_for_program("worker")  # before the imports that it is about

# Imports make hardly any garbage, and looking for it takes a sixth of the start.
import gc

_collects = gc.isenabled()
gc.disable()

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from splitpoint.checkpoint.decoder import ModelBackend
from splitpoint.config import parse_rate, parse_size
from splitpoint.discovery.redis_announcer import Announcer, announced
from splitpoint.errors import Internal
from splitpoint.observe.meters import Meters
from splitpoint.observe.metrics import Service
from splitpoint.observe.metrics_server import metrics_served
from splitpoint.options.speculation import read_speculative_config
from splitpoint.options.values import parse_options
from splitpoint.options.worker import SECTIONS
from splitpoint.planning.weight_placement import WeightObjective
from splitpoint.progress import Progress
from splitpoint.service import OnReady, Setup, announce_ready, run_service, set_up
from splitpoint.shapes import DataType, WeightFormat
from splitpoint.transport.guard import count_calls
from splitpoint.transport.limits import WATCHER_SECONDS, answer_pings_within
from splitpoint.transport.servers import HealthReporter, create_server, enable_reflection, listen
from splitpoint.transport.tls import Identity
from splitpoint.v1 import worker_pb2_grpc
from worker_service.metrics import WorkerMetrics
from worker_service.server import DRAIN_SECONDS, SERVICE_NAME, WorkerServicer
from worker_service.startup.options import WorkerOptions
from worker_service.startup.worker import LoadedWorker, load_worker

if _collects:
    gc.enable()

if TYPE_CHECKING:
    from splitpoint.discovery.redis_link import RedisLink

log = logging.getLogger(__name__)

# Seconds for streams to end by themselves after the drain.
STOP_SECONDS = 0.5
# Concurrent calls: of one scheduler and a few operators.
MAX_CALLS = 64


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    return parse_options("worker_service", __doc__, SECTIONS, arguments)


def options_from(arguments: argparse.Namespace, identity: Identity) -> WorkerOptions:
    memory, pin = arguments.device_memory, arguments.pin_limit
    rate = arguments.link_rate
    return WorkerOptions(
        worker_id=arguments.worker_id,
        model_folder=arguments.model,
        kvstore_address=arguments.kvstore,
        device=arguments.device,
        data_type=None if arguments.dtype == "auto" else DataType(arguments.dtype),
        device_memory_bytes=None if memory is None else parse_size(memory, field="device-memory"),
        max_batch_size=arguments.max_batch,
        max_batched_tokens=arguments.max_batched_tokens,
        weight_objective=WeightObjective(arguments.weight_objective),
        threads=arguments.threads,
        cpu_kernels=arguments.cpu_kernels,
        model_backend=ModelBackend(arguments.model_backend),
        numerics=arguments.numerics,
        weights=WeightFormat(arguments.weights),
        max_model_len=arguments.max_model_len,
        chunk_tokens=arguments.chunk_tokens,
        pin_limit_bytes=None if pin is None else parse_size(pin, field="pin-limit"),
        verify_rate=arguments.verify_rate,
        identity=identity,
        shares_prefixes=not arguments.no_device_prefix_cache,
        is_serial=arguments.serial,
        is_eager=arguments.enforce_eager,
        link_bytes_per_second=None if rate is None else parse_rate(rate, field="link-rate"),
        trace_file=arguments.trace,
        speculation=read_speculative_config(arguments.speculative_config, arguments.draft_model),
        artifacts=None if arguments.artifacts is None else Path(arguments.artifacts),
        progress_seconds=arguments.progress_seconds,
        on_loading=_print_progress if arguments.progress_lines else None,
    )


def _print_progress(progress: Progress) -> None:
    print(progress.line, flush=True)


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until a signal or the parent's end."""
    await run(arguments, set_up(arguments), announce_ready)


async def run(arguments: argparse.Namespace, setup: Setup, on_ready: OnReady) -> None:
    """Listen at once, load the model, become ready; drain and stop once `setup.stop` is set."""
    meters = Meters(Service.WORKER)
    server = create_server(
        max_concurrent_rpcs=MAX_CALLS,
        access=setup.access,
        on_answer=count_calls(meters, [SERVICE_NAME]),
        # A scheduler that is gone without a word must not hold memory for long.
        options=[
            ("grpc.keepalive_time_ms", round(WATCHER_SECONDS * 1000)),
            *answer_pings_within(WATCHER_SECONDS),
        ],
    )
    health = HealthReporter(server)
    servicer = WorkerServicer(health=health)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    await health.set("", True)
    await health.set(SERVICE_NAME, False)
    if arguments.reflection:
        enable_reflection(server, [SERVICE_NAME])
    address = listen(server, arguments.listen, setup.identity)
    await server.start()
    try:
        options = options_from(arguments, setup.identity)
        async with metrics_served(arguments, meters):
            await _load_and_run(
                options, servicer, health, address, setup, on_ready, arguments.advertise, meters
            )
    finally:
        await server.stop(STOP_SECONDS)


async def _load_and_run(
    options: WorkerOptions,
    servicer: WorkerServicer,
    health: HealthReporter,
    address: str,
    setup: Setup,
    on_ready: OnReady,
    advertise: str | None,
    meters: Meters,
) -> None:
    loading = asyncio.create_task(load_worker(options))
    stopping = asyncio.create_task(setup.stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        return
    worker = loading.result()
    WorkerMetrics(meters, worker)
    servicer.worker = worker
    await health.set(SERVICE_NAME, True)
    on_ready(address)
    worker.populator.start()
    failing = asyncio.create_task(worker.runtime.failed.wait())

    def registration(link: RedisLink) -> Announcer:
        from worker_service.registration import Registration

        worker.redis_is_up = lambda: not link.is_away
        return Registration(
            link,
            worker,
            advertise or address,
            options.identity,
            is_draining=lambda: servicer.draining,
        )

    async with announced(setup.redis, registration, name="registration"):
        await asyncio.wait({stopping, failing}, return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        _write_trace(worker, options.trace_file)
        # Device memory is in an unknown state: end, and let a supervisor restart. This is not
        # a drain, which the scheduler would not count as a loss.
        raise Internal("the engine failed; see the log above")
    await health.shut_down()
    cancelled = await servicer.drain(DRAIN_SECONDS)
    if cancelled:
        log.warning("%d requests were cancelled after %g s", cancelled, DRAIN_SECONDS)
    servicer.close()
    await worker.runtime.stop()
    await asyncio.to_thread(worker.populator.close)
    if worker.weight_lock is not None:
        worker.weight_lock.close()
    await asyncio.to_thread(worker.monitor.stop)
    _write_trace(worker, options.trace_file)
    stopping.cancel()
    failing.cancel()


def _write_trace(worker: LoadedWorker, path: Path | None) -> None:
    """Write the trace after the engine's thread has ended."""
    trace = worker.engine.trace
    if path is None or trace is None:
        return
    try:
        trace.write(path)
    except OSError as error:  # the disk is full, perhaps; all else ended well
        log.error("the trace was not written: %s", error)
    else:
        log.info("%d spans written to %s", len(trace.spans), path)


def main() -> int:
    arguments = parse_arguments()
    name = arguments.worker_id
    service = name if name.startswith("worker") else f"worker-{name}"
    return run_service(service, serve, arguments, SECTIONS)


if __name__ == "__main__":
    sys.exit(main())

"""Builds a worker from its options: layout, weights, memory plan, store, engine, profile.

The store must have been made for the worker's checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from splitpoint.checkpoint.decoder import AttentionConfig
from splitpoint.checkpoint.resolve import model_fingerprint
from splitpoint.costs.profile import Profile
from splitpoint.errors import FailedPrecondition
from splitpoint.residency.batch_size import BatchSize
from splitpoint.shapes import ArenaLayout, ModelShape, Numerics, WeightFormat
from worker_service.device.choice import choose_device
from worker_service.device.pinning import CudaRegistrar, Pinning
from worker_service.device.populating import Populator
from worker_service.engine.engine import Engine
from worker_service.hardware.monitor import DeviceMonitor, monitor_of
from worker_service.hardware.streams import make_current
from worker_service.lanes.lanes import EmulatedLink, Lanes
from worker_service.lanes.select import lanes_of
from worker_service.numerics.verdict import NOT_CHECKED, WorkerNumerics, check_wish
from worker_service.retrieval.selector import ScreenSource
from worker_service.runtime import Runtime
from worker_service.startup.drafting import NO_DRAFTS, WorkerSpeculation
from worker_service.startup.engine import load_engine, lock_weights, prepare
from worker_service.startup.kernels import (
    agree_on_rows,
    choose_kernels,
    describe,
    kernel_wish,
    numerics_of,
    obstacle_of,
)
from worker_service.startup.model_source import model_source
from worker_service.startup.options import WorkerOptions
from worker_service.store.client import StoreClient
from worker_service.structured.compiler import GrammarCompiler
from worker_service.weights.lock import WeightLock


def store_client(
    options: WorkerOptions, device: torch.device, populator: Populator | None
) -> StoreClient | None:
    """Return a client of the worker's store, not yet connected; None if it has no store.

    `populator` populates the mapping of its arena.
    """
    if options.kvstore_address is None:
        return None
    name, pinning = f"worker-{options.worker_id}", None
    if device.type == "cuda" and options.pin_limit_bytes != 0:
        pinning = Pinning(
            CudaRegistrar(device),
            limit_bytes=options.pin_limit_bytes,
            progress_seconds=options.progress_seconds,
        )
    return StoreClient(
        options.kvstore_address,
        name,
        identity=options.identity,
        pinning=pinning,
        populator=populator,
    )


def check_layout(layout: ArenaLayout, shape: ModelShape, options: WorkerOptions) -> None:
    """Raise FailedPrecondition unless the store was made for this checkpoint, dtype and format."""
    folder = options.model_folder

    def layout_for(weights: WeightFormat) -> ArenaLayout:
        return ArenaLayout.of(
            shape,
            chunk_tokens=layout.chunk_tokens,
            has_activations=layout.has_activations,
            model_fingerprint=model_fingerprint(folder, weights),
            encoding=layout.encoding,
        )

    expected = layout_for(options.weights)
    if expected.layout_hash != layout.layout_hash:
        for other in WeightFormat:
            if layout_for(other).layout_hash == layout.layout_hash:
                raise FailedPrecondition(
                    f"the KV store was made for --weights {other.value}, this worker has "
                    f"{options.weights.value}: their caches differ",
                    reason="LAYOUT_MISMATCH",
                )
        differing = [
            name
            for name in ArenaLayout.__dataclass_fields__
            if getattr(expected, name) != getattr(layout, name)
        ]
        raise FailedPrecondition(
            f"the KV store was made for another model: {', '.join(differing)} differ",
            reason="LAYOUT_MISMATCH",
        )


log = logging.getLogger(__name__)


@dataclass(slots=True)
class LoadedWorker:
    """A worker that can serve.

    Attributes:
        weights: which weights are on the host, or whose code computes them, for people; empty:
            all are on the device, and our own decoder computes.
        batch: most sequences of a step, and why; it stays, also when costs are measured again.
        populator: populates memory ahead of its first use; started once the worker is ready, and
            closed after the runtime.
        weight_lock: page-locks weights on the host for a GPU; closed after the runtime.
        monitor: reads the hardware's counters; stopped at the end.
        speculation: what it drafts by, and for requests that do not say.
        screens: those of the selections that it can serve; None without a store.
        numerics: what the bits of its results depend on.
        redis_is_up: whether Redis answers; None if the worker does not use it.
    """

    worker_id: str
    instance_id: bytes
    model_folder: Path
    engine: Engine
    runtime: Runtime
    store: StoreClient | None
    device_description: str
    weights: str
    batch: BatchSize
    populator: Populator
    weight_lock: WeightLock | None
    monitor: DeviceMonitor
    speculation: WorkerSpeculation = NO_DRAFTS
    screens: ScreenSource | None = None
    numerics: WorkerNumerics = NOT_CHECKED
    redis_is_up: Callable[[], bool] | None = None

    @property
    def store_is_up(self) -> bool | None:
        """True if the worker is attached to its store; None if it has none."""
        return None if self.store is None else self.store.connection is not None

    @property
    def profile(self) -> Profile:
        """The worker's costs, as measured so far."""
        return self.runtime.profile


async def load_worker(options: WorkerOptions) -> LoadedWorker:
    """Do everything between the command line and readiness.

    Raises InvalidArgument (checkpoint, device), ResourceExhausted (memory),
    FailedPrecondition (the store holds another model), Unavailable (no store).
    """
    device = choose_device(options.device)
    lanes = _lanes(options, device)
    if options.threads is not None and device.type == "cpu":
        torch.set_num_threads(options.threads)
    source = await asyncio.to_thread(model_source, options)
    shape, quantization = source.config.shape, source.config.quantization
    wish = kernel_wish(options, device, quantization)
    async with AsyncExitStack() as on_failure:
        on_failure.callback(lanes.close)
        # Before the weights are loaded, which uses link and power, too.
        monitor = await asyncio.to_thread(monitor_of, device)
        monitor.start()
        on_failure.push_async_callback(asyncio.to_thread, monitor.stop)  # it may wait
        populator = Populator()
        # A GPU's driver maps an arena by itself, as it page-locks it.
        store = store_client(options, device, populator if device.type == "cpu" else None)
        if store is None:
            layout = ArenaLayout.of(shape, chunk_tokens=options.chunk_tokens, has_activations=False)
        else:
            on_failure.push_async_callback(store.close)
            layout = await store.layout()
            await asyncio.to_thread(check_layout, layout, shape, options)
        kernels = None
        if device.type == "cpu":
            kernels = await asyncio.to_thread(choose_kernels, options, shape, wish, quantization)
        description = describe(lanes, kernels)
        against = await asyncio.to_thread(
            obstacle_of, options, device, source.config, layout, kernels
        )
        # Before the weights are loaded, which takes long.
        check_wish(options.numerics, against)
        if kernels is not None and against is None and options.numerics != Numerics.FAST:
            await asyncio.to_thread(agree_on_rows, source.product_shapes, shape)
        screens = None
        if store is not None:
            screens = await asyncio.to_thread(_screens, options, source.config, device)
        loaded = await asyncio.to_thread(
            load_engine, options, source, layout, lanes, screens, description
        )
        engine = loaded.engine
        numerics = await asyncio.to_thread(
            numerics_of, options.numerics, against, engine.model, layout.chunk_tokens
        )
        await asyncio.to_thread(prepare, loaded, description, options.trace_file)
        if store is not None:
            await store.start(layout)
        on_failure.pop_all()
    for memory in (engine.cache.page_memory, engine.cache.input_memory):
        if memory is not None:
            populator.watch(memory)
    runtime = Runtime(engine, store, _grammars(engine))
    runtime.start()
    return LoadedWorker(
        worker_id=options.worker_id,
        instance_id=os.urandom(16),
        model_folder=options.model_folder,
        engine=engine,
        runtime=runtime,
        store=store,
        device_description=description,
        weights=loaded.weights,
        batch=loaded.batch,
        populator=populator,
        weight_lock=lock_weights(options, engine),
        monitor=monitor,
        speculation=loaded.speculation,
        screens=screens,
        numerics=numerics,
    )


def _grammars(engine: Engine) -> GrammarCompiler | None:
    """Return what compiles structured output; None if this worker cannot follow it."""
    size = engine.model.shape.vocabulary_size
    grammars = GrammarCompiler.if_possible(engine.tokenizer, size)
    log.info("structured output is %s", "off" if grammars is None else "on")
    return grammars


def _screens(options: WorkerOptions, config: AttentionConfig, device: torch.device) -> ScreenSource:
    """Read the artefacts of selections, before what is left of the device memory is divided."""
    make_current(device)
    return ScreenSource.open(config, options.model_folder, options.artifacts, device)


def _lanes(options: WorkerOptions, device: torch.device) -> Lanes:
    """Return the device's lanes. Raises InvalidArgument for an emulated link on a GPU."""
    rate = options.link_bytes_per_second
    link = None if rate is None else EmulatedLink(rate)
    return lanes_of(device, overlapped=not options.is_serial, link=link)

"""Loads the engine of a worker, and measures its costs.

The device memory is divided before anything is loaded: weights, drafts, pages and graphs. Where the
batch is chosen by measured costs, pages are divided again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from splitpoint.checkpoint.config import TEXT_ONLY, read_config, reads_more_than_text
from splitpoint.checkpoint.decoder import ModelBackend
from splitpoint.checkpoint.resolve import eos_token_ids
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.config import format_rate, format_size
from splitpoint.costs.profile import Profile
from splitpoint.errors import InvalidArgument
from splitpoint.host.memory import memory_facts
from splitpoint.options.worker import CPU_MEMORY_SHARE, GPU_MEMORY_SHARE
from splitpoint.planning.weight_placement import NOTHING_ON_HOST, OnHost, WeightSizes
from splitpoint.progress import Progress, Ticker
from splitpoint.residency.batch_size import LEAST, BatchSize, choose_batch_size
from splitpoint.shapes import ArenaLayout
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.device.memory import DividedDevice, divide_device
from worker_service.device.pinning import CudaRegistrar
from worker_service.engine.engine import Engine
from worker_service.graphs.support import EagerReason, graph_bytes, graph_obstacle, graphs_of
from worker_service.hardware.streams import make_current
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.timeline import Trace
from worker_service.profiling.profiler import measure, measure_rates
from worker_service.profiling.restore_costs import measure_overheads
from worker_service.retrieval.selector import ScreenSource
from worker_service.startup.drafting import DraftSetup, WorkerSpeculation
from worker_service.startup.kernels import describe
from worker_service.startup.model_source import ModelSource
from worker_service.startup.options import WorkerOptions
from worker_service.store.verifier import Verifier
from worker_service.weights.lock import WeightLock


@dataclass(frozen=True, slots=True)
class DividedMemory:
    """The device memory, divided.

    Attributes:
        served: without what the draft model needs; with the least batch, if none is given.
        eager_reason: why decoding steps are not recorded as graphs.
    """

    served: DividedDevice
    drafts: DraftSetup
    eager_reason: EagerReason


def divide_memory(
    options: WorkerOptions,
    source: ModelSource,
    layout: ArenaLayout,
    lanes: Lanes,
    artifact_bytes: int,
) -> DividedMemory:
    """Place the weights, and divide what they and artefacts leave. Raises ResourceExhausted."""
    device, folder, shape = lanes.device, options.model_folder, source.config.shape
    dtype = TORCH_TYPES[shape.data_type]
    sizes = source.weight_sizes(device, options.weights)
    budget = _budget(options, sizes, device) - artifact_bytes
    batch = LEAST if options.max_batch_size is None else options.max_batch_size
    drafts = DraftSetup.plan(
        options.speculation,
        folder,
        shape,
        layout,
        device,
        budget_bytes=budget,
        max_batch_size=batch,
        max_batched_tokens=options.max_batched_tokens,
        has_store=options.kvstore_address is not None,
    )
    budget -= drafts.model_bytes

    def obstacle_to_graphs(on_host: OnHost) -> EagerReason | None:
        is_asked = not options.is_eager
        found = graph_obstacle(device, dtype, shape.head_dim, on_host, is_asked=is_asked)
        if found is None and source.backend is not ModelBackend.OWN:
            return EagerReason.TRANSFORMERS
        return found

    divided = divide_device(
        shape,
        layout,
        sizes,
        budget_bytes=budget,
        max_batch_size=batch,
        max_batched_tokens=options.max_batched_tokens,
        is_gpu=device.type == "cuda",
        rates=lambda: measure_rates(shape, lanes),
        objective=options.weight_objective,
        has_store=options.kvstore_address is not None,
        draft_tokens=drafts.draft_tokens,
        window_pages=drafts.window_pages(shape, layout),
        graph_bytes=lambda on_host: 0 if obstacle_to_graphs(on_host) else graph_bytes(budget),
    )
    eager_reason = obstacle_to_graphs(divided.placement.on_host) or EagerReason.NO_MEMORY
    return DividedMemory(divided, drafts, eager_reason)


def _budget(options: WorkerOptions, sizes: WeightSizes, device: torch.device) -> int:
    if options.device_memory_bytes is not None:
        return options.device_memory_bytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(GPU_MEMORY_SHARE * free)
    return sizes.total + int(CPU_MEMORY_SHARE * memory_facts().usable_bytes)


log = logging.getLogger(__name__)

# Seconds between two reports of loading to a supervisor.
LOADING_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, and what was decided and measured while it was loaded.

    Attributes:
        profile: the costs, without those of restores.
        weights: what to say of the weights; empty: nothing.
    """

    engine: Engine
    profile: Profile
    batch: BatchSize
    weights: str
    speculation: WorkerSpeculation


def load_engine(
    options: WorkerOptions,
    source: ModelSource,
    layout: ArenaLayout,
    lanes: Lanes,
    screens: ScreenSource | None,
    description: str,
) -> LoadedEngine:
    """Divide the device memory, load the model and what drafts for it, and measure its costs.

    The batch is chosen by them, so the cache is made last. `description`: of the device.
    """
    device, folder, shape = lanes.device, options.model_folder, source.config.shape
    make_current(device)
    # Before the weights are read: a budget that cannot hold them fails at once.
    artifact_bytes = 0 if screens is None else screens.size_bytes
    memory = divide_memory(options, source, layout, lanes, artifact_bytes)
    served, placement, tickers = memory.served, memory.served.placement, _tickers(options)
    model = source.load(device, placement.on_host, tickers, options.weights)
    model.use_lanes(lanes)
    profile = measure(model, device, description, lanes=lanes)
    batch = choose_batch_size(
        shape,
        profile,
        lambda size: served.with_batch(size).page_count,
        chunk_tokens=layout.chunk_tokens,
        prefill_tokens=served.max_batched_tokens,
        given=options.max_batch_size,
        has_draft_model=memory.drafts.model is not None,
    )
    plan = served.with_batch(batch.size)
    cache, eos = DeviceCache(layout, plan, device), eos_token_ids(folder)
    drafters = memory.drafts.load(model, cache, lanes, eos_token_ids=eos, tickers=tickers)
    engine = Engine(
        model,
        cache,
        max_batch_size=batch.size,
        max_batched_tokens=served.max_batched_tokens,
        eos_token_ids=eos,
        tokenizer=Tokenizer.load(folder),
        lanes=lanes,
        verifier=Verifier(options.verify_rate),
        shares_prefixes=options.shares_prefixes,
        drafters=drafters,
        graphs=graphs_of(
            cache,
            [layer.window for layer in model.layers],
            max_batch_size=batch.size,
        ),
        eager_reason=memory.eager_reason,
        screens_of=None if screens is None else screens.screens,
    )
    is_part = reads_more_than_text(read_config(folder))
    log.info(
        "%s%s by %s on %s: weights take %s (%s), cache %s in %d pages",
        shape.name,
        f" ({TEXT_ONLY})" if is_part else "",
        model.code,
        describe(lanes),
        format_size(plan.weight_bytes),
        placement.reason,
        format_size(plan.cache_capacity_bytes),
        plan.page_count,
    )
    log.info("%s", batch.reason)
    weights = "" if placement.on_host == NOTHING_ON_HOST else placement.reason
    if source.backend is not ModelBackend.OWN:
        weights = f"the model is computed by {model.code} (docs/models.md)"
    how = "" if source.config.quantization is None else source.config.quantization.text
    weights = "; ".join(filter(None, (TEXT_ONLY if is_part else "", how, weights)))
    return LoadedEngine(engine, profile, batch, weights, memory.drafts.described(drafters))


def prepare(loaded: LoadedEngine, description: str, trace_file: Path | None) -> None:
    """Open the trace, and measure the costs of restores."""
    engine = loaded.engine
    make_current(engine.lanes.device)
    if engine.lanes.link is not None:
        rate = format_rate(engine.lanes.link.bytes_per_second)
        log.warning("the link is emulated at %s: this worker is slower than it could be", rate)
    if engine.lanes.device.type == "cuda":
        eager = engine.eager_reason
        log.info("decoding steps are %s", f"eager: {eager.text}" if eager else "CUDA graphs")
    if trace_file is not None:
        engine.trace = Trace({"device": description, "schedule": engine.lanes.schedule.value})
        _write_trace(engine.trace, trace_file)
    profile = measure_overheads(engine, loaded.profile)
    engine.watch_costs(profile)
    if profile.host_weight_bytes:
        log.warning(
            "weights on the host take at least %.3g ms of each step (--device-memory): %s",
            1e3 * profile.weight_seconds,
            loaded.weights,
        )


def lock_weights(options: WorkerOptions, engine: Engine) -> WeightLock | None:
    """Page-lock weights on the host in the background; None if there is nothing to lock."""
    device, memory = engine.cache.device, engine.model.host_memory
    if device.type != "cuda" or not memory or options.pin_limit_bytes == 0:
        return None
    return WeightLock(CudaRegistrar(device), memory)


def _tickers(options: WorkerOptions) -> list[Ticker]:
    """Return the receivers of the progress of loading."""

    def write(progress: Progress) -> None:
        done, total = format_size(progress.done_bytes), format_size(progress.total_bytes)
        log.info("loading weights: %s of %s", done, total)

    tickers = [Ticker(write, options.progress_seconds)]
    if options.on_loading is not None:
        tickers.append(Ticker(options.on_loading, min(LOADING_SECONDS, options.progress_seconds)))
    return tickers


def _write_trace(trace: Trace, path: Path) -> None:
    """Write an empty trace at the start, so that a bad path fails now and not at the stop."""
    try:
        trace.write(path)
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot be written: {error.strerror}", field="trace"
        ) from error

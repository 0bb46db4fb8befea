"""Builds a worker from its options: layout, weights, memory plan, engine, profile."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from splitpoint.checkpoint.config import model_name, read_config, shape_from_config
from splitpoint.checkpoint.resolve import eos_token_ids, model_fingerprint
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.config import format_rate, format_size
from splitpoint.costs.profile import Profile
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.host.memory import memory_facts
from splitpoint.host.openmp import spins_long
from splitpoint.numerics import Numerics
from splitpoint.options import worker as options
from splitpoint.options.cpu_kernels import with_panels
from splitpoint.options.speculation import SpeculativeConfig
from splitpoint.planning.weight_placement import (
    NOTHING_ON_HOST,
    WeightObjective,
    WeightPlacement,
    WeightSizes,
)
from splitpoint.progress import Progress, Ticker
from splitpoint.shapes import ArenaLayout, DataType, ModelShape, WeightFormat
from splitpoint.transport.tls import PLAIN, Identity
from worker_service.checkpoint.config import DecoderConfig
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.device.current import make_current
from worker_service.device.memory import (
    STAGING_PAGES,
    MemoryPlan,
    divide,
    grown_prefill,
    place,
    staging_pages_on_gpu,
)
from worker_service.device.pinning import Pinning
from worker_service.device.registrar import CudaRegistrar
from worker_service.drafting import NO_DRAFTS, DraftSetup, WorkerSpeculation, head_dims
from worker_service.engine.engine import Engine
from worker_service.graphs.eager_reason import EagerReason
from worker_service.graphs.support import graph_bytes, graph_obstacle, graphs_of
from worker_service.hardware.monitor import DeviceMonitor, monitor_of
from worker_service.kernels import panel_gemm
from worker_service.kernels.choice import Choice
from worker_service.kernels.compiled import NoKernels
from worker_service.kernels.gpu_order import use_one_order
from worker_service.lanes.lanes import EmulatedLink, Lanes
from worker_service.lanes.select import lanes_of
from worker_service.lanes.timeline import Trace
from worker_service.model.decoder import Decoder
from worker_service.model.span_attention import kernels_of
from worker_service.numerics.digest import facts_of, numerics_digest
from worker_service.numerics.obstacles import obstacle
from worker_service.numerics.self_check import dependence
from worker_service.numerics.verdict import NOT_CHECKED, WorkerNumerics, check_wish, decide
from worker_service.profiling.agreeing_rows import use_agreeing_rows
from worker_service.profiling.calibration import prefers_one_order, use_kernels
from worker_service.profiling.profiler import measure, measure_rates
from worker_service.profiling.restore_costs import measure_overheads
from worker_service.retrieval.screen_source import ScreenSource
from worker_service.runtime import Runtime
from worker_service.store.client import StoreClient
from worker_service.store.remote_client import RemoteStoreClient
from worker_service.store.verifier import Verifier
from worker_service.structured.compiler import GrammarCompiler
from worker_service.weights.lock import WeightLock
from worker_service.weights.matrices import product_shapes, weight_sizes

log = logging.getLogger(__name__)

# A CPU worker without --device-memory takes this share of what is available.
CPU_MEMORY_SHARE = 0.2
# A GPU worker leaves this share to the driver, libraries and fragmentation.
GPU_MEMORY_SHARE = 0.9
# Seconds between two reports of loading to a supervisor.
LOADING_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of splitpoint/options/worker.py. Those that are None are decided at the start.

    `on_loading` is called with the progress of loading, more often than the log is written.
    """

    worker_id: str
    model_folder: Path
    kvstore_address: str | None = None
    device: str = "auto"
    data_type: DataType | None = None
    device_memory_bytes: int | None = None
    max_batch_size: int = options.MAX_BATCH.default
    max_batched_tokens: int = options.MAX_BATCHED_TOKENS.default
    weight_objective: WeightObjective = WeightObjective.BALANCED
    threads: int | None = None
    cpu_kernels: str = options.CPU_KERNELS.default
    numerics: str = options.NUMERICS.default
    weights: WeightFormat = WeightFormat.NATIVE
    chunk_tokens: int = options.CHUNK_TOKENS.default
    pin_limit_bytes: int | None = None
    verify_rate: float = options.VERIFY_RATE.default
    identity: Identity = PLAIN
    kvstore_is_remote: bool = False
    mirror_memory_bytes: int | None = None
    shares_prefixes: bool = True
    is_serial: bool = False
    is_eager: bool = False
    link_bytes_per_second: int | None = None
    trace_file: Path | None = None
    speculation: SpeculativeConfig | None = None
    artifacts: Path | None = None
    progress_seconds: float = options.PROGRESS_SECONDS.default
    on_loading: Callable[[Progress], None] | None = None

    def __post_init__(self) -> None:
        if self.kvstore_is_remote != (self.mirror_memory_bytes is not None):
            raise InvalidArgument(
                "--kvstore-remote and --mirror-memory go together", field="mirror_memory"
            )
        if self.kvstore_is_remote and self.kvstore_address is None:
            raise InvalidArgument("--kvstore-remote needs --kvstore", field="kvstore")
        for name in ("max_batch_size", "max_batched_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} must be at least 1", field=name)
        if not 0 <= self.verify_rate <= 1:
            raise InvalidArgument("must be between 0 and 1", field="verify-rate")
        if not 1 <= len(self.worker_id) <= 64:
            raise InvalidArgument("worker_id must have 1 to 64 characters", field="worker_id")
        if not self.progress_seconds > 0:
            raise InvalidArgument("must be above 0", field="progress-seconds")
        if self.trace_file is not None and not self.trace_file.parent.is_dir():
            raise InvalidArgument(f"{self.trace_file.parent} is no folder", field="trace")
        if self.artifacts is not None and not self.artifacts.is_dir():
            raise InvalidArgument(f"{self.artifacts} is no folder", field="artifacts")


@dataclass(slots=True)
class LoadedWorker:
    """A worker that can serve.

    Attributes:
        weights: which weights are on the host, for people; empty: none.
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
    wish = _kernel_wish(options, device)
    lanes = _lanes(options, device)
    if options.threads is not None and device.type == "cpu":
        torch.set_num_threads(options.threads)
    config = read_config(options.model_folder)
    shape = shape_from_config(
        config, name=model_name(options.model_folder), data_type=options.data_type
    )
    async with AsyncExitStack() as on_failure:
        on_failure.callback(lanes.close)
        # Before the weights are loaded, which uses link and power, too.
        monitor = await asyncio.to_thread(monitor_of, device)
        monitor.start()
        on_failure.push_async_callback(asyncio.to_thread, monitor.stop)  # it may wait
        store = _store_client(options, device)
        if store is None:
            layout = ArenaLayout.of(shape, chunk_tokens=options.chunk_tokens, has_activations=False)
        else:
            on_failure.push_async_callback(store.close)
            layout = await store.layout()
            await asyncio.to_thread(_check_layout, layout, shape, options)
        kernels, kernels_text = None, ""
        if device.type == "cpu":
            kernels = await asyncio.to_thread(
                use_kernels,
                TORCH_TYPES[shape.data_type],
                wish,
                head_dims=head_dims(options.speculation, shape),
                is_invariant=prefers_one_order(options.numerics),
            )
            if options.weights is WeightFormat.INT8:
                await asyncio.to_thread(_prepare_int8, TORCH_TYPES[shape.data_type])
            kernels_text = f", {kernels.text}, {_waiting()}"
        description = _describe(lanes, kernels_text)
        against = await asyncio.to_thread(_obstacle, options, device, layout, kernels)
        # Before the weights are loaded, which takes long.
        check_wish(options.numerics, against)
        if kernels is not None and against is None and options.numerics != Numerics.FAST:
            await asyncio.to_thread(_agree_on_rows, options, shape)
        screens = None
        if store is not None:
            screens = await asyncio.to_thread(_screens, options, shape, device)
        engine, weights, speculation = await asyncio.to_thread(
            _load_engine, options, shape, layout, lanes, screens
        )
        numerics = await asyncio.to_thread(
            _numerics, options.numerics, against, engine.model, layout.chunk_tokens
        )
        await asyncio.to_thread(_prepare, engine, description, weights, options.trace_file)
        if store is not None:
            await store.start(layout)
        on_failure.pop_all()
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
        weights=weights,
        weight_lock=_lock_weights(options, engine),
        monitor=monitor,
        speculation=speculation,
        screens=screens,
        numerics=numerics,
    )


def _grammars(engine: Engine) -> GrammarCompiler | None:
    """Return what compiles structured output; None if this worker cannot follow it."""
    size = engine.model.shape.vocabulary_size
    grammars = GrammarCompiler.if_possible(engine.tokenizer, size)
    log.info("structured output is %s", "off" if grammars is None else "on")
    return grammars


def choose_device(text: str) -> torch.device:
    """Return the device of `cpu`, `cuda`, `cuda:N` or `auto` (a GPU if there is one).

    Raises InvalidArgument.
    """
    if text == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise InvalidArgument(f"{text!r} is not a device", field="device") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device {text!r} is neither cpu nor cuda", field="device")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise InvalidArgument(
                f"device {text!r} does not exist: PyTorch sees {count} CUDA devices",
                field="device",
            )
        return torch.device("cuda", device.index or 0)
    return device


def _obstacle(
    options: WorkerOptions, device: torch.device, layout: ArenaLayout, kernels: Choice | None
) -> str | None:
    """Choose a GPU's kernels, and return what excludes invariant numerics before the check.

    `kernels`: a CPU's; None on a GPU.
    """
    in_one_order = kernels is None and options.numerics == Numerics.INVARIANT
    use_one_order(in_one_order)
    return obstacle(
        options.numerics,
        is_gpu=kernels is None,
        encoding=layout.encoding,
        kernels=kernels,
        has_triton=in_one_order and kernels_of(device) is not None,
    )


def _kernel_wish(options: WorkerOptions, device: torch.device) -> str:
    """Return `--cpu-kernels`, as int8 weights need them. Raises InvalidArgument."""
    if options.weights is WeightFormat.NATIVE:
        return options.cpu_kernels
    if device.type != "cpu":
        raise InvalidArgument("--weights int8 is for CPU workers", field="weights")
    return with_panels(options.cpu_kernels)


def _prepare_int8(dtype: torch.dtype) -> None:
    """Compile the kernel of int8 weights. Raises FailedPrecondition."""
    try:
        panel_gemm.prepare(dtype, is_int8=True)
    except NoKernels as error:
        raise FailedPrecondition(f"--weights int8: {error}", reason="NO_INT8_KERNEL") from error


def _check_layout(layout: ArenaLayout, shape: ModelShape, options: WorkerOptions) -> None:
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


def _store_client(options: WorkerOptions, device: torch.device) -> StoreClient | None:
    """Return a client of the worker's store, not yet connected; None if it has no store."""
    if options.kvstore_address is None:
        return None
    name, pinning = f"worker-{options.worker_id}", None
    if device.type == "cuda" and options.pin_limit_bytes != 0:
        pinning = Pinning(
            CudaRegistrar(device),
            limit_bytes=options.pin_limit_bytes,
            progress_seconds=options.progress_seconds,
        )
    if options.mirror_memory_bytes is None:
        return StoreClient(
            options.kvstore_address, name, identity=options.identity, pinning=pinning
        )
    return RemoteStoreClient(
        options.kvstore_address,
        name,
        identity=options.identity,
        mirror_bytes=options.mirror_memory_bytes,
        pinning=pinning,
    )


def _agree_on_rows(options: WorkerOptions, shape: ModelShape) -> None:
    """Let products depend on no other rows, also where the kernels at hand are torch's."""
    config = DecoderConfig.read(options.model_folder, shape.data_type)
    use_agreeing_rows(product_shapes(config), TORCH_TYPES[shape.data_type])


def _numerics(wish: str, against: str | None, model: Decoder, page_tokens: int) -> WorkerNumerics:
    """Check the numerics. Those that are invariant have a digest."""
    check = partial(dependence, model, page_tokens)
    found = decide(wish, obstacle=against, check=check)
    log.info("numerics are %s: %s", found.numerics.value, found.reason)
    if found.numerics is not Numerics.INVARIANT:
        return found
    facts = facts_of(model, page_tokens)
    found = replace(found, digest=numerics_digest(facts))
    log.info("numerics digest %s", found.digest)
    # Of two workers that should be alike, the logs show what differs.
    log.debug("numerics digest %s is of %s", found.digest, facts)
    return found


def _screens(options: WorkerOptions, shape: ModelShape, device: torch.device) -> ScreenSource:
    """Read the artefacts of selections, before what is left of the device memory is divided."""
    make_current(device)
    config = DecoderConfig.read(options.model_folder, shape.data_type)
    return ScreenSource.open(config, options.model_folder, options.artifacts, device)


def _load_engine(
    options: WorkerOptions,
    shape: ModelShape,
    layout: ArenaLayout,
    lanes: Lanes,
    screens: ScreenSource | None,
) -> tuple[Engine, str, WorkerSpeculation]:
    """Divide the device memory and load the model, and what drafts for it.

    Returns the engine, which weights are on the host (empty: none), and the speculation.
    """
    device, folder = lanes.device, options.model_folder
    make_current(device)
    # Before the weights are read: a budget that cannot hold them fails at once.
    artifact_bytes = 0 if screens is None else screens.size_bytes
    memory = _divide_memory(options, shape, layout, lanes, artifact_bytes)
    placement, plan, tickers = memory.placement, memory.plan, _tickers(options)
    dtype = TORCH_TYPES[shape.data_type]
    model = Decoder.load(folder, device, dtype, placement.on_host, tickers, options.weights)
    cache, eos = DeviceCache(layout, plan, device), eos_token_ids(folder)
    drafters = memory.drafts.load(model, cache, lanes, eos_token_ids=eos, tickers=tickers)
    engine = Engine(
        model,
        cache,
        max_batch_size=options.max_batch_size,
        max_batched_tokens=memory.max_batched_tokens,
        eos_token_ids=eos,
        tokenizer=Tokenizer.load(folder),
        lanes=lanes,
        verifier=Verifier(options.verify_rate),
        shares_prefixes=options.shares_prefixes,
        drafters=drafters,
        graphs=graphs_of(
            cache,
            [layer.window for layer in model.layers],
            max_batch_size=options.max_batch_size,
        ),
        eager_reason=memory.eager_reason,
        screens_of=None if screens is None else screens.screens,
    )
    log.info(
        "%s on %s: weights take %s (%s), cache %s in %d pages",
        shape.name,
        _describe(lanes),
        format_size(plan.weight_bytes),
        placement.reason,
        format_size(plan.cache_capacity_bytes),
        plan.page_count,
    )
    weights = "" if placement.on_host == NOTHING_ON_HOST else placement.reason
    return engine, weights, memory.drafts.described(drafters)


@dataclass(frozen=True, slots=True)
class _Memory:
    """The device memory, divided.

    Attributes:
        plan: without what the draft model needs.
        eager_reason: why decoding steps are not recorded as graphs.
    """

    placement: WeightPlacement
    plan: MemoryPlan
    drafts: DraftSetup
    max_batched_tokens: int
    eager_reason: EagerReason


def _divide_memory(
    options: WorkerOptions,
    shape: ModelShape,
    layout: ArenaLayout,
    lanes: Lanes,
    artifact_bytes: int,
) -> _Memory:
    """Place the weights, and divide what they and artefacts leave. Raises ResourceExhausted."""
    device, folder = lanes.device, options.model_folder
    dtype = TORCH_TYPES[shape.data_type]
    config = DecoderConfig.read(folder, shape.data_type)
    sizes = weight_sizes(config, device, dtype, options.weights)
    budget = _budget(options, sizes, device) - artifact_bytes
    is_gpu = device.type == "cuda"
    drafts = DraftSetup.plan(
        options.speculation,
        folder,
        shape,
        layout,
        device,
        budget_bytes=budget,
        max_batch_size=options.max_batch_size,
        max_batched_tokens=options.max_batched_tokens,
        has_store=options.kvstore_address is not None,
    )
    budget -= drafts.model_bytes
    limits: dict[str, Any] = {
        "budget_bytes": budget,
        "draft_tokens": drafts.draft_tokens,
        "max_batch_size": options.max_batch_size,
        "max_batched_tokens": options.max_batched_tokens,
        "staging_pages": staging_pages_on_gpu(shape, layout, budget) if is_gpu else STAGING_PAGES,
        "has_store": options.kvstore_address is not None,
    }
    placement = place(shape, layout, sizes, **limits)
    if placement.streamed_bytes:
        rates = measure_rates(shape, lanes)
        placement = place(
            shape, layout, sizes, **limits, rates=rates, objective=options.weight_objective
        )
        limits["max_batched_tokens"] = grown_prefill(shape, layout, placement, rates, **limits)
    obstacle = graph_obstacle(
        device, dtype, shape.head_dim, placement.on_host, is_asked=not options.is_eager
    )
    plan = divide(
        shape,
        layout,
        weight_bytes=placement.device_bytes,
        graph_bytes=0 if obstacle else graph_bytes(budget),
        window_pages=drafts.window_pages(shape, layout),
        **limits,
    )
    return _Memory(
        placement, plan, drafts, limits["max_batched_tokens"], obstacle or EagerReason.NO_MEMORY
    )


def _prepare(engine: Engine, description: str, weights: str, trace_file: Path | None) -> None:
    """Open the trace, and measure the engine's costs."""
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
    profile = measure(engine.model, engine.cache.device, description, lanes=engine.lanes)
    profile = measure_overheads(engine, profile)
    engine.watch_costs(profile)
    if profile.host_weight_bytes:
        log.warning(
            "weights on the host: %s, at least %.3g ms of each step (--device-memory)",
            weights,
            1e3 * profile.weight_seconds,
        )


def _describe(lanes: Lanes, kernels: str = "") -> str:
    """Return the device, its kernels, and its emulated link if it has one."""
    description = f"{describe_device(lanes.device)}{kernels}"
    if lanes.link is None:
        return description
    return f"{description}, link emulated at {format_rate(lanes.link.bytes_per_second)}"


def _tickers(options: WorkerOptions) -> list[Ticker]:
    """Return the receivers of the progress of loading."""

    def write(progress: Progress) -> None:
        done, total = format_size(progress.done_bytes), format_size(progress.total_bytes)
        log.info("loading weights: %s of %s", done, total)

    tickers = [Ticker(write, options.progress_seconds)]
    if options.on_loading is not None:
        tickers.append(Ticker(options.on_loading, min(LOADING_SECONDS, options.progress_seconds)))
    return tickers


def _budget(options: WorkerOptions, sizes: WeightSizes, device: torch.device) -> int:
    if options.device_memory_bytes is not None:
        return options.device_memory_bytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(GPU_MEMORY_SHARE * free)
    return sizes.total + int(CPU_MEMORY_SHARE * memory_facts().usable_bytes)


def _lanes(options: WorkerOptions, device: torch.device) -> Lanes:
    """Return the device's lanes. Raises InvalidArgument for an emulated link on a GPU."""
    rate = options.link_bytes_per_second
    link = None if rate is None else EmulatedLink(rate)
    return lanes_of(device, overlapped=not options.is_serial, link=link)


def _lock_weights(options: WorkerOptions, engine: Engine) -> WeightLock | None:
    """Page-lock weights on the host in the background; None if there is nothing to lock."""
    device, memory = engine.cache.device, engine.model.host_memory
    if device.type != "cuda" or not memory or options.pin_limit_bytes == 0:
        return None
    return WeightLock(CudaRegistrar(device), memory)


def _write_trace(trace: Trace, path: Path) -> None:
    """Write an empty trace at the start, so that a bad path fails now and not at the stop."""
    try:
        trace.write(path)
    except OSError as error:
        raise InvalidArgument(
            f"{path} cannot be written: {error.strerror}", field="trace"
        ) from error


def _waiting() -> str:
    """Return how compute threads wait for each other (splitpoint/host/openmp.py)."""
    spins = spins_long()
    if spins is None:
        return "threads wait as the user set"
    return "threads spin while they wait" if spins else "threads wait briefly, then sleep"


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' if threads > 1 else ''})"

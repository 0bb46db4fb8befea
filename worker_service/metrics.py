"""A worker's metrics: its counters, read at each scrape, and distributions.

`splitpoint/observe/metrics.py` has the names and texts. The worker's monitor adds what only
a driver knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from splitpoint.observe import metrics
from splitpoint.observe.meters import Meters, Reading
from splitpoint.planning.plan import RestoreMethod
from splitpoint.selection import SelectionUsage
from worker_service.counters import METHODS, Counters, Predicted, Traffic, predictions
from worker_service.engine.messages import StepOutput
from worker_service.graphs.decode_graphs import DecodeGraphs
from worker_service.graphs.support import EagerReason
from worker_service.startup.worker import LoadedWorker


class WorkerMetrics:
    """The metrics of one loaded worker. Construct it on the event loop, where it is read."""

    def __init__(self, meters: Meters, worker: LoadedWorker) -> None:
        self._worker = worker
        self._steps = meters.histogram(metrics.WORKER_STEP_SECONDS)
        self._step_tokens = meters.histogram(metrics.WORKER_STEP_TOKENS)
        self._step_usage = meters.histogram(metrics.WORKER_STEP_CACHE_USAGE)
        self._splits = meters.histogram(metrics.SPLIT_TOKENS)
        restores = meters.histogram(metrics.RESTORE_SECONDS)
        self._restores = {method: restores.labels(method.value) for method in METHODS}
        ratios = meters.histogram(metrics.PREDICTION_RATIO)
        self._ratios = {what: ratios.labels(what.value) for what in Predicted}
        meters.read(self.readings)
        worker.runtime.observers.append(self.observe)

    def observe(self, output: StepOutput) -> None:
        """Add every step and restore of an output to the distributions."""
        if output.step is not None:
            self._steps.observe(output.step.times.seconds)
            self._step_tokens.observe(output.step.scheduled_tokens)
            capacity = self._worker.engine.memory_plan.cache_capacity_bytes
            self._step_usage.observe(output.cache_used_bytes / capacity)
        for event in output.restores:
            if event.brought_tokens:
                self._restores[event.method].observe(event.restore_seconds)
                if event.method is not RestoreMethod.TOKENS:
                    self._splits.observe(event.split_tokens)
        for what, predicted, measured in predictions(output):
            self._ratios[what].observe(measured / predicted)

    def readings(self) -> Iterator[Reading]:
        worker, counters = self._worker, self._worker.runtime.counters
        yield from _of_worker(worker)
        yield from _of_steps(counters)
        yield from selection_readings(counters.selected)
        yield from _of_link(worker, counters)
        yield from _of_cache(counters)
        yield Reading(
            metrics.COMPUTE_BUSY_SECONDS,
            counters.compute_until_now(worker.engine.computing_seconds),
        )
        yield from worker.monitor.readings()


def _weights_label(worker: LoadedWorker) -> str:
    place, kind = worker.weights or "all on the device", worker.engine.model.weights
    return f"{kind.value}, {place}" if kind.is_lossy else place


def _of_worker(worker: LoadedWorker) -> Iterable[Reading]:
    engine, store = worker.engine, worker.store
    yield Reading(
        metrics.WORKER_INFO,
        1,
        (
            worker.worker_id,
            worker.device_description,
            engine.lanes.schedule.value,
            _weights_label(worker),
            worker.numerics.numerics.value,
        ),
    )
    yield Reading(metrics.MODEL_INFO, 1, (engine.model.shape.name,))
    yield Reading(metrics.WORKER_RUNNING, len(engine.queues.running))
    verifier = engine.verifier
    for result, count in (
        ("intact", verifier.intact_count if verifier else 0),
        ("damaged", verifier.damaged_count if verifier else 0),
    ):
        yield Reading(metrics.WORKER_VERIFIED_CHUNKS, count, (result,))
    used, capacity = engine.cache.used_bytes, engine.memory_plan.cache_capacity_bytes
    yield Reading(metrics.WORKER_CACHE_BYTES, used, ("used",))
    yield Reading(metrics.WORKER_CACHE_BYTES, capacity, ("capacity",))
    memory = engine.cache.page_memory
    if memory is not None:
        populated = memory.ready_count * memory.page_bytes
        yield Reading(metrics.WORKER_CACHE_BYTES, populated, ("populated",))
    yield Reading(metrics.WORKER_CACHE_USAGE, used / capacity)
    pages = engine.cache.pages
    for state, count in (
        ("used", pages.used_count),
        ("cached", pages.cached_count),
        ("free", pages.free_count),
    ):
        yield Reading(metrics.WORKER_CACHE_PAGES, count, (state,))
    # A prefill is itself one of the batch.
    budget = engine.max_batch_size - 1 + engine.max_batched_tokens
    yield Reading(metrics.WORKER_STEP_TOKEN_BUDGET, budget)
    yield Reading(metrics.WORKER_MASKS, engine.mask_totals.count)
    yield Reading(metrics.WORKER_MASK_SECONDS, engine.mask_totals.seconds)
    if worker.store_is_up is not None:
        yield Reading(metrics.WORKER_STORE_UP, worker.store_is_up)
    if worker.redis_is_up is not None:
        yield Reading(metrics.REDIS_UP, worker.redis_is_up())
    if store is not None and store.pinning is not None:
        yield Reading(metrics.WORKER_PINNED_BYTES, store.pinning.pinned_bytes)
    if engine.lanes.device.type == "cuda":
        yield from graph_readings(engine.graphs, engine.eager_reason)


def graph_readings(
    graphs: DecodeGraphs | None, eager_reason: EagerReason | None
) -> Iterable[Reading]:
    """Return what a worker on a GPU says of its CUDA graphs."""
    count = 0 if graphs is None else graphs.graph_count
    why = "none" if eager_reason is None else eager_reason.value
    yield Reading(metrics.WORKER_GRAPHS, count, (why,))
    if graphs is not None:
        yield Reading(metrics.WORKER_GRAPH_BYTES, graphs.size_bytes)
        yield Reading(metrics.WORKER_GRAPH_STEPS, graphs.counts.replayed, ("replayed",))
        yield Reading(metrics.WORKER_GRAPH_STEPS, graphs.counts.eager, ("eager",))


def _of_steps(counters: Counters) -> Iterable[Reading]:
    for kind, count in counters.steps.items():
        yield Reading(metrics.WORKER_STEPS, count, (kind.value,))
    yield Reading(metrics.WORKER_SCHEDULED_TOKENS, counters.prefilled_tokens, ("prefill",))
    yield Reading(metrics.WORKER_SCHEDULED_TOKENS, counters.decoded_tokens, ("decode",))
    yield Reading(metrics.WORKER_GENERATED_TOKENS, counters.generated_tokens)
    yield Reading(metrics.WORKER_CHUNK_LOSSES, counters.chunk_losses)
    yield Reading(metrics.WORKER_PREEMPTIONS, counters.preemptions)
    yield Reading(metrics.WORKER_GRAMMARS, counters.grammars)
    yield Reading(metrics.WORKER_GRAMMAR_SECONDS, counters.grammar_seconds)
    for method, count in counters.drafts.items():
        labels = (method.value,)
        yield Reading(metrics.SPEC_DECODE_DRAFTS, count, labels)
        yield Reading(metrics.SPEC_DECODE_DRAFT_TOKENS, counters.drafted_tokens[method], labels)
        yield Reading(metrics.SPEC_DECODE_ACCEPTED_TOKENS, counters.accepted_tokens[method], labels)
    for result, count in counters.written.chunks.items():
        yield Reading(metrics.WORKER_WRITE_BACK_CHUNKS, count, (result.value,))


def selection_readings(usage: SelectionUsage) -> Iterable[Reading]:
    """Return what a worker read by selection."""
    yield Reading(metrics.SELECTION_STEPS, usage.step_count)
    yield Reading(metrics.SELECTION_TOKENS, usage.read_token_count, ("read",))
    yield Reading(metrics.SELECTION_TOKENS, usage.skipped_token_count, ("skipped",))
    yield Reading(metrics.SELECTION_ROWS, usage.fetched_row_count, ("fetched",))
    yield Reading(metrics.SELECTION_ROWS, usage.reused_row_count, ("reused",))
    yield Reading(metrics.SELECTION_LINK_BYTES, usage.link_bytes)


def _of_link(worker: LoadedWorker, counters: Counters) -> Iterable[Reading]:
    profile, link = worker.profile, worker.engine.lanes.link
    for traffic in Traffic:
        labels = ("in", traffic.value)
        yield Reading(metrics.LINK_BYTES, counters.link_in_bytes[traffic], labels)
    yield Reading(metrics.LINK_BYTES, counters.written.bytes, ("out", "write_back"))
    yield Reading(metrics.LINK_BUSY_SECONDS, counters.link_in_seconds, ("in",))
    yield Reading(metrics.LINK_BUSY_SECONDS, counters.written.seconds, ("out",))
    yield Reading(metrics.LINK_RATE, profile.link_bytes_per_second)
    if link is not None:
        yield Reading(metrics.LINK_CEILING, link.bytes_per_second)
    yield Reading(metrics.PROFILE_FLOPS, profile.rebuild_flops_per_second, ("rebuild",))
    yield Reading(metrics.PROFILE_FLOPS, profile.prefill_flops_per_second, ("prefill",))


def _of_cache(counters: Counters) -> Iterable[Reading]:
    yield Reading(metrics.RECOMPUTE_SECONDS, counters.rebuild_seconds, ("activations",))
    yield Reading(metrics.RECOMPUTE_SECONDS, counters.prefill_seconds, ("tokens",))
    for (residency, way), count in counters.cache_tokens.items():
        yield Reading(metrics.CACHE_TOKENS, count, (residency.value, way.value))
    yield Reading(metrics.WORKER_DEVICE_CACHED_TOKENS, counters.device_tokens)
    yield Reading(metrics.FETCHED_TOKENS, counters.fetched.tokens)
    yield Reading(metrics.FETCH_SECONDS, counters.fetched.seconds)
    for method, count in counters.restores.items():
        yield Reading(metrics.RESTORES, count, (method.value,))
    restored = counters.restored.seconds
    yield Reading(metrics.RESTORED_LINK_SECONDS, restored.link)
    yield Reading(metrics.RESTORED_DEVICE_SECONDS, restored.restore, ("restore",))
    yield Reading(metrics.RESTORED_DEVICE_SECONDS, restored.prefill, ("prefill",))
    yield Reading(metrics.RESTORED_FIRST_TOKEN_SECONDS, restored.total)
    for what in Predicted:
        predicted, measured = counters.predicted_seconds[what], counters.measured_seconds[what]
        yield Reading(metrics.PREDICTED_SECONDS, predicted, (what.value,))
        yield Reading(metrics.MEASURED_SECONDS, measured, (what.value,))

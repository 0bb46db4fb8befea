"""Every metric of every service, as data: names, units, labels, and what each one tells.

The one list that services measure by, docs/metrics.md is written from, and dashboards
and alerts are checked against. Names follow Prometheus: base units, `_total` for
counters; shares are divided where they are looked at, except for the cache usage, which
autoscalers read without a query language. Knows neither how values come about
(splitpoint/observe/meters.py) nor who asks for them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """How Prometheus reads a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Service(enum.StrEnum):
    """Whose process a metric is measured in."""

    KVSTORE = "kvstore"
    WORKER = "worker"
    SCHEDULER = "scheduler"


class Needs(enum.StrEnum):
    """What must be there for a metric to have values at all."""

    REDIS = "a Redis"
    STORE = "a KV store"
    GPU = "an NVIDIA GPU"
    RAPL = "readable RAPL counters"
    EMULATED_LINK = "a GPU or an emulated link"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. `name` as Prometheus prints it, `_total` of counters included.

    Attributes:
        labels: names, in the order in which values are given.
        buckets: upper bounds of a histogram, ascending, infinity left out.
        needs: absent where that is; None: always there.
    """

    name: str
    kind: Kind
    help: str
    services: tuple[Service, ...]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    needs: Needs | None = None

    def __post_init__(self) -> None:
        if self.name.endswith("_total") != (self.kind is Kind.COUNTER):
            raise ValueError(f"{self.name}: counters, and only they, end in _total")
        if bool(self.buckets) != (self.kind is Kind.HISTOGRAM):
            raise ValueError(f"{self.name}: histograms, and only they, have buckets")


# vLLM's boundaries, so that its dashboards and habits carry over.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# Tokens of a request.
LENGTH_BUCKETS = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3),
    *(1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6),
)
# Measured over predicted: 1 is right.
_PREDICTION_BUCKETS = (0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)
_KAPPA_BUCKETS = (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 1024.0)
_TOKEN_BUCKETS = (0.0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

_ALL = (Service.KVSTORE, Service.WORKER, Service.SCHEDULER)
_STORE = (Service.KVSTORE,)
_WORKER = (Service.WORKER,)
_SCHEDULER = (Service.SCHEDULER,)


def _counter(
    services: tuple[Service, ...], name: str, text: str, *labels: str, needs: Needs | None = None
) -> Metric:
    return Metric(f"splitpoint_{name}", Kind.COUNTER, text, services, labels, needs=needs)


def _gauge(
    services: tuple[Service, ...], name: str, text: str, *labels: str, needs: Needs | None = None
) -> Metric:
    return Metric(f"splitpoint_{name}", Kind.GAUGE, text, services, labels, needs=needs)


def _histogram(
    services: tuple[Service, ...], name: str, text: str, buckets: tuple[float, ...], *labels: str
) -> Metric:
    return Metric(f"splitpoint_{name}", Kind.HISTOGRAM, text, services, labels, buckets)


# -- all services ---------------------------------------------------------------------

BUILD_INFO = _gauge(_ALL, "build_info", "Always 1; the release.", "service", "version")
RPC_CALLS = _counter(
    _ALL,
    "rpc_calls_total",
    "gRPC calls that ended, by method and status; given up by their caller, or late: CANCELLED.",
    *("method", "code"),
)
REDIS_UP = _gauge(
    _ALL,
    "redis_up",
    "1 while Redis answers, 0 while the service goes on without it.",
    needs=Needs.REDIS,
)

MODEL_INFO = _gauge(
    (Service.WORKER, Service.SCHEDULER),
    "model_info",
    "Always 1; the model that a worker or the scheduler serves.",
    "model_name",
)

# -- the store --------------------------------------------------------------------------

STORE_INFO = _gauge(
    _STORE,
    "store_info",
    "Always 1; how the cache is kept, who is evicted, what the arena's memory is.",
    *("encoding", "eviction_policy", "chunk_tokens", "activations", "memory"),
)
STORE_ARENA_BYTES = _gauge(_STORE, "store_arena_bytes", "Size of the arena's file.")
STORE_EPOCH = _gauge(_STORE, "store_epoch", "Starts on this arena; grows by 1 with each.")
STORE_SLOTS = _gauge(
    _STORE,
    "store_slots",
    "Slots by state (free, writing, sealed, quarantined); together the whole arena.",
    "state",
)
STORE_LEASED_SLOTS = _gauge(
    _STORE, "store_leased_slots", "Sealed slots that at least one lease keeps from eviction."
)
STORE_LEASES = _gauge(_STORE, "store_leases", "Open leases.")
STORE_SESSIONS = _gauge(_STORE, "store_sessions", "Attached workers.")
STORE_MATCHES = _counter(_STORE, "store_matches_total", "Prefix look-ups that ask for a lease.")
STORE_MATCH_HITS = _counter(
    _STORE, "store_match_hits_total", "Of these, those that found a prefix."
)
STORE_QUERY_TOKENS = _counter(_STORE, "store_query_tokens_total", "Tokens that were looked up.")
STORE_HIT_TOKENS = _counter(_STORE, "store_hit_tokens_total", "Tokens found, of those looked up.")
STORE_SEALED_CHUNKS = _counter(_STORE, "store_sealed_chunks_total", "Chunks published.")
STORE_DUPLICATE_CHUNKS = _counter(
    _STORE, "store_duplicate_chunks_total", "Chunks that were there already when sealed."
)
STORE_UNADMITTED_CHUNKS = _counter(
    _STORE, "store_unadmitted_chunks_total", "Chunks that store-on-second-use kept out."
)
STORE_EVICTIONS = _counter(
    _STORE,
    "store_evictions_total",
    "Chunks evicted: for room that was needed at once, by the watermark beforehand, or because "
    "an operator asked (room, watermark, request).",
    *("policy", "cause"),
)
STORE_EVICTED_AGE_SECONDS = _counter(
    _STORE, "store_evicted_age_seconds_total", "Age of evicted chunks since sealing, summed."
)
STORE_EVICTED_BY_USE = _counter(
    _STORE,
    "store_evicted_by_use_total",
    "Chunks evicted, by how often they were used after sealing (0, 1, 2-3, 4-7, 8-15, 16+); "
    "many at 0: one-shot traffic.",
    "uses",
)
STORE_REFUSED_RESERVATIONS = _counter(
    _STORE,
    "store_refused_reservations_total",
    "Reservations refused because nothing more could be evicted: the arena is too small.",
)
STORE_CHECKSUM_FAILURES = _counter(
    _STORE, "store_checksum_failures_total", "Chunks whose bytes differ from their checksum."
)
STORE_DAMAGED_CHUNKS = _counter(
    _STORE,
    "store_damaged_chunks_total",
    "Sealed chunks that changed while the store ran, by what found them (scrub, report); dropped.",
    "found_by",
)
STORE_SCRUBBED_BYTES = _counter(
    _STORE, "store_scrubbed_bytes_total", "Payload that the scrubber read back."
)
STORE_SCRUB_PROGRESS = _gauge(
    _STORE,
    "store_scrub_progress_ratio",
    "Share of the arena that the present scrub pass has seen, 0 to 1.",
)
STORE_SCRUB_PASS_SECONDS = _gauge(
    _STORE,
    "store_scrub_pass_seconds",
    "How long the last complete scrub pass took; 0: none is complete, or none is wanted.",
)
STORE_INTEGRITY_VIOLATIONS = _gauge(
    _STORE, "store_integrity_violations", "Invariants that the last check found broken; 0 is right."
)
STORE_RECOVERED_CHUNKS = _gauge(
    _STORE,
    "store_recovered_chunks",
    "What this start found in the arena: adopted, refused (damaged), quarantined.",
    "result",
)
STORE_RECOVERY_SECONDS = _gauge(
    _STORE, "store_recovery_seconds", "How long reading the arena's records took at the start."
)
STORE_FORMER_ARENA_LOST = _gauge(
    _STORE,
    "store_former_arena_lost",
    "1 if this store began with an empty arena because the one before was lost, by how: removed, "
    "truncated, damaged; else 0.",
    "loss",
)
STORE_REMOTE_BYTES = _counter(
    _STORE,
    "store_remote_bytes_total",
    "Payload that went over gRPC to and from other hosts (read, written).",
    "direction",
)

# -- workers: steps and their requests -----------------------------------------------------

WORKER_INFO = _gauge(
    _WORKER,
    "worker_info",
    "Always 1; who this worker is and how it moves the cache.",
    *("worker_id", "device", "schedule", "weights"),
)
WORKER_RUNNING = _gauge(_WORKER, "worker_running_requests", "Requests that the engine runs.")
WORKER_CACHE_BYTES = _gauge(
    _WORKER, "worker_cache_bytes", "Device memory for the cache: used, capacity.", "kind"
)
WORKER_CACHE_USAGE = _gauge(
    _WORKER,
    "worker_cache_usage_ratio",
    "Used share of the device memory for the cache, 0 to 1.",
)
WORKER_STEPS = _counter(
    _WORKER, "worker_steps_total", "Engine steps: prefill, decode, or mixed.", "kind"
)
WORKER_STEP_SECONDS = _histogram(
    _WORKER, "worker_step_seconds", "One engine step, from its batch to its tokens.", ITL_BUCKETS
)
WORKER_SCHEDULED_TOKENS = _counter(
    _WORKER, "worker_scheduled_tokens_total", "Tokens that steps computed, by phase.", "phase"
)
WORKER_STEP_TOKEN_BUDGET = _gauge(
    _WORKER,
    "worker_step_token_budget",
    "Most tokens of one step: a piece of a prefill for one request of a full batch, and one "
    "token for each of the others.",
)
WORKER_GENERATED_TOKENS = _counter(
    _WORKER, "worker_generated_tokens_total", "Tokens sampled; the divisor of joules per token."
)
WORKER_STORE_UP = _gauge(
    _WORKER,
    "worker_store_up",
    "1 while the worker is attached to its KV store; 0: no reuse, no streaming.",
    needs=Needs.STORE,
)
WORKER_CHUNK_LOSSES = _counter(
    _WORKER, "worker_chunk_losses_total", "Sequences that lost chunks under them and began anew."
)
WORKER_VERIFIED_CHUNKS = _counter(
    _WORKER,
    "worker_verified_chunks_total",
    "Chunks read from the arena whose checksum was compared: intact, damaged.",
    "result",
)
WORKER_WRITE_BACK_CHUNKS = _counter(
    _WORKER,
    "worker_write_back_chunks_total",
    "Chunks handed to write-back: stored, failed, or unwanted by the store.",
    "result",
)
WORKER_PINNED_BYTES = _gauge(
    _WORKER, "worker_pinned_bytes", "Arena memory page-locked for the GPU.", needs=Needs.GPU
)

# -- workers: the link, and what is done instead of using it ---------------------------------

LINK_BYTES = _counter(
    _WORKER,
    "link_bytes_total",
    "Bytes over the link to the device. in: kv, activations, weights; out: write_back.",
    *("direction", "method"),
)
LINK_BUSY_SECONDS = _counter(
    _WORKER,
    "link_busy_seconds_total",
    "Seconds that copies of a direction took, each by itself: weights come beside the cache, so "
    "these may grow by more than 1 a second.",
    "direction",
)
LINK_RATE = _gauge(
    _WORKER, "link_rate_bytes_per_second", "What copies reach, as fitted from their own times."
)
LINK_CEILING = _gauge(
    _WORKER,
    "link_ceiling_bytes_per_second",
    "What the link can reach: PCIe generation times width, or the emulated rate.",
    needs=Needs.EMULATED_LINK,
)
COMPUTE_BUSY_SECONDS = _counter(
    _WORKER,
    "compute_busy_seconds_total",
    "Seconds of device work: prefill and decode steps, and restores.",
)
RECOMPUTE_SECONDS = _counter(
    _WORKER,
    "recompute_seconds_total",
    "Seconds of rebuilding K,V instead of loading it: from activations or from tokens.",
    "method",
)
CACHE_TOKENS = _counter(
    _WORKER,
    "cache_tokens_total",
    "Cached tokens by how they came to the device: loaded, rebuilt (from activations), "
    "recomputed (from token ids). Restores count tokens, streamed steps tokens of each step.",
    *("residency", "method"),
)
FETCHED_TOKENS = _counter(
    _WORKER, "fetched_tokens_total", "Tokens brought from other hosts' stores."
)
FETCH_SECONDS = _counter(_WORKER, "fetch_seconds_total", "Seconds of these fetches.")
RESTORES = _counter(_WORKER, "restores_total", "Prefixes brought back, by method.", "method")
RESTORE_SECONDS = _histogram(
    _WORKER, "restore_seconds", "Bringing one prefix back, by method.", TTFT_BUCKETS, "method"
)
SPLIT_TOKENS = _histogram(
    _WORKER,
    "split_tokens",
    "Split point l of restores: tokens before it are rebuilt.",
    _TOKEN_BUCKETS,
)
PREDICTION_RATIO = _histogram(
    _WORKER,
    "prediction_ratio",
    "Measured over predicted seconds, of restores and of streamed steps; 1 is right.",
    _PREDICTION_BUCKETS,
    "what",
)
PREDICTED_SECONDS = _counter(
    _WORKER, "predicted_seconds_total", "Predicted, of what was predicted at all.", "what"
)
MEASURED_SECONDS = _counter(
    _WORKER, "measured_seconds_total", "Measured, of the same restores and steps.", "what"
)
PROFILE_FLOPS = _gauge(
    _WORKER,
    "profile_flops_per_second",
    "Fitted rates of the device: rebuild (K,V from X), prefill.",
    "work",
)

# -- workers: power ------------------------------------------------------------------------

GPU_UP = _gauge(
    _WORKER, "gpu_up", "1 while the driver answers for this worker's GPU.", needs=Needs.GPU
)
GPU_FIELD_SUPPORTED = _gauge(
    _WORKER,
    "gpu_field_supported",
    "1 for what this GPU and driver can tell, 0 for what they cannot; its metric is absent then.",
    "field",
    needs=Needs.GPU,
)
GPU_PCIE_BYTES = _counter(
    _WORKER,
    "gpu_pcie_bytes_total",
    "All PCIe traffic of the GPU by the driver's counters: rx (to the GPU), tx (from it).",
    "direction",
    needs=Needs.GPU,
)
GPU_PCIE_GENERATION = _gauge(
    _WORKER, "gpu_pcie_generation", "Of the link: current, and max.", "kind", needs=Needs.GPU
)
GPU_PCIE_LANES = _gauge(
    _WORKER, "gpu_pcie_lanes", "Width of the link: current, and max.", "kind", needs=Needs.GPU
)
GPU_POWER_WATTS = _gauge(_WORKER, "gpu_power_watts", "Power drawn.", needs=Needs.GPU)
GPU_POWER_LIMIT_WATTS = _gauge(
    _WORKER, "gpu_power_limit_watts", "Enforced power limit (TDP unless lowered).", needs=Needs.GPU
)
GPU_ENERGY_JOULES = _counter(
    _WORKER, "gpu_energy_joules_total", "Energy since the worker started.", needs=Needs.GPU
)
GPU_UTILIZATION = _gauge(
    _WORKER,
    "gpu_utilization_ratio",
    "Share of the driver's last sampling period in which a kernel ran, 0 to 1.",
    needs=Needs.GPU,
)
GPU_MEMORY_BYTES = _gauge(
    _WORKER, "gpu_memory_bytes", "Memory of the GPU: used, total.", "kind", needs=Needs.GPU
)
GPU_CLOCK_HERTZ = _gauge(_WORKER, "gpu_clock_hertz", "Clocks: sm, memory.", "kind", needs=Needs.GPU)
GPU_TEMPERATURE = _gauge(_WORKER, "gpu_temperature_celsius", "Of the die.", needs=Needs.GPU)
CPU_ENERGY_JOULES = _counter(
    _WORKER,
    "cpu_energy_joules_total",
    "Energy of the whole host's CPU packages since the worker started, by RAPL zone.",
    "zone",
    needs=Needs.RAPL,
)

# -- the scheduler ---------------------------------------------------------------------------

REQUESTS_RUNNING = _gauge(_SCHEDULER, "requests_running", "Requests placed on a worker.")
REQUESTS_WAITING = _gauge(_SCHEDULER, "requests_waiting", "Requests in the queue.")
QUEUE_CAPACITY = _gauge(_SCHEDULER, "queue_capacity", "Most requests that may wait.")
REQUESTS_FINISHED = _counter(
    _SCHEDULER,
    "requests_finished_total",
    "Requests that were accepted and ended: stop, length, error, or abandoned by their reader.",
    "outcome",
)
REQUESTS_REJECTED = _counter(
    _SCHEDULER,
    "requests_rejected_total",
    "Requests turned away, by the error's reason (QUEUE_FULL, NEVER_FITS, TENANT_QUOTA, ...).",
    "reason",
)
PROMPT_TOKENS = _counter(_SCHEDULER, "prompt_tokens_total", "Prompt tokens of completed requests.")
CACHED_TOKENS = _counter(
    _SCHEDULER, "cached_tokens_total", "Of these, tokens that a store had, however they came back."
)
GENERATED_TOKENS = _counter(
    _SCHEDULER, "generated_tokens_total", "Tokens taken from workers for clients."
)
TTFT_SECONDS = _histogram(
    _SCHEDULER, "ttft_seconds", "Arrival to first token, queueing included.", TTFT_BUCKETS
)
ITL_SECONDS = _histogram(
    _SCHEDULER,
    "itl_seconds",
    "Gaps between a request's tokens as workers send them. Tokens that come together count once; "
    "pauses that a slow reader caused do not.",
    ITL_BUCKETS,
)
QUEUE_SECONDS = _histogram(
    _SCHEDULER, "queue_seconds", "Arrival to placement on a worker.", TTFT_BUCKETS
)
REQUEST_SECONDS = _histogram(
    _SCHEDULER, "request_seconds", "Arrival to last token, of completed requests.", REQUEST_BUCKETS
)
PREFILL_SECONDS = _histogram(
    _SCHEDULER,
    "prefill_seconds",
    "Placement on a worker to first token, of completed requests; restoring a prefix included.",
    TTFT_BUCKETS,
)
DECODE_SECONDS = _histogram(
    _SCHEDULER,
    "decode_seconds",
    "First to last token, of completed requests.",
    REQUEST_BUCKETS,
)
TPOT_SECONDS = _histogram(
    _SCHEDULER,
    "tpot_seconds",
    "Time per output token: first to last token over the tokens after the first, one value for "
    "each completed request of at least two tokens.",
    ITL_BUCKETS,
)
REQUEST_PROMPT_TOKENS = _histogram(
    _SCHEDULER, "request_prompt_tokens", "Prompt tokens of a completed request.", LENGTH_BUCKETS
)
REQUEST_GENERATED_TOKENS = _histogram(
    _SCHEDULER,
    "request_generated_tokens",
    "Generated tokens of a completed request.",
    LENGTH_BUCKETS,
)
PLANS = _counter(
    _SCHEDULER,
    "plans_total",
    "Plans sent to workers, by what they chose.",
    *("residency", "method"),
)
KAPPA_RATIO = _histogram(
    _SCHEDULER,
    "kappa_ratio",
    "Cached over new tokens of placed requests; above kappa_crit the link is the limit.",
    _KAPPA_BUCKETS,
)
KAPPA_CRIT = _gauge(
    _SCHEDULER,
    "kappa_crit",
    "Where loading K cached tokens takes as long as prefilling T new ones, per worker.",
    "worker",
)
WORKER_KNOWN = _gauge(
    _SCHEDULER,
    "worker_known",
    "Always 1; a worker that the scheduler was told of or found, by its name, or by its address "
    "until it has answered.",
    "worker",
)
WORKER_READY = _gauge(
    _SCHEDULER,
    "worker_ready",
    "1 for a worker that takes requests, 0 for one that is lost, loading or draining.",
    "worker",
)
WORKER_LOSSES = _counter(
    _SCHEDULER,
    "worker_losses_total",
    "Times a worker's stream broke, no drain announcing it.",
    "worker",
)
FAILOVERS = _counter(
    _SCHEDULER, "failovers_total", "Requests that were placed again after a worker was lost."
)
DROPPED_RESULTS = _counter(
    _SCHEDULER,
    "dropped_results_total",
    "Worker messages not taken: late (of an attempt that no longer counts), duplicate.",
    "cause",
)
LEDGER_BYTES = _gauge(
    _SCHEDULER,
    "ledger_bytes",
    "Device cache by the scheduler's books: charged to requests, and capacity.",
    *("worker", "kind"),
)
LEDGER_SLOTS = _gauge(
    _SCHEDULER,
    "ledger_slots",
    "Slots of a store: charged to streamed requests, and capacity.",
    *("store", "kind"),
)


def all_metrics() -> Iterator[Metric]:
    """In the order of this file."""
    return (value for value in globals().values() if isinstance(value, Metric))


def metrics_of(service: Service) -> tuple[Metric, ...]:
    return tuple(metric for metric in all_metrics() if service in metric.services)

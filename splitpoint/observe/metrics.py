"""Every metric of every service, as data: name, unit, labels and meaning.

Services measure by this list, docs/monitoring.md is generated from it, and dashboards and
alerts are checked against it. Names follow Prometheus: base units, `_total` for counters.
Queries divide shares, except for the cache usage, which autoscalers read without a query
language. splitpoint/observe/meters.py holds the values.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass


class Kind(enum.StrEnum):
    """Prometheus's type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Service(enum.StrEnum):
    """The kind of process that measures a metric."""

    KVSTORE = "kvstore"
    WORKER = "worker"
    SCHEDULER = "scheduler"
    GATEWAY = "gateway"


class Needs(enum.StrEnum):
    """A condition for a metric to have values."""

    REDIS = "a Redis"
    STORE = "a KV store"
    GPU = "an NVIDIA GPU"
    RAPL = "readable RAPL counters"
    EMULATED_LINK = "a GPU or an emulated link"
    TIER = "a tier behind the arena"
    TRANSFER = "a transfer engine"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    Attributes:
        name: as Prometheus prints it, with the `_total` of counters.
        labels: names, in the order of their values.
        buckets: upper bounds of a histogram, ascending, without infinity.
        needs: the metric is absent without this; None: it is always there.
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
_SHARE_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
_TOKEN_BUCKETS = (0.0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True, slots=True)
class _Group:
    """Declares metrics of these services. `labels` are separated by spaces."""

    services: tuple[Service, ...]
    needs: Needs | None = None

    def counter(
        self, name: str, help: str, labels: str = "", *, needs: Needs | None = None
    ) -> Metric:
        return self._metric(Kind.COUNTER, name, help, labels, needs)

    def gauge(
        self, name: str, help: str, labels: str = "", *, needs: Needs | None = None
    ) -> Metric:
        return self._metric(Kind.GAUGE, name, help, labels, needs)

    def histogram(
        self, name: str, help: str, buckets: tuple[float, ...], labels: str = ""
    ) -> Metric:
        return self._metric(Kind.HISTOGRAM, name, help, labels, None, buckets)

    def _metric(
        self,
        kind: Kind,
        name: str,
        help: str,
        labels: str,
        needs: Needs | None,
        buckets: tuple[float, ...] = (),
    ) -> Metric:
        full_name = f"splitpoint_{name}"
        names = tuple(labels.split())
        return Metric(full_name, kind, help, self.services, names, buckets, needs or self.needs)


_every = _Group((Service.KVSTORE, Service.WORKER, Service.SCHEDULER, Service.GATEWAY))
_all = _Group((Service.KVSTORE, Service.WORKER, Service.SCHEDULER))
_serving = _Group((Service.WORKER, Service.SCHEDULER))
_store = _Group((Service.KVSTORE,))
_tier = _Group((Service.KVSTORE,), Needs.TIER)
_transfer = _Group((Service.KVSTORE,), Needs.TRANSFER)
_worker = _Group((Service.WORKER,))
_gpu = _Group((Service.WORKER,), Needs.GPU)
_scheduler = _Group((Service.SCHEDULER,))
_gateway = _Group((Service.GATEWAY,))

# -- all services ---------------------------------------------------------------------

BUILD_INFO = _every.gauge("build_info", "Always 1; the release of this process.", "service version")
RPC_CALLS = _all.counter(
    "rpc_calls_total",
    "gRPC calls that ended, by method and status. CANCELLED: given up by the caller, or late.",
    "method code",
)
REDIS_UP = _all.gauge(
    "redis_up", "1 while Redis answers, 0 while the service works without it.", needs=Needs.REDIS
)
MODEL_INFO = _serving.gauge(
    "model_info", "Always 1; the model that the process serves.", "model_name"
)

# -- the store --------------------------------------------------------------------------

STORE_INFO = _store.gauge(
    "store_info",
    "Always 1; the store's encoding, eviction policy, chunk size (0: pages) and kind of memory.",
    "encoding eviction_policy chunk_tokens activations memory",
)
STORE_ARENA_BYTES = _store.gauge("store_arena_bytes", "Size of the arena file.")
STORE_SLOT_BYTES = _store.gauge(
    "store_slot_bytes", "Payload bytes of a slot: of a chunk, or of the largest page."
)
STORE_EPOCH = _store.gauge("store_epoch", "Number of store starts on this arena.")
STORE_SLOTS = _store.gauge(
    "store_slots",
    "Slots by state (free, writing, sealed, quarantined); their sum is the whole arena.",
    "state",
)
STORE_LEASED_SLOTS = _store.gauge(
    "store_leased_slots", "Sealed slots that at least one lease protects from eviction."
)
STORE_LEASES = _store.gauge("store_leases", "Open leases.")
STORE_SESSIONS = _store.gauge("store_sessions", "Attached workers and engines.")
STORE_OUTCOMES = _store.counter(
    "store_outcomes_total",
    "What engines that store pages counted, by their own names (docs/vllm.md).",
    "outcome",
)
STORE_MATCHES = _store.counter("store_matches_total", "Prefix look-ups that asked for a lease.")
STORE_MATCH_HITS = _store.counter("store_match_hits_total", "Prefix look-ups that found a prefix.")
STORE_QUERY_TOKENS = _store.counter(
    "store_query_tokens_total", "Tokens looked up; pages in a store of pages."
)
STORE_HIT_TOKENS = _store.counter(
    "store_hit_tokens_total", "Tokens found, of those looked up; pages in a store of pages."
)
STORE_SEALED_CHUNKS = _store.counter(
    "store_sealed_chunks_total", "Chunks sealed, and so published."
)
STORE_DUPLICATE_CHUNKS = _store.counter(
    "store_duplicate_chunks_total", "Chunks that were already stored when they were sealed."
)
STORE_UNADMITTED_CHUNKS = _store.counter(
    "store_unadmitted_chunks_total", "Chunks that store-on-second-use did not store."
)
STORE_EVICTIONS = _store.counter(
    "store_evictions_total",
    "Chunks evicted, by cause: room for a reservation, the watermark, or an operator's request.",
    "policy cause",
)
STORE_EVICTED_AGE_SECONDS = _store.counter(
    "store_evicted_age_seconds_total", "Sum of the ages of evicted chunks, since they were sealed."
)
STORE_EVICTED_BY_USE = _store.counter(
    "store_evicted_by_use_total",
    "Chunks evicted, by number of uses after sealing (0, 1, 2-3, 4-7, 8-15, 16+). Many at 0: "
    "the traffic has no reuse.",
    "uses",
)
STORE_REFUSED_RESERVATIONS = _store.counter(
    "store_refused_reservations_total",
    "Reservations refused because nothing could be evicted: the arena is too small.",
)
STORE_CHECKSUM_FAILURES = _store.counter(
    "store_checksum_failures_total", "Chunks whose bytes differ from their checksum."
)
STORE_DAMAGED_CHUNKS = _store.counter(
    "store_damaged_chunks_total",
    "Sealed chunks dropped because their bytes changed, by detection (scrub, report).",
    "found_by",
)
STORE_SCRUBBED_BYTES = _store.counter(
    "store_scrubbed_bytes_total", "Payload bytes that the scrubber read."
)
STORE_SCRUB_PROGRESS = _store.gauge(
    "store_scrub_progress_ratio", "Share of the arena that the current scrub pass has read, 0 to 1."
)
STORE_SCRUB_PASS_SECONDS = _store.gauge(
    "store_scrub_pass_seconds", "Duration of the last complete scrub pass; 0 if there was none."
)
STORE_INTEGRITY_VIOLATIONS = _store.gauge(
    "store_integrity_violations", "Invariants that the last check found broken; 0 is correct."
)
STORE_RECOVERED_CHUNKS = _store.gauge(
    "store_recovered_chunks",
    "Chunks that this start found in the arena: adopted, refused (damaged), quarantined.",
    "result",
)
STORE_RECOVERY_SECONDS = _store.gauge(
    "store_recovery_seconds", "Time to read the arena's records at the start."
)
STORE_FORMER_ARENA_LOST = _store.gauge(
    "store_former_arena_lost",
    "1 if this store started with an empty arena because the former one was removed, "
    "truncated or damaged; else 0.",
    "loss",
)
STORE_REMOTE_BYTES = _store.counter(
    "store_remote_bytes_total", "Payload bytes that other hosts read over gRPC."
)

# -- the store: tiers behind the arena, and the transfer engine ------------------------------

STORE_TIER_UP = _tier.gauge(
    "store_tier_up",
    "1 while the tier (disk, or a pool's engine) is read and written, 0 while it is away.",
    "tier",
)
STORE_TIER_CAPACITY_BYTES = _tier.gauge(
    "store_tier_capacity_bytes", "Bytes that the tier may use; 0: not known, as of a pool.", "tier"
)
STORE_TIER_USED_BYTES = _tier.gauge("store_tier_used_bytes", "Bytes that the tier uses.", "tier")
STORE_TIER_CHUNKS = _tier.gauge(
    "store_tier_chunks", "Chunks in the tier; 0 if that is not known, as of a pool.", "tier"
)
STORE_TIER_WAITING_CHUNKS = _tier.gauge(
    "store_tier_waiting_chunks", "Chunks that wait to be written to the tier.", "tier"
)
STORE_TIER_READ_RATE = _tier.gauge(
    "store_tier_read_bytes_per_second",
    "Moving average of the rate of loads from the tier; 0 if there was none.",
    "tier",
)
STORE_TIER_WRITTEN_CHUNKS = _tier.counter(
    "store_tier_written_chunks_total", "Chunks written to the tier.", "tier"
)
STORE_TIER_WRITTEN_BYTES = _tier.counter(
    "store_tier_written_bytes_total", "Payload bytes written to the tier.", "tier"
)
STORE_TIER_READ_CHUNKS = _tier.counter(
    "store_tier_read_chunks_total", "Chunks loaded from the tier into the arena.", "tier"
)
STORE_TIER_READ_BYTES = _tier.counter(
    "store_tier_read_bytes_total", "Payload bytes loaded from the tier into the arena.", "tier"
)
STORE_TIER_MISSED_CHUNKS = _tier.counter(
    "store_tier_missed_chunks_total", "Chunks that were missing when they were loaded.", "tier"
)
STORE_TIER_DAMAGED_CHUNKS = _tier.counter(
    "store_tier_damaged_chunks_total",
    "Chunks whose bytes in the tier differ from their checksum; they are dropped, never served.",
    "tier",
)
STORE_TIER_EVICTED_CHUNKS = _tier.counter(
    "store_tier_evicted_chunks_total", "Chunks that the tier's bound removed from it.", "tier"
)
STORE_TIER_DROPPED_CHUNKS = _tier.counter(
    "store_tier_dropped_chunks_total",
    "Chunks that left the arena without being written: the tier was away, full or too slow.",
    "tier",
)
STORE_TRANSFER_UP = _transfer.gauge(
    "store_transfer_up", "1 while the transfer engine runs, 0 while chunks come by gRPC instead."
)
STORE_TRANSFER_REGISTERED_BYTES = _transfer.gauge(
    "store_transfer_registered_bytes", "Bytes of the arena that other stores can read by now."
)
STORE_TRANSFER_READ_BYTES = _transfer.counter(
    "store_transfer_read_bytes_total", "Payload bytes read from other stores' arenas."
)
STORE_TRANSFER_READ_CHUNKS = _transfer.counter(
    "store_transfer_read_chunks_total", "Chunks read from other stores' arenas."
)
STORE_TRANSFER_FAILED_READS = _transfer.counter(
    "store_transfer_failed_reads_total",
    "Reads from other stores that failed; their chunks come by gRPC or are computed.",
)
STORE_TRANSFER_RESTARTS = _transfer.counter(
    "store_transfer_restarts_total", "Starts of the engine's process after the first."
)

# -- workers: steps and their requests -----------------------------------------------------

WORKER_INFO = _worker.gauge(
    "worker_info",
    "Always 1; the worker's name, device, restore schedule, place of the weights, and numerics "
    "(invariant or fast).",
    "worker_id device schedule weights numerics",
)
WORKER_RUNNING = _worker.gauge("worker_running_requests", "Requests in the engine.")
WORKER_CACHE_BYTES = _worker.gauge(
    "worker_cache_bytes",
    "Device memory for the cache: used, capacity; of a CPU worker also populated (resident).",
    "kind",
)
WORKER_CACHE_USAGE = _worker.gauge(
    "worker_cache_usage_ratio", "Used share of the device memory for the cache, 0 to 1."
)
WORKER_CACHE_PAGES = _worker.gauge(
    "worker_cache_pages",
    "Pages of the device memory for the cache: used by requests, cached (prefixes that no "
    "request uses now), free.",
    "state",
)
WORKER_DEVICE_CACHED_TOKENS = _worker.counter(
    "worker_device_cached_tokens_total",
    "Prompt tokens of requests that were on the device already, so that nothing restored them.",
)
WORKER_STEPS = _worker.counter(
    "worker_steps_total", "Engine steps by kind: prefill, decode, mixed.", "kind"
)
WORKER_STEP_SECONDS = _worker.histogram(
    "worker_step_seconds", "Duration of one engine step, from its batch to its tokens.", ITL_BUCKETS
)
WORKER_SCHEDULED_TOKENS = _worker.counter(
    "worker_scheduled_tokens_total", "Tokens that steps computed, by phase.", "phase"
)
WORKER_STEP_TOKENS = _worker.histogram(
    "worker_step_tokens", "Tokens that one engine step prefilled and decoded.", LENGTH_BUCKETS
)
WORKER_STEP_CACHE_USAGE = _worker.histogram(
    "worker_step_cache_usage_ratio",
    "Used share of the device memory for the cache after one engine step, 0 to 1.",
    _SHARE_BUCKETS,
)
WORKER_STEP_TOKEN_BUDGET = _worker.gauge(
    "worker_step_token_budget",
    "Most tokens of one step: a piece of a prefill for one request, and one token for each "
    "other request of a full batch.",
)
WORKER_GENERATED_TOKENS = _worker.counter(
    "worker_generated_tokens_total", "Tokens sampled; divide joules by this."
)
WORKER_STORE_UP = _worker.gauge(
    "worker_store_up",
    "1 while the worker is attached to its KV store; 0: no reuse and no streaming.",
    needs=Needs.STORE,
)
WORKER_CHUNK_LOSSES = _worker.counter(
    "worker_chunk_losses_total", "Sequences that lost a chunk while running and started again."
)
WORKER_PREEMPTIONS = _worker.counter(
    "worker_preemptions_total",
    "Sequences that left the device because others needed their pages.",
)
WORKER_GRAMMARS = _worker.counter(
    "worker_grammars_total", "Requests with structured output whose grammar was compiled or found."
)
WORKER_GRAMMAR_SECONDS = _worker.counter(
    "worker_grammar_seconds_total", "Seconds that these requests waited for their grammar."
)
WORKER_MASKS = _worker.counter(
    "worker_masks_total", "Masks of structured output: one for each token, and each draft of one."
)
WORKER_MASK_SECONDS = _worker.counter(
    "worker_mask_seconds_total",
    "Seconds of the processor that masks took, on threads beside the model.",
)
# vLLM's names, so that its dashboards and habits carry over.
SPEC_DECODE_DRAFTS = _worker.counter(
    "spec_decode_num_drafts_total",
    "Times that a step verified the draft of a sequence, by what drafted it: self, suffix, model.",
    "method",
)
SPEC_DECODE_DRAFT_TOKENS = _worker.counter(
    "spec_decode_draft_tokens_total", "Tokens of the drafts that steps verified.", "method"
)
SPEC_DECODE_ACCEPTED_TOKENS = _worker.counter(
    "spec_decode_accepted_tokens_total",
    "Drafted tokens that sampling chose, too; each of them saved a step of its sequence.",
    "method",
)
SELECTION_STEPS = _worker.counter(
    "selection_steps_total",
    "Decode steps of single requests that read cached tokens by selection; drafted tokens where "
    "the selection verifies.",
)
SELECTION_TOKENS = _worker.counter(
    "selection_tokens_total",
    "Tokens that these steps could attend to in a layer that selects, by what became of them: "
    "read, skipped.",
    "result",
)
SELECTION_ROWS = _worker.counter(
    "selection_rows_total",
    "Rows (K and V of one token in one layer and KV head) that these steps wanted: fetched over "
    "the link, reused from steps before.",
    "source",
)
SELECTION_LINK_BYTES = _worker.counter(
    "selection_link_bytes_total", "Bytes of the rows that selections fetched over the link."
)
WORKER_VERIFIED_CHUNKS = _worker.counter(
    "worker_verified_chunks_total",
    "Chunks read from the arena whose checksum was compared: intact, damaged.",
    "result",
)
WORKER_WRITE_BACK_CHUNKS = _worker.counter(
    "worker_write_back_chunks_total",
    "Chunks given to write-back: stored, failed, or unwanted by the store.",
    "result",
)
WORKER_PINNED_BYTES = _gpu.gauge(
    "worker_pinned_bytes", "Arena bytes that are page-locked for the GPU."
)
WORKER_GRAPHS = _gpu.gauge(
    "worker_cuda_graphs",
    "CUDA graphs of decoding steps; eager_reason says why there are none: not_asked, "
    "weights_on_host, attention_gathers, attention_plans, no_memory, recording_failed (the log has "
    "its text); none if steps are recorded.",
    "eager_reason",
)
WORKER_GRAPH_BYTES = _gpu.gauge(
    "worker_cuda_graph_bytes", "Device memory of CUDA graphs, as measured when they were recorded."
)
WORKER_GRAPH_STEPS = _gpu.counter(
    "worker_cuda_graph_steps_total",
    "Decoding steps without prefill, streaming and restore: replayed as a graph, or eager.",
    "way",
)

# -- workers: the link, and what is done instead of using it ---------------------------------

LINK_BYTES = _worker.counter(
    "link_bytes_total",
    "Bytes over the link to the device. in: kv, activations, weights; out: write_back.",
    "direction method",
)
LINK_BUSY_SECONDS = _worker.counter(
    "link_busy_seconds_total",
    "Seconds of copies, by direction, each copy counted alone. Copies of weights and cache "
    "overlap, so this may grow by more than 1 a second.",
    "direction",
)
LINK_RATE = _worker.gauge(
    "link_rate_bytes_per_second", "Rate of copies, fitted from their measured times."
)
LINK_CEILING = _worker.gauge(
    "link_ceiling_bytes_per_second",
    "Greatest rate of the link: PCIe generation times width, or the emulated rate.",
    needs=Needs.EMULATED_LINK,
)
COMPUTE_BUSY_SECONDS = _worker.counter(
    "compute_busy_seconds_total", "Seconds of device work: prefill and decode steps, and restores."
)
RECOMPUTE_SECONDS = _worker.counter(
    "recompute_seconds_total",
    "Seconds of rebuilding K,V instead of loading it: from activations or from tokens.",
    "method",
)
CACHE_TOKENS = _worker.counter(
    "cache_tokens_total",
    "Cached tokens by source: loaded, rebuilt (from activations), recomputed (from token "
    "ids). Restores count each token once, streamed requests in every step.",
    "residency method",
)
FETCHED_TOKENS = _worker.counter(
    "fetched_tokens_total", "Tokens copied from tiers and other hosts' stores."
)
FETCH_SECONDS = _worker.counter("fetch_seconds_total", "Seconds of these copies.")
RESTORES = _worker.counter("restores_total", "Prefixes restored, by method.", "method")
RESTORE_SECONDS = _worker.histogram(
    "restore_seconds", "Duration of restoring one prefix, by method.", TTFT_BUCKETS, "method"
)
# All three count a request at its first token, so that quotients are of the same requests.
RESTORED_LINK_SECONDS = _worker.counter(
    "restored_link_seconds_total",
    "Seconds of copies that restored the prefixes of resident requests, up to their first tokens.",
)
RESTORED_DEVICE_SECONDS = _worker.counter(
    "restored_device_seconds_total",
    "Seconds of the device for the same requests: restore (rebuilding or recomputing the prefix), "
    "prefill (the tokens behind it).",
    "work",
)
RESTORED_FIRST_TOKEN_SECONDS = _worker.counter(
    "restored_first_token_seconds_total",
    "Seconds of the same requests in restores and the steps of these prefills; without the queue.",
)
SPLIT_TOKENS = _worker.histogram(
    "split_tokens", "Split point l of restores: the tokens before it are rebuilt.", _TOKEN_BUCKETS
)
PREDICTION_RATIO = _worker.histogram(
    "prediction_ratio",
    "Measured over predicted seconds of restores and streamed steps; 1 is exact.",
    _PREDICTION_BUCKETS,
    "what",
)
PREDICTED_SECONDS = _worker.counter(
    "predicted_seconds_total",
    "Predicted seconds of restores and streamed steps, where there was a prediction.",
    "what",
)
MEASURED_SECONDS = _worker.counter(
    "measured_seconds_total", "Measured seconds of the same restores and steps.", "what"
)
PROFILE_FLOPS = _worker.gauge(
    "profile_flops_per_second", "Fitted rates of the device: rebuild (K,V from X), prefill.", "work"
)

# -- workers: power ------------------------------------------------------------------------

GPU_UP = _gpu.gauge("gpu_up", "1 while the driver answers for this worker's GPU.")
GPU_FIELD_SUPPORTED = _gpu.gauge(
    "gpu_field_supported",
    "1 if this GPU and driver report the field, else 0; its metric is absent then.",
    "field",
)
GPU_PCIE_BYTES = _gpu.counter(
    "gpu_pcie_bytes_total",
    "PCIe traffic of the GPU by the driver's counters: rx (to the GPU), tx (from it).",
    "direction",
)
GPU_PCIE_GENERATION = _gpu.gauge(
    "gpu_pcie_generation", "PCIe generation of the link: current, max.", "kind"
)
GPU_PCIE_LANES = _gpu.gauge("gpu_pcie_lanes", "Width of the PCIe link: current, max.", "kind")
GPU_POWER_WATTS = _gpu.gauge("gpu_power_watts", "Power draw.")
GPU_POWER_LIMIT_WATTS = _gpu.gauge(
    "gpu_power_limit_watts", "Enforced power limit; the TDP unless lowered."
)
GPU_POWER_DEFAULT_LIMIT_WATTS = _gpu.gauge(
    "gpu_power_default_limit_watts",
    "Power limit that the card has unless it is changed. Absent for a slice of a card (MIG).",
)
GPU_ENERGY_JOULES = _gpu.counter("gpu_energy_joules_total", "Energy since the worker started.")
GPU_UTILIZATION = _gpu.gauge(
    "gpu_utilization_ratio",
    "Share of the driver's last sampling period in which a kernel ran, 0 to 1.",
)
GPU_MEMORY_BYTES = _gpu.gauge("gpu_memory_bytes", "Memory of the GPU: used, total.", "kind")
GPU_CLOCK_HERTZ = _gpu.gauge("gpu_clock_hertz", "Clocks: sm, memory.", "kind")
GPU_TEMPERATURE = _gpu.gauge("gpu_temperature_celsius", "Temperature of the die.")
CPU_ENERGY_JOULES = _worker.counter(
    "cpu_energy_joules_total",
    "Energy of the whole host's CPU packages since the worker started, by RAPL zone.",
    "zone",
    needs=Needs.RAPL,
)

# -- the scheduler ---------------------------------------------------------------------------

REQUESTS_RUNNING = _scheduler.gauge("requests_running", "Requests placed on a worker.")
REQUESTS_WAITING = _scheduler.gauge("requests_waiting", "Requests in the queue.")
QUEUE_CAPACITY = _scheduler.gauge("queue_capacity", "Most requests that the queue holds.")
REQUESTS_FINISHED = _scheduler.counter(
    "requests_finished_total",
    "Accepted requests that ended: stop, length, error, or abandoned (cancelled by the client).",
    "outcome",
)
REQUESTS_REJECTED = _scheduler.counter(
    "requests_rejected_total",
    "Requests rejected, by the error's reason (QUEUE_FULL, NEVER_FITS, TENANT_QUOTA, ...).",
    "reason",
)
PROMPT_TOKENS = _scheduler.counter("prompt_tokens_total", "Prompt tokens of completed requests.")
CACHED_TOKENS = _scheduler.counter(
    "cached_tokens_total",
    "Prompt tokens of completed requests that a store had, by any restore method.",
)
GENERATED_TOKENS = _scheduler.counter(
    "generated_tokens_total", "Tokens received from workers for clients."
)
TTFT_SECONDS = _scheduler.histogram(
    "ttft_seconds", "Arrival to first token, queueing included.", TTFT_BUCKETS
)
ITL_SECONDS = _scheduler.histogram(
    "itl_seconds",
    "Gaps between a request's tokens as workers send them. Tokens that arrive together count "
    "once; pauses that a slow client causes do not count.",
    ITL_BUCKETS,
)
QUEUE_SECONDS = _scheduler.histogram(
    "queue_seconds",
    "Arrival to placement on a worker, by what limits the request there: link (its kappa_ratio is "
    "above kappa_crit) or device.",
    TTFT_BUCKETS,
    "limit",
)
OLDEST_WAIT_SECONDS = _scheduler.gauge(
    "oldest_wait_seconds",
    "How long the longest-waiting request has waited, without those whose readers are behind; 0 if "
    "none waits.",
)
REQUEST_SECONDS = _scheduler.histogram(
    "request_seconds", "Arrival to last token, of completed requests.", REQUEST_BUCKETS
)
PREFILL_SECONDS = _scheduler.histogram(
    "prefill_seconds",
    "Placement on a worker to first token, restore included, of completed requests.",
    TTFT_BUCKETS,
)
DECODE_SECONDS = _scheduler.histogram(
    "decode_seconds", "First to last token, of completed requests.", REQUEST_BUCKETS
)
TPOT_SECONDS = _scheduler.histogram(
    "tpot_seconds",
    "Time per output token of a completed request with at least two tokens: first to last "
    "token, over the tokens after the first.",
    ITL_BUCKETS,
)
REQUEST_PROMPT_TOKENS = _scheduler.histogram(
    "request_prompt_tokens", "Prompt tokens of a completed request.", LENGTH_BUCKETS
)
REQUEST_GENERATED_TOKENS = _scheduler.histogram(
    "request_generated_tokens", "Generated tokens of a completed request.", LENGTH_BUCKETS
)
PLANS = _scheduler.counter(
    "plans_total", "Plans sent to workers, by their choices.", "residency method"
)
KAPPA_RATIO = _scheduler.histogram(
    "kappa_ratio",
    "Cached over new tokens of placed requests; above kappa_crit the link is the limit.",
    _KAPPA_BUCKETS,
)
KAPPA_CRIT = _scheduler.gauge(
    "kappa_crit",
    "Ratio of cached to new tokens at which loading takes as long as prefilling, per worker.",
    "worker",
)
WORKER_KAPPA_RATIO = _scheduler.gauge(
    "worker_kappa_ratio",
    "Cached over new tokens of the last 50 or so requests placed on the worker. Far above "
    "kappa_crit: the device waits for the link.",
    "worker",
)
WORKER_POWER_ADVISED = _scheduler.gauge(
    "worker_power_advised_watts",
    "Power cap that the worker's requests leave room for, since the link is their limit; absent if "
    "it is not. Advice: nothing sets it.",
    "worker",
    needs=Needs.GPU,
)
WORKER_KNOWN = _scheduler.gauge(
    "worker_known",
    "Always 1; a configured or discovered worker, by its name, or by its address until it answers.",
    "worker",
)
WORKER_READY = _scheduler.gauge(
    "worker_ready",
    "1 if the worker takes requests, 0 if it is lost, loading or draining.",
    "worker",
)
WORKER_LOSSES = _scheduler.counter(
    "worker_losses_total", "Times a worker's stream broke without a drain before.", "worker"
)
FAILOVERS = _scheduler.counter(
    "failovers_total", "Requests placed again after their worker was lost."
)
POLICY_DECISIONS = _scheduler.counter(
    "policy_decisions_total",
    "Requests that started, by the policy's reason: turn (the first that could), set (it fills its "
    "worker best), spare (of a tenant ahead of its share: no other could use the worker), "
    "reservation (it waited long, and memory was kept), streamed (instead of waiting for memory).",
    "reason",
)
TENANT_SERVICE = _scheduler.counter(
    "tenant_service_byte_seconds_total",
    "Bytes of device memory times the seconds for which a tenant's requests have had them. Tenants "
    "have pseudonyms, which the status explains; after the first 20 they are called other.",
    "tenant",
)
TENANT_WAITING = _scheduler.gauge(
    "tenant_waiting_requests", "Requests of a tenant in the queue; names as above.", "tenant"
)
TENANT_OLDEST_WAIT = _scheduler.gauge(
    "tenant_oldest_wait_seconds",
    "How long the longest-waiting request of a tenant has waited, without those whose readers are "
    "behind; names as above.",
    "tenant",
)
WORKER_BOUND_TOKENS = _scheduler.gauge(
    "worker_bound_tokens", "Tokens of placed requests that are not prefilled yet.", "worker"
)
WORKER_RESTORING_BYTES = _scheduler.gauge(
    "worker_restoring_bytes",
    "Bytes that placed requests without a first token bring over the worker's link.",
    "worker",
)
RESUMES = _scheduler.counter(
    "resumes_total",
    "Clients that came back with tokens they had: attached (the request is known here), forced (a "
    "worker repeats those tokens, as after the loss of a scheduler). Of forced ones the latencies "
    "have only the time per token made here.",
    "how",
)
DROPPED_RESULTS = _scheduler.counter(
    "dropped_results_total",
    "Worker messages ignored: late (from an attempt that was replaced), duplicate.",
    "cause",
)
LEDGER_BYTES = _scheduler.gauge(
    "ledger_bytes",
    "Device memory for the cache in the scheduler's accounts: charged to requests, which may "
    "exceed the capacity while answers grow beyond what was expected; capacity.",
    "worker kind",
)
LEDGER_SLOTS = _scheduler.gauge(
    "ledger_slots",
    "Slots of a store in the scheduler's accounts: charged to streamed requests, capacity.",
    "store kind",
)

# -- the gateway ------------------------------------------------------------------------

GATEWAY_REQUESTS = _gateway.counter(
    "gateway_requests_total",
    "HTTP requests that ended, by endpoint and status. 499: the client left before its answer was "
    "whole; a stream that failed counts with the status of its error.",
    "endpoint status",
)
GATEWAY_REQUEST_SECONDS = _gateway.histogram(
    "gateway_request_seconds",
    "Time from the head of an HTTP request to the last byte of its answer.",
    REQUEST_BUCKETS,
    "endpoint",
)
GATEWAY_FIRST_TOKEN_SECONDS = _gateway.histogram(
    "gateway_first_token_seconds",
    "Time from the head of an HTTP request to the first event of its stream.",
    TTFT_BUCKETS,
    "endpoint",
)
GATEWAY_OPEN_REQUESTS = _gateway.gauge(
    "gateway_open_requests", "HTTP requests that are being answered, those that wait included."
)
GATEWAY_OPEN_GENERATIONS = _gateway.gauge(
    "gateway_open_generations", "Generations that are open at the scheduler for HTTP requests."
)
GATEWAY_CONNECTIONS = _gateway.gauge("gateway_connections", "Open HTTP connections.")
GATEWAY_BODY_BYTES = _gateway.gauge(
    "gateway_body_bytes", "Bytes of request bodies that are being read."
)
GATEWAY_RETRIES = _gateway.counter(
    "gateway_retries_total",
    "Times that a generation went on elsewhere, or later, after its scheduler was lost.",
)


def all_metrics() -> Iterator[Metric]:
    """Yield all metrics in the order of this file."""
    return (value for value in globals().values() if isinstance(value, Metric))


def metrics_of(service: Service) -> tuple[Metric, ...]:
    return tuple(metric for metric in all_metrics() if service in metric.services)

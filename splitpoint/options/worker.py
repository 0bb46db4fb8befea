"""Options of a worker."""

from __future__ import annotations

from pathlib import Path

from splitpoint.checkpoint.decoder import ModelBackend
from splitpoint.options.cpu_kernels import AUTO
from splitpoint.options.option import RATE, SIZE, Option, Section
from splitpoint.options.service import ADVERTISE, COMMON, MAX_MODEL_LEN
from splitpoint.options.store import DTYPE, WEIGHTS
from splitpoint.planning.weight_placement import WeightObjective
from splitpoint.shapes import Numerics

WORKER_ID: Option[str] = Option("worker-id", str, "0", "Name of this worker.", unit="ID")
MODEL: Option[Path] = Option(
    "model", Path, Path(), "Checkpoint folder.", unit="DIR", is_required=True
)
KVSTORE: Option[str | None] = Option(
    "kvstore",
    str,
    None,
    "Address of the store; absent: prefixes are not reused.",
    unit="ADDRESS",
)
# Share of a GPU's free memory; workers leave the rest to the driver, libraries and fragmentation.
GPU_MEMORY_SHARE = 0.9
# Share of the memory available on a host, beside the weights, for a CPU worker.
CPU_MEMORY_SHARE = 0.2

DEVICE: Option[str] = Option(
    "device", str, "auto", "Device of the worker: cpu, cuda, cuda:N or auto.", unit="DEVICE"
)
DEVICE_MEMORY: Option[str | None] = Option(
    "device-memory",
    str,
    None,
    "Bytes of device memory for weights, caches and workspace; absent: a part of what is free.",
    unit=SIZE,
)
MAX_BATCH: Option[int | None] = Option(
    "max-batch",
    int,
    None,
    "Largest number of requests in one engine step; absent: chosen by device memory and measured "
    "steps, 32 to 512 (docs/scheduling.md).",
    unit="N",
    least=1,
    most=512,
)
MAX_BATCHED_TOKENS: Option[int] = Option(
    "max-batched-tokens",
    int,
    512,
    "Largest number of prompt tokens in one engine step; up to 8 times as many while weights "
    "come from the host.",
    unit="N",
    least=1,
    former_name="prefill-chunk",
)
WEIGHT_OBJECTIVE: Option[str] = Option(
    "weight-objective",
    str,
    WeightObjective.BALANCED.value,
    "Aim in placing weights that do not fit the device: least seconds of a step (latency), most "
    "tokens per second (throughput), or their quotient (balanced).",
    choices=tuple(objective.value for objective in WeightObjective),
    is_rare=True,
)
THREADS: Option[int | None] = Option(
    "threads",
    int,
    None,
    "CPU threads of each worker; absent: `up` divides the cores among CPU workers.",
    unit="N",
    least=1,
    is_rare=True,
)
CPU_KERNELS: Option[str] = Option(
    "cpu-kernels",
    str,
    "auto",
    "Kernels of a CPU worker: auto (measured once per host), flags (by the processor's kind), or "
    "by name, such as decode=products,prefill=sdpa,linear=packed.",
    unit="KERNELS",
    is_rare=True,
)
MODEL_BACKEND: Option[str] = Option(
    "model-backend",
    str,
    ModelBackend.AUTO.value,
    "Whose code computes the model: own (our decoder, for the families that it has), transformers "
    "(its code, for any family), or auto (own where it can).",
    choices=tuple(each.value for each in ModelBackend),
    is_rare=True,
)
NUMERICS: Option[str] = Option(
    "numerics",
    str,
    AUTO,
    "Numerics: invariant (the bits of an answer do not depend on other requests, nor on what was "
    "cached), fast, or auto (invariant where a check at the start confirms it).",
    choices=(AUTO, *(each.value for each in Numerics)),
)
CHUNK_TOKENS: Option[int] = Option(
    "chunk-tokens",
    int,
    64,
    "Tokens in a page without a store; with one, the store's chunks decide.",
    unit="N",
    least=1,
)
PIN_LIMIT: Option[str | None] = Option(
    "pin-limit",
    str,
    None,
    "Largest part of the arena, in bytes, to page-lock for the GPU; 0: nothing; absent: all.",
    unit=SIZE,
    is_rare=True,
)
# To verify one later read of a hundred costs a hundredth of a restore's bandwidth.
VERIFY_RATE: Option[float] = Option(
    "verify-rate",
    float,
    0.01,
    "Share of chunk reads, after a worker's first read of each chunk, in which the worker "
    "compares the checksum.",
    unit="FRACTION",
    least=0,
    most=1,
    is_rare=True,
)
NO_DEVICE_PREFIX_CACHE = Option(
    "no-device-prefix-cache",
    bool,
    False,
    "Keep no prefixes on the device and share none between requests: the twin, for comparison.",
    is_rare=True,
)
SERIAL = Option(
    "serial",
    bool,
    False,
    "Run the serial twin: copy and compute in turn, without overlap.",
    is_rare=True,
)
ENFORCE_EAGER = Option(
    "enforce-eager",
    bool,
    False,
    "Launch each kernel of a decoding step, without CUDA graphs: the twin, for comparison.",
    is_rare=True,
)
LINK_RATE: Option[str | None] = Option(
    "link-rate",
    str,
    None,
    "Emulate a link of this many bytes per second on a CPU: 184MB is 184 MB per second; "
    "absent: no emulation.",
    unit=RATE,
    is_rare=True,
)
TRACE: Option[Path | None] = Option(
    "trace",
    Path,
    None,
    "File for a timeline of copies and compute, written at the stop as Chrome trace JSON; "
    "absent: none.",
    unit="FILE",
)
SPECULATIVE_CONFIG: Option[str | None] = Option(
    "speculative-config",
    str,
    None,
    "What drafts tokens for requests that do not say, with vLLM's names: method (off, auto, self, "
    "suffix, model), num_speculative_tokens, prompt_lookup_min, model; absent: no drafts.",
    unit="JSON",
)
DRAFT_MODEL: Option[str | None] = Option(
    "draft-model",
    str,
    None,
    "Checkpoint folder of a small model with the same vocabulary, which drafts tokens; absent: "
    "none.",
    unit="DIR",
)
ARTIFACTS: Option[str | None] = Option(
    "artifacts",
    str,
    None,
    "Folder of what `splitpoint calibrate` made for selections; absent: beside the model.",
    unit="DIR",
    is_rare=True,
)
PROGRESS_SECONDS: Option[float] = Option(
    "progress-seconds",
    float,
    2.0,
    "Seconds between two log lines about the progress of loading and page-locking.",
    unit="SECONDS",
    is_rare=True,
)
PROGRESS_LINES = Option(
    "progress-lines",
    bool,
    False,
    'Print "PROGRESS loading DONE TOTAL" (bytes) on stdout before READY, for supervisors.',
)

SECTIONS = (
    *COMMON,
    Section(
        "model and device",
        (
            WORKER_ID,
            MODEL,
            DEVICE,
            DTYPE,
            WEIGHTS,
            MAX_MODEL_LEN,
            DEVICE_MEMORY,
            THREADS,
            CPU_KERNELS,
            MODEL_BACKEND,
            NUMERICS,
            ENFORCE_EAGER,
        ),
    ),
    Section(
        "batches",
        (MAX_BATCH, MAX_BATCHED_TOKENS, CHUNK_TOKENS, NO_DEVICE_PREFIX_CACHE, WEIGHT_OBJECTIVE),
    ),
    Section("store", (KVSTORE, PIN_LIMIT, VERIFY_RATE)),
    Section("speculation (docs/speculation.md)", (SPECULATIVE_CONFIG, DRAFT_MODEL)),
    Section("selection (docs/selection.md)", (ARTIFACTS,)),
    Section("lanes (docs/pipeline.md)", (SERIAL, LINK_RATE, TRACE)),
    Section("progress", (PROGRESS_SECONDS, PROGRESS_LINES)),
    Section("discovery", (ADVERTISE,)),
)

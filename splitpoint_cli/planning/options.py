"""Options of `splitpoint plan` and `splitpoint size`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.options import scheduler, store, worker
from splitpoint.options.option import RATE, SIZE, Option
from splitpoint.planning.plan import Residency
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import Encoding
from splitpoint_cli.models import DEFAULT_SHAPE, KNOWN_SHAPES
from splitpoint_cli.options import of

_MODEL: Option[str] = Option(
    "model",
    str,
    "",
    "Checkpoint folder, a hub name that was downloaded before, or one of "
    f"{', '.join(KNOWN_SHAPES)}.",
    unit="DIR|SHAPE",
    is_required=True,
)
_PROFILE: Option[str] = Option(
    "profile",
    str,
    "",
    f"JSON file with measured costs, or one of {', '.join(BUILT_IN_PROFILES)}.",
    unit="NAME|FILE",
    is_required=True,
)
_CACHED: Option[int] = Option(
    "cached", int, 0, "Number of cached prefix tokens (K).", unit="K", is_required=True
)
_TIER_TOKENS: Option[int] = Option(
    "tier-tokens",
    int,
    0,
    "Leading prompt tokens, the cached ones included, that a tier behind the arena holds: the plan "
    "says whether loading them pays.",
    unit="N",
    least=0,
)
_TIER_RATE: Option[str | None] = Option(
    "tier-rate",
    str,
    None,
    "Bytes per second that come from the tier, for --tier-tokens; absent: the profile's rate of a "
    "disk tier, or 1 GB/s.",
    unit=RATE,
)
_NEW: Option[int] = Option(
    "new", int, 0, "Number of new prompt tokens (T).", unit="T", is_required=True
)
_MAX_TOKENS: Option[int] = Option(
    "max-tokens", int, 128, "Number of generated tokens, for the footprint.", unit="N", least=1
)
_SCHEDULE: Option[str] = Option(
    "schedule",
    str,
    Schedule.PIPELINED.value,
    "Overlap of copies and compute: pipelined (X in tiles, rebuilt while the rest is on the link), "
    "serial (X, rebuild, load in turn: workers with --serial), column (X, then rebuild beside "
    "load: KVPR), row (X already on the device).",
    choices=tuple(schedule.value for schedule in Schedule),
)
_RESIDENCY: Option[str] = Option(
    "residency",
    str,
    Residency.RESIDENT.value,
    "Place of the cache: resident, restored once; streamed, pulled in each decode step.",
    choices=tuple(residency.value for residency in Residency),
)
_SPARE: Option[str] = Option(
    "spare",
    str,
    "0",
    "Device memory in bytes in which a part of a streamed prefix may stay.",
    unit=SIZE,
)
_KEEP_ACTIVATIONS = Option(
    "keep-activations",
    bool,
    True,
    "Let X stay on the device, instead of keys and values, for a streamed request.",
)
_STEP_MS: Option[float | None] = Option(
    "step-ms",
    float,
    None,
    "Milliseconds of a streamed decode step beside its cache traffic; absent: the profile's.",
    unit="MS",
    least=0,
)
_ENCODING: Option[str] = Option(
    "encoding",
    str,
    Encoding.NATIVE.value,
    "Encoding of stored keys, values and activations.",
    choices=store.KV_ENCODING.choices,
)
_ACTIVATIONS = Option("activations", bool, True, "The store holds activations, where they can pay.")
_WORKER_MEMORY: Option[str | None] = replace(
    worker.DEVICE_MEMORY,
    help="Bytes of device memory of the worker; weights that do not fit stay on the host; "
    "absent: all weights fit.",
)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Values of the options of `splitpoint plan`."""

    model: str = of(_MODEL)
    profile: str = of(_PROFILE)
    cached: int = of(_CACHED)
    new: int = of(_NEW)
    tier_tokens: int = of(_TIER_TOKENS)
    tier_rate: str | None = of(_TIER_RATE)
    max_tokens: int = of(_MAX_TOKENS)
    schedule: str = of(_SCHEDULE)
    objective: str = of(scheduler.OBJECTIVE)
    residency: str = of(_RESIDENCY)
    spare: str = of(_SPARE)
    keep_activations: bool = of(_KEEP_ACTIVATIONS)
    step_ms: float | None = of(_STEP_MS)
    encoding: str = of(_ENCODING)
    chunk_tokens: int = of(store.CHUNK_TOKENS)
    activations: bool = of(_ACTIVATIONS)
    device_memory: str | None = of(_WORKER_MEMORY)
    max_batch: int | None = of(worker.MAX_BATCH)
    max_batched_tokens: int = of(worker.MAX_BATCHED_TOKENS)
    weight_objective: str = of(worker.WEIGHT_OBJECTIVE)
    dtype: str = of(store.DTYPE)

    @property
    def token_count(self) -> int:
        return self.cached + self.new + self.max_tokens

    @property
    def step_seconds(self) -> float | None:
        return None if self.step_ms is None else self.step_ms / 1e3


_SIZED_MODEL: Option[str | None] = Option(
    "model",
    str,
    None,
    f"{_MODEL.help.removesuffix('.')}; absent: the model that --profile was measured with, or "
    f"{DEFAULT_SHAPE} with a built-in one.",
    unit=_MODEL.unit,
)
_SIZED_PROFILE = replace(_PROFILE, default="h100", is_required=False)
_SIZED_MEMORY: Option[str | None] = replace(
    worker.DEVICE_MEMORY,
    help="Bytes of device memory for weights, cache and workspace; absent: those of the machine "
    "that --profile names; required with measured costs.",
)
_TOKENS: Option[int | None] = Option(
    "tokens",
    int,
    None,
    "Tokens of one request, prompt and answer; absent: 32,768, or the model's context if that is "
    "shorter.",
    unit="N",
    least=2,
)
_PROMPT_NEW: Option[int] = Option(
    "new", int, 512, "Prompt tokens of one request that the store lacks.", unit="N", least=1
)
_ANSWER_TOKENS: Option[int] = Option(
    "max-tokens", int, 256, "Generated tokens of one request.", unit="N", least=1
)
_PREFIXES: Option[int] = Option(
    "prefixes",
    int,
    100,
    "Number of cached prefixes to keep in addition to those of running requests.",
    unit="N",
    least=0,
)
_STREAMED: Option[int | None] = Option(
    "streamed",
    int,
    None,
    "Number of streamed requests at once; absent: those of the batch with the most tokens per "
    "second while weights cross the link, all if no request fits as resident, else none.",
    unit="N",
    least=0,
)
_SPECULATIVE: Option[str | None] = replace(
    worker.SPECULATIVE_CONFIG,
    help="The workers' --speculative-config: room for checking drafts, and for windows of self "
    "drafts, is then left out of the cache.",
)
_DRAFT_MODEL: Option[str | None] = replace(
    worker.DRAFT_MODEL,
    unit="DIR|SHAPE",
    help="The workers' --draft-model, a checkpoint or shape as for --model: its weights, workspace "
    "and cache are taken from the device's memory first; absent: none.",
)


@dataclass(frozen=True, slots=True)
class SizeOptions:
    """Values of the options of `splitpoint size`."""

    model: str | None = of(_SIZED_MODEL)
    profile: str = of(_SIZED_PROFILE)
    device_memory: str | None = of(_SIZED_MEMORY)
    tokens: int | None = of(_TOKENS)
    new: int = of(_PROMPT_NEW)
    max_tokens: int = of(_ANSWER_TOKENS)
    prefixes: int = of(_PREFIXES)
    streamed: int | None = of(_STREAMED)
    kv_encoding: str = of(store.KV_ENCODING)
    weights: str = of(store.WEIGHTS)
    step_ms: float | None = of(_STEP_MS)
    max_batch: int | None = of(worker.MAX_BATCH)
    max_batched_tokens: int = of(worker.MAX_BATCHED_TOKENS)
    weight_objective: str = of(worker.WEIGHT_OBJECTIVE)
    chunk_tokens: int = of(store.CHUNK_TOKENS)
    speculative_config: str | None = of(_SPECULATIVE)
    draft_model: str | None = of(_DRAFT_MODEL)
    dtype: str = of(store.DTYPE)

"""Options of `splitpoint simulate`, and what they ask for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from scheduler_service.policy.settings import PolicySettings
from splitpoint.config import parse_size
from splitpoint.costs.profile import BUILT_IN_PROFILES, MACHINES, Machine, load_profile
from splitpoint.errors import InvalidArgument
from splitpoint.options import scheduler, store, worker
from splitpoint.options.option import SIZE, Option
from splitpoint.planning.plan import Residency
from splitpoint.shapes import Encoding, WeightFormat
from splitpoint_cli.models import DEFAULT_SHAPE, find_profiled, find_shape
from splitpoint_cli.options import of
from splitpoint_cli.planning.sizing import Node
from splitpoint_cli.simulate.costs import Overheads
from splitpoint_cli.simulate.device_types import device_type
from splitpoint_cli.simulate.measures import GOALS
from splitpoint_cli.simulate.run import Fleet, Load
from splitpoint_cli.traces.generators import CONVERSATION, PUBLISHED

_FLEET = "Fleet"
_LOAD = "Load"
_POLICY = "Policy"
_RESULT = "Result"

# Name of a worker that was measured.
MEASURED = "measured"
# Bounds of factors: beyond them, no trace has a length or a rate that means anything.
_LEAST_FACTOR, _MOST_FACTOR = 1e-6, 1e6

MODEL: Option[str | None] = Option(
    "model",
    str,
    None,
    "Checkpoint folder, or a built-in shape; absent: the model that --profile was measured with, "
    f"or {DEFAULT_SHAPE}.",
    unit="DIR|SHAPE",
)
DEVICES: Option[str] = Option(
    "devices",
    str,
    "h100=8",
    f"Kinds and counts of devices, of {', '.join(MACHINES)}; a count alone with --profile.",
    unit="TYPE=N,...",
)
PROFILE: Option[str | None] = Option(
    "profile",
    str,
    None,
    "Costs of the devices instead of those of their type: a profile, a built-in name, or the "
    "output of `splitpoint status --json`, which also says what cache, chunks and store there are.",
    unit="NAME|FILE",
)
DEVICE_MEMORY: Option[str | None] = Option(
    "device-memory",
    str,
    None,
    "Bytes of each device for weights, cache and workspace; absent: 90 % of its type's.",
    unit=SIZE,
)
HOST_MEMORY: Option[str | None] = Option(
    "host-memory",
    str,
    None,
    "Bytes of the KV store of each cell; absent: 128GiB for each of its devices, or what "
    "--profile says.",
    unit=SIZE,
)
CELL: Option[int] = Option(
    "cell",
    int,
    8,
    "Most devices of one scheduler, which share one KV store; several schedulers share nothing.",
    unit="N",
    least=1,
)
STEP_OVERHEAD: Option[float] = Option(
    "step-overhead-ms",
    float,
    0.0,
    "Milliseconds of each step besides what the profile knows.",
    unit="MS",
    least=0,
)
ROW_OVERHEAD: Option[float] = Option(
    "row-overhead-ms",
    float,
    0.0,
    "Milliseconds of each sequence that decodes in a step, besides its products.",
    unit="MS",
    least=0,
)
START_OVERHEAD: Option[float] = Option(
    "start-overhead-ms",
    float,
    0.0,
    "Milliseconds by which a step takes longer for each request whose prefill begins in it.",
    unit="MS",
    least=0,
)
REQUEST_OVERHEAD: Option[float] = Option(
    "request-overhead-ms",
    float,
    0.0,
    "Milliseconds from a request's arrival to its place in the scheduler's queue.",
    unit="MS",
    least=0,
)
TRACE: Option[str] = Option(
    "trace",
    str,
    CONVERSATION,
    f"Requests: a file (JSON lines or CSV), or a made one of {', '.join(PUBLISHED)}.",
    unit="FILE|NAME",
)
REQUESTS: Option[int | None] = Option(
    "num-prompts",
    int,
    None,
    "Number of requests, at most those of a file; absent: all of the trace.",
    unit="N",
    least=1,
)
SECONDS: Option[float | None] = Option(
    "seconds",
    float,
    None,
    "Leave out what arrives later than this, and end a generated trace there; absent: nothing.",
    unit="SECONDS",
    least=0,
)
TRACE_RATE: Option[float] = Option(
    "trace-rate",
    float,
    1.0,
    "Factor of the trace's requests per second.",
    least=_LEAST_FACTOR,
    most=_MOST_FACTOR,
)
TRACE_INPUT: Option[float] = Option(
    "trace-input",
    float,
    1.0,
    "Factor of its prompts' lengths.",
    least=_LEAST_FACTOR,
    most=_MOST_FACTOR,
)
TRACE_OUTPUT: Option[float] = Option(
    "trace-output",
    float,
    1.0,
    "Factor of its answers' lengths.",
    least=_LEAST_FACTOR,
    most=_MOST_FACTOR,
)
TRACE_TENANTS: Option[int] = Option(
    "trace-tenants", int, 1, "Number of tenants of a made trace.", least=1
)
SEED: Option[int] = Option("seed", int, 0, "Seed of prompts and gaps.", least=0)
COMPARE: Option[bool] = Option("compare", bool, False, "Simulate every policy, side by side.")
FIND: Option[str | None] = Option(
    "find",
    str,
    None,
    "Find how many devices keep --goodput for --good-share of the requests.",
    choices=("gpus",),
)
GOOD_SHARE: Option[float] = Option(
    "good-share", float, 0.9, "Part of the requests for --find.", least=0, most=1
)
MOST_DEVICES: Option[int] = Option(
    "most-devices", int, 10_000, "Most devices that --find tries.", unit="N", least=1
)
PROCESSES: Option[int] = Option(
    "processes", int, 1, "Processes that simulate cells at the same time.", unit="N", least=1
)

Goodput = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Most milliseconds of a good request, by {', '.join(GOALS)}; more may follow.",
        metavar="METRIC:MS",
        rich_help_panel=_RESULT,
    ),
]
MoreGoals = Annotated[
    list[str] | None,
    typer.Argument(help="More of --goodput.", metavar="METRIC:MS", show_default=False),
]
TenantWeights = Annotated[
    list[str] | None,
    typer.Option(
        "--tenant-weight",
        help="Weight of a tenant, as in its tokens.toml; repeatable; the others have 1.",
        metavar="TENANT=WEIGHT",
        rich_help_panel=_LOAD,
    ),
]


@dataclass(frozen=True, slots=True)
class SimulateOptions:
    """Values of the options that are no lists."""

    model: str | None = of(MODEL, _FLEET)
    devices: str = of(DEVICES, _FLEET)
    profile: str | None = of(PROFILE, _FLEET)
    device_memory: str | None = of(DEVICE_MEMORY, _FLEET)
    host_memory: str | None = of(HOST_MEMORY, _FLEET)
    cell: int = of(CELL, _FLEET)
    max_batch: int | None = of(worker.MAX_BATCH, _FLEET)
    max_batched_tokens: int = of(worker.MAX_BATCHED_TOKENS, _FLEET)
    chunk_tokens: int = of(store.CHUNK_TOKENS, _FLEET)
    kv_encoding: str = of(store.KV_ENCODING, _FLEET)
    weights: str = of(store.WEIGHTS, _FLEET)
    dtype: str = of(store.DTYPE, _FLEET)
    step_overhead_ms: float = of(STEP_OVERHEAD, _FLEET)
    row_overhead_ms: float = of(ROW_OVERHEAD, _FLEET)
    start_overhead_ms: float = of(START_OVERHEAD, _FLEET)
    request_overhead_ms: float = of(REQUEST_OVERHEAD, _FLEET)
    trace: str = of(TRACE, _LOAD)
    num_prompts: int | None = of(REQUESTS, _LOAD)
    seconds: float | None = of(SECONDS, _LOAD)
    trace_rate: float = of(TRACE_RATE, _LOAD)
    trace_input: float = of(TRACE_INPUT, _LOAD)
    trace_output: float = of(TRACE_OUTPUT, _LOAD)
    trace_tenants: int = of(TRACE_TENANTS, _LOAD)
    seed: int = of(SEED, _LOAD)
    residency: str = of(scheduler.RESIDENCY, _POLICY)
    policy: str = of(scheduler.POLICY, _POLICY)
    policy_aging_seconds: float = of(scheduler.POLICY_AGING_SECONDS, _POLICY)
    policy_lead_requests: float = of(scheduler.POLICY_LEAD_REQUESTS, _POLICY)
    compare: bool = of(COMPARE, _POLICY)
    find: str | None = of(FIND, _RESULT)
    good_share: float = of(GOOD_SHARE, _RESULT)
    most_devices: int = of(MOST_DEVICES, _RESULT)
    processes: int = of(PROCESSES, _RESULT)

    def fleet(self) -> Fleet:
        """Return the devices. Raises InvalidArgument, NotFound."""
        if self.residency == Residency.STREAMED.value:
            raise InvalidArgument(
                "requests that are all streamed are not simulated: auto or resident",
                field="residency",
            )
        measured = None if self.profile is None else read_measured(self.profile)
        if measured is None:
            shape = find_shape(self.model or DEFAULT_SHAPE, self.dtype)
        else:
            costs = (measured.profile, str(self.profile))
            shape = find_profiled(self.model, self.dtype, *costs).shape
        kinds = self._kinds(measured)
        chunk_tokens, max_batch = self.chunk_tokens, self.max_batch
        if measured is not None and measured.chunk_tokens:
            chunk_tokens = measured.chunk_tokens
        if measured is not None and max_batch is None:
            max_batch = measured.max_batch
        node = Node(
            kinds[0][0].profile,
            kinds[0][0].memory_bytes,
            max_batch=max_batch,
            max_batched_tokens=self.max_batched_tokens,
            chunk_tokens=chunk_tokens,
            encoding=Encoding(self.kv_encoding),
            weights=WeightFormat(self.weights),
        )
        fleet = Fleet(
            shape,
            node,
            kinds,
            self.cell,
            0,
            streams=self.residency == "auto",
            overheads=Overheads(
                self.step_overhead_ms / 1e3,
                self.row_overhead_ms / 1e3,
                self.start_overhead_ms / 1e3,
                self.request_overhead_ms / 1e3,
            ),
        )
        return replace(fleet, store_bytes=self._store_bytes(fleet, measured))

    def _kinds(self, measured: Measured | None) -> list[tuple[Machine, int]]:
        memory = self.device_memory and parse_size(self.device_memory, field="device_memory")
        if measured is None:
            found = [(device_type(name), count) for name, count in parse_devices(self.devices)]
        else:
            known = [*BUILT_IN_PROFILES.values()]
            if measured.cache_bytes is None and not memory:
                kind = "a built-in profile" if measured.profile in known else "a profile alone"
                raise InvalidArgument(
                    f"{kind} does not say how much memory there is: give --device-memory",
                    field="device_memory",
                )
            count = self.devices if self.devices != DEVICES.default else "1"
            if not (count.isdecimal() and int(count)):
                raise InvalidArgument(
                    f"with --profile, --devices is a number, not {count!r}", field="devices"
                )
            kind_of = Machine(
                MEASURED, measured.profile, memory or 0, cache_bytes=measured.cache_bytes
            )
            found = [(kind_of, int(count))]
        if memory:
            found = [(replace(kind, memory_bytes=memory, cache_bytes=None), n) for kind, n in found]
        return found

    def _store_bytes(self, fleet: Fleet, measured: Measured | None) -> int:
        if self.host_memory is not None:
            return parse_size(self.host_memory, field="host_memory")
        if measured is not None and measured.store_slots:
            return measured.store_slots * next(iter(fleet.workers().values())).facts.slot_bytes
        return min(self.cell, fleet.device_count) << 37

    def load(self, weights: Iterable[str]) -> Load:
        """Return the requests. Raises InvalidArgument."""
        count = self.num_prompts
        if count is None and self.seconds is not None and self.trace in PUBLISHED:
            rate = PUBLISHED[self.trace].request_rate * self.trace_rate
            # Gaps are drawn for the whole trace: a few more, and none is missing at its end.
            count = max(1, int(1.02 * self.seconds * rate) + 16)
        return Load(
            self.trace,
            self.seed,
            count,
            self.seconds,
            self.trace_rate,
            self.trace_input,
            self.trace_output,
            self.trace_tenants,
            read_weights(weights),
        )

    def settings(self) -> list[PolicySettings]:
        """Return the policies that are simulated."""
        names = scheduler.POLICY.choices if self.compare else (self.policy,)
        return [
            PolicySettings(
                scheduler.Policy(name),
                aging_seconds=self.policy_aging_seconds,
                lead_requests=self.policy_lead_requests,
            )
            for name in names
        ]


@dataclass(frozen=True, slots=True)
class Measured:
    """What a file says of a worker. None or 0: it does not say it."""

    profile: Any
    cache_bytes: int | None = None
    chunk_tokens: int = 0
    store_slots: int = 0
    max_batch: int | None = None


def read_measured(name_or_path: str) -> Measured:
    """Return the costs of a profile, and with a status what its first worker has."""
    profile = load_profile(name_or_path)
    if name_or_path.lower() in BUILT_IN_PROFILES:
        return Measured(profile)
    status = json.loads(Path(name_or_path).read_text())
    workers = [each for each in status.get("workers", ()) if each.get("profile")]
    if not workers:
        return Measured(profile)
    stores = [each for each in status.get("stores", ()) if each.get("slot_count")]
    models = status.get("models") or [{}]
    return Measured(
        profile,
        int(workers[0].get("cache_capacity_bytes") or 0) or None,
        int(models[0].get("chunk_tokens") or 0),
        int(stores[0]["slot_count"]) if stores else 0,
        int(workers[0].get("max_batch_size") or 0) or None,
    )


def parse_devices(text: str) -> list[tuple[str, int]]:
    """Return kinds and counts of "h100=8,l40s=4"; a name alone is one. Raises InvalidArgument."""
    found = []
    for part in text.split(","):
        name, separator, count = part.strip().partition("=")
        if not name or (separator and not (count.isdecimal() and int(count) > 0)):
            raise InvalidArgument(
                f"--devices: {part.strip()!r} is not TYPE=N, such as h100=8", field="devices"
            )
        found.append((name, int(count) if separator else 1))
    return found


def read_weights(words: Iterable[str]) -> dict[str, float]:
    """Return the weights of TENANT=WEIGHT words. Raises InvalidArgument."""
    weights = {}
    for word in words:
        name, _, text = word.partition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = 0.0
        if not name or not 0 < weight < float("inf"):
            raise InvalidArgument(f"{word!r} is not TENANT=WEIGHT", field="tenant_weight")
        weights[name] = weight
    return weights

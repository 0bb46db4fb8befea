"""Where the split point lies, and why: pure arithmetic over shape and profile.

A cached prefix of s tokens comes back layer by layer: [0, l) is rebuilt from
stored activations X, [l, s) is loaded. Per layer, with

    a = h p / v_link      c = 2 d_kv p / v_link      g = 4 h d_kv / v_gpu

the schedules cost (KVPR Eq. 10, with intercepts C0 per copy and G0 per GEMM):

    SERIAL  (C0 + a l) + (G0 + g l) + (C0 + c (s - l))       nothing overlaps
    COLUMN  (C0 + a l) + max(G0 + g l, C0 + c (s - l))       X first, then both
    ROW                  max(G0 + g l, C0 + c (s - l))       X is on the device

where a part without tokens costs nothing, its intercept included. Each is
convex between 1 and s - 1, so the optimum is 0, s, or one of two integers
beside the crossing: no search. Knows no gRPC, no clock, no tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from splitpoint.costs import Profile
from splitpoint.errors import InvalidArgument
from splitpoint.schedule import Schedule
from splitpoint.shapes import ModelShape


class Residency(Enum):
    """Where the cache lives while a request decodes."""

    RESIDENT = "resident"
    STREAMED = "streamed"


class RestoreMethod(Enum):
    """How a cached prefix gets back onto the device."""

    NONE = "none"
    LOAD = "load"
    SPLIT = "split"
    RECOMPUTE = "recompute"
    TOKENS = "tokens"

    @classmethod
    def of(cls, split_tokens: int, cached_tokens: int) -> RestoreMethod:
        if cached_tokens == 0:
            return cls.NONE
        if split_tokens == 0:
            return cls.LOAD
        return cls.RECOMPUTE if split_tokens >= cached_tokens else cls.SPLIT


class Objective(Enum):
    """What a plan is to be best at."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class PlanInput:
    """One request, as the planner sees it. Token counts; footprint in bytes."""

    cached_tokens: int
    new_tokens: int
    has_activations: bool
    schedule: Schedule = Schedule.SERIAL
    residency: Residency = Residency.RESIDENT
    footprint_bytes: int = 0
    forced_split_tokens: int | None = None
    # Said after the split's reason: why this residency.
    residency_reason: str = ""

    def __post_init__(self) -> None:
        if self.cached_tokens < 0:
            raise InvalidArgument("cached_tokens must be at least 0", field="cached_tokens")
        if self.new_tokens < 1:
            raise InvalidArgument("new_tokens must be at least 1", field="new_tokens")
        if self.forced_split_tokens is not None:
            if self.forced_split_tokens < 0:
                raise InvalidArgument("split_tokens must be at least 0", field="split_tokens")
            if self.forced_split_tokens > 0 and not self.has_activations:
                raise InvalidArgument(
                    "the store holds no activations, so nothing can be rebuilt from them: "
                    "only split 0 is possible (start with --activations always)",
                    field="split_tokens",
                    reason="NO_ACTIVATIONS",
                )


@dataclass(frozen=True, slots=True)
class Plan:
    """The planner's immutable answer; the fields of types.proto's Plan."""

    residency: Residency
    method: RestoreMethod
    split_tokens: int
    reason: str
    cached_tokens: int
    new_tokens: int
    footprint_bytes: int
    predicted_restore_seconds: float
    predicted_load_seconds: float
    predicted_ttft_seconds: float
    # l(s) = clamp(slope * s + intercept, 0, cap), for a growing sequence.
    split_slope: float = 0.0
    split_intercept: float = 0.0
    split_cap: int = 0
    # Of the cached tokens, those that come from another host's store first, and
    # the predicted seconds for that (part of predicted_ttft_seconds).
    fetched_tokens: int = 0
    predicted_fetch_seconds: float = 0.0
    schedule: Schedule = Schedule.SERIAL
    # With method TOKENS: [0, recomputed_tokens) is expected to be prefilled.
    recomputed_tokens: int = 0
    # Streamed: K,V of [0, resident_tokens) stay on the device, [resident_tokens,
    # split_tokens) is rebuilt in each step. Schedule ROW: X stays there.
    resident_tokens: int = 0
    # Tokens of X in one tile on the link; 0: the worker chooses.
    tile_tokens: int = 0
    # Streamed: predicted seconds of a decode step at this length.
    predicted_step_seconds: float = 0.0
    objective: Objective = Objective.LATENCY

    @property
    def kappa_ratio(self) -> float:
        """K / T, cached over new tokens."""
        return self.cached_tokens / self.new_tokens


@dataclass(frozen=True, slots=True)
class SplitCosts:
    """Seconds per token and per operation in one layer; see the module's formulas."""

    activation: float  # a
    load: float  # c
    rebuild: float  # g
    copy_overhead: float  # C0
    rebuild_overhead: float  # G0

    @classmethod
    def of(cls, shape: ModelShape, profile: Profile) -> SplitCosts:
        link = profile.link_bytes_per_second
        return cls(
            activation=shape.activation_bytes_per_token_layer / link,
            load=shape.kv_bytes_per_token_layer / link,
            rebuild=shape.rebuild_flops_per_token_layer / profile.rebuild_flops_per_second,
            copy_overhead=profile.link_overhead_seconds,
            rebuild_overhead=profile.rebuild_overhead_seconds,
        )

    def layer_seconds(self, split: int, cached: int, schedule: Schedule) -> float:
        """t(l) of one layer, for a prefix of `cached` tokens split at `split`."""
        send = self.copy_overhead + self.activation * split if split else 0.0
        rebuild = self.rebuild_overhead + self.rebuild * split if split else 0.0
        load = self.copy_overhead + self.load * (cached - split) if split < cached else 0.0
        if schedule is Schedule.SERIAL:
            return send + rebuild + load
        return (send if schedule is Schedule.COLUMN else 0.0) + max(rebuild, load)

    def crossing(self, cached: int) -> float:
        """l at which rebuilding [0, l) takes as long as loading [l, s)."""
        return self.line[0] * cached + self.line[1]

    @property
    def line(self) -> tuple[float, float]:
        """(slope, intercept) of the crossing as a function of s."""
        total = self.load + self.rebuild
        return self.load / total, (self.copy_overhead - self.rebuild_overhead) / total


def best_split(costs: SplitCosts, cached: int, schedule: Schedule) -> int:
    """The l in [0, cached] with the least layer_seconds; the smallest such l.

    Closed form: between 1 and cached - 1 the cost is convex and piecewise
    linear with its only kink at the crossing, so its minimum there is at an
    end or beside the kink; 0 and cached stand alone, since a part without
    tokens drops its intercept too.
    """
    candidates = {0, min(1, cached), max(cached - 1, 0), cached}
    crossing = costs.crossing(cached)
    for near in (math.floor(crossing), math.ceil(crossing)):
        candidates.add(min(max(near, 0), cached))
    return min(candidates, key=lambda split: (costs.layer_seconds(split, cached, schedule), split))


def plan_request(shape: ModelShape, profile: Profile, request: PlanInput) -> Plan:
    """Plan one request. Raises InvalidArgument for a forced split that cannot be."""
    costs = SplitCosts.of(shape, profile)
    cached = request.cached_tokens

    def restore_seconds(split: int) -> float:
        return shape.layer_count * costs.layer_seconds(split, cached, request.schedule)

    split = _choose_split(costs, request)
    restore = restore_seconds(split)
    load = restore_seconds(0)
    prefill = profile.prefill_seconds(shape.prefill_flops(request.new_tokens, cached))
    slope, intercept, cap = _split_line(costs, request, split)
    reason = _split_reason(shape, costs, request, split, restore, load)
    if request.residency_reason:
        reason = f"{reason}; {request.residency_reason}"
    return Plan(
        residency=request.residency,
        method=RestoreMethod.of(split, cached),
        split_tokens=split,
        reason=reason,
        cached_tokens=cached,
        new_tokens=request.new_tokens,
        footprint_bytes=request.footprint_bytes,
        predicted_restore_seconds=restore,
        predicted_load_seconds=load,
        predicted_ttft_seconds=restore + prefill,
        split_slope=slope,
        split_intercept=intercept,
        split_cap=cap,
    )


def _choose_split(costs: SplitCosts, request: PlanInput) -> int:
    if request.forced_split_tokens is not None:
        return min(request.forced_split_tokens, request.cached_tokens)
    if not request.has_activations:
        return 0
    return best_split(costs, request.cached_tokens, request.schedule)


def _split_line(costs: SplitCosts, request: PlanInput, split: int) -> tuple[float, float, int]:
    """(slope, intercept, cap) that give `split` at the present length."""
    if split == 0 or request.forced_split_tokens is not None:
        return 0.0, float(split), split
    if split == request.cached_tokens or request.schedule is Schedule.SERIAL:
        return 1.0, float(split - request.cached_tokens), split
    slope, intercept = costs.line
    return slope, intercept, request.cached_tokens


def _split_reason(
    shape: ModelShape,
    costs: SplitCosts,
    request: PlanInput,
    split: int,
    restore: float,
    load: float,
) -> str:
    cached = request.cached_tokens
    if cached == 0:
        return f"nothing is cached: {request.new_tokens:,} tokens are prefilled"
    if request.forced_split_tokens is not None:
        note = "" if split == request.forced_split_tokens else " (all that is cached)"
        return (
            f"split {split:,}{note} was asked for: predicted {_ms(restore)} against "
            f"{_ms(load)} for loading everything"
        )
    if split == 0:
        return (
            f"split 0: all {cached:,} cached tokens are loaded, {_why_zero(shape, costs, request)}"
        )
    if split == cached:
        return (
            f"split {split:,}: everything is rebuilt from activations, predicted {_ms(restore)} "
            f"against {_ms(load)} for loading (x {restore / load:.2f})"
        )
    return (
        f"split {split:,} of {cached:,}: rebuilding the front while the rest is on the link takes "
        f"{_ms(restore)} against {_ms(load)} for loading everything (x {restore / load:.2f})"
    )


def _why_zero(shape: ModelShape, costs: SplitCosts, request: PlanInput) -> str:
    on_link = request.schedule is not Schedule.ROW
    if on_link and not shape.activations_can_pay:
        return (
            f"since an activation is {shape.rho:.2f} x the bytes of its keys and values "
            "(rho >= 1): sending it can never pay"
        )
    if not request.has_activations:
        return "since the store holds no activations"
    send = costs.activation if on_link else 0.0
    if send + costs.rebuild >= costs.load and request.schedule is Schedule.SERIAL:
        return (
            f"since loading a token takes {_us(costs.load)} a layer and rebuilding it "
            f"{_us(send + costs.rebuild)}"
        )
    return f"since {request.cached_tokens:,} tokens are too few to pay for a second operation"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs"

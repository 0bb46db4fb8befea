"""One request's plan: how its cached prefix comes back, what that takes, and why.

Pure arithmetic over shape and profile. `split_costs` has the formulas of the
schedules, `token_recompute` that of recomputing from token ids, `resident_share` what
stays on the device of a streamed sequence, `choices` compares them, `plan_reasons`
finds the words. Knows no gRPC, no clock, no tensors.
"""

from __future__ import annotations

from splitpoint.costs.profile import Profile
from splitpoint.planning.choices import Chooser
from splitpoint.planning.plan import (
    FORCED_METHODS,
    Objective,
    Plan,
    PlanInput,
    Residency,
    RestoreMethod,
    check_forced_method,
    check_forced_split,
)
from splitpoint.planning.reasons import reason_of
from splitpoint.shapes import ModelShape

__all__ = [
    "FORCED_METHODS",
    "Objective",
    "Plan",
    "PlanInput",
    "Residency",
    "RestoreMethod",
    "check_forced_method",
    "check_forced_split",
    "plan_request",
]


def plan_request(shape: ModelShape, profile: Profile, request: PlanInput) -> Plan:
    """Plan one request. A plan that nobody forced is never predicted slower than loading."""
    chooser = Chooser.of(shape, profile, request)
    choices = chooser.choose()
    best, cached = choices.best, request.cached_tokens
    load_seconds = chooser.costs.seconds(0, cached, chooser.options)
    reason = reason_of(chooser, choices, load_seconds)
    if request.residency_reason:
        reason = f"{reason}; {request.residency_reason}"
    return Plan(
        residency=request.residency,
        method=best.method,
        split_tokens=best.now,
        reason=reason,
        cached_tokens=cached,
        new_tokens=request.new_tokens,
        footprint_bytes=request.footprint_bytes,
        predicted_restore_seconds=best.seconds,
        predicted_load_seconds=load_seconds,
        predicted_ttft_seconds=best.seconds + chooser.prefill_seconds,
        split_slope=best.line.slope,
        split_intercept=best.line.intercept,
        split_cap=best.line.cap,
        schedule=best.schedule,
        recomputed_tokens=best.recomputed,
        resident_tokens=best.resident,
        tile_tokens=best.tile if chooser.length else 0,
        predicted_step_seconds=best.step_seconds,
        objective=request.objective,
    )

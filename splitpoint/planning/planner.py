"""Plans of a request and of a streamed batch: how the cached prefix is restored, and the reason.

Pure arithmetic over shape and profile: no gRPC, no clock, no tensors. In the order in which
a plan is made: `choices` compares the ways, with `split_costs` (formulas of the schedules),
`split_search` (the best split), `token_recompute` (from token ids) and `stream_plan` (a
streamed sequence); `reasons` says in words why the best one was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from splitpoint.costs.profile import Profile
from splitpoint.planning.choices import Chooser
from splitpoint.planning.plan import (
    Objective,
    Plan,
    PlanInput,
    Residency,
    SplitLine,
)
from splitpoint.planning.reasons import details_of, explained
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import Encoding, ModelShape


def plan_request(shape: ModelShape, profile: Profile, request: PlanInput) -> Plan:
    """Return the plan of one request.

    Unless the client forces a method or a split, the predicted score under the request's
    objective is never worse than that of loading everything.
    """
    chooser = Chooser.of(shape, profile, request)
    comparison = chooser.choose()
    best, cached = comparison.best, request.cached_tokens
    load_seconds = chooser.costs.seconds(0, cached, chooser.options)
    plan = Plan(
        residency=request.residency,
        method=best.method,
        split_tokens=best.now,
        reason="",
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
        predicted_recompute_seconds=chooser.recompute_seconds,
    )
    return explained(plan, *details_of(chooser, comparison, load_seconds))


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The split of each sequence in a batch of streamed ones.

    Attributes:
        line: the split as a function of the length of one sequence.
        reason: why, in one line.
        step_seconds: predicted seconds of one decode step of the whole batch.
    """

    line: SplitLine
    reason: str
    step_seconds: float


def plan_batch(
    shape: ModelShape,
    profile: Profile,
    lengths: Sequence[int],
    *,
    has_activations: bool,
    schedule: Schedule,
    chunk_tokens: int,
    staging_tokens: int,
    encoding: Encoding = Encoding.NATIVE,
    resident_tokens: int = 0,
    step_compute_seconds: float | None = None,
    objective: Objective = Objective.LATENCY,
) -> BatchPlan:
    """Return one split line for streamed sequences of these lengths, in tokens.

    Sequences that decode together share the link and the step, so they are planned as one
    sequence of all their tokens. If each sequence had its own plan, each plan would
    count the compute of the whole step, and would rebuild too few tokens.

    Args:
        lengths: at least one.
        resident_tokens: tokens, of all sequences together, whose K and V stay on the device.
        step_compute_seconds: seconds of a step without cache traffic. None: use the profile's.
    """
    total, count = sum(lengths), len(lengths)
    plan = plan_request(
        # The combined sequence may be as long as the maximum contexts of all sequences together.
        replace(shape, context_length=count * shape.context_length),
        profile,
        PlanInput(
            cached_tokens=total,
            new_tokens=count,
            has_activations=has_activations,
            schedule=schedule,
            residency=Residency.STREAMED,
            chunk_tokens=chunk_tokens,
            staging_tokens=staging_tokens,
            encoding=encoding,
            spare_bytes=resident_tokens * shape.kv_bytes_per_token,
            step_compute_seconds=step_compute_seconds,
            objective=objective,
        ),
    )
    # The sum over all n of slope * s_i + intercept / n is the line of the sum.
    cap = shape.context_length if plan.split_cap else 0
    line = SplitLine(plan.split_slope, plan.split_intercept / count, cap)
    return BatchPlan(line, plan.explanation, plan.predicted_step_seconds)

"""One split line for all streamed sequences of a batch.

Sequences that decode together share the link and the step, so to the planner they are
one sequence of all their tokens: planned one by one, each would count the whole step's
compute as its own, and rebuild too little. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import Objective, PlanInput, Residency
from splitpoint.planning.planner import plan_request
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.split_line import SplitLine
from splitpoint.shapes import Encoding, ModelShape


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """`line` holds for each sequence by itself; the rest is about all of them.

    Attributes:
        step_seconds: predicted, of a decode step of them all.
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
    """For streamed sequences of these lengths, in tokens; at least one.

    Args:
        resident_tokens: of all of them, whose K and V stay on the device.
        step_compute_seconds: of a step with nothing to fetch; None: the profile's.
    """
    total, count = sum(lengths), len(lengths)
    plan = plan_request(
        # The line of one sequence ends at its context, that of all at all of theirs.
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
    # slope * s_i + intercept / n, summed over all n, is the line of their sum.
    cap = shape.context_length if plan.split_cap else 0
    line = SplitLine(plan.split_slope, plan.split_intercept / count, cap)
    return BatchPlan(line, plan.reason, plan.predicted_step_seconds)

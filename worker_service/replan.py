"""Where the split of a running streamed sequence lies once costs have changed.

The scheduler planned with the costs it knew when the request began. When the worker
finds that link or device are not what they were, it draws the line anew by the same
planner, so that nobody has to be asked in the middle of a generation. Pure.
"""

from __future__ import annotations

from splitpoint.costs import Profile
from splitpoint.planner import PlanInput, Residency, plan_request
from splitpoint.schedule import Schedule
from splitpoint.shapes import ArenaLayout, ModelShape
from splitpoint.split_line import SplitLine


def split_line_of(
    shape: ModelShape,
    layout: ArenaLayout,
    profile: Profile,
    *,
    schedule: Schedule,
    tokens: int,
    resident_tokens: int,
    staging_tokens: int,
) -> SplitLine:
    """The line for a sequence of `tokens`, the first `resident_tokens` of which stay."""
    plan = plan_request(
        shape,
        profile,
        PlanInput(
            cached_tokens=tokens,
            new_tokens=1,
            has_activations=layout.has_activations,
            schedule=schedule,
            residency=Residency.STREAMED,
            chunk_tokens=layout.chunk_tokens,
            staging_tokens=staging_tokens,
            encoding=layout.encoding,
            # What stays was decided at admission: its pages are claimed.
            spare_bytes=resident_tokens * shape.kv_bytes_per_token,
        ),
    )
    return SplitLine(plan.split_slope, plan.split_intercept, plan.split_cap)

"""Draws one split line for all sequences that stream in the same steps."""

from __future__ import annotations

from collections.abc import Sequence

from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import SplitLine
from splitpoint.planning.planner import plan_batch
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import ArenaLayout, ModelShape


class SharedSplit:
    """Decides when the scheduler's split lines are to be replaced, and by which line.

    The scheduler plans each request as if it were alone. Only the worker knows which
    requests share its steps, and what steps cost now.
    """

    def __init__(
        self, shape: ModelShape, layout: ArenaLayout, schedule: Schedule, staging_tokens: int
    ) -> None:
        self._shape = shape
        self._layout = layout
        self._schedule = schedule
        self._staging_tokens = staging_tokens
        # Sequences that the present line is for; 0 if the scheduler's plans still hold.
        self._sharing = 0

    def draw(
        self,
        profile: Profile,
        lengths: Sequence[int],
        *,
        resident_tokens: int,
        costs_changed: bool,
    ) -> SplitLine | None:
        """Return the line for sequences of these lengths; None if the present ones still hold.

        `resident_tokens`: tokens of all of them that stay on the device.
        """
        sharing = len(lengths) if len(lengths) > 1 else 0
        if not lengths or (sharing == self._sharing and not costs_changed):
            return None
        self._sharing = sharing
        plan = plan_batch(
            self._shape,
            profile,
            lengths,
            has_activations=self._layout.has_activations,
            schedule=self._schedule,
            chunk_tokens=self._layout.chunk_tokens,
            staging_tokens=self._staging_tokens,
            encoding=self._layout.encoding,
            resident_tokens=resident_tokens,
        )
        return plan.line

"""Keeps a profile true while it is used: refits its lines from what copies and products took.

KVPR profiles once at start and names that as a limitation; here every restore and
every streamed step is a measurement. Old ones are forgotten step by step, so that a
link that becomes slower is noticed within a few steps, and small changes are kept
from those who plan by it. Pure: no clock, no device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from splitpoint.costs.profile import Line, Profile

# What a measurement counts after one more step: a tenth after ten steps.
KEPT = 0.8
# A profile whose predictions moved by less is not worth telling anybody.
HYSTERESIS = 0.10
# Below this spread of sizes (relative variance) a slope cannot be told from an overhead.
_LEAST_SPREAD = 0.01


@dataclass(frozen=True, slots=True)
class Observation:
    """One copy or product: bytes or FLOP, and seconds; both above 0."""

    amount: float
    seconds: float


class LineTracker:
    """`seconds = overhead + amount / rate`, from measurements that fade.

    Attributes:
        line: the present fit; the one given, until something was observed.
    """

    def __init__(self, line: Line, kept: float = KEPT) -> None:
        self.line = line
        self._kept = kept
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, step: Iterable[Observation]) -> None:
        """What one step or restore measured; the earlier ones fade by as much, once."""
        seen = [each for each in step if each.amount > 0 and each.seconds > 0]
        if not seen:
            return
        for name in ("_weight", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * self._kept)
        # Relative errors count (see splitpoint.costs.profile.fit_line), but a step counts as much
        # as any other: else those of a link that was faster would outlive many slow ones.
        scale = len(seen) / sum(1.0 / (each.seconds * each.seconds) for each in seen)
        for each in seen:
            weight = scale / (each.seconds * each.seconds)
            self._weight += weight
            self._x += weight * each.amount
            self._y += weight * each.seconds
            self._xx += weight * each.amount * each.amount
            self._xy += weight * each.amount * each.seconds
        self.line = self._fit()

    @property
    def typical_amount(self) -> float:
        """What was observed, on average; 0 before anything was."""
        return self._x / self._weight if self._weight else 0.0

    def seconds(self, amount: float) -> float:
        """What so much would take by the present fit."""
        return self.line.overhead + amount / self.line.rate

    def _fit(self) -> Line:
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance > _LEAST_SPREAD * mean_x * mean_x:
            slope = (self._xy / self._weight - mean_x * mean_y) / variance
            overhead = mean_y - slope * mean_x
            if slope > 0 and overhead >= 0:
                return Line(overhead, 1.0 / slope)
            # Noise made small sizes look free: through the origin, as when fitted at start.
            return Line(0.0, self._xx / self._xy)
        # All of one size: the point is known, and nothing about the overhead. It stays
        # what it was as long as that leaves most of the time to the amount.
        overhead = min(self.line.overhead, 0.5 * mean_y)
        return Line(overhead, mean_x / (mean_y - overhead))


class MeanTracker:
    """A duration that has no amount, from measurements that fade; None before the first."""

    def __init__(self, kept: float = KEPT) -> None:
        self.seconds: float | None = None
        self._kept = kept

    def observe(self, seconds: float) -> None:
        if self.seconds is None:
            self.seconds = seconds
        else:
            self.seconds = self._kept * self.seconds + (1 - self._kept) * seconds


class CostTracker:
    """A profile that follows what is measured.

    Attributes:
        profile: the latest one worth telling; replaced by `settle`.
        link, rebuild, prefill: the present fits, ahead of `profile`.
        restore: seconds of restores beside their copies and products, over how many
            of these there are.
        step_compute: what a decode step computes, its cache traffic left out.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.link = LineTracker(Line(profile.link_overhead_seconds, profile.link_bytes_per_second))
        self.rebuild = LineTracker(
            Line(profile.rebuild_overhead_seconds, profile.rebuild_flops_per_second)
        )
        self.prefill = LineTracker(
            Line(profile.prefill_overhead_seconds, profile.prefill_flops_per_second)
        )
        self.restore = LineTracker(_overheads(profile))
        self.step_compute = MeanTracker()
        if profile.step_compute_seconds:
            self.step_compute.observe(profile.step_compute_seconds)

    def settle(self) -> bool:
        """Take the fits into `profile` if any prediction moved by 10 %; whether it did."""
        known, step = self.profile, self.step_compute.seconds or 0.0
        moved = (
            _moved(self.link, Line(known.link_overhead_seconds, known.link_bytes_per_second))
            or _moved(
                self.rebuild, Line(known.rebuild_overhead_seconds, known.rebuild_flops_per_second)
            )
            or _moved(
                self.prefill, Line(known.prefill_overhead_seconds, known.prefill_flops_per_second)
            )
            or _moved(self.restore, _overheads(known))
            or abs(step - known.step_compute_seconds) > HYSTERESIS * known.step_compute_seconds
        )
        if moved:
            self.profile = self.fits
        return moved

    @property
    def fits(self) -> Profile:
        """The present fits as a profile, whether or not they were taken over."""
        return replace(
            self.profile,
            link_bytes_per_second=self.link.line.rate,
            link_overhead_seconds=self.link.line.overhead,
            rebuild_flops_per_second=self.rebuild.line.rate,
            rebuild_overhead_seconds=self.rebuild.line.overhead,
            prefill_flops_per_second=self.prefill.line.rate,
            prefill_overhead_seconds=self.prefill.line.overhead,
            step_compute_seconds=self.step_compute.seconds or 0.0,
            restore_overhead_seconds=self.restore.line.overhead,
            operation_overhead_seconds=1.0 / self.restore.line.rate,
        )


def _overheads(profile: Profile) -> Line:
    """Seconds of a restore over its operations; none at all if they were not measured."""
    operation = profile.operation_overhead_seconds
    return Line(profile.restore_overhead_seconds, 1.0 / operation if operation else math.inf)


def _moved(tracker: LineTracker, known: Line) -> bool:
    """Whether the fit predicts something else than `known` for what is usually moved."""
    amount = tracker.typical_amount
    if not amount:
        return False
    before = known.overhead + amount / known.rate
    return abs(tracker.seconds(amount) - before) > HYSTERESIS * before

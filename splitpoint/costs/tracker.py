"""Keeps a profile up to date: refits its lines from measured copies and products.

KVPR profiles once at start and names that as a limitation; here every restore and every
streamed step is a measurement. Old measurements fade, so that a slower link is noticed
within a few steps. Small changes are not reported to the planner.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from splitpoint.costs.profile import Line, Profile

# Weight of a measurement after one more step: a tenth after ten steps.
KEPT = 0.8
# Predictions that moved by a smaller share are not reported.
HYSTERESIS = 0.10
# Least spread of sizes (relative variance) at which slope and overhead can be told apart.
_LEAST_SPREAD = 0.01


@dataclass(frozen=True, slots=True)
class Observation:
    """One copy or product: bytes or FLOP, and seconds; both above 0."""

    amount: float
    seconds: float


class LineTracker:
    """`seconds = overhead + amount / rate`, from measurements that fade.

    Attributes:
        line: the present fit; the given one before the first observation.
    """

    def __init__(self, line: Line, kept: float = KEPT) -> None:
        self.line = line
        self._kept = kept
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, step: Iterable[Observation]) -> None:
        """Add the measurements of one step or restore; earlier ones fade once."""
        seen = [each for each in step if each.amount > 0 and each.seconds > 0]
        if not seen:
            return
        for name in ("_weight", "_x", "_y", "_xx", "_xy"):
            setattr(self, name, getattr(self, name) * self._kept)
        # Relative errors count (see splitpoint.costs.profile.fit_line), but all steps count
        # equally: else those of a fast link would outweigh many slow ones.
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
        """Mean of the observed amounts; 0 before the first one."""
        return self._x / self._weight if self._weight else 0.0

    def seconds(self, amount: float) -> float:
        """Return the seconds of an amount by the present fit."""
        return self.line.overhead + amount / self.line.rate

    def _fit(self) -> Line:
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance > _LEAST_SPREAD * mean_x * mean_x:
            slope = (self._xy / self._weight - mean_x * mean_y) / variance
            overhead = mean_y - slope * mean_x
            if slope > 0 and overhead >= 0:
                return Line(overhead, 1.0 / slope)
            # Small sizes looked free because of noise: through the origin, as at the start.
            return Line(0.0, self._xx / self._xy)
        # All of one size: the overhead is unknown. It stays as it was, up to half of the time.
        overhead = min(self.line.overhead, 0.5 * mean_y)
        return Line(overhead, mean_x / (mean_y - overhead))


class MeanTracker:
    """Mean duration from measurements that fade; None before the first one."""

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
        profile: the latest reported one; replaced by `settle`.
        link, rebuild, prefill: the present fits, ahead of `profile`.
        restore: seconds of restores besides their copies and products, over the number of
            these.
        step_compute: seconds of a decode step without its cache traffic.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        trackers = [LineTracker(line) for line in _lines(profile)]
        self.link, self.rebuild, self.prefill, self.restore = trackers
        self.step_compute = MeanTracker()
        if profile.step_compute_seconds:
            self.step_compute.observe(profile.step_compute_seconds)

    def settle(self) -> bool:
        """Replace `profile` by the fits if any prediction moved by 10 %; True if one did."""
        known, step = self.profile.step_compute_seconds, self.step_compute.seconds or 0.0
        trackers = (self.link, self.rebuild, self.prefill, self.restore)
        moved = abs(step - known) > HYSTERESIS * known or any(
            map(_moved, trackers, _lines(self.profile))
        )
        if moved:
            self.profile = self.fits
        return moved

    @property
    def fits(self) -> Profile:
        """The present fits as a profile, reported or not."""
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


def _lines(profile: Profile) -> tuple[Line, ...]:
    """Return the lines of link, rebuild, prefill and restore."""
    operation = profile.operation_overhead_seconds
    return (
        Line(profile.link_overhead_seconds, profile.link_bytes_per_second),
        Line(profile.rebuild_overhead_seconds, profile.rebuild_flops_per_second),
        Line(profile.prefill_overhead_seconds, profile.prefill_flops_per_second),
        Line(profile.restore_overhead_seconds, 1.0 / operation if operation else math.inf),
    )


def _moved(tracker: LineTracker, known: Line) -> bool:
    """Return True if the fit and `known` differ by 10 % at the typical amount."""
    amount = tracker.typical_amount
    if not amount:
        return False
    before = known.overhead + amount / known.rate
    return abs(tracker.seconds(amount) - before) > HYSTERESIS * before

"""Learns costs from the spans of restores and streamed steps, and predicts the next ones.

It decides which piece of work is a measurement of which cost; `splitpoint.costs.tracker`
fits them. Used by the engine's thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from splitpoint.costs.profile import Profile
from splitpoint.costs.tracker import CostTracker, MeanTracker, Observation
from splitpoint.planning.schedule import Lane, Schedule
from worker_service.lanes.timeline import FETCHING_ROWS, REBUILDING, Span, StepTimes, Trace

# In a restore that takes longer, what its operations took is less than what the rates
# of link and device are wrong by.
_TELLING_SECONDS = 0.02
_LEAST_SECONDS = 1e-6
# A prefill of fewer tokens shows what each step takes, not the device's rate.
_TELLING_TOKENS = 128


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Work of a step before it runs: bytes of each copy, FLOP of each product."""

    copies: tuple[float, ...]
    rebuilds: tuple[float, ...]


class CostWatch:
    """The present costs of one worker."""

    def __init__(self, profile: Profile) -> None:
        self._tracker = CostTracker(profile)
        # Seconds of a step beyond the busier of link and device: its layout, the first
        # tile's copy, sampling.
        self._beyond = MeanTracker()

    @property
    def profile(self) -> Profile:
        """The latest profile that was reported."""
        return self._tracker.profile

    def restored(self, spans: Iterable[Span], *, is_first_use: bool = False) -> None:
        """Learn from a restore.

        `is_first_use`: its copies waited for the memory of their pages, so they do not show the
        link's rate.
        """
        if is_first_use:
            self.computed(spans)
        else:
            self._observe(list(spans))

    def took(self, seconds: float, spans: Iterable[Span], schedule: Schedule) -> None:
        """Learn the overhead of a restore from its time in all and its spans on lanes.

        Only short restores show what they took beside their copies and products.
        """
        if seconds > _TELLING_SECONDS:
            return
        listed = list(spans)
        link = sum(span.seconds for span in listed if span.lane is not Lane.COMPUTE)
        device = sum(span.seconds for span in listed if span.lane is Lane.COMPUTE)
        busy = link + device if schedule is Schedule.SERIAL else max(link, device)
        beside = max(seconds - busy, _LEAST_SECONDS)
        self._tracker.restore.observe([Observation(len(listed), beside)])

    def stepped(
        self,
        times: StepTimes,
        spans: Iterable[Span],
        *,
        only_decodes: bool,
        drafting_seconds: float = 0.0,
    ) -> None:
        """Learn from a streamed step.

        Args:
            only_decodes: it shows a decode step's compute: it has no prefill, reads nothing by
                selection and builds no screen.
            drafting_seconds: of the step, in which its drafts were made, and rows fetched for them.
        """
        listed = list(spans)
        self._observe(listed)
        if only_decodes:
            rebuilding = sum(span.seconds for span in listed if span.name in REBUILDING)
            for_drafts = sum(span.seconds for span in listed if span.name == FETCHING_ROWS)
            self._tracker.step_compute.observe(times.compute_busy - rebuilding)
            busy = max(times.link_busy - for_drafts, times.compute_busy)
            self._beyond.observe(max(0.0, times.seconds - drafting_seconds - busy))

    def changed_profile(self) -> Profile | None:
        """Return the profile if it changed enough to be reported, else None."""
        return self._tracker.profile if self._tracker.settle() else None

    # -- predictions -------------------------------------------------------------------

    def step_seconds(self, traffic: StepTraffic) -> float | None:
        """Predict a decode step with this traffic; None before the first step was measured."""
        own, beyond = self._tracker.step_compute.seconds, self._beyond.seconds
        if own is None or beyond is None:
            return None
        link = self.fits.weight_seconds
        link += sum(self._tracker.link.seconds(size) for size in traffic.copies)
        device = own + sum(self._tracker.rebuild.seconds(work) for work in traffic.rebuilds)
        return max(link, device) + beyond

    @property
    def fits(self) -> Profile:
        """The present fits, reported or not."""
        return self._tracker.fits

    # -- measurements --------------------------------------------------------------------

    def computed(self, spans: Iterable[Span]) -> None:
        """Learn from the products of a step or restore whose copies do not show the link's rate."""
        spans = list(spans)
        self._tracker.rebuild.observe(_of(spans, Lane.COMPUTE, "rebuild"))
        # The time of a prefill that waited for its weights does not show the device's rate.
        if not self.profile.host_weight_bytes:
            self._tracker.prefill.observe(_of(spans, Lane.COMPUTE, "prefill"))
            steps = [span for span in spans if span.tokens >= _TELLING_TOKENS]
            self._tracker.prefill.observe(_of(steps, Lane.COMPUTE, "prefill step"))

    def _observe(self, spans: list[Span]) -> None:
        # Single rows show another rate than whole chunks.
        whole = (span for span in spans if span.name != FETCHING_ROWS)
        self._tracker.link.observe(_of(whole, Lane.LINK_IN))
        self.computed(spans)


@dataclass(slots=True)
class Observers:
    """Receivers of the spans of restores and steps; each is None if it is off."""

    trace: Trace | None = None
    costs: CostWatch | None = None


def _of(spans: Iterable[Span], lane: Lane, name: str | None = None) -> list[Observation]:
    """Return each piece with an amount; a copy of many planes at once counts as one."""
    return [
        Observation(span.amount, span.seconds)
        for span in spans
        if span.lane is lane and span.amount and (name is None or span.name == name)
    ]

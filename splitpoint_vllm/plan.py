"""Decides whether an engine loads a found prefix or computes it. Pure: the clock is an argument.

With F found tokens of which the first L are loaded, the first token waits for

    load(L) + compute(L, F)        load(L) = o + c L

since vLLM begins to compute a request only when its load has ended. Computing a token costs more
the more tokens are before it, so the sum is concave in L: it is least at L = 0 or at L = F. A split
in between, as in KVPR (Eq. 11), pays only where loads and recomputation of one request overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from splitpoint.costs.profile import Line
from splitpoint.costs.tracker import LineTracker, MeanTracker, Observation

# After this time without a measured load, a request whose load is refused loads one chunk, so that
# a link that became faster is noticed. What was measured before then counts no more.
REMEASURE_SECONDS = 30.0


class Reason(StrEnum):
    """What became of a request's look-up. Also the names of counts and labels."""

    LOADED = "loaded"
    MISS = "miss"
    # The engine's own cache reaches as far as the store's pages.
    LOCAL = "local"
    # The store's answer came after the deadline.
    LATE = "late"
    # Computing the found tokens is faster than loading them.
    SLOWER = "slower"
    # As SLOWER, but one chunk is loaded to measure the link again.
    REMEASURED = "remeasured"
    AWAY = "away"
    # The load failed; the tokens were computed.
    FAILED = "failed"
    PAGES_DO_NOT_FIT = "pages_do_not_fit"
    # The store is not used for this request, or not at all.
    DISABLED = "disabled"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How many of the found tokens are loaded, and why.

    Attributes:
        tokens: the found ones, none, or those of one chunk.
        load_seconds, compute_seconds: predicted for all found tokens. None: not measured yet.
    """

    tokens: int
    reason: Reason
    load_seconds: float | None
    compute_seconds: float | None


class LoadPlanner:
    """Compares loads with prefills by what both took before. `clock`: monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Seconds per byte. Pages are large: the overhead of a load is small beside them.
        self._load = MeanTracker()
        self._load_measured_at = 0.0
        self._remeasured_at = 0.0
        # None before the first step.
        self._step: LineTracker | None = None

    def measured_load(self, byte_count: int, seconds: float) -> None:
        """Note a finished load: the time from its submission, without waiting for other loads."""
        if byte_count <= 0 or seconds <= 0:
            return
        now = self._clock()
        if now - self._load_measured_at >= REMEASURE_SECONDS:
            self._load = MeanTracker()
        self._load.observe(seconds / byte_count)
        self._load_measured_at = now

    def measured_step(self, token_count: int, seconds: float) -> None:
        """Note an engine step that computed this many tokens, prompts' and new ones."""
        if token_count <= 0 or seconds <= 0:
            return
        if self._step is None:
            self._step = LineTracker(Line(0.0, token_count / seconds))
        self._step.observe([Observation(token_count, seconds)])

    def plan(
        self, found_tokens: int, chunk_tokens: int, load_bytes: int, waiting_bytes: int = 0
    ) -> LoadPlan:
        """Return the plan of a request.

        Args:
            found_tokens: tokens that the store has and the engine lacks; at least 1.
            chunk_tokens: fewest tokens that can be loaded.
            load_bytes: bytes of the pages to load for them.
            waiting_bytes: bytes of loads that were submitted before and have not ended.
        """
        per_byte, step = self._load.seconds, self._step
        load_seconds = None if per_byte is None else (load_bytes + waiting_bytes) * per_byte
        # Without the overhead of a step, which the engine runs for other tokens anyway.
        compute_seconds = None if step is None else found_tokens / step.line.rate
        is_slower = (
            load_seconds is not None
            and compute_seconds is not None
            and load_seconds > compute_seconds
        )
        tokens, reason = found_tokens, Reason.LOADED
        if is_slower:
            tokens, reason = 0, Reason.SLOWER
            now = self._clock()
            if now - max(self._load_measured_at, self._remeasured_at) >= REMEASURE_SECONDS:
                tokens, reason = min(chunk_tokens, found_tokens), Reason.REMEASURED
                # One request pays for it, not those beside it.
                self._remeasured_at = now
        return LoadPlan(tokens, reason, load_seconds, compute_seconds)

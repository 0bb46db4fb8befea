"""Computing the front of a prefix while a tier brings its back into the arena.

Chunks come with all their planes, the last ones first, and are restored from the arena once both
have met:

    t(m) = max(prefill(own, m), chunks of [m, s) * chunk bytes / rate) + what the meeting costs

Knows no requests and no clock. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.costs.fetching import ROUND_TRIP_SECONDS
from splitpoint.costs.profile import Profile
from splitpoint.shapes import ModelShape, chunks_of

# Write-back stores the end of the front, the loaded chunks are sealed and looked up. Measured by
# `benchmarks.tier_ends` and `benchmarks.planner_tiers` on two CPU cores: 5 to 30 ms.
MEETING_SECONDS = 20e-3


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """[own, tokens) is computed and the rest loaded, in `seconds`, the restore excluded."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TierEnds:
    """Costs of bringing chunks [own_chunks, chunk_count) of a sequence into the arena.

    Attributes:
        bytes_per_second: of the tier.
        block_tokens: most tokens of one step; 0: no bound.
    """

    shape: ModelShape
    profile: Profile
    own_chunks: int
    chunk_count: int
    chunk_tokens: int
    chunk_bytes: int
    bytes_per_second: float
    block_tokens: int = 0

    def compute_seconds(self, chunks: int) -> float:
        """Return the seconds to prefill the first so many of the missing chunks."""
        if not chunks:
            return 0.0
        tokens, first = chunks * self.chunk_tokens, self.own_chunks * self.chunk_tokens
        flops = self.shape.prefill_flops(tokens, first)
        pieces = chunks_of(tokens, self.block_tokens) if self.block_tokens else 1
        return self.profile.prefill_seconds(flops, pieces)

    def load_seconds(self, chunks: int) -> float:
        """Return the seconds to load so many chunks."""
        return chunks * self.chunk_bytes / self.bytes_per_second

    def meeting_point(self) -> MeetingPoint | None:
        """Return where both meet first; None if one side does all the work."""
        missing = self.chunk_count - self.own_chunks
        # The least number of computed chunks that takes as long as loading the rest.
        low, high = 0, missing
        while low < high:
            middle = (low + high) // 2
            if self.compute_seconds(middle) < self.load_seconds(missing - middle):
                low = middle + 1
            else:
                high = middle
        sides = [count for count in (low - 1, low) if 0 < count < missing]
        if not sides:
            return None
        best = min(sides, key=lambda count: self._seconds(count, missing))
        seconds = ROUND_TRIP_SECONDS + MEETING_SECONDS + self._seconds(best, missing)
        return MeetingPoint((self.own_chunks + best) * self.chunk_tokens, seconds)

    def _seconds(self, computed: int, missing: int) -> float:
        return max(self.compute_seconds(computed), self.load_seconds(missing - computed))

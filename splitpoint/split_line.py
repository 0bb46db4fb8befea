"""The split point as a line in the sequence's length: what a worker follows as it grows.

The best split is affine in the length, so a plan carries a line and nobody has to be
asked for each token. Pure arithmetic; where the line comes from is the planner's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from splitpoint.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class SplitLine:
    """l(s) = clamp(slope * s + intercept, 0, cap), rounded to a multiple of `quantum`.

    All in tokens. With quantum 1 nothing is rounded: so are splits that were asked for.
    Raises InvalidArgument for a line that is none.
    """

    slope: float
    intercept: float
    cap: int
    quantum: int = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.slope) and math.isfinite(self.intercept)):
            raise InvalidArgument("the split's line must be finite", field="split_slope")
        if self.cap < 0:
            raise InvalidArgument("must be at least 0", field="split_cap")
        if self.quantum < 1:
            raise InvalidArgument("a split is rounded to at least 1 token", field="chunk_tokens")

    @classmethod
    def fixed(cls, split_tokens: int) -> SplitLine:
        """The same split at every length."""
        return cls(0.0, float(split_tokens), split_tokens)

    def at(self, length: int) -> int:
        """The split of a sequence of `length` tokens; never beyond its end."""
        wanted = min(max(self.slope * length + self.intercept, 0.0), float(self.cap), length)
        nearest = math.floor(wanted / self.quantum + 0.5) * self.quantum
        return min(nearest, length - length % self.quantum)

"""The split point as a line in the sequence's length, which a worker follows as it grows.

The best split is affine in the length, so a plan carries a line, and no new plan is needed
for each token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from splitpoint.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class SplitLine:
    """l(s) = clamp(slope * s + intercept, 0, cap), all in tokens.

    Raises InvalidArgument for values that are not finite, and for a negative cap.
    """

    slope: float
    intercept: float
    cap: int

    def __post_init__(self) -> None:
        if not math.isfinite(self.slope):
            raise InvalidArgument("must be finite", field="split_slope")
        if not math.isfinite(self.intercept):
            raise InvalidArgument("must be finite", field="split_intercept")
        if self.cap < 0:
            raise InvalidArgument("must be at least 0", field="split_cap")

    @classmethod
    def fixed(cls, split_tokens: int) -> SplitLine:
        """Return a line with the same split at every length that reaches it."""
        return cls(0.0, float(split_tokens), split_tokens)

    def at(self, tokens: int, quantum: int) -> int:
        """Return the split of so many tokens: a multiple of the quantum, or all of them."""
        wanted = min(max(self.slope * tokens + self.intercept, 0.0), float(self.cap))
        if wanted >= tokens:
            return tokens
        return min(round(wanted / quantum) * quantum, tokens)

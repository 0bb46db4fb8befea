"""Recomputing a cached prefix's front from its token ids while its back is loaded.

The front [0, m) is prefilled for real, in pieces; chunks of the back come over the
link last ones first; both go on until they meet at m. No stored X is needed, so it
works for every architecture, grouped queries included:

    t(m) = max(prefill(m), L (C0 pieces + c (s - m)))

The prefill grows with m, faster than linearly, and the link's part shrinks, so the
least t lies beside their one crossing. The worker finds the real meeting point as
it runs; this is the prediction. Knows no requests and no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from splitpoint.costs import Profile
from splitpoint.shapes import ModelShape, chunks_of
from splitpoint.split_costs import SplitCosts, tiles_of


@dataclass(frozen=True, slots=True)
class TokenRecompute:
    """Costs of one prefix of `cached` tokens.

    `piece_tokens`: tokens of one load, over all layers. `prefill_tokens`: of one
    piece of the prefill; 0: it is one piece.
    """

    shape: ModelShape
    profile: Profile
    costs: SplitCosts
    cached: int
    piece_tokens: int
    prefill_tokens: int = 0

    def prefill_seconds(self, recomputed: int) -> float:
        """How long the device is busy with [0, recomputed)."""
        if not recomputed:
            return 0.0
        pieces = tiles_of(recomputed, self.prefill_tokens)
        return self.profile.prefill_seconds(self.shape.prefill_flops(recomputed), pieces)

    def load_seconds(self, recomputed: int) -> float:
        """How long the link is busy with [recomputed, cached)."""
        rest = self.cached - recomputed
        pieces = tiles_of(rest, self.piece_tokens)
        costs = self.costs
        return costs.layer_count * (pieces * costs.copy_overhead + costs.load * rest)

    def seconds(self, recomputed: int, *, overlapped: bool = True) -> float:
        prefill, load = self.prefill_seconds(recomputed), self.load_seconds(recomputed)
        return max(prefill, load) if overlapped else prefill + load

    def meeting_point(self, chunk_tokens: int = 1) -> int:
        """The m, a multiple of chunk_tokens or all, with the least overlapped seconds."""
        low, high = 0, chunks_of(self.cached, chunk_tokens)
        while high - low > 1:
            middle = (low + high) // 2
            if self.prefill_seconds(middle * chunk_tokens) < self.load_seconds(
                middle * chunk_tokens
            ):
                low = middle
            else:
                high = middle
        beside = (low * chunk_tokens, min(high * chunk_tokens, self.cached))
        return min(beside, key=lambda recomputed: (self.seconds(recomputed), recomputed))


def load_piece(costs: SplitCosts, cached: int, chunk_tokens: int) -> int:
    """Tokens of one load from the back: a multiple of chunk_tokens.

    Small loads cost overheads, and the last one, which the prefill waits for, costs
    half of itself on average: least at sqrt(2 s C0 / c).
    """
    wanted = math.sqrt(2 * cached * costs.copy_overhead / costs.load)
    chunks = max(1, round(wanted / chunk_tokens))
    return min(chunks, max(1, chunks_of(cached, chunk_tokens))) * chunk_tokens

"""Recomputing a cached prefix's front from its token ids while its back is loaded.

The front [0, m) is prefilled for real, a block at a time; chunks of the back come over
the link last ones first; both go on until they meet at m. No stored X is needed, so it
works for every architecture, grouped queries included. Without overheads

    t(m) = max(prefill(m), L c (s - m))

of which one part grows with m and the other shrinks. Who takes which chunks is decided
as it runs (`meeting`): the prediction lets the two sides run on paper, each asking for
its next piece when it is done with one. Knows no requests and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.costs.profile import Profile
from splitpoint.planning.bidirectional import BidirectionalQueue, piece_sizes
from splitpoint.planning.split_costs import SplitCosts
from splitpoint.shapes import ModelShape, chunks_of

# What a copy that its lane draws by itself takes beside its bytes, as a share of what one
# takes that is handed to the lane. Not measured by itself: with it the predictions of
# `benchmarks.restore_predictions` fit best on two CPU cores.
DRAWN_COPY = 0.5


@dataclass(frozen=True, slots=True)
class RecomputeEstimate:
    """How it goes: [0, recomputed) is computed, the rest loaded. `seconds` until both are
    done, and how long link and device are busy."""

    recomputed: int
    seconds: float
    link_seconds: float
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class TokenRecompute:
    """Costs of one prefix of `cached` tokens. `prefill_tokens`: most of one block; 0: all.

    `extra_operations`: copies beside, as of `PipelineOptions`.
    """

    shape: ModelShape
    profile: Profile
    costs: SplitCosts
    cached: int
    chunk_tokens: int
    prefill_tokens: int = 0
    extra_operations: int = 0

    def block_seconds(self, first: int, last: int) -> float:
        """K and V of tokens [first, last) in every layer, after those before them."""
        return self.profile.prefill_seconds(self.shape.fill_flops(last - first, first))

    def load_seconds(self, tokens: int) -> float:
        """One piece on the link: K and V of so many tokens in every layer."""
        return self.costs.layer_count * (self.costs.copy_overhead + self.costs.load * tokens)

    def expected_point(self) -> int:
        """The m, a multiple of chunk_tokens or all, with the least max(prefill, load), each
        in one piece: what the two sides are told to expect."""
        low, high = 0, chunks_of(self.cached, self.chunk_tokens)
        while high - low > 1:
            middle = (low + high) // 2
            tokens = middle * self.chunk_tokens
            if self.block_seconds(0, tokens) < self.load_seconds(self.cached - tokens):
                low = middle
            else:
                high = middle
        beside = (low * self.chunk_tokens, min(high * self.chunk_tokens, self.cached))
        return min(beside, key=lambda tokens: (self._in_one_piece(tokens), tokens))

    def estimate(self, *, overlapped: bool = True) -> RecomputeEstimate:
        """Where they meet and when; in turn, back first, where nothing overlaps."""
        front, back = piece_sizes(self.chunk_tokens, self.prefill_tokens or self.cached)
        count = chunks_of(self.cached, self.chunk_tokens)
        share = chunks_of(self.expected_point(), self.chunk_tokens) / count
        meeting = BidirectionalQueue(count, front=front, back=back, expected_share=share)
        recomputed, computing, loading = 0, 0.0, 0.0
        operations: float = self.extra_operations
        front_ends = back_ends = False
        while not (front_ends and back_ends):
            is_back = not back_ends and (not overlapped or front_ends or loading <= computing)
            if is_back:
                piece = meeting.pop_back() if overlapped else meeting.pop_back_in_turn()
                if piece is None:
                    back_ends = True
                    continue
                last = min(piece.stop * self.chunk_tokens, self.cached)
                loading += self.load_seconds(last - piece.start * self.chunk_tokens)
                operations += DRAWN_COPY * self.costs.layer_count
            else:
                piece = meeting.pop_front()
                if piece is None:
                    front_ends = True
                    continue
                last = min(piece.stop * self.chunk_tokens, self.cached)
                computing += self.block_seconds(recomputed, last)
                operations += 1
                # Every block brings the weights that are on the host.
                loading += self.profile.weight_seconds
                recomputed = last
        seconds = max(computing, loading) if overlapped else computing + loading
        seconds += self.costs.overhead_seconds(operations)
        return RecomputeEstimate(recomputed, seconds, loading, computing)

    def _in_one_piece(self, tokens: int) -> float:
        prefill = self.block_seconds(0, tokens) if tokens else 0.0
        load = self.load_seconds(self.cached - tokens) if tokens < self.cached else 0.0
        return max(prefill, load)

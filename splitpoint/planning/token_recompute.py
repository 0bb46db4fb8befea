"""Recomputing a cached prefix's front from its token ids while its back is loaded.

The front [0, m) is prefilled, a block at a time. Chunks of the back cross the link last ones
first. Both go on until they meet at m. This needs no stored X, so it works for every
architecture, grouped queries included. Without overheads

    t(m) = max(prefill(m), L c (s - m))

of which one part grows with m and the other shrinks. The chunks are divided at run time by a
BidirectionalQueue; the estimate simulates its two sides. Knows no requests and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.costs.profile import Profile
from splitpoint.planning.bidirectional import BidirectionalQueue, PieceSize, piece_sizes
from splitpoint.planning.split_costs import SplitCosts
from splitpoint.shapes import ModelShape, chunks_of

# The overhead of a copy that its lane pops by itself, as a share of that of a copy which is
# handed to the lane. Not measured: predictions of restores
# (docs/lab/log.md) fit best with it on two CPU cores.
POPPED_COPY = 0.5


@dataclass(frozen=True, slots=True)
class RecomputeEstimate:
    """A restore that computes [0, recomputed) and loads the rest.

    `seconds`: until both have ended. `link_seconds`, `compute_seconds`: busy seconds.
    """

    recomputed: int
    seconds: float
    link_seconds: float
    compute_seconds: float


@dataclass(frozen=True, slots=True)
class TokenRecompute:
    """Costs of one prefix of `cached` tokens.

    Attributes:
        prefill_tokens: most tokens of one block; 0: no bound.
        extra_operations: see `PipelineOptions`.
    """

    shape: ModelShape
    profile: Profile
    costs: SplitCosts
    cached: int
    chunk_tokens: int
    prefill_tokens: int = 0
    extra_operations: int = 0

    def block_seconds(self, first: int, last: int) -> float:
        """Return the seconds to compute K and V of tokens [first, last) in every layer."""
        return self.profile.prefill_seconds(self.shape.fill_flops(last - first, first))

    def load_seconds(self, tokens: int) -> float:
        """Return the seconds to load K and V of this many tokens in every layer, as one piece."""
        return self.costs.layer_count * (self.costs.copy_overhead + self.costs.load * tokens)

    def expected_point(self) -> int:
        """Return the m with the least max(prefill, load), each in one piece.

        It is a multiple of chunk_tokens, or `cached`.
        """
        low, high = 0, chunks_of(self.cached, self.chunk_tokens)
        while high - low > 1:
            middle = (low + high) // 2
            tokens = middle * self.chunk_tokens
            if self.block_seconds(0, tokens) < self.load_seconds(self.cached - tokens):
                low = middle
            else:
                high = middle
        both = (low * self.chunk_tokens, min(high * self.chunk_tokens, self.cached))
        return min(both, key=lambda tokens: (self._in_one_piece(tokens), tokens))

    def estimate(self, *, overlapped: bool = True) -> RecomputeEstimate:
        """Return where the sides meet, and when; loading ends first unless `overlapped`.

        `expected_point` leaves out the overheads of operations. If computing everything takes
        less because of them, nothing is loaded, except by the serial twin.
        """
        count = chunks_of(self.cached, self.chunk_tokens)
        share = chunks_of(self.expected_point(), self.chunk_tokens) / count
        meeting = self._from_both_ends(share, overlapped=overlapped)
        seconds = meeting.seconds
        if not meeting.recomputed:  # then a plan loads, and each copy is handed to its lane
            loading = self.load_seconds(count * self.chunk_tokens)
            seconds = loading + self._overhead_seconds(self.costs.layer_count)
        if not overlapped or share == 1 or self.alone_seconds() >= seconds:
            return meeting
        computing = self._from_both_ends(1.0, overlapped=True)
        return computing if computing.seconds < seconds else meeting

    def alone_seconds(self) -> float:
        """Return the seconds of a restore that computes everything and loads nothing."""
        front, _ = self._piece_sizes()
        blocks = chunks_of(self.cached, front.most * self.chunk_tokens)
        flops = self.shape.fill_flops(self.cached, 0)
        return self.profile.prefill_seconds(flops, blocks) + self._overhead_seconds(blocks)

    def _piece_sizes(self) -> tuple[PieceSize, PieceSize]:
        all_chunks = chunks_of(self.cached, self.chunk_tokens) * self.chunk_tokens
        return piece_sizes(self.chunk_tokens, self.prefill_tokens or all_chunks)

    def _overhead_seconds(self, operations: float) -> float:
        """Return the overheads of a restore, X of a partial last chunk included."""
        extra = self.extra_operations
        return self.costs.overhead_seconds(operations + extra) + extra * self.costs.send_seconds(
            self.chunk_tokens
        )

    def _from_both_ends(self, share: float, *, overlapped: bool) -> RecomputeEstimate:
        """Return the estimate if the front is expected to compute this share of the chunks."""
        front, back = self._piece_sizes()
        count = chunks_of(self.cached, self.chunk_tokens)
        queue = BidirectionalQueue(count, front=front, back=back, expected_share=share)
        pop_back = queue.pop_back if overlapped else queue.pop_back_in_turn
        recomputed, computing, loading = 0, 0.0, 0.0
        operations = 0.0
        front_ended = back_ended = False
        while not (front_ended and back_ended):
            # The side that is free first asks first.
            is_back = not back_ended and (not overlapped or front_ended or loading <= computing)
            piece = pop_back() if is_back else queue.pop_front()
            if piece is None:
                back_ended, front_ended = back_ended or is_back, front_ended or not is_back
                continue
            last = min(piece.stop * self.chunk_tokens, self.cached)
            if is_back:
                # Whole chunks cross the link.
                loading += self.load_seconds(len(piece) * self.chunk_tokens)
                operations += POPPED_COPY * self.costs.layer_count
            else:
                computing += self.block_seconds(recomputed, last)
                # Every block reads the weights that are on the host.
                loading += self.profile.weight_seconds
                operations += 1
                recomputed = last
        seconds = max(computing, loading) if overlapped else computing + loading
        seconds += self._overhead_seconds(operations)
        return RecomputeEstimate(recomputed, seconds, loading, computing)

    def _in_one_piece(self, tokens: int) -> float:
        prefill = self.block_seconds(0, tokens) if tokens else 0.0
        load = self.load_seconds(self.cached - tokens) if tokens < self.cached else 0.0
        return max(prefill, load)

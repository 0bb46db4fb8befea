"""Seconds of what a simulated device does: many equal steps at once, streamed steps, restores.

The formulas are the planner's (`splitpoint.residency.seconds`); here they are summed over steps
and remembered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from splitpoint.planning.plan import Plan
from splitpoint.residency.seconds import DeviceRoom, IterationSeconds, PieceSeconds
from splitpoint.shapes import ModelShape

# Lengths of streamed sequences whose steps are taken as one: chunks of them.
_STREAMED_CHUNKS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """`count` steps, of which step i takes `first + i * growth` seconds."""

    count: int
    first: float
    growth: float = 0.0

    @property
    def seconds(self) -> float:
        return self.until(self.count)

    def until(self, count: int) -> float:
        """Return the seconds of the first `count` steps."""
        return count * self.first + self.growth * (count * (count - 1) / 2)

    def steps_until(self, seconds: float) -> int:
        """Return the least number of steps that take at least so long; at most `count`."""
        first, growth = self.first, self.growth
        if growth <= 1e-12 * first:
            guess = math.ceil(seconds / first)
        else:
            half = first / growth - 0.5
            guess = math.ceil(math.sqrt(half * half + 2 * seconds / growth) - half)
        guess = max(1, min(self.count, guess))
        while guess > 1 and self.until(guess - 1) >= seconds:
            guess -= 1
        while guess < self.count and self.until(guess) < seconds:
            guess += 1
        return guess


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds that a profile does not know.

    Attributes:
        step: of each step, besides its compute.
        row: of each decoding sequence in a step, such as sampling and sending its token.
        start: of the step in which a request's prefill begins, such as those of its admission.
        request: between a request's arrival and its place in the queue.
    """

    step: float = 0.0
    row: float = 0.0
    start: float = 0.0
    request: float = 0.0


NO_OVERHEADS = Overheads()


class DeviceCosts:
    """Predicted seconds on one kind of worker."""

    def __init__(self, pieces: PieceSeconds, overheads: Overheads = NO_OVERHEADS) -> None:
        self.pieces = pieces
        self.overheads = overheads
        self.shape: ModelShape = pieces.shape
        self._iteration: IterationSeconds = pieces.iteration
        embedding = 2 * self.shape.vocabulary_size * self.shape.hidden_size
        self._head_flops = embedding
        self._row_flops = self.shape.prefill_flops_per_token
        # FLOP of one new token's attention to one token before it.
        self._pair_flops = 4 * self.shape.query_width * self.shape.layer_count
        self._restores: dict[int, Plan] = {}
        self._streamed: dict[tuple[int, int, int], float] = {}

    @property
    def room(self) -> DeviceRoom:
        return self.pieces.room

    # -- resident steps ---------------------------------------------------------------

    def prefill_flops(self, tokens: int, context: float, *, ends: bool) -> float:
        """Return the FLOP of a piece of a prefill after `context` tokens.

        `ends`: its logits are computed. Equals `ModelShape.prefill_flops` then.
        """
        attention = self._pair_flops * (context + (tokens + 1) / 2)
        return tokens * (self._row_flops + attention) + (self._head_flops if ends else 0)

    def step(self, count: int, tokens: float, flops: float = 0.0, pieces: int = 0) -> float:
        """Return one step; see IterationSeconds."""
        overheads = self.overheads.step + count * self.overheads.row
        return self._iteration.seconds(count, tokens, flops, pieces) + overheads

    def decodes(self, steps: int, count: int, tokens: float) -> Run:
        """Return at most this many steps of `count` sequences, which grow by a token in each."""
        return self._run(steps, count, tokens, 0, 0)

    def prefills(self, steps: int, count: int, tokens: float, piece: int, context: int) -> Run:
        """Return at most this many such steps, each with another piece of one prefill besides."""
        return self._run(steps, count, tokens, piece, context)

    def _run(self, steps: int, count: int, tokens: float, piece: int, context: int) -> Run:
        """The cost is linear in the step's number unless another bound takes over on the way:
        then fewer steps are returned."""
        first = self._at(0, count, tokens, piece, context)
        while steps > 2:
            last = self._at(steps - 1, count, tokens, piece, context)
            middle = self._at((steps - 1) // 2, count, tokens, piece, context)
            growth = (last - first) / (steps - 1)
            if abs(first + growth * ((steps - 1) // 2) - middle) <= 1e-6 * middle:
                return Run(steps, first, growth)
            steps //= 2
        return Run(1, first)

    def _at(self, step: int, count: int, tokens: float, piece: int, context: int) -> float:
        flops = self.prefill_flops(piece, context + step * piece, ends=False) if piece else 0.0
        return self.step(count, tokens + step * count, flops, 1 if piece else 0)

    # -- streamed steps, restores --------------------------------------------------------

    def streamed_step(self, count: int, tokens: int, resident_count: int) -> float:
        """Return a decode step in which `count` sequences of `tokens` tokens together stream."""
        size = self.room.chunk_tokens * _STREAMED_CHUNKS
        length = max(1, round(tokens / count / size)) * size
        key = (count, length, resident_count)
        found = self._streamed.get(key)
        if found is None:
            found = self.pieces.streamed_step(count, length, resident_count=resident_count)
            self._streamed[key] = found
        return found + self.overheads.step + (count + resident_count) * self.overheads.row

    def restore(self, tokens: int) -> Plan:
        """Return the planner's plan of a restore of this many tokens, at least 1."""
        found = self._restores.get(tokens)
        if found is None:
            found = self._restores[tokens] = self.pieces.restore_plan(tokens)
        return found

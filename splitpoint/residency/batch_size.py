"""The largest number of sequences in a worker's steps, where no option gives it. Pure.

A larger batch lets more requests begin, and makes the gaps between the tokens of each one longer.
So it is the largest n of SIZES, and at least the first of them, for which

    pages(n) >= n * pages of one sequence      the cache holds them, beside the workspace of n rows
    step(n) <= max(MOST_STEP_SECONDS, FREE_GROWTH * step(1))

with sequences of TYPICAL_TOKENS tokens, and step(n) of seconds.py. Where m, the seconds per byte of
device memory, is not measured, K and V are taken to be read as fast as the weights in D, or as the
link copies.

Each request that waits for a place waits for the end of another one's answer. Below the first size
a longer step is therefore better than a queue, and short sequences use places for which the memory
has too few pages of long ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from splitpoint.config import counted, format_seconds, format_size
from splitpoint.costs.profile import Profile
from splitpoint.errors import ResourceExhausted
from splitpoint.residency.seconds import IterationSeconds
from splitpoint.shapes import ModelShape, chunks_of

# Few, so that the noise of measured costs seldom changes the choice.
SIZES = (32, 48, 64, 96, 128, 192, 256, 384, 512)
LEAST = SIZES[0]
TYPICAL_TOKENS = 1024
# As fast as people read aloud: 183 words a minute (Brysbaert, 2019), four tokens for three words.
MOST_STEP_SECONDS = 0.25
# Where reading the weights, or their way over the link, takes the time of a step, rows are free.
FREE_GROWTH = 1.1


class BatchLimit(StrEnum):
    """Why a batch is not larger."""

    GIVEN = "given"
    MEMORY = "memory"
    STEP = "step"
    DRAFTS = "drafts"
    MOST = "most"


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A batch and its costs. Seconds of steps are predictions, with sequences of `tokens` tokens.

    Attributes:
        size: sequences of a step, at most.
        held: sequences of `tokens` tokens that the cache has pages for.
        cost_bytes: of the cache that a batch of LEAST would have: workspace of the places above.
        step_seconds, prefill_seconds: a step of `size` sequences, and with `prefill_tokens` prompt
            tokens beside them.
        fewer, fewer_seconds: a smaller batch, to compare, and its step.
        more, more_seconds: the next larger size, and its step; equal to `size` if there is none.
    """

    size: int
    limit: BatchLimit
    tokens: int
    held: int
    cost_bytes: int
    prefill_tokens: int
    step_seconds: float
    prefill_seconds: float
    fewer: int
    fewer_seconds: float
    more: int
    more_seconds: float

    @property
    def reason(self) -> str:
        """The batch, why it is not larger, and what it costs, in words."""
        size = self.size
        steps = f"a step of {size} takes about {format_seconds(self.step_seconds)}"
        if self.fewer != size:
            steps += f", of {self.fewer} {format_seconds(self.fewer_seconds)}"
        steps += (
            f", and {format_seconds(self.prefill_seconds)} with "
            f"{counted(self.prefill_tokens, 'prompt token')} beside it"
        )
        held = f"memory for {counted(self.held, 'sequence')} of {counted(self.tokens, 'token')}"
        if self.cost_bytes:
            held += f" ({format_size(self.cost_bytes)} less than with {LEAST} places)"
        return f"batch {size}{self._limit_words}: {held}; {steps}"

    @property
    def _limit_words(self) -> str:
        match self.limit:
            case BatchLimit.GIVEN:
                return " (--max-batch)"
            case BatchLimit.MEMORY:
                return f" (too little memory for {self.more})"
            case BatchLimit.STEP:
                return f" (a step of {self.more} takes about {format_seconds(self.more_seconds)})"
            case BatchLimit.DRAFTS:
                return " (the most beside a draft model)"
            case BatchLimit.MOST:
                return " (the most)"


def choose_batch_size(
    shape: ModelShape,
    profile: Profile,
    pages: Callable[[int], int],
    *,
    chunk_tokens: int,
    prefill_tokens: int,
    given: int | None = None,
    has_draft_model: bool = False,
    step_compute_seconds: float | None = None,
) -> BatchSize:
    """Return the batch of a worker, or what the `given` one costs.

    Args:
        pages: returns the pages of the cache beside a batch of so many. ResourceExhausted: it does
            not fit. What it raises for LEAST, or for the given one, is passed on.
        prefill_tokens: prompt tokens of a step at most.
        has_draft_model: LEAST is chosen: its drafts pay for few sequences.
        step_compute_seconds: see DeviceRoom.
    """
    costs = _step_costs(shape, profile, step_compute_seconds)
    tokens = min(TYPICAL_TOKENS, shape.context_length)
    each = chunks_of(tokens, chunk_tokens)

    def seconds(count: int, flops: float = 0.0) -> float:
        return costs.seconds(count, count * tokens, flops, 1 if flops else 0)

    def held(count: int) -> int:
        try:
            return pages(count) // each
        except ResourceExhausted:
            return 0

    size, limit = LEAST if given is None else given, BatchLimit.GIVEN
    if given is None:
        most_seconds, limit = max(MOST_STEP_SECONDS, FREE_GROWTH * seconds(1)), BatchLimit.MOST
        for larger in SIZES[1:]:
            if has_draft_model:
                limit = BatchLimit.DRAFTS
            elif held(larger) < larger:
                limit = BatchLimit.MEMORY
            elif seconds(larger) > most_seconds:
                limit = BatchLimit.STEP
            if limit is not BatchLimit.MOST:
                break
            size = larger
    here = pages(size)
    # A larger batch may leave no room for graphs, and so more for the cache.
    lost = max(0, pages(LEAST) - here) if size > LEAST else 0
    fewer = LEAST if size > LEAST else 1
    more = min((larger for larger in SIZES if larger > size), default=size)
    return BatchSize(
        size=size,
        limit=limit,
        tokens=tokens,
        held=here // each,
        cost_bytes=lost * shape.page_bytes(chunk_tokens),
        prefill_tokens=prefill_tokens,
        step_seconds=seconds(size),
        prefill_seconds=seconds(size, shape.prefill_flops(prefill_tokens)),
        fewer=fewer,
        fewer_seconds=seconds(fewer),
        more=more,
        more_seconds=seconds(more),
    )


def _step_costs(
    shape: ModelShape, profile: Profile, step_compute_seconds: float | None
) -> IterationSeconds:
    costs = IterationSeconds.of(shape, profile, step_compute_seconds)
    if profile.memory_seconds_per_byte:
        return costs
    # Attention is no part of a measured step. A small model takes long for each of its weights, and
    # the link of a CPU is its memory.
    read = min(costs.alone / shape.step_weight_bytes, 1 / profile.link_bytes_per_second)
    return replace(costs, read=read * shape.kv_bytes_per_token)

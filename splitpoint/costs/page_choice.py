"""How many rows a cache should grow by at once: the model of BMC, and the choice of the page size.

A kernel that reads whole buckets also reads their spare rows. Small buckets have few of them but
cost something for each bucket: a contiguous cache copies all of its rows when it grows (the paper's
case), and a paged cache merges one more partial result for each page in every step. Both costs,
of n rows and buckets of r, are `u * n / r` a token, beside `a * r / 2` for the spare rows. So both
have their least total at the same `r* = sqrt(2 * (u / a) * n)`, and the number of growths,
`T = N / r*`, grows with the root of N (paper: "Striking the Right Balance between Compute and
Copy", section V-A, whose constant does not fit its own figures: so constants are measured).

With speculative decoding a step computes k drafts more and yields m tokens (section VI-B, Eq. 9).
A contiguous cache still copies once every r tokens but is read once every m: the second cost is
`a * r / (2 * m)`, and `T = N / r*` grows with the root of N / m. A paged cache pays both costs once
a step, so m has no part in its r*, and k only by the costs, which are those of steps with k drafts.
`--page-tokens auto` chooses by it: policy only, from measured costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from splitpoint.config import counted, format_size
from splitpoint.shapes import ModelShape, chunks_of


@dataclass(frozen=True, slots=True)
class Rows:
    """A generation: `new` tokens after a prompt of `prompt` rows, in each sequence of a batch.

    Attributes:
        drafts: k, drafted tokens that each step verifies.
        step_tokens: m, tokens that each step yields, from 1 to k + 1.
    """

    prompt: int
    new: int
    drafts: int = 0
    step_tokens: int = 1

    @property
    def mean(self) -> float:
        """Rows of a sequence in the middle of the generation: `s + G / 2`."""
        return self.prompt + self.new / 2

    @property
    def steps(self) -> Iterator[tuple[int, int]]:
        """For each step the tokens in the cache before it, and the rows that it computes."""
        end = self.prompt + self.new
        for length in range(self.prompt, end, self.step_tokens):
            yield length, min(1 + self.drafts, end - length)

    @property
    def bucket_sizes(self) -> tuple[int, ...]:
        """All powers of two below `new`, then `new` itself: everything upfront."""
        powers = (1 << exponent for exponent in range(self.new.bit_length()))
        return (*(power for power in powers if power < self.new), self.new)


@dataclass(frozen=True, slots=True)
class BucketCosts:
    """Seconds of a contiguous cache that grows by buckets, of a whole batch.

    Attributes:
        step_seconds, row_seconds: attention of one step, and for each row that it reads.
        growth_seconds, copy_seconds: one growth, and for each row that it copies.
        spare_seconds: for each row of a new bucket, which is cleared.
    """

    step_seconds: float
    row_seconds: float
    growth_seconds: float
    copy_seconds: float
    spare_seconds: float

    @property
    def ratio(self) -> float:
        """cc: the cost of copying a row over that of attending to it."""
        return self.copy_seconds / self.row_seconds

    def best_bucket(self, rows: Rows) -> float:
        """Return r*, at most all new tokens, at least 1; not rounded (Eq. 9).

        A growth's cost besides copying counts, too (the paper's C_0, which it drops).
        """
        growth = self.growth_seconds + self.copy_seconds * rows.mean
        best = math.sqrt(2 * rows.step_tokens * growth / self.row_seconds)
        return min(max(best, 1.0), float(rows.new))

    def seconds(self, rows: Rows, bucket: int) -> float:
        """Return the seconds of the whole generation, summed step by step."""
        seconds, capacity = 0.0, rows.prompt
        for length, count in rows.steps:
            added = grown_rows(capacity, length + count, bucket)
            if added:
                seconds += self.growth_seconds + self.copy_seconds * length
                seconds += self.spare_seconds * added
                capacity += added
            seconds += self.step_seconds + self.row_seconds * capacity
        return seconds


@dataclass(frozen=True, slots=True)
class PageCosts:
    """Seconds of attention over pages, of one step of each sequence of a batch.

    Attributes:
        step_seconds: besides pages and rows.
        page_seconds: for each page of a sequence: its part of the merged result.
        row_seconds: for each row of a sequence's pages, spare rows included.
    """

    step_seconds: float
    page_seconds: float
    row_seconds: float

    @property
    def ratio(self) -> float:
        """The cost of a page over that of attending to a row.

        Infinite if rows cost nothing that a measurement finds: a few rows of a fast kernel.
        """
        return self.page_seconds / self.row_seconds if self.row_seconds else math.inf


def best_rows(ratio: float, mean_rows: float) -> float:
    """Return `sqrt(2 * ratio * mean_rows)`, the size at which both costs are equal."""
    return math.sqrt(2 * ratio * mean_rows)


def nearest_power(rows: float, *, least: int = 1, most: int) -> int:
    """Return the power of two in [least, most] with the smallest quotient to `rows`.

    `least` is a power of two and not above `most`.
    """
    exponent = round(math.log2(min(max(rows, least), most)))
    return max(least, min(1 << exponent, 1 << (most.bit_length() - 1)))


def grown_rows(capacity: int, needed: int, bucket: int) -> int:
    """Return the rows that a cache grows by, in whole buckets, to have those that are needed."""
    return max(0, chunks_of(needed - capacity, bucket)) * bucket


# Each chunk costs the store a record and some 35 us of calls; only whole chunks of a prefix are
# found, and a partial page holds memory.
LEAST_PAGE, MOST_PAGE = 16, 256
# Smaller copies reach only a part of a GPU's link.
LEAST_PIECE = 64 << 10
# An arena of fewer chunks keeps few prefixes apart.
_LEAST_CHUNKS = 64
# Requests that the page is chosen for, in tokens, and how many of them run at once.
_TYPICAL_CONTEXT = 2048
TYPICAL_BATCH = 8


@dataclass(frozen=True, slots=True)
class PageChoice:
    """Tokens of a page, and why; the reason is empty if the user gave the number."""

    tokens: int
    reason: str = ""


def typical_rows(shape: ModelShape) -> Rows:
    """Return the requests that a page is chosen for: half a context, then an eighth of it."""
    context = min(shape.context_length, _TYPICAL_CONTEXT)
    return Rows(prompt=max(1, context // 2), new=max(1, context // 8))


def choose_page(
    shape: ModelShape, costs: PageCosts, *, arena_bytes: int, has_gpu: bool
) -> PageChoice:
    """Return the power of two nearest to the model's C* within what arena and link allow."""
    rows = typical_rows(shape)
    best = best_rows(costs.ratio, rows.mean)
    least, most = _limits(shape, arena_bytes, has_gpu=has_gpu)
    tokens = nearest_power(best, least=least, most=most)
    limit = ""
    if best < least:
        cause = "chunks" if least <= LEAST_PAGE else f"copies of {format_size(LEAST_PIECE)} each"
        limit = f", but {cause} have at least {least}"
    elif best > most:
        limit = f", but chunks of an arena of {format_size(arena_bytes)} have at most {most}"
    return PageChoice(
        tokens,
        f"auto: a page costs attention as much as {costs.ratio:.1f} rows on this host; for "
        f"sequences of {counted(round(rows.mean), 'token')} pages of {best:.0f} are best{limit}",
    )


def _limits(shape: ModelShape, arena_bytes: int, *, has_gpu: bool) -> tuple[int, int]:
    """Return the fewest and the most tokens of a page, powers of two."""
    chunks_fit = arena_bytes // _LEAST_CHUNKS // shape.kv_bytes_per_token
    most = min(MOST_PAGE, shape.context_length, chunks_fit)
    most = 1 << max(0, most.bit_length() - 1)
    least = LEAST_PAGE
    while has_gpu and least * shape.kv_width * shape.data_type.size < LEAST_PIECE:
        least *= 2
    return min(least, most), most

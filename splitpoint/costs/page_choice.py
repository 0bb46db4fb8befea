"""The choice of the page size by `--page-tokens auto`: policy only, from measured costs."""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.config import format_size
from splitpoint.costs.growth import PageCosts, Rows, best_rows, nearest_power
from splitpoint.shapes import ModelShape
from splitpoint.words import counted

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

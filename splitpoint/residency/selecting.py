"""Device pages of a streamed request that reads by a selection.

Row pages hold the fetched rows of each layer and KV head; screen pages hold what the screens keep
of every stored token. Both are ordinary pages of the cache: scheduler and worker count them by the
same functions. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from splitpoint.selection import Selection, SelectionMethod
from splitpoint.shapes import ModelShape, chunks_of

# Tokens of one page of Quest's bounds.
QUEST_TOKENS = 16
# Of the scale of an int8 row.
SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class SelectionPages:
    """Pages of one sequence. `rows`: for fetched rows; `screens`: for what the screens keep."""

    rows: int
    screens: int

    @property
    def count(self) -> int:
        return self.rows + self.screens


def wanted_rows(selection: Selection, stored_tokens: int) -> int:
    """Return how many of the stored tokens a decode step wants at most, in each KV head."""
    if selection.budget_tokens is not None:
        wanted = selection.budget_tokens
    else:
        share = selection.cap if selection.alpha is not None else selection.ratio
        # As `choose` rounds: 10 % of 200 tokens are 20 despite binary fractions.
        wanted = math.ceil(stored_tokens * (1.0 if share is None else share) - 1e-6)
    return max(1, min(wanted, stored_tokens))


def selection_pages(
    shape: ModelShape, selection: Selection, stored_tokens: int, chunk_tokens: int
) -> SelectionPages:
    """Return the pages for a request of whose tokens so many are in the store at last."""
    if not stored_tokens:
        return SelectionPages(0, 0)
    rows = chunks_of(wanted_rows(selection, stored_tokens), chunk_tokens)
    size, tokens = kept_record(shape, selection)
    if not size:
        return SelectionPages(rows, 0)
    # A page has one plane for K and one for V in each layer.
    plane = chunk_tokens * shape.kv_width * shape.data_type.size
    in_plane = plane // size
    if not in_plane:
        raise ValueError(f"{size} bytes for {tokens} tokens do not fit a page of {plane}")
    return SelectionPages(rows, chunks_of(chunks_of(stored_tokens, tokens), 2 * in_plane))


def kept_record(shape: ModelShape, selection: Selection) -> tuple[int, int]:
    """Return the bytes that a screen keeps of some tokens in one layer, and of how many tokens."""
    heads, item = shape.kv_head_count, shape.data_type.size
    if selection.method is SelectionMethod.WINDOW:
        return 0, 1
    if selection.method is SelectionMethod.QUEST:
        return 2 * shape.kv_width * item, QUEST_TOKENS
    columns = selection.kept_columns(shape.head_dim)
    row = columns + SCALE_BYTES if selection.keeps_int8 else columns * item
    return heads * row, 1

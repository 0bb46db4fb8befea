"""Screens by bounds of pages (Quest): the smallest and largest key of each page, per dimension.

The score of a page is the largest product that any key within the bounds could have with the
query, `sum_i max(q_i * low_i, q_i * high_i)`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from splitpoint.residency.selecting import QUEST_TOKENS
from splitpoint.selection import SelectionMethod
from worker_service.selection.records import Records
from worker_service.selection.screen import (
    AttentionShape,
    Guess,
    Maker,
    TokenRows,
    grouped_products,
    to_logits,
)


class QuestScreen:
    """Bounds of the pages of one layer of one sequence, in the type of the keys."""

    block_tokens = QUEST_TOKENS

    def __init__(self, shape: AttentionShape, records: Records | None = None) -> None:
        """`records`: empty ones that hold the bounds; None: in memory of their own."""
        self._shape = shape
        # Low and high `[n_kv, d]` of each page; the last page may have room for more tokens.
        self._bounds = Records() if records is None else records
        self._tokens = 0

    @property
    def device_bytes(self) -> int:
        return self._bounds.size_bytes

    def extend(self, rows: TokenRows) -> None:
        """Add the tokens to the last page, then to new ones."""
        keys = rows.keys
        room = min(-self._tokens % QUEST_TOKENS, len(keys))
        if room:
            low, high = self._bounds.newest()
            torch.minimum(low, keys[:room].amin(0), out=low)
            torch.maximum(high, keys[:room].amax(0), out=high)
        whole = (len(keys) - room) // QUEST_TOKENS
        last = room + whole * QUEST_TOKENS
        pages = keys[room:last].view(whole, QUEST_TOKENS, *keys.shape[1:])
        for each in (pages, keys[last:].unsqueeze(0)):
            if each.numel():
                self._bounds.append(each.amin(1), each.amax(1))
        self._tokens += len(keys)

    def scores(self, guess: Guess) -> torch.Tensor:
        """Return bounds of the logits of each page, fp32 `[T, n_q, pages]`."""
        positive, negative = guess.queries.clamp_min(0), guess.queries.clamp_max(0)
        bounds = grouped_products(positive, self._bounds.field(1)) + grouped_products(
            negative, self._bounds.field(0)
        )
        return to_logits(bounds, self._shape)


MAKERS: Mapping[SelectionMethod, Maker] = {
    SelectionMethod.QUEST: lambda _, shape, records, __: QuestScreen(shape, records)
}

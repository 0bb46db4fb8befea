"""Screens by bounds of pages (Quest): the smallest and largest key of each page, per dimension.

The score of a page is the largest product that any key within the bounds could have with the
query, `sum_i max(q_i * low_i, q_i * high_i)`.
"""

from __future__ import annotations

import torch

from worker_service.selection.screen import (
    AttentionShape,
    Guess,
    TokenRows,
    grouped_products,
    to_logits,
)

PAGE_TOKENS = 16


class QuestScreen:
    """Bounds of the pages of one layer of one sequence, in the type of the keys."""

    block_tokens = PAGE_TOKENS

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape
        # `[pages, n_kv, d]`; the last page may have room for more tokens.
        self._low = torch.empty(0)
        self._high = torch.empty(0)
        self._tokens = 0

    @property
    def device_bytes(self) -> int:
        return self._low.nbytes + self._high.nbytes

    def extend(self, rows: TokenRows) -> None:
        """Add the tokens to the last page, then to new ones."""
        keys = rows.keys
        room = min(-self._tokens % PAGE_TOKENS, len(keys))
        if room:
            self._low[-1] = torch.minimum(self._low[-1], keys[:room].amin(0))
            self._high[-1] = torch.maximum(self._high[-1], keys[:room].amax(0))
        if room < len(keys):
            pages = torch.split(keys[room:], PAGE_TOKENS)
            self._low = _appended(self._low, torch.stack([page.amin(0) for page in pages]))
            self._high = _appended(self._high, torch.stack([page.amax(0) for page in pages]))
        self._tokens += len(keys)

    def scores(self, guess: Guess) -> torch.Tensor:
        """Return bounds of the logits of each page, fp32 `[T, n_q, pages]`."""
        positive, negative = guess.queries.clamp_min(0), guess.queries.clamp_max(0)
        bounds = grouped_products(positive, self._high) + grouped_products(negative, self._low)
        return to_logits(bounds, self._shape)


def _appended(before: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.cat((before, rows)) if len(before) else rows

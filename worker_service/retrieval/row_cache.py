"""Which row of a sequence's row pages holds which token, for one layer: least recently used.

Each KV head has its own tokens. All of it is computed by torch on the device, with shapes that
the host knows: nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the wanted tokens of each KV head lie, or go.

    Attributes:
        rows: int64 `[n_kv, n]`, the row of each token among those of the row pages.
        is_new: bool `[n_kv, n]`, True where the row has to be fetched.
    """

    rows: torch.Tensor
    is_new: torch.Tensor


class RowCache:
    """The tokens in the rows of one layer.

    Attributes:
        tokens: int32 `[n_kv, rows]`, the stored token in each row; -1: none yet.
    """

    def __init__(self, kv_heads: int, device: torch.device) -> None:
        self.tokens = torch.empty((kv_heads, 0), dtype=torch.int32, device=device)
        # The step that last wanted each row.
        self._used = torch.empty_like(self.tokens)
        self._step = 0

    @property
    def is_wanted(self) -> torch.Tensor:
        """Which rows have a token that was wanted last, bool `[n_kv, rows]`."""
        return self._used == self._step

    @property
    def row_count(self) -> int:
        return self.tokens.shape[1]

    def grow(self, row_count: int) -> None:
        """Have this many rows, the new ones empty."""
        more = (len(self.tokens), row_count - self.row_count)
        self.tokens = torch.cat((self.tokens, self.tokens.new_full(more, -1)), 1)
        self._used = torch.cat((self._used, self._used.new_full(more, -1)), 1)

    def forget(self, tokens: torch.Tensor, stored: int) -> None:
        """Hold none of these tokens `[n_kv, n]`, all below `stored`, any more."""
        gone = torch.zeros((len(self.tokens), stored + 1), dtype=torch.bool, device=tokens.device)
        gone.scatter_(1, tokens, True)
        held = torch.where(self.tokens < 0, stored, self.tokens).long()
        self.tokens.masked_fill_(gone.gather(1, held), -1)

    def place(self, tokens: torch.Tensor, is_wanted: torch.Tensor | None, stored: int) -> Placed:
        """Give each wanted token a row: its own, or that of a token unused for longest.

        Args:
            tokens: int64 `[n_kv, n]`, below `stored`.
            is_wanted: bool `[n_kv, n]`, which of them are wanted; None: all are. Those are
                distinct, and at most `row_count` of each head.
        """
        self._step += 1
        heads, rows = self.tokens.shape
        # The row of each token; the last column is for empty rows.
        row_of = self.tokens.new_full((heads, stored + 1), -1)
        every = torch.arange(rows, dtype=torch.int32, device=self.tokens.device)
        token_of = torch.where(self.tokens < 0, stored, self.tokens).long()
        row_of.scatter_(1, token_of, every.expand(heads, -1))
        row_of[:, stored] = -1
        held = row_of.gather(1, tokens).long()
        is_new = held < 0
        if is_wanted is not None:
            is_new &= is_wanted
            held = torch.where(is_wanted, held, -1)
        # One column more takes what is not written.
        used = torch.cat((self._used, self._used.new_zeros((heads, 1))), 1)
        used.scatter_(1, torch.where(held < 0, rows, held), self._step)
        oldest = used[:, :rows].argsort(dim=1, stable=True)
        turn = (is_new.cumsum(1) - 1).clamp(0, max(0, rows - 1))
        placed = torch.where(is_new, oldest.gather(1, turn), held)
        target = torch.where(is_new, placed, rows)
        used.scatter_(1, target, self._step)
        held_tokens = torch.cat((self.tokens, self.tokens.new_zeros((heads, 1))), 1)
        held_tokens.scatter_(1, target, tokens.int())
        self._used, self.tokens = used[:, :rows], held_tokens[:, :rows]
        return Placed(placed, is_new)

"""Heavy hitters (H2O): tokens with the largest attention so far stay, the others are evicted.

An evicted token never returns. The prompt, which is the first call of `extend`, is attended in
full; behind it each new token displaces the least attended one. Half of the budget belongs to the
newest tokens, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from splitpoint.selection import Selection, SelectionMethod
from worker_service.selection.screen import (
    AttentionShape,
    Guess,
    Maker,
    TokenRows,
    grouped_products,
    to_logits,
)
from worker_service.selection.token_choice import visible_tokens

_FP32_BYTES = 4


class HeavyHitterScreen:
    """What is left of one layer of one sequence, per KV head.

    It knows which tokens each query of the newest `extend` could read, so `scores` answers for
    these and for the next token.
    """

    def __init__(self, shape: AttentionShape, selection: Selection) -> None:
        self._shape = shape
        self._selection = selection
        self._keys = torch.empty(0)
        # Of m tokens that are left: positions, ascending, and attention received so far,
        # both `[n_kv, m]`.
        self._left = torch.empty((shape.kv_heads, 0), dtype=torch.int64)
        self._received = torch.empty((shape.kv_heads, 0))
        # Which tokens each query of the newest call read, bool `[T, n_kv, S]`.
        self._read = torch.empty(0, dtype=torch.bool)

    @property
    def device_bytes(self) -> int:
        """Bytes of K and V of the tokens that are left, and of their sums of attention."""
        row = 2 * self._shape.head_dim * self._keys.element_size() + _FP32_BYTES
        return self._left.numel() * row

    def extend(self, rows: TokenRows) -> None:
        first, count = len(self._keys), len(rows.keys)
        self._keys = torch.cat((self._keys, rows.keys)) if first else rows.keys
        logits = to_logits(grouped_products(rows.queries, self._keys), self._shape)
        by_group = logits.view(count, self._shape.kv_heads, -1, first + count)
        if first:
            self._read = by_group.new_zeros(by_group.shape[:2] + by_group.shape[3:]).bool()
            for index in range(count):
                self._admit(first + index)
                self._attend(by_group[index])
                self._read[index].scatter_(-1, self._left, self._left >= 0)
        else:
            self._take_prompt(by_group)

    def scores(self, guess: Guess) -> torch.Tensor:
        """Return 0 for tokens that are left and -inf for evicted ones, fp32 `[T, n_q, S]`."""
        tokens = len(self._keys)
        begin = guess.first_position - (tokens - len(self._read))
        if guess.first_position == tokens and len(guess.queries) == 1:
            read = torch.zeros((1, self._shape.kv_heads, tokens), dtype=torch.bool)
            read.scatter_(-1, self._left.unsqueeze(0), value=True)
        else:
            read = self._read[begin : begin + len(guess.queries)]
        if begin < 0 or len(read) != len(guess.queries):
            raise RuntimeError("heavy hitters are asked for queries that are not the newest")
        scores = torch.zeros(read.shape).masked_fill_(~read, -math.inf)
        return scores.repeat_interleave(self._shape.query_heads // self._shape.kv_heads, 1)

    def _take_prompt(self, logits: torch.Tensor) -> None:
        """Attend the prompt `[T, n_kv, g, T]` in full, and evict what exceeds the budget."""
        count, kv_heads, _, tokens = logits.shape
        visible = visible_tokens(0, count, tokens, self._shape.window, logits.device)
        weights = logits.masked_fill(~visible[:, None, None], -math.inf).softmax(-1)
        self._received = weights.sum((0, 2))
        self._left = torch.arange(tokens, device=logits.device).repeat(kv_heads, 1)
        self._read = visible.unsqueeze(1).expand(-1, kv_heads, -1)
        self._evict(tokens)

    def _admit(self, position: int) -> None:
        """Add a token, and evict others for it."""
        shape = (len(self._left), 1)
        self._left = torch.cat((self._left, self._left.new_full(shape, position)), -1)
        self._received = torch.cat((self._received, self._received.new_zeros(shape)), -1)
        self._evict(position + 1)

    def _attend(self, logits: torch.Tensor) -> None:
        """Add one query's attention to what is left, of its logits `[n_kv, g, S]`."""
        index = self._left.unsqueeze(1).expand(-1, logits.shape[1], -1)
        self._received += logits.gather(-1, index).softmax(-1).sum(1)

    def _evict(self, tokens: int) -> None:
        """Evict the least attended tokens until as many are left as the budget allows.

        Those that a sliding window hides go first: no later query sees them.
        """
        window = self._shape.window
        first = 0 if window is None else max(0, tokens - window)
        budget = self._budget(tokens - first)
        left = self._left
        if left.shape[-1] <= budget:
            return
        newest = tokens - max(self._selection.recent, budget // 2)
        protected = (left < self._selection.sinks) | (left >= newest)
        rank = self._received.masked_fill(protected, math.inf)
        if first:
            rank = rank.masked_fill(left < first, -math.inf)
        kept = rank.topk(budget, sorted=False).indices.sort(-1).values
        self._left, self._received = left.gather(-1, kept), self._received.gather(-1, kept)

    def _budget(self, visible: int) -> int:
        """Return the tokens that may be left."""
        selection = self._selection
        if selection.budget_tokens is not None:
            wanted = selection.budget_tokens
        else:
            wanted = math.ceil((selection.ratio or 1.0) * visible - 1e-6)
        return max(wanted, min(visible, selection.sinks + selection.recent))


MAKERS: Mapping[SelectionMethod, Maker] = {
    SelectionMethod.H2O: lambda selection, shape, _, __: HeavyHitterScreen(shape, selection)
}

"""A bounded pool of cached tokens: which are left, and which leave first (InfiniGen, section 4.4).

Bookkeeping only, per layer and KV head. The pool may hold a fraction of the tokens so far; the
first and the newest tokens of a selection never leave it. Ties leave in order of age. Tokens join
it once they are stored; newer ones are on the device, and left.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from splitpoint.selection import PoolPolicy, Selection

# A counter that reaches this is saturated: then all counters of its KV head are halved.
COUNTER_MOST = 255
# Newest queries of a prompt whose choices are the first that a pool learns of.
PROMPT_QUERIES = 32
_MOST = torch.iinfo(torch.int64).max


class TokenPool:
    """What is left of one layer of one sequence, per KV head.

    Attributes:
        evicted: evictions so far, of all KV heads.
    """

    def __init__(self, selection: Selection, kv_heads: int, window: int | None) -> None:
        """`window`: tokens that the layer's queries see; None: all. Hidden tokens hold no room."""
        self._selection = selection
        self._window = window
        self.evicted = 0
        self._left = torch.empty((kv_heads, 0), dtype=torch.bool)
        # Tokens of smaller ranks leave first: position, step of the last reading, or counter.
        self._rank = torch.empty((kv_heads, 0), dtype=torch.int64)

    def left(self, tokens: int) -> torch.Tensor:
        """Return which of all tokens are left, newer ones than the pool's included: `[n_kv, S]`."""
        return functional.pad(self._left, (0, tokens - self._left.shape[1]), value=True)

    def admit(self, count: int) -> None:
        """Add the next tokens; they are as recent as their positions, or counted as the median."""
        tokens = self._left.shape[1]
        ranks = torch.arange(tokens, tokens + count).expand(len(self._rank), -1)
        if self._selection.policy is PoolPolicy.COUNTER:
            ranks = self._median().expand(-1, count)
        self._rank = torch.cat((self._rank, ranks), -1)
        self._left = functional.pad(self._left, (0, count), value=True)

    def _median(self) -> torch.Tensor:
        """Return the counters' median of the tokens that are left, `[n_kv, 1]`; 0 of none."""
        counters = self._rank.masked_fill(~self._left, _MOST).sort(-1).values
        if not counters.shape[1]:
            return counters.new_zeros((len(counters), 1))
        middle = (self._left.sum(-1, keepdim=True) - 1).div(2, rounding_mode="floor")
        return counters.gather(-1, middle.clamp_min(0))

    def read(self, chosen: torch.Tensor, first_position: int) -> None:
        """Learn what consecutive queries read, bool `[T, n_kv, S]`."""
        for step, of_step in enumerate(chosen[..., : self._left.shape[1]], first_position):
            if self._selection.policy is PoolPolicy.LRU:
                self._rank.masked_fill_(of_step, step)
            elif self._selection.policy is PoolPolicy.COUNTER:
                self._rank += of_step
                saturated = (self._rank >= COUNTER_MOST).any(-1, keepdim=True)
                self._rank >>= saturated.long()

    def evict(self) -> None:
        """Evict until no more tokens are left than the pool may hold; each at most once."""
        selection = self._selection
        tokens = self._left.shape[1]
        hidden = 0 if self._window is None else max(0, tokens - self._window)
        self._left[:, :hidden] = False
        limit = math.ceil((selection.pool or 1.0) * (tokens - hidden) - 1e-6)
        free = self._left.clone()
        free[:, : selection.sinks] = False
        free[:, max(0, tokens - selection.recent) :] = False
        # As many as exceed the limit, fewer where fewer are free, `[n_kv, 1]`.
        counts = (self._left.sum(-1) - limit).clamp_min(0).minimum(free.sum(-1)).unsqueeze(-1)
        by_age = self._rank * tokens + torch.arange(tokens)
        order = by_age.masked_fill_(~free, _MOST).argsort(-1)
        is_victim = torch.arange(tokens) < counts
        self._left &= ~torch.zeros_like(self._left).scatter_(-1, order, is_victim)
        self.evicted += int(counts.sum())

    def masked(self, scores: torch.Tensor, tokens: int, block_tokens: int) -> torch.Tensor:
        """Return scores `[T, n_q, blocks]` with -inf where no token of a block is left."""
        padded = functional.pad(self.left(tokens), (0, -tokens % block_tokens))
        left = padded.view(len(padded), -1, block_tokens).any(-1)
        group = scores.shape[1] // len(left)
        return scores.masked_fill(~left.repeat_interleave(group, 0), -math.inf)

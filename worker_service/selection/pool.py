"""A bounded pool of cached tokens: which are left, and which leave first (InfiniGen, section 4.4).

Bookkeeping only, per layer and KV head. Each token has a place. The tokens that leave give theirs
to new ones (`evict_oldest`, `overwrite`), as in a served pool, or keep it and are masked
(`evict`), as `splitpoint eval` has it. The first and the newest tokens of a selection never leave.
Ties leave in order of age. Tokens join the pool once they are stored; newer ones are on the
device, and left.
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
        tokens: int64 `[n_kv, places]`, the position of the token that each place had last.
    """

    def __init__(
        self,
        selection: Selection,
        kv_heads: int,
        window: int | None = None,
        *,
        first_position: int = 0,
        device: torch.device | None = None,
    ) -> None:
        """
        Args:
            window: tokens that the layer's queries see; None: all. Hidden tokens hold no room.
            first_position: of the first token that joins.
        """
        self._selection = selection
        self._window = window
        # Position of the next token that joins.
        self._next = first_position
        self.evicted = 0
        self._left = torch.empty((kv_heads, 0), dtype=torch.bool, device=device)
        self.tokens = torch.empty((kv_heads, 0), dtype=torch.int64, device=device)
        # Tokens of smaller ranks leave first: position, step of the last reading, or counter.
        self._rank = torch.empty_like(self.tokens)

    @property
    def held(self) -> torch.Tensor:
        """The places with a token that is left, bool `[n_kv, places]`."""
        return self._left

    def left(self, tokens: int) -> torch.Tensor:
        """Return which of all tokens are left, newer ones than the pool's included: `[n_kv, S]`.

        For pools whose places are never overwritten.
        """
        return functional.pad(self._left, (0, tokens - self._left.shape[1]), value=True)

    def admit(self, count: int) -> None:
        """Give the next tokens places of their own; see `_ranks`."""
        tokens, ranks = self._joining(count)
        self.tokens = torch.cat((self.tokens, tokens), -1)
        self._rank = torch.cat((self._rank, ranks), -1)
        self._left = functional.pad(self._left, (0, count), value=True)

    def overwrite(self, places: torch.Tensor) -> None:
        """Give the next tokens the places `[n_kv, n]` of tokens that have left."""
        tokens, ranks = self._joining(places.shape[1])
        self.tokens.scatter_(1, places, tokens)
        self._rank.scatter_(1, places, ranks)
        self._left.scatter_(1, places, True)

    def _joining(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions of the next tokens, and their ranks, `[n_kv, count]` each.

        They are as recent as their positions, or counted as the median.
        """
        first, self._next = self._next, self._next + count
        tokens = torch.arange(first, self._next, device=self._rank.device)
        tokens = tokens.expand(len(self._rank), -1)
        if self._selection.policy is PoolPolicy.COUNTER:
            return tokens, self._median().expand(-1, count)
        return tokens, tokens

    def _median(self) -> torch.Tensor:
        """Return the counters' median of the tokens that are left, `[n_kv, 1]`; 0 of none."""
        counters = self._rank.masked_fill(~self._left, _MOST).sort(-1).values
        if not counters.shape[1]:
            return counters.new_zeros((len(counters), 1))
        middle = (self._left.sum(-1, keepdim=True) - 1).div(2, rounding_mode="floor")
        return counters.gather(-1, middle.clamp_min(0))

    def read(self, chosen: torch.Tensor, first_position: int) -> None:
        """Learn which places consecutive queries read, bool `[T, n_kv, S]`."""
        for step, of_step in enumerate(chosen[..., : self._left.shape[1]], first_position):
            if self._selection.policy is PoolPolicy.LRU:
                self._rank.masked_fill_(of_step, step)
            elif self._selection.policy is PoolPolicy.COUNTER:
                self._rank += of_step
                saturated = (self._rank >= COUNTER_MOST).any(-1, keepdim=True)
                self._rank >>= saturated.long()

    def evict(self) -> None:
        """Evict until no more tokens are left than the pool may hold; each at most once.

        For pools whose places are never overwritten.
        """
        selection = self._selection
        tokens = self._left.shape[1]
        hidden = 0 if self._window is None else max(0, tokens - self._window)
        self._left[:, :hidden] = False
        limit = math.ceil((selection.pool or 1.0) * (tokens - hidden) - 1e-6)
        free = self._free(self._next - selection.recent)
        # As many as exceed the limit, fewer where fewer are free, `[n_kv, 1]`.
        counts = (self._left.sum(-1) - limit).clamp_min(0).minimum(free.sum(-1)).unsqueeze(-1)
        is_victim = torch.arange(tokens) < counts
        order = self._oldest_first(free)
        self._left &= ~torch.zeros_like(self._left).scatter_(-1, order, is_victim)
        self.evicted += int(counts.sum())

    def evict_oldest(self, count: int, *, first_place: int, first_recent: int) -> torch.Tensor:
        """Evict this many tokens of each KV head; return their places, int64 `[n_kv, count]`.

        Args:
            first_place: only from this place on; there must be as many tokens that may leave.
            first_recent: tokens at this position, and behind it, stay.
        """
        free = self._free(first_recent)
        free[:, :first_place] = False
        places = self._oldest_first(free)[:, :count]
        self._left.scatter_(1, places, False)
        self.evicted += places.numel()
        return places

    def restore(self) -> None:
        """Take back all evictions, while no place was given away."""
        self._left.fill_(True)
        self.evicted = 0

    def keep(self, places: torch.Tensor) -> None:
        """Leave out all places but these `[n_kv, n]`, which are numbered from 0 on."""
        self.tokens, self._rank, self._left = (
            each.gather(1, places) for each in (self.tokens, self._rank, self._left)
        )

    def _free(self, first_recent: int) -> torch.Tensor:
        """Return the places whose tokens may leave: neither first nor newest ones."""
        sinks = self._selection.sinks
        return self._left & (self.tokens >= sinks) & (self.tokens < first_recent)

    def _oldest_first(self, free: torch.Tensor) -> torch.Tensor:
        """Return all places by rank, then by age; those that are not free come last."""
        by_age = self._rank * self._next + self.tokens
        return by_age.masked_fill_(~free, _MOST).argsort(-1)

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[T, n_q, S]` with -inf where no token is left."""
        left = self.left(scores.shape[-1])
        group = scores.shape[1] // len(left)
        return scores.masked_fill(~left.repeat_interleave(group, 0), -math.inf)

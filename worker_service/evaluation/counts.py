"""What selections of one text amount to: how much is read, how well it was chosen, what changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# One query in this many is measured by its true weights, which need a sort.
_MEASURED_EVERY = 8


@dataclass(slots=True)
class SelectionCounts:
    """Sums over the queries and KV heads (weights: query heads) of a text.

    Attributes:
        read, visible: tokens that were read and that could have been, in all layers.
        screened_read, screened_visible: the same, in the layers that select.
        kept: tokens that were read by a query and by the one before it, of `kept_of`.
        hits: of the n tokens with the largest weights, where n is the number read, those that
            were read; of `wanted`.
        evicted: tokens that left a bounded pool, of `pooled`, in the layers that select.
        weight: attention weight of what was read, were everything read; of `weighed` rows.
    """

    read: int = 0
    visible: int = 0
    screened_read: int = 0
    screened_visible: int = 0
    kept: int = 0
    kept_of: int = 0
    hits: int = 0
    wanted: int = 0
    weight: float = 0.0
    weighed: int = 0
    evicted: int = 0
    pooled: int = 0

    def add(self, other: SelectionCounts) -> None:
        """Add the sums of another text."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def read_ratio(self) -> float:
        """Tokens read over visible tokens, of all layers."""
        return self.read / self.visible

    @property
    def screened_ratio(self) -> float:
        """Tokens read over visible tokens, of the layers that select; 1 if none does."""
        return self.screened_read / self.screened_visible if self.screened_visible else 1.0

    @property
    def overlap(self) -> float:
        """Share of the tokens read that the query before read, too."""
        return self.kept / self.kept_of if self.kept_of else 1.0

    @property
    def recall(self) -> float:
        """Share of the tokens with the largest weights that were read."""
        return self.hits / self.wanted if self.wanted else 1.0

    @property
    def evicted_ratio(self) -> float:
        """Share of the tokens that left a bounded pool."""
        return self.evicted / self.pooled if self.pooled else 0.0

    @property
    def held_weight(self) -> float:
        """Attention weight, of 1, that the tokens read have."""
        return self.weight / self.weighed if self.weighed else 1.0


class LayerCounts:
    """Counts one layer's blocks of consecutive queries, in order, into the sums of a text."""

    def __init__(self, counts: SelectionCounts) -> None:
        self._counts = counts
        # The last query's selection `[1, n_kv, S]`.
        self._last: torch.Tensor | None = None

    def add(self, chosen: torch.Tensor, visible: torch.Tensor, *, is_screened: bool) -> None:
        """Add what each query read and could have read, bool `[T, n_kv, S]`, `[T, 1, S]`."""
        counts = self._counts
        read = int(chosen.sum())
        seen = int(visible.sum()) * chosen.shape[1]
        counts.read += read
        counts.visible += seen
        if not is_screened:
            return
        counts.screened_read += read
        counts.screened_visible += seen
        whole = chosen
        if self._last is not None:
            last = torch.zeros_like(chosen[:1])
            last[..., : self._last.shape[-1]] = self._last
            whole = torch.cat((last, chosen))
        counts.kept += int((whole[1:] & whole[:-1]).sum())
        counts.kept_of += int(whole[1:].sum())
        self._last = chosen[-1:]

    def add_pool(self, evicted: int, keys: torch.Tensor) -> None:
        """Add evictions of all KV heads, of the layer's keys `[S, n_kv, d]`."""
        self._counts.evicted += evicted
        self._counts.pooled += len(keys) * keys.shape[1]

    def add_weights(
        self, chosen: torch.Tensor, visible: torch.Tensor, scores: torch.Tensor
    ) -> None:
        """Compare some queries' selections with their true scores, fp32 `[T, n_q, S]`."""
        counts = self._counts
        chosen, visible, scores = (each[::_MEASURED_EVERY] for each in (chosen, visible, scores))
        group = scores.shape[1] // chosen.shape[1]
        read = chosen.repeat_interleave(group, 1)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        numbers = read.sum(-1, keepdim=True)
        most = int(numbers.max())
        best = weights.topk(most, dim=-1).indices
        wanted = torch.arange(most, device=best.device) < numbers
        counts.hits += int((read.gather(-1, best) & wanted).sum())
        counts.wanted += int(wanted.sum())
        counts.weight += float((weights * read).sum(dtype=torch.float64))
        counts.weighed += weights.shape[0] * weights.shape[1]

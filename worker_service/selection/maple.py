"""MAPLE's screen: low-rank queries and keys straight from X, `x P W_Q` and `x P W_K`.

P is a sparse random matrix, W_Q and W_K are trained on a frozen model and quantised once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from splitpoint.selection import Selection, SelectionMethod
from worker_service.selection.kept_rows import KeptRows
from worker_service.selection.records import Records
from worker_service.selection.screen import (
    AttentionShape,
    Factor,
    Guess,
    Maker,
    TokenRows,
    to_logits,
)


def sparse_projection(width: int, rank: int, random: torch.Generator) -> torch.Tensor:
    """Return P, fp32 `[width, rank]`, with `E[P P^T] = I` (Achlioptas).

    Entries are `sqrt(3 / rank)` times -1, 0 or 1, with probabilities 1/6, 2/3 and 1/6.
    """
    drawn = torch.randint(6, (width, rank), generator=random)
    signs = (drawn == 0).float() - (drawn == 1).float()
    return signs * math.sqrt(3.0 / rank)


@dataclass(frozen=True, slots=True)
class MapleWeights:
    """One layer's factors.

    Attributes:
        projection: P, fp32 `[h, k]`.
        query: W_Q, fp32 `[k, n_q, r]`; key: W_K, fp32 `[k, n_kv, r]`.
    """

    projection: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor

    def queries(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map X `[T, h]` to fp32 `[T, n_q, r]`."""
        return torch.einsum("tk,knr->tnr", inputs.float() @ self.projection, self.query)

    def keys(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map X `[T, h]` to fp32 `[T, n_kv, r]`."""
        return torch.einsum("tk,knr->tnr", inputs.float() @ self.projection, self.key)


class MapleScreen:
    """Low-rank keys of one layer of one sequence."""

    block_tokens = 1

    def __init__(self, shape: AttentionShape, weights: MapleWeights, *, int8: bool) -> None:
        self._shape = shape
        self._weights = weights
        self._kept = KeptRows(int8=int8)

    @property
    def device_bytes(self) -> int:
        return self._kept.size_bytes

    def extend(self, rows: TokenRows) -> None:
        self._kept.extend(self._weights.keys(rows.inputs).to(rows.keys.dtype))

    def scores(self, guess: Guess) -> torch.Tensor:
        return to_logits(self._kept.products(self._weights.queries(guess.inputs)), self._shape)


def maple_weights(factor: Factor) -> MapleWeights:
    """Return a layer's factors, W_Q and W_K out of int8. Raises InvalidArgument."""
    query, key = (factor(name).float() * factor(f"{name}_scale") for name in ("query", "key"))
    return MapleWeights(factor("projection"), query, key)


def _make(
    selection: Selection, shape: AttentionShape, records: Records, factor: Factor
) -> MapleScreen:
    # Only measured, so its keys have memory of their own.
    return MapleScreen(shape, maple_weights(factor), int8=selection.keeps_int8)


MAKERS: Mapping[SelectionMethod, Maker] = {SelectionMethod.MAPLE: _make}

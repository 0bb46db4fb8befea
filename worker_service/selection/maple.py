"""MAPLE's screen: low-rank queries and keys straight from X, `x P W_Q` and `x P W_K` (Eq. 1).

P is a sparse random matrix, W_Q and W_K are trained on a frozen model and quantised once. X has no
positions in models with RoPE: there the columns are pairs, each of which is rotated by its position
times a frequency of its own, as RoPE rotates the pairs that it stands for. The paper does not say
how it treats them. Rotating `x P W` is what makes products depend on the tokens' distance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from splitpoint.selection import Selection, SelectionMethod
from worker_service.selection.kept_rows import KeptRows
from worker_service.selection.records import Records
from worker_service.selection.screen import (
    PIECE_TOKENS,
    AttentionShape,
    Factor,
    Guess,
    Maker,
    TokenRows,
    to_logits,
)


def sparse_signs(width: int, rank: int, random: torch.Generator) -> torch.Tensor:
    """Return the signs of P, int8 `[width, rank]`: -1, 0 or 1 at probabilities 1/6, 2/3 and 1/6."""
    drawn = torch.randint(6, (width, rank), generator=random)
    return (drawn == 0).to(torch.int8) - (drawn == 1).to(torch.int8)


def project(inputs: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return `X P` and a column of ones in fp32, `[T, k + 1]`; X itself if P has no columns.

    P is `sqrt(3 / k)` times its signs, so that `E[P P^T] = I` (Achlioptas). The ones stand for
    biases of q and k, which the paper's model has not.
    """
    rows = inputs.float()
    if rank := signs.shape[-1]:
        rows = rows @ (signs.float() * math.sqrt(3.0 / rank))
    return functional.pad(rows, (0, 1), value=1.0)


@dataclass(frozen=True, slots=True)
class MapleWeights:
    """One layer's factors.

    Attributes:
        projection: signs of P, int8 `[h, k]`; without columns: X is not projected, and k is h.
        query: W_Q, `[k + 1, n_q, r]`; key: W_K, `[k + 1, n_kv, r]`: fp32, or int8 of which each
            column has a scale.
        frequencies: fp32 `[n_kv, r / 2]`, radians a token, by which columns i and i + r/2 of a KV
            head and its group are rotated; without columns: none is (learned positions, which X
            has).
        query_scale, key_scale: fp32 `[1, n, r]`, or one for all.
    """

    projection: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    frequencies: torch.Tensor
    query_scale: torch.Tensor | float = 1.0
    key_scale: torch.Tensor | float = 1.0

    def queries(self, inputs: torch.Tensor, first_position: int) -> torch.Tensor:
        """Map X `[T, h]` of consecutive tokens to fp32 `[T, n_q, r]`."""
        return self._mapped(inputs, self.query, self.query_scale, first_position)

    def keys(self, inputs: torch.Tensor, first_position: int) -> torch.Tensor:
        """Map X `[T, h]` of consecutive tokens to fp32 `[T, n_kv, r]`."""
        return self._mapped(inputs, self.key, self.key_scale, first_position)

    def _mapped(
        self,
        inputs: torch.Tensor,
        factor: torch.Tensor,
        scale: torch.Tensor | float,
        first_position: int,
    ) -> torch.Tensor:
        rows = torch.einsum("tk,knr->tnr", project(inputs, self.projection), factor.float())
        rows = rows * scale
        if not self.frequencies.shape[-1]:
            return rows
        kv_heads, pairs = self.frequencies.shape
        positions = torch.arange(
            first_position, first_position + len(rows), dtype=torch.float32, device=rows.device
        )
        angles = (positions.unsqueeze(-1) * self.frequencies.flatten()).view(-1, kv_heads, pairs)
        angles = angles.repeat_interleave(rows.shape[1] // kv_heads, 1)
        cosine, sine = angles.cos(), angles.sin()
        first, second = rows[..., :pairs], rows[..., pairs:]
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class MapleScreen:
    """Low-rank keys of one layer of one sequence."""

    def __init__(
        self,
        shape: AttentionShape,
        weights: MapleWeights,
        *,
        int8: bool,
        records: Records | None = None,
    ) -> None:
        """`records`: see `KeptRows`."""
        self._shape = shape
        self._weights = weights
        self._kept = KeptRows(int8=int8, records=records)

    @property
    def device_bytes(self) -> int:
        return self._kept.size_bytes

    def extend(self, rows: TokenRows) -> None:
        for first in range(0, len(rows.inputs), PIECE_TOKENS):
            inputs = rows.inputs[first : first + PIECE_TOKENS]
            keys = self._weights.keys(inputs, rows.first_position + first)
            self._kept.extend(keys.to(inputs.dtype))

    def scores(self, guess: Guess) -> torch.Tensor:
        queries = self._weights.queries(guess.inputs, guess.first_position)
        return to_logits(self._kept.products(queries), self._shape)


def maple_weights(factor: Factor) -> MapleWeights:
    """Return a layer's factors, as they were stored. Raises InvalidArgument."""
    names = ("projection", "query", "key", "frequencies", "query_scale", "key_scale")
    return MapleWeights(*map(factor, names))


def _make(
    selection: Selection, shape: AttentionShape, records: Records, factor: Factor
) -> MapleScreen:
    weights = maple_weights(factor)
    return MapleScreen(shape, weights, int8=selection.keeps_int8, records=records)


MAKERS: Mapping[SelectionMethod, Maker] = {SelectionMethod.MAPLE: _make}

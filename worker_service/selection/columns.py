"""Screens by some columns of queries and keys (InfiniGen), and screens by low-rank maps of both.

The columns of a KV head are those with the largest `sum|Q| + sum|K|` over the prompt and the
group's query heads, after RoPE, raw or skewed. Skewing rotates both by an orthogonal A per KV head,
which leaves q.k as it is and gathers it in few columns. RoPE does not commute with A, so A stands
behind RoPE.

The maps are one pair per KV head, behind RoPE: `lowrank` has the closed form, the best bilinear
approximation of q.k on calibration text.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
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
    grouped_products,
    in_pieces,
    to_logits,
)


class ColumnScreen:
    """Partial keys of one layer of one sequence."""

    def __init__(
        self,
        shape: AttentionShape,
        columns: int,
        *,
        int8: bool,
        skew: torch.Tensor | None = None,
        records: Records | None = None,
    ) -> None:
        """`columns`: how many to keep; `skew`: A `[n_kv, d, d]`, None: raw columns.

        `records`: see `KeptRows`.
        """
        self._shape = shape
        self._count = columns
        self._skew = skew
        self._kept = KeptRows(int8=int8, records=records)
        # From the prompt: numbers of the columns, `[n_kv, r]`; with a skew also these columns of A,
        # `[n_kv, d, r]`, so that no other is ever computed.
        self._columns: torch.Tensor | None = None
        self._kept_skew: torch.Tensor | None = None

    @property
    def device_bytes(self) -> int:
        return self._kept.size_bytes

    def extend(self, rows: TokenRows) -> None:
        if self._columns is None:
            self._columns = self._largest(self._skewed(rows.queries), rows.keys)
        for keys in in_pieces(rows.keys):
            self._kept.extend(self._partial(keys))

    def keep(self, places: torch.Tensor) -> None:
        self._kept.keep(places)

    def overwrite(self, places: npt.NDArray[np.int64], keys: torch.Tensor) -> None:
        self._kept.overwrite(places, self._partial(keys))

    def scores(self, guess: Guess) -> torch.Tensor:
        return to_logits(self._kept.products(self._partial(guess.queries)), self._shape)

    def scores_of(self, guess: Guess, keys: torch.Tensor) -> torch.Tensor:
        # q A_c . k A_c = (q A_c A_c^T) . k, so that not every key has to be rotated.
        queries = guess.queries
        if self._skew is None:
            index = self._index(queries)
            queries = torch.zeros_like(queries).scatter(-1, index, queries.gather(-1, index))
        else:
            kept = self._of_skew(self._skew)
            queries = by_kv_head(by_kv_head(queries, kept), kept.transpose(-1, -2))
        return to_logits(grouped_products(queries, keys), self._shape)

    def _skewed(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate `[T, heads, d]` by the A of each head's KV head."""
        return heads if self._skew is None else by_kv_head(heads, self._skew)

    def _partial(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the kept columns of `[T, heads, d]`, of each head's KV head, `[T, heads, r]`."""
        if self._skew is None:
            return heads.gather(-1, self._index(heads))
        return by_kv_head(heads, self._of_skew(self._skew))

    def _index(self, heads: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the kept columns of each of `[T, heads, d]`, `[T, heads, r]`."""
        if self._columns is None:
            raise RuntimeError("a screen is asked before the prompt")
        group = heads.shape[1] // len(self._columns)
        return self._columns.repeat_interleave(group, 0).expand(len(heads), -1, -1)

    def _of_skew(self, skew: torch.Tensor) -> torch.Tensor:
        """Return the kept columns of A, `[n_kv, d, r]`."""
        if self._columns is None:
            raise RuntimeError("a screen is asked before the prompt")
        if self._kept_skew is None:
            index = self._columns.unsqueeze(1).expand(-1, skew.shape[1], -1)
            self._kept_skew = skew.gather(-1, index)
        return self._kept_skew

    def _largest(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the columns to keep, ascending, `[n_kv, r]`.

        `queries` are skewed already, `keys` are not.
        """
        count, kv_heads, width = keys.shape
        of_queries = queries.view(len(queries), kv_heads, -1, width).float().abs().sum((0, 2))
        # Fewer queries than keys weigh as much as the keys.
        sums = of_queries * (count / len(queries))
        for piece in in_pieces(keys):
            sums += self._skewed(piece).float().abs().sum(0)
        return sums.topk(min(self._count, width), dim=-1).indices.sort(-1).values


def by_kv_head(heads: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """Multiply `[T, heads, d]` by the map of each head's KV head, `[n_kv, d, r]`."""
    count, head_count, width = heads.shape
    kv_heads = len(maps)
    folded = heads.view(count, kv_heads, head_count // kv_heads, width)
    mapped = torch.einsum("tkgd,kdr->tkgr", folded, maps.to(heads.dtype))
    return mapped.reshape(count, head_count, -1)


class LowRankScreen:
    """Mapped keys of one layer of one sequence."""

    def __init__(
        self,
        shape: AttentionShape,
        query_maps: torch.Tensor,
        key_maps: torch.Tensor,
        *,
        int8: bool,
        records: Records | None = None,
    ) -> None:
        """`query_maps`, `key_maps`: fp32 `[n_kv, d, r]`; q.k is about `(q M_q).(k M_k)`.

        `records`: see `KeptRows`.
        """
        self._shape = shape
        self._query_maps, self._key_maps = query_maps, key_maps
        self._kept = KeptRows(int8=int8, records=records)

    @property
    def device_bytes(self) -> int:
        return self._kept.size_bytes

    def extend(self, rows: TokenRows) -> None:
        for keys in in_pieces(rows.keys):
            self._kept.extend(self._mapped(keys))

    def keep(self, places: torch.Tensor) -> None:
        self._kept.keep(places)

    def overwrite(self, places: npt.NDArray[np.int64], keys: torch.Tensor) -> None:
        self._kept.overwrite(places, self._mapped(keys))

    def _mapped(self, keys: torch.Tensor) -> torch.Tensor:
        return by_kv_head(keys.float(), self._key_maps).to(keys.dtype)

    def scores(self, guess: Guess) -> torch.Tensor:
        queries = by_kv_head(guess.queries.float(), self._query_maps)
        return to_logits(self._kept.products(queries), self._shape)

    def scores_of(self, guess: Guess, keys: torch.Tensor) -> torch.Tensor:
        mapped = by_kv_head(guess.queries.float(), self._query_maps)
        queries = by_kv_head(mapped, self._key_maps.transpose(-1, -2))
        return to_logits(grouped_products(queries.to(keys.dtype), keys), self._shape)


def _columns(
    selection: Selection, shape: AttentionShape, records: Records, factor: Factor
) -> ColumnScreen:
    columns = selection.kept_columns(shape.head_dim)
    return ColumnScreen(shape, columns, int8=selection.keeps_int8, records=records)


def _infinigen(
    selection: Selection, shape: AttentionShape, records: Records, factor: Factor
) -> ColumnScreen:
    columns, skew = selection.kept_columns(shape.head_dim), factor("skew")
    return ColumnScreen(shape, columns, int8=selection.keeps_int8, skew=skew, records=records)


def _oracle(
    selection: Selection, shape: AttentionShape, records: Records, factor: Factor
) -> ColumnScreen:
    # Only measured: it keeps whole keys, for which no page has room.
    return ColumnScreen(shape, shape.head_dim, int8=selection.keeps_int8)


def _lowrank(
    selection: Selection, shape: AttentionShape, records: Records, factor: Factor
) -> LowRankScreen:
    # Columns are in the order of what they explain: the best of a rank are the first.
    kept = selection.kept_columns(shape.head_dim)
    maps = (factor(name)[..., :kept] for name in ("query_map", "key_map"))
    return LowRankScreen(shape, *maps, int8=selection.keeps_int8, records=records)


MAKERS: Mapping[SelectionMethod, Maker] = {
    SelectionMethod.COLUMNS: _columns,
    SelectionMethod.INFINIGEN: _infinigen,
    SelectionMethod.ORACLE: _oracle,
    SelectionMethod.LOWRANK: _lowrank,
}

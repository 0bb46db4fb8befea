"""Screens by low-rank maps of q and k behind RoPE, one pair per KV head.

`lowrank` has the closed form, the best bilinear approximation of q.k on calibration text;
`ranked` has maps that were trained on ranking.
"""

from __future__ import annotations

import torch

from worker_service.selection.columns import by_kv_head
from worker_service.selection.kept_rows import KeptRows, Records
from worker_service.selection.screen import (
    AttentionShape,
    Guess,
    TokenRows,
    in_pieces,
    to_logits,
)


class LowRankScreen:
    """Mapped keys of one layer of one sequence."""

    block_tokens = 1

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
            mapped = by_kv_head(keys.float(), self._key_maps)
            self._kept.extend(mapped.to(keys.dtype))

    def scores(self, guess: Guess) -> torch.Tensor:
        queries = by_kv_head(guess.queries.float(), self._query_maps)
        return to_logits(self._kept.products(queries), self._shape)

"""Rows of heads that a screen keeps, in the model's type, or in int8 with a scale each."""

from __future__ import annotations

import torch

from worker_service.selection.records import Records
from worker_service.selection.screen import grouped_products

# Tokens whose rows `products` holds besides, in fp32 where they are kept in int8.
PIECE_ROWS = 8192
_INT8_MOST = 127


class KeptRows:
    """Growing `[S, n_kv, r]` of one layer of one sequence."""

    def __init__(self, *, int8: bool, records: Records | None = None) -> None:
        """`records`: empty ones that hold the rows; None: in memory of their own."""
        self._int8 = int8
        self._records = Records() if records is None else records

    def __len__(self) -> int:
        return len(self._records)

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows so far, scales included."""
        return self._records.size_bytes

    def extend(self, rows: torch.Tensor) -> None:
        """Append rows `[T, n_kv, r]`."""
        if self._int8:
            quantized, scales = to_int8(rows)
            self._records.append(scales, quantized)
        else:
            self._records.append(rows)

    def products(self, queries: torch.Tensor) -> torch.Tensor:
        """Multiply queries `[T, n_q, r]` by their KV heads' rows: fp32 `[T, n_q, S]`.

        Rows are brought together, and int8 ones widened, PIECE_ROWS at a time.
        """
        pieces = []
        for first in range(0, len(self), PIECE_ROWS):
            rows = self._part(first, min(first + PIECE_ROWS, len(self)))
            pieces.append(grouped_products(queries.to(rows.dtype), rows))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def all(self) -> torch.Tensor:
        """Return all rows `[S, n_kv, r]`; fp32 if they are kept in int8."""
        return self._part(0, len(self))

    def _part(self, first: int, last: int) -> torch.Tensor:
        if not self._int8:
            return self._records.part(0, first, last)
        scales, rows = (self._records.part(each, first, last) for each in (0, 1))
        return rows.to(torch.float32) * scales.to(torch.float32)


def to_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[..., r]` as int8 and its fp16 scales `[..., 1]`; rows of zeros stay zeros."""
    wide = rows.to(torch.float32)
    scales = (wide.abs().amax(-1, keepdim=True) / _INT8_MOST).to(torch.float16)
    divisor = scales.to(torch.float32)
    divisor = torch.where(divisor > 0, divisor, torch.ones_like(divisor))
    quantized = (wide / divisor).round_().clamp_(-_INT8_MOST, _INT8_MOST)
    return quantized.to(torch.int8), scales

"""Rows of heads that a screen keeps, in the model's type, or in int8 with a scale each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from worker_service.selection.records import Fields, Records
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
        self._records.append(*self._fields(rows))

    def keep(self, places: torch.Tensor) -> None:
        """Leave out all rows but these `[n_kv, n]`: each head keeps its own."""
        self._records.keep(places)

    def overwrite(self, places: npt.NDArray[np.int64], rows: torch.Tensor) -> None:
        """Write rows `[T, n_kv, r]` over those in places `[n_kv, T]`."""
        self._records.overwrite(places, *self._fields(rows))

    def _fields(self, rows: torch.Tensor) -> Fields:
        if not self._int8:
            return (rows,)
        quantized, scales = to_int8(rows)
        return scales, quantized

    def products(self, queries: torch.Tensor) -> torch.Tensor:
        """Multiply queries `[T, n_q, r]` by their KV heads' rows: fp32 `[T, n_q, S]`.

        Rows are brought together, and int8 ones widened, PIECE_ROWS at a time. Their scales come
        after the product, where there are fewer numbers. Products of int8 queries with them, in
        whole numbers, take longer on a CPU (docs/lab/selection.md).
        """
        pieces = []
        for first in range(0, len(self), PIECE_ROWS):
            last = min(first + PIECE_ROWS, len(self))
            rows = self._rows(first, last)
            products = grouped_products(queries.to(rows.dtype), rows)
            if self._int8:
                scales = self._scales(first, last).squeeze(-1).T
                products *= scales.repeat_interleave(queries.shape[1] // len(scales), 0)
            pieces.append(products)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)

    def all(self) -> torch.Tensor:
        """Return all rows `[S, n_kv, r]`; fp32 if they are kept in int8."""
        rows = self._rows(0, len(self))
        return rows * self._scales(0, len(self)) if self._int8 else rows

    def _rows(self, first: int, last: int) -> torch.Tensor:
        """Return rows, int8 ones as fp32 without their scales."""
        if not self._int8:
            return self._records.part(0, first, last)
        return self._records.part(1, first, last).to(torch.float32)

    def _scales(self, first: int, last: int) -> torch.Tensor:
        return self._records.part(0, first, last).to(torch.float32)


def to_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[..., r]` as int8 and its fp16 scales `[..., 1]`; rows of zeros stay zeros."""
    wide = rows.to(torch.float32)
    scales = (wide.abs().amax(-1, keepdim=True) / _INT8_MOST).to(torch.float16)
    divisor = scales.to(torch.float32)
    divisor = torch.where(divisor > 0, divisor, torch.ones_like(divisor))
    quantized = (wide / divisor).round_().clamp_(-_INT8_MOST, _INT8_MOST)
    return quantized.to(torch.int8), scales

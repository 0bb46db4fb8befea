"""Rows that a screen keeps of each token: in the model's type, or in int8 with a scale per row."""

from __future__ import annotations

import torch

_INT8_MOST = 127


class KeptRows:
    """Growing `[S, n_kv, r]` of one layer of one sequence.

    Memory doubles when it is full; `size_bytes` counts the rows that are there.
    """

    def __init__(self, *, int8: bool) -> None:
        self._int8 = int8
        self._rows = torch.empty(0)
        self._scales = torch.empty(0)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows so far, scales included."""
        if not self._count:
            return 0
        kept = self._rows[: self._count].nbytes
        return kept + (self._scales[: self._count].nbytes if self._int8 else 0)

    def extend(self, rows: torch.Tensor) -> None:
        """Append rows `[T, n_kv, r]`."""
        last = self._count + len(rows)
        if self._int8:
            quantized, scales = to_int8(rows)
            self._scales = _with_room(self._scales, self._count, last, scales)
            self._scales[self._count : last] = scales
            rows = quantized
        self._rows = _with_room(self._rows, self._count, last, rows)
        self._rows[self._count : last] = rows
        self._count = last

    def all(self) -> torch.Tensor:
        """Return all rows `[S, n_kv, r]`; fp32 if they are kept in int8."""
        rows = self._rows[: self._count]
        if not self._int8:
            return rows
        return rows.to(torch.float32) * self._scales[: self._count].to(torch.float32)


def to_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[..., r]` as int8 and its fp16 scales `[..., 1]`; rows of zeros stay zeros."""
    wide = rows.to(torch.float32)
    scales = (wide.abs().amax(-1, keepdim=True) / _INT8_MOST).to(torch.float16)
    divisor = scales.to(torch.float32)
    divisor = torch.where(divisor > 0, divisor, torch.ones_like(divisor))
    quantized = (wide / divisor).round_().clamp_(-_INT8_MOST, _INT8_MOST)
    return quantized.to(torch.int8), scales


def _with_room(memory: torch.Tensor, count: int, wanted: int, like: torch.Tensor) -> torch.Tensor:
    """Return memory for `wanted` rows like those of `like`, with the first `count` as they are."""
    if count and wanted <= len(memory):
        return memory
    larger = like.new_empty((max(wanted, 2 * count), *like.shape[1:]))
    if count:
        larger[:count] = memory[:count]
    return larger

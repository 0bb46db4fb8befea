"""What a layer does to each row by itself on a CPU, in one pass over it: `row_wise.h`.

Norms, rotary positions, and K and V on their way into pages. By torch's operators a bfloat16 norm
takes nine passes, and each of them longer to be called than to compute a few rows.
"""

from __future__ import annotations

import ctypes

import torch

from worker_service.kernels.choice import Layout, in_use
from worker_service.kernels.compiled import ELEMENTS
from worker_service.kernels.panel_gemm import library

# Cosine and sine `[N, 1, d]` of `Rotary`.
Angles = tuple[torch.Tensor, torch.Tensor]


class Norm(ctypes.Structure):
    """A norm over a row, with the tensors that it is multiplied by and added to."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("kind", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
    )

    @classmethod
    def of(
        cls, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float, *, is_wide: bool
    ) -> Norm:
        """Return LayerNorm if there is a bias, else RMS; `is_wide`: its weight is fp32."""
        kind = _LAYER if bias is not None else _WIDE_RMS if is_wide else _RMS
        made = cls(weight.data_ptr(), None if bias is None else bias.data_ptr(), kind, epsilon)
        made.tensors = (weight, bias)
        return made

    def fits(self, width: int, dtype: torch.dtype) -> bool:
        """Return True if it norms rows of this width and type."""
        weight, bias = self.tensors
        types = [torch.float32 if self.kind == _WIDE_RMS else dtype, dtype]
        return all(
            each is None or (each.shape == (width,) and each.dtype == one and each.stride() == (1,))
            for each, one in zip((weight, bias), types, strict=True)
        )


_LAYER, _RMS, _WIDE_RMS = 1, 2, 3
NO_NORM = Norm()


class _Heads(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "cosine", "sine", "outputs")),
        *((name, ctypes.c_int64) for name in ("row_stride", "head_stride")),
        *((name, ctypes.c_int64) for name in ("output_stride", "output_head")),
        *((name, ctypes.c_int64) for name in ("row_count", "head_count", "width")),
        ("norm", Norm),
        ("threads", ctypes.c_int32),
    )


class _Written(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_pages", "value_pages")),
        *((name, ctypes.c_void_p) for name in ("pages", "rows")),
        *((name, ctypes.c_int64) for name in ("key_stride", "key_head", "value_stride")),
        *((name, ctypes.c_int64) for name in ("value_head", "page_stride", "page_head")),
        *((name, ctypes.c_int64) for name in ("row_count", "head_count", "width")),
        ("threads", ctypes.c_int32),
    )


def takes(rows: torch.Tensor) -> bool:
    """Return True if this process computes these rows here: where weights are in panels."""
    chosen = in_use()
    if chosen is None or chosen.linear is not Layout.PANELS or rows.requires_grad:
        return False
    return rows.device.type == "cpu" and rows.dtype in ELEMENTS


def places_of(
    angles: Angles | None, count: int, dtype: torch.dtype
) -> tuple[int | None, int | None]:
    """Return where cosine and sine are. Raises ValueError unless they have `count` elements."""
    if angles is None:
        return None, None
    if any(each.numel() != count or each.dtype != dtype for each in angles):
        raise ValueError(f"angles {tuple(angles[0].shape)} for {count} elements of {dtype}")
    return angles[0].data_ptr(), angles[1].data_ptr()


def turned(rows: torch.Tensor, norm: Norm = NO_NORM, angles: Angles | None = None) -> torch.Tensor:
    """Return `[..., width]` after the norm, then RoPE; with angles rows are `[N, heads, width]`.

    Raises ValueError for angles of other rows, and without a norm and angles. The norm must be of
    this width and type.
    """
    width, shape = rows.shape[-1], rows.shape
    if norm is NO_NORM and angles is None:
        raise ValueError("neither a norm nor angles: nothing would be written")
    if rows.dim() == 3 and rows.stride(2) == 1:
        count, heads, strides = shape[0], shape[1], rows.stride()[:2]
    else:
        rows = rows.contiguous()
        count, heads, strides = rows.numel() // max(1, width), 1, (width, 0)
    outputs = torch.empty(shape, dtype=rows.dtype)
    places = places_of(angles, count * width, rows.dtype)
    call = _Heads(
        *(rows.data_ptr(), *places, outputs.data_ptr(), *strides, heads * width, width),
        *(count, heads, width, norm, torch.get_num_threads()),
    )
    library(rows.dtype).turn(ctypes.byref(call))
    return outputs


def write(
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    pages: torch.Tensor,
    rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Store K and V `[N, n_kv, d]` at `pages[i], rows[i]` (int64 `[N]` each).

    `key_pages`, `value_pages`: `[pages, n_kv, C, d]`, on any device.
    """
    planes, heads = (key_pages, value_pages), (keys, values)
    tensors = (*planes, *heads)
    is_fit = (
        takes(keys)
        and len({(each.dtype, each.device) for each in tensors}) == 1
        and all(each.is_contiguous() for each in (*planes, pages, rows))
        and all(each.stride(2) == 1 for each in heads)
        and keys.shape == values.shape == (len(pages), *key_pages.shape[1::2])
        and key_pages.shape == value_pages.shape
    )
    if not is_fit:
        key_pages[pages, :, rows] = keys
        value_pages[pages, :, rows] = values
        return
    call = _Written(
        *(each.data_ptr() for each in (*heads, *planes, pages, rows)),
        *(*keys.stride()[:2], *values.stride()[:2], *key_pages.stride()[:2]),
        *(*keys.shape, torch.get_num_threads()),
    )
    library(keys.dtype).write_rows(ctypes.byref(call))

"""Paged decode attention of a CPU in one pass over the pages: `paged_attention.cpp`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker_service.kernels.compiled import load

# The constants of the source file.
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LANES = 16
_POINTERS = (
    *("queries", "keys", "values", "pages", "lows", "highs", "starts", "owners", "firsts"),
    *("order", "groups", "part_sums", "part_peaks", "part_totals", "sums", "peaks", "totals"),
)
_STRIDES = ("key_page", "key_head", "value_page", "value_head")
_COUNTS = ("group_count", "query_count", "query_heads", "kv_heads", "threads")


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _COUNTS),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    )


class Spans(Protocol):
    """The pages that B queries read, in S spans of one query each: `SpanView`, all int32.

    Attributes:
        order: `[S]`, all spans; those that begin at the same page are neighbours.
        groups: `[G + 1]`, the bounds of these neighbours in `order`.
    """

    @property
    def pages(self) -> torch.Tensor: ...
    @property
    def lows(self) -> torch.Tensor: ...
    @property
    def highs(self) -> torch.Tensor: ...
    @property
    def starts(self) -> torch.Tensor: ...
    @property
    def owners(self) -> torch.Tensor: ...
    @property
    def firsts(self) -> torch.Tensor: ...
    @property
    def order(self) -> torch.Tensor: ...
    @property
    def groups(self) -> torch.Tensor: ...


def grouped(
    pages: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return `Spans.order` and `Spans.groups` of spans that begin at `pages[starts]`."""
    first = pages[starts]
    order = np.argsort(first, kind="stable")
    changes = np.flatnonzero(np.diff(first[order])) + 1
    bounds = [0, *changes.tolist(), len(order)] if len(order) else [0]
    return order, np.asarray(bounds, dtype=np.int64)


def attend_spans(
    spans: Spans,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    cap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attend pages of `keys`, `values` `[pages, n_kv, C, d]` with queries `[B, n_q, d]`.

    Returns fp32 sums `[B, n_q, d]`, peaks and totals `[B, n_q]`, as `PartialAttention` has
    them. Raises NoKernels, if the kernel for this type and d cannot be compiled.
    """
    count, heads, width = queries.shape
    queries, keys, values = queries.contiguous(), _with_rows(keys), _with_rows(values)
    span_count, padded = len(spans.owners), -(-width // _LANES) * _LANES
    parts = [torch.empty(span_count, heads, size) for size in (padded, 1, 1)]
    peaks, totals = torch.empty(2, count, heads).unbind()
    sums = torch.empty(count, heads, width)
    pointers = (
        *(queries, keys, values, spans.pages, spans.lows, spans.highs, spans.starts),
        *(spans.owners, spans.firsts, spans.order, spans.groups, *parts, sums, peaks, totals),
    )
    call = _Call(
        *(tensor.data_ptr() for tensor in pointers),
        *(keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)),
        *(len(spans.groups) - 1, count, heads, keys.shape[1], torch.get_num_threads()),
        *(scale, cap or 0.0),
    )
    _library(width, queries.dtype).attend_spans(ctypes.byref(call))
    return sums, peaks, totals


def prepare(head_dim: int, dtype: torch.dtype) -> None:
    """Compile and load what `attend_spans` needs for these. Raises NoKernels."""
    _library(head_dim, dtype)


@lru_cache
def _library(head_dim: int, dtype: torch.dtype) -> ctypes.CDLL:
    library = load("paged_attention.cpp", {"HEAD_DIM": head_dim, "ELEMENT": _ELEMENTS[dtype]})
    library.attend_spans.argtypes = [ctypes.POINTER(_Call)]
    library.attend_spans.restype = None
    return library


def _with_rows(plane: torch.Tensor) -> torch.Tensor:
    """Return `[pages, n_kv, C, d]` with the rows of a head one after the other."""
    return plane if plane.stride()[2:] == (plane.shape[3], 1) else plane.contiguous()

"""Paged attention of a CPU in one pass over the pages: `paged_attention.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker_service.kernels.compiled import ELEMENTS, LANES, content, load

# ROWS of the source file.
UNIT_ROWS = 128
_POINTERS = (
    *("queries", "keys", "values", "pages", "lows", "highs", "owners", "order", "groups"),
    *("part_sums", "part_peaks", "part_totals", "listing", "firsts", "sums", "peaks", "totals"),
)
_STRIDES = ("key_page", "key_head", "value_page", "value_head")
_COUNTS = ("group_count", "query_count", "query_heads", "kv_heads", "threads")
_PROMPT_POINTERS = (*("queries", "keys", "values", "pages", "sums", "peaks", "totals", "attended"),)
_PROMPT_COUNTS = (
    *("page_count", "page_tokens", "query_count", "query_heads", "kv_heads"),
    *("window", "block_rows", "threads"),
)
# Rows of a prefill's block: its queries and sums stay in the second cache beside a unit's keys and
# values. Fewer if threads would be idle.
_BLOCK_ROWS = 192
_FEWEST_ROWS = 4
_TASKS_PER_THREAD = 4
_LEAST = torch.finfo(torch.float32).min

# fp32 sums `[N, n_q, d]`, peaks and totals `[N, n_q]`: see `PartialAttention`.
Partial = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Units(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _COUNTS),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    )


class _Prompt(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _PROMPT_POINTERS),
        *((name, ctypes.c_int64) for name in (*_STRIDES, "query_position", "page_position")),
        *((name, ctypes.c_int32) for name in _PROMPT_COUNTS),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    )


class Units(Protocol):
    """What B queries read, in U units of one query each, all int32: `UnitView`.

    A unit is at most UNIT_ROWS rows of a page: those between two multiples of it. A query's units
    are neighbours, in the order of their positions.

    Attributes:
        pages, lows, highs, owners: `[U]`, query `owners[i]` reads the rows [low, high).
        firsts: `[B + 1]`, query b has units [firsts[b], firsts[b + 1]).
        order: `[U]`, all units; those of the same page are neighbours.
        groups: `[G + 1]`, the bounds of these neighbours in `order`.
    """

    @property
    def pages(self) -> torch.Tensor: ...
    @property
    def lows(self) -> torch.Tensor: ...
    @property
    def highs(self) -> torch.Tensor: ...
    @property
    def owners(self) -> torch.Tensor: ...
    @property
    def firsts(self) -> torch.Tensor: ...
    @property
    def order(self) -> torch.Tensor: ...
    @property
    def groups(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class PromptPages:
    """Consecutive pages of one sequence that T consecutive queries read.

    Attributes:
        pages: int32 `[P]`; row r of page i is at `page_position + i * C + r`.
        query_position: of the first query. No query sees a later position than its own.
        window: how many positions back a query sees; None: all.
    """

    pages: torch.Tensor
    page_position: int
    query_position: int
    window: int | None


def grouped(
    pages: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return `Units.order` and `Units.groups` of units of these pages."""
    order = np.argsort(pages, kind="stable")
    changes = np.flatnonzero(np.diff(pages[order])) + 1
    bounds = [0, *changes.tolist(), len(order)] if len(order) else [0]
    return order, np.asarray(bounds, dtype=np.int64)


def attend_units(
    units: Units,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    cap: float | None,
) -> Partial:
    """Attend pages of `keys`, `values` `[pages, n_kv, C, d]` with queries `[B, n_q, d]`.

    Raises NoKernels, if the kernel for this type and d cannot be compiled.
    """
    parts = _Parts(len(units.owners), queries)
    fields, kept = _attended(units, queries, keys, values, scale, cap)
    return _merged(queries, fields | parts.fields() | {"firsts": units.firsts.data_ptr()}, kept)


class UnitParts:
    """Parts of the attention of queries `[B, n_q, d]`, from pages of several planes.

    They are merged once all are there: in the order of positions, however they came.
    """

    def __init__(self, queries: torch.Tensor, listing: torch.Tensor, firsts: torch.Tensor) -> None:
        """Make room for U units, which are numbered as they are added.

        Args:
            listing: int32 `[U]`, the units' numbers, by query and then by position.
            firsts: int32 `[B + 1]`, query b has those of `listing[firsts[b] : firsts[b + 1]]`.
        """
        self._queries, self._listing, self._firsts = queries, listing, firsts
        self._parts = _Parts(len(listing), queries)
        self._count = 0

    def add(
        self,
        units: Units,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        cap: float | None,
    ) -> None:
        """Attend the next units: see `attend_units`. Raises ValueError if there is no room."""
        first, self._count = self._count, self._count + len(units.owners)
        if self._count > len(self._listing):
            raise ValueError(f"{self._count} units where {len(self._listing)} were planned")
        fields, kept = _attended(units, self._queries, keys, values, scale, cap)
        _call(self._queries, fields | self._parts.fields(first), kept)

    def merged(self) -> Partial:
        """Return the attention over all units. Raises ValueError if some are missing."""
        if self._count != len(self._listing):
            raise ValueError(f"{self._count} units where {len(self._listing)} were planned")
        tables = {"listing": self._listing.data_ptr(), "firsts": self._firsts.data_ptr()}
        return _merged(self._queries, self._parts.fields() | tables, [])


class _Parts:
    """Room for the parts of so many units of queries `[B, n_q, d]`."""

    def __init__(self, count: int, queries: torch.Tensor) -> None:
        _, heads, width = queries.shape
        self._sums = torch.empty(count, heads, -(-width // LANES) * LANES)
        self._peaks, self._totals = torch.empty(2, count, heads).unbind()

    def fields(self, first: int = 0) -> dict[str, Any]:
        """Return the places of the parts from number `first` on."""
        names = ("part_sums", "part_peaks", "part_totals")
        rooms = (self._sums, self._peaks, self._totals)
        return {name: room[first:].data_ptr() for name, room in zip(names, rooms, strict=True)}


def _attended(
    units: Units,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    cap: float | None,
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return the fields of a call that attends units, and tensors that it must keep."""
    queries, keys, values = queries.contiguous(), _with_rows(keys), _with_rows(values)
    tables = ("pages", "lows", "highs", "owners", "order", "groups")
    fields = {
        **{name: getattr(units, name).data_ptr() for name in tables},
        **_plane_fields(queries, keys, values),
        "group_count": len(units.groups) - 1,
        "scale": scale,
        "cap": cap or 0.0,
    }
    return fields, [queries, keys, values]


def _plane_fields(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> dict[str, Any]:
    return {
        "queries": queries.data_ptr(),
        "keys": keys.data_ptr(),
        "values": values.data_ptr(),
        "key_page": keys.stride(0),
        "key_head": keys.stride(1),
        "value_page": values.stride(0),
        "value_head": values.stride(1),
        "kv_heads": keys.shape[1],
    }


def _merged(queries: torch.Tensor, fields: dict[str, Any], kept: list[torch.Tensor]) -> Partial:
    """Call with these fields, and return the merged parts of each query."""
    count, heads, width = queries.shape
    sums = torch.empty(count, heads, width)
    peaks, totals = torch.empty(2, count, heads).unbind()
    results = {"sums": sums, "peaks": peaks, "totals": totals}
    pointers = {name: tensor.data_ptr() for name, tensor in results.items()}
    _call(queries, fields | pointers, [*kept, *results.values()])
    return sums, peaks, totals


def _call(queries: torch.Tensor, fields: dict[str, Any], _kept: list[torch.Tensor]) -> None:
    """Run the kernel; `_kept` live until it has ended."""
    count, heads, width = queries.shape
    call = _Units(query_count=count, query_heads=heads, threads=torch.get_num_threads(), **fields)
    _library(width, queries.dtype).attend_units(ctypes.byref(call))


def attend_prompt(
    pages: PromptPages,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    """Attend with T consecutive queries `[T, n_q, d]`; return `[T, n_q * d]`.

    `keys`, `values` `[pages, n_kv, C, d]` have all that the queries see, themselves included.
    Raises NoKernels as `attend_units`, and MemoryError.
    """
    attended = torch.empty(len(queries), queries.shape[1] * queries.shape[2], dtype=queries.dtype)
    _prompt(pages, queries, keys, values, scale, cap, {"attended": attended})
    return attended


class PromptParts:
    """Attention of T consecutive queries `[T, n_q, d]` over parts, in the order of positions."""

    def __init__(self, queries: torch.Tensor) -> None:
        count, heads, width = queries.shape
        self._queries = queries
        self.sums = torch.zeros(count, heads, width)
        self.peaks = torch.full((count, heads), _LEAST)
        self.totals = torch.zeros(count, heads)

    def add(
        self,
        pages: PromptPages,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        cap: float | None,
    ) -> None:
        """Attend the next pages, which are behind those before: see `attend_prompt`."""
        state = {"sums": self.sums, "peaks": self.peaks, "totals": self.totals}
        _prompt(pages, self._queries, keys, values, scale, cap, state)


def _prompt(
    pages: PromptPages,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    cap: float | None,
    results: Mapping[str, torch.Tensor],
) -> None:
    """Attend pages; `results` are the tensors that the kernel continues or writes."""
    queries, keys, values = queries.contiguous(), _with_rows(keys), _with_rows(values)
    count, heads, width = queries.shape
    threads, rows = torch.get_num_threads(), count * heads
    wanted = -(-rows // (_TASKS_PER_THREAD * threads))
    call = _Prompt(
        **_plane_fields(queries, keys, values),
        **{name: tensor.data_ptr() for name, tensor in results.items()},
        pages=pages.pages.data_ptr(),
        query_position=pages.query_position,
        page_position=pages.page_position,
        page_count=len(pages.pages),
        page_tokens=keys.shape[2],
        query_count=count,
        query_heads=heads,
        window=pages.window or 0,
        block_rows=min(_BLOCK_ROWS, max(wanted, _FEWEST_ROWS)),
        threads=threads,
        scale=scale,
        cap=cap or 0.0,
    )
    if _library(width, queries.dtype).attend_prompt(ctypes.byref(call)):
        raise MemoryError("no memory for a block of a prefill's attention")


def prepare(head_dim: int, dtype: torch.dtype) -> None:
    """Compile and load what `attend_units` needs for these. Raises NoKernels."""
    _library(head_dim, dtype)


def library_digest(head_dim: int, dtype: torch.dtype) -> str:
    """Return `compiled.content` of what `prepare` loads. Raises NoKernels."""
    return content(_library(head_dim, dtype))


@lru_cache
def _library(head_dim: int, dtype: torch.dtype) -> ctypes.CDLL:
    library = load("paged_attention.cpp", {"HEAD_DIM": head_dim, "ELEMENT": ELEMENTS[dtype]})
    library.attend_units.argtypes = [ctypes.POINTER(_Units)]
    library.attend_units.restype = None
    library.attend_prompt.argtypes = [ctypes.POINTER(_Prompt)]
    library.attend_prompt.restype = ctypes.c_int
    return library


def _with_rows(plane: torch.Tensor) -> torch.Tensor:
    """Return `[pages, n_kv, C, d]` with the rows of a head one after the other."""
    return plane if plane.stride()[2:] == (plane.shape[3], 1) else plane.contiguous()

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

_POINTERS = (
    *("queries", "keys", "values", "pages", "lows", "highs", "owners", "seen", "order", "groups"),
    *("cuts", "ranks", "part_sums", "part_peaks", "part_totals", "places", "firsts"),
    *("sums", "peaks", "totals", "attended"),
)
_TABLES = (
    *("pages", "lows", "highs", "owners", "firsts"),
    *("order", "groups", "cuts", "ranks", "places"),
)
_STRIDES = ("key_page", "key_head", "value_page", "value_head")
_COUNTS = ("round_count", "query_count", "query_heads", "kv_heads", "page_rows", "threads")
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
    are neighbours, in the order of their positions. They are attended in R rounds, each of which
    merges its parts before the next one's take their memory.

    Attributes:
        pages, lows, highs, owners: `[U]`, query `owners[i]` reads the rows [low, high).
        firsts: `[B + 1]`, query b has units [firsts[b], firsts[b + 1]).
        order: `[U]`, all units by round; those of the same page are neighbours.
        groups: `[G + 1]`, the bounds of these neighbours in `order`.
        cuts: `[R + 1]`, round r has the groups [cuts[r], cuts[r + 1]),
        ranks: `[R + 1]`, and of each query's units those of numbers [ranks[r], ranks[r + 1]).
        places: `[U]`, where in its round's parts that of each unit is.
        room: parts of the largest round.
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
    @property
    def cuts(self) -> torch.Tensor: ...
    @property
    def ranks(self) -> torch.Tensor: ...
    @property
    def places(self) -> torch.Tensor: ...
    @property
    def room(self) -> int: ...


class PartOrder(Protocol):
    """In which order parts are merged that are numbered as they come, int32: `UnitOrder`.

    Attributes:
        listing: `[U]`, the parts' numbers, by query and then by position.
        firsts: `[B + 1]`, query b has those of `listing[firsts[b] : firsts[b + 1]]`.
    """

    @property
    def listing(self) -> torch.Tensor: ...
    @property
    def firsts(self) -> torch.Tensor: ...


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
    seen: torch.Tensor | None = None,
) -> Partial:
    """Attend pages of `keys`, `values` `[pages, n_kv, C, d]` with queries `[B, n_q, d]`.

    `seen`: see `decode_partial`. Raises NoKernels, if the kernel for this type and d cannot be
    compiled.
    """
    state = _state(queries)
    _attend(units, queries, keys, values, scale, cap, seen, _state_fields(state))
    return state


def attend_all(
    units: Units,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    """Return the normalised result `[B, n_q * d]` of `attend_units`; each query sees some key."""
    results = {"attended": queries.new_empty(len(queries), queries.shape[1] * queries.shape[2])}
    if len(units.cuts) > 2:
        results |= _state_fields(_state(queries))
    _attend(units, queries, keys, values, scale, cap, None, results)
    return results["attended"]


class UnitParts:
    """Attention of queries `[B, n_q, d]` over pages of several planes, in the order of positions.

    Units that come in this order are merged as they come. Those of an order that says otherwise
    are kept until all are there.
    """

    def __init__(self, queries: torch.Tensor, order: PartOrder | None) -> None:
        """`order`: of all units that will be added, one view after the other."""
        self._queries, self._order = queries, order
        self._kept = None if order is None else _Parts(len(order.listing), queries)
        self._state, self._count = _state(queries), 0

    def add(
        self,
        units: Units,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        cap: float | None,
        seen: torch.Tensor | None = None,
    ) -> None:
        """Attend the next units: see `attend_units`. Raises ValueError if there is no room."""
        kept = self._kept
        first, self._count = self._count, self._count + len(units.owners)
        results = _state_fields(self._state)
        if kept is not None:
            if self._count > kept.count or len(units.cuts) > 2:
                raise ValueError(f"{self._count} units where {kept.count} were planned")
            results = kept.fields(first)
        _attend(units, self._queries, keys, values, scale, cap, seen, results)

    def merged(self) -> Partial:
        """Return the attention over all units. Raises ValueError if some are missing."""
        if self._kept is None or self._order is None:
            return self._state
        if self._count != self._kept.count:
            raise ValueError(f"{self._count} units where {self._kept.count} were planned")
        tables = {"places": self._order.listing, "firsts": self._order.firsts}
        fields = self._kept.fields() | _state_fields(self._state)
        # One round, which attends nothing more.
        ends = torch.tensor([[0, 0], [0, self._count]], dtype=torch.int32)
        rounds = {"cuts": ends[0], "ranks": ends[1]}
        _call(self._queries, fields | tables | rounds, {"round_count": 1})
        return self._state


class _Parts:
    """Room for the parts of this many units of queries `[B, n_q, d]`."""

    def __init__(self, count: int, queries: torch.Tensor) -> None:
        _, heads, width = queries.shape
        self.count = count
        self._sums = torch.empty(count, heads, -(-width // LANES) * LANES)
        self._peaks, self._totals = torch.empty(2, count, heads).unbind()

    def fields(self, first: int = 0) -> dict[str, torch.Tensor]:
        """Return the tensors of the parts from number `first` on."""
        names = ("part_sums", "part_peaks", "part_totals")
        rooms = (self._sums, self._peaks, self._totals)
        return {name: room[first:] for name, room in zip(names, rooms, strict=True)}


def _attend(
    units: Units,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    cap: float | None,
    seen: torch.Tensor | None,
    results: dict[str, torch.Tensor],
) -> None:
    """Attend units; `results`: the state onto which parts are merged, or room where they wait."""
    queries, keys, values = queries.contiguous(), _with_rows(keys), _with_rows(values)
    tables = {name: getattr(units, name) for name in _TABLES} | results
    if "part_sums" not in results:
        tables |= _Parts(units.room, queries).fields()
    if seen is not None:
        tables["seen"] = seen
    _call(
        queries,
        tables,
        {
            **_plane_fields(queries, keys, values),
            "round_count": len(units.cuts) - 1,
            "page_rows": keys.shape[2],
            "scale": scale,
            "cap": cap or 0.0,
        },
    )


def _state(queries: torch.Tensor) -> Partial:
    """Return the attention of queries `[B, n_q, d]` over nothing."""
    count, heads, width = queries.shape
    peaks = torch.full((count, heads), _LEAST)
    return torch.zeros(count, heads, width), peaks, torch.zeros(count, heads)


def _state_fields(state: Partial) -> dict[str, torch.Tensor]:
    return dict(zip(("sums", "peaks", "totals"), state, strict=True))


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


def _call(
    queries: torch.Tensor, tensors: Mapping[str, torch.Tensor], fields: Mapping[str, Any]
) -> None:
    """Run the kernel with the places of these tensors, which live until it has ended."""
    count, heads, width = queries.shape
    call = _Units(
        query_count=count,
        query_heads=heads,
        threads=torch.get_num_threads(),
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        **fields,
    )
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
        self._queries, self.state = queries, _state(queries)

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
        _prompt(pages, self._queries, keys, values, scale, cap, _state_fields(self.state))


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

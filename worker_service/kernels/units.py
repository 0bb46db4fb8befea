"""The pages that kernels of one order attend: what those of paged_attention.py are told.

All queries, of decode steps and of prefills, share one order of reduction
(paged_attention.cpp; on a GPU span_kernel.py). So a row has the same bits alone or beside others,
as a decoded token, a guess or a part of a prompt, and with its keys on the device or in tiles
from the host. This module knows no plans and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from splitpoint.shapes import chunks_of
from worker_service.device.memory import ATTENTION_PARTS, UNIT_ROWS
from worker_service.device.upload import Upload
from worker_service.kernels.choice import Decode, Prefill, adds_in_one_order, in_use
from worker_service.kernels.paged_attention import grouped

Numbers = npt.NDArray[np.int64]

_limit = [ATTENTION_PARTS]


def limit_parts(count: int) -> None:
    """Keep at most this many parts at once in this process from now on: those that are planned."""
    _limit[:] = [count]


def _most_parts() -> int:
    return min(ATTENTION_PARTS, _limit[0])


def decodes_in_units(device: torch.device) -> bool:
    """Return True if this process decodes on this device by the kernel of `UnitView`."""
    chosen = in_use()
    return device.type == "cpu" and chosen is not None and chosen.decode is Decode.FUSED


def prefills_in_units(device: torch.device) -> bool:
    """Return True if this process prefills on this device by a kernel that reads pages."""
    if device.type != "cpu":
        return adds_in_one_order()
    chosen = in_use()
    return chosen is not None and chosen.prefill is Prefill.FUSED


def units_per_page(page_rows: int) -> int:
    """Return the units of a page: each has at most UNIT_ROWS rows."""
    return -(-page_rows // UNIT_ROWS)


def unit_count(tokens: int, page_rows: int) -> int:
    """Return the units of the first `tokens` of a sequence."""
    pages, rest = divmod(tokens, page_rows)
    return pages * units_per_page(page_rows) + units_per_page(rest)


def may_wait(page_count: int, chunk_tokens: int, unit_count: int) -> bool:
    """Return True if parts of this many pages and further units may wait until all are there."""
    return page_count * chunks_of(chunk_tokens, UNIT_ROWS) + unit_count <= _most_parts()


@dataclass(frozen=True, slots=True)
class UnitView:
    """The pages that B queries read, as `paged_attention.Units`; int32 on the host.

    Attributes:
        positions: int64 `[U]`, of the first row of each unit, as far as they order a query's.
    """

    pages: torch.Tensor
    lows: torch.Tensor
    highs: torch.Tensor
    owners: torch.Tensor
    firsts: torch.Tensor
    order: torch.Tensor
    groups: torch.Tensor
    cuts: torch.Tensor
    ranks: torch.Tensor
    places: torch.Tensor
    room: int
    positions: Numbers

    @classmethod
    def of(
        cls,
        numbers: Numbers,
        owners: Numbers,
        positions: Numbers,
        seen: npt.NDArray[np.bool_],
        query_count: int,
    ) -> UnitView:
        """Cut pages into units.

        Query `owners[i]` sees the rows `seen[i]` `[C]` of page `numbers[i]`: at least one, and
        no two with a gap between them. The page's first row is at `positions[i]`.
        """
        units = cut_units(seen)
        numbers, owners, positions = (each[units.page] for each in (numbers, owners, positions))
        positions = positions + units.start
        order = np.lexsort((positions, owners))
        return cls._of_units(
            numbers[order],
            units.low[order],
            units.high[order],
            owners[order],
            positions[order],
            query_count,
        )

    @classmethod
    def _of_units(
        cls,
        pages: Numbers,
        lows: Numbers,
        highs: Numbers,
        owners: Numbers,
        positions: Numbers,
        query_count: int,
    ) -> UnitView:
        """Lay out units that are ordered by owner and position."""
        firsts = bounds(owners, query_count)
        rounds = _Rounds.of(pages, owners, firsts)
        return cls(
            pages=_table(pages),
            lows=_table(lows),
            highs=_table(highs),
            owners=_table(owners),
            firsts=_table(firsts),
            order=_table(rounds.order),
            groups=_table(rounds.groups),
            cuts=_table(rounds.cuts),
            ranks=_table(rounds.ranks),
            places=_table(rounds.places),
            room=rounds.room,
            positions=positions,
        )

    def halves(self, borders: Numbers) -> tuple[UnitView, UnitView]:
        """Return the units before position `borders[b]` of each query b, and those behind."""
        owners = self.owners.numpy().astype(np.int64)
        is_before = self.positions < borders[owners]
        before, behind = (
            UnitView._of_units(
                self.pages.numpy()[some],
                self.lows.numpy()[some],
                self.highs.numpy()[some],
                owners[some],
                self.positions[some],
                len(borders),
            )
            for some in (is_before, ~is_before)
        )
        return before, behind

    @property
    def sort_keys(self) -> tuple[npt.NDArray[Any], Numbers]:
        """The query and the position of each unit, on the host."""
        return self.owners.numpy(), self.positions


class HasSortKeys(Protocol):
    """A view whose units can be merged in the order of positions."""

    @property
    def sort_keys(self) -> tuple[npt.NDArray[Any], Numbers]: ...


@dataclass(frozen=True, slots=True)
class UnitOrder:
    """The order in which units of several views are merged: see `paged_attention.PartOrder`.

    On a GPU each unit is a span.
    """

    listing: torch.Tensor
    firsts: torch.Tensor

    @classmethod
    def of(cls, views: Sequence[HasSortKeys], query_count: int, upload: Upload) -> UnitOrder:
        """Return the order for views whose units are attended one view after the other."""
        keys = (view.sort_keys for view in views)
        owners, positions = (np.concatenate(each) for each in zip(*keys, strict=True))
        listing, firsts = np.lexsort((positions, owners)), bounds(owners, query_count)
        return cls(upload.table(listing, np.int32), upload.table(firsts, np.int32))


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Rounds of at most as many units as parts may wait, or of one of each query: see `Units`."""

    order: Numbers
    groups: Numbers
    cuts: Numbers
    ranks: Numbers
    places: Numbers
    room: int

    @classmethod
    def of(cls, pages: Numbers, owners: Numbers, firsts: Numbers) -> _Rounds:
        count, most = len(pages), _most_parts()
        if count <= most:
            order, groups = grouped(pages)
            cuts, places = np.array([0, len(groups) - 1]), np.arange(count)
            return cls(order, groups, cuts, np.array([0, count]), places, count)
        ranks = np.arange(count) - firsts[owners]
        ends = np.cumsum(np.bincount(ranks))
        edges, taken = [0], 0
        while edges[-1] < len(ends):
            reached = int(np.searchsorted(ends, taken + most, side="right"))
            edges.append(max(reached, edges[-1] + 1))
            taken = int(ends[edges[-1] - 1])
        rounds = np.searchsorted(edges, ranks, side="right") - 1
        sizes = np.bincount(rounds)
        by_round = np.argsort(rounds, kind="stable")
        places = np.empty_like(by_round)
        places[by_round] = np.arange(count) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        # The same page of two rounds counts as two.
        order, groups = grouped(rounds * (int(pages.max()) + 1) + pages)
        cuts = np.searchsorted(rounds[order[groups[:-1]]], np.arange(len(edges)))
        return cls(order, groups, cuts, np.array(edges), places, int(sizes.max()))


@dataclass(frozen=True, slots=True)
class Cut:
    """Units: of which page each is, and its first row; the rows [low, high) of it are seen."""

    page: Numbers
    start: Numbers
    low: Numbers
    high: Numbers


def cut_units(seen: npt.NDArray[np.bool_]) -> Cut:
    """Cut pages `[P, C]` into units of which some row is seen."""
    pages, rows = seen.shape
    per_page = units_per_page(rows)
    if per_page > 1:
        missing = per_page * UNIT_ROWS - rows
        seen = np.pad(seen, ((0, 0), (0, missing))).reshape(pages * per_page, UNIT_ROWS)
    used = np.flatnonzero(seen.any(axis=1))
    start = used % per_page * UNIT_ROWS
    low = start + seen[used].argmax(axis=1)
    return Cut(used // per_page, start, low, low + seen[used].sum(axis=1))


def bounds(owners: npt.NDArray[Any], query_count: int) -> Numbers:
    """Return `[B + 1]`: the first of each query's neighbours, and the end of the last."""
    return np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=query_count))])


def _table(values: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))

"""The pages that a CPU attends: what the kernels of paged_attention.py are told.

All queries, of decode steps and of prefills, share one order of reduction
(paged_attention.cpp). So a row has the same bits alone or beside others, as a decoded token, a
guess or a part of a prompt, and with its keys on the device or in tiles from the host.
This module knows no plans and no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker_service.kernels.choice import Decode, Prefill, in_use
from worker_service.kernels.paged_attention import UNIT_ROWS, grouped

Numbers = npt.NDArray[np.int64]


def decodes_in_units(device: torch.device) -> bool:
    """Return True if this process decodes on this device by the kernel of `UnitView`."""
    chosen = in_use()
    return device.type == "cpu" and chosen is not None and chosen.decode is Decode.FUSED


def prefills_in_units(device: torch.device) -> bool:
    """Return True if this process prefills on this device by `attend_prompt`."""
    chosen = in_use()
    return device.type == "cpu" and chosen is not None and chosen.prefill is Prefill.FUSED


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
        units = _cut(seen)
        numbers, owners, positions = (each[units.page] for each in (numbers, owners, positions))
        positions = positions + units.start
        order = np.lexsort((positions, owners))
        numbers, owners = numbers[order], owners[order]
        by_page, groups = grouped(numbers)
        return cls(
            pages=_table(numbers),
            lows=_table(units.low[order]),
            highs=_table(units.high[order]),
            owners=_table(owners),
            firsts=_bounds(owners, query_count),
            order=_table(by_page),
            groups=_table(groups),
            positions=positions[order],
        )


@dataclass(frozen=True, slots=True)
class UnitOrder:
    """The order in which units of several views are merged: see `paged_attention.UnitParts`."""

    listing: torch.Tensor
    firsts: torch.Tensor

    @classmethod
    def of(cls, views: Sequence[UnitView], query_count: int) -> UnitOrder:
        """Return the order for views whose units are attended one view after the other."""
        owners = np.concatenate([view.owners.numpy() for view in views])
        positions = np.concatenate([view.positions for view in views])
        return cls(_table(np.lexsort((positions, owners))), _bounds(owners, query_count))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Units: of which page each is, and its first row; the rows [low, high) of it are seen."""

    page: Numbers
    start: Numbers
    low: Numbers
    high: Numbers


def _cut(seen: npt.NDArray[np.bool_]) -> _Cut:
    """Cut pages `[P, C]` into units of which some row is seen."""
    pages, rows = seen.shape
    per_page = max(1, -(-rows // UNIT_ROWS))
    if per_page > 1:
        missing = per_page * UNIT_ROWS - rows
        seen = np.pad(seen, ((0, 0), (0, missing))).reshape(pages * per_page, UNIT_ROWS)
    used = np.flatnonzero(seen.any(axis=1))
    start = used % per_page * UNIT_ROWS
    low = start + seen[used].argmax(axis=1)
    return _Cut(used // per_page, start, low, low + seen[used].sum(axis=1))


def _bounds(owners: npt.NDArray[Any], query_count: int) -> torch.Tensor:
    """Return int32 `[B + 1]`: the first of each query's neighbours, and the end of the last."""
    return _table(np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=query_count))]))


def _table(values: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))

"""Lays out what one step reads from the store: tiles, and what each transfer needs.

Layers with a sliding window read only what some query sees. Built once per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from worker_service.device.cache import DeviceCache
from worker_service.device.memory import PREFILL_TILE_PAGES, largest_tile
from worker_service.device.upload import Upload
from worker_service.engine.selected_step import SelectedStep
from worker_service.engine.sequence import Segment, Sequence
from worker_service.engine.streamed_step import (
    DevicePages,
    LayerDecodes,
    StreamedPrefill,
    StreamedStep,
    Window,
    is_seen,
    query_counts,
    transfer_of,
)
from worker_service.kernels.choice import adds_in_one_order
from worker_service.kernels.units import UnitOrder, UnitView, may_wait, prefills_in_units
from worker_service.model.attention_plan import DecodePlan
from worker_service.model.span_attention import SpanView
from worker_service.pipeline.task_work import TileTransfer
from worker_service.pipeline.tiles import (
    StoredPage,
    StreamedTokens,
    Tile,
    decode_tiles,
    ordered_tiles,
    prefill_tiles,
)
from worker_service.pipeline.transfer import CacheTransfer, Part
from worker_service.retrieval.row_plan import RowPlan
from worker_service.retrieval.sequence_reads import SequenceReads

Result = TypeVar("Result")
MakeTiles = Callable[[list[StoredPage], int, int], list[Tile]]


@dataclass(frozen=True, slots=True)
class _KeptInputs:
    """X of a tile's pages that is kept on the device.

    Attributes:
        halves: for each half of the pages that hold X: its number, the places in the tile,
            and the pages; int64.
    """

    cache: DeviceCache
    halves: list[tuple[int, torch.Tensor, torch.Tensor]]

    def copy(self, layer: int, staging: torch.Tensor) -> None:
        """Copy the layer's X into staging pages `[tile pages, C, h]`."""
        planes = self.cache.inputs_in_pages(layer)
        for half, places, pages in self.halves:
            staging.index_copy_(0, places, planes[half].index_select(0, pages))


@dataclass(frozen=True, slots=True)
class _Decodes:
    """What decoding sequences attend: see `StreamedStep`."""

    before: DecodePlan | None
    layers: list[LayerDecodes]
    behind: DecodePlan | None


class StreamedBuilder:
    """Lays out what a step reads from the store."""

    def __init__(
        self,
        cache: DeviceCache,
        windows: Rows[Window],
        tile_pages: int,
        upload: Upload,
    ) -> None:
        """`upload` sends the step's tables before anything of it runs."""
        self._upload = upload
        self._cache = cache
        self._chunk = cache.layout.chunk_tokens
        self._device = cache.device
        # One for each layer.
        self._windows = windows
        self._tile_pages = min(tile_pages, largest_tile(cache.plan.staging_pages))

    def step(
        self,
        decodes: Rows[Sequence],
        decode_plan: DecodePlan | None,
        prefills: Rows[tuple[Sequence, StreamedPrefill]],
        selected: SelectedStep,
    ) -> StreamedStep | None:
        """Return what the step reads from the store; None if that is nothing.

        Args:
            decode_plan: for all device pages of the decoding sequences.
            selected: what they read by selection.
        """
        planned = self._decodes(decodes, decode_plan, selected)
        layers = [
            [
                *(tile_transfer for tile_transfer, _ in reads.tiles),
                *(
                    tile_transfer
                    for _, prefill in prefills
                    for tile_transfer in prefill.tile_transfers[window]
                ),
            ]
            for window, reads in zip(self._windows, planned.layers, strict=True)
        ]
        if not any(layers) and not selected.readers:
            return None
        sequences = [sequence for sequence in decodes if sequence.stored_range]
        sequences += [sequence for sequence, _ in prefills]
        # Layers with windows see less, and those that select have fewer tiles.
        most = max(layers, key=lambda listed: sum(len(each.tile.pages) for each in listed))
        tokens = StreamedTokens.of((each.tile for each in most), self._chunk)
        return StreamedStep(
            sequences,
            self._tile_pages,
            layers,
            tokens,
            before=planned.before,
            decodes=planned.layers,
            behind=planned.behind,
            selected=selected,
        )

    def prefill(self, segment: Segment, first_row: int) -> StreamedPrefill:
        """Return what a prefill segment attends; its queries begin at `first_row`."""
        sequence = segment.sequence
        tile_pages = min(self._tile_pages, PREFILL_TILE_PAGES)
        pages = self._stored_pages(sequence, 0)
        make_tiles = ordered_tiles if prefills_in_units(self._device) else prefill_tiles
        tile_transfers = self._by_window(
            pages,
            [segment.start],
            lambda seen: self._transfers(seen, [sequence], tile_pages, make_tiles),
        )
        stored, end = sequence.stored_range, segment.start + segment.count
        return StreamedPrefill(
            first_row,
            segment.count,
            segment.start,
            self._kept(sequence, range(stored.start), end),
            tile_transfers,
            self._kept(sequence, range(stored.stop, len(sequence.pages)), end),
        )

    # -- decodes ---------------------------------------------------------------------------

    def _decodes(
        self, decodes: Rows[Sequence], on_device: DecodePlan | None, selected: SelectedStep
    ) -> _Decodes:
        pages = [
            page
            for number, sequence in enumerate(decodes)
            for page in self._stored_pages(sequence, number)
        ]
        # The first query of a sequence sees the most.
        queries = [sequence.computed for sequence in decodes]
        counts = query_counts(decodes)
        kinds = [(window, selected.selecting(at)) for at, window in enumerate(self._windows)]
        rows = {
            selecting: self._rows_plan(decodes, selecting, queries, counts)
            for selecting in dict.fromkeys(selecting for _, selecting in kinds)
        }
        in_order = on_device is not None and self._takes_many_parts(
            [on_device, *map(_pages_of, rows.values())],
            pages,
            queries,
            counts or [1] * len(decodes),
        )
        make_tiles = ordered_tiles if in_order else decode_tiles

        def with_plans(seen: list[StoredPage]) -> list[tuple[TileTransfer, DecodePlan]]:
            tile_transfers = self._transfers(seen, decodes, self._tile_pages, make_tiles)
            return [(each, self._plan_of(each.tile, queries, counts)) for each in tile_transfers]

        made: dict[tuple[int, frozenset[int]], list[tuple[TileTransfer, DecodePlan]]] = {}
        by_kind: dict[tuple[Window, frozenset[int]], LayerDecodes] = {}
        for window, selecting in dict.fromkeys(kinds):
            seen = self._seen(pages, queries, window)
            # A larger window sees more of each sequence, so equal counts are equal pages.
            same = len(seen), selecting
            if same not in made:
                made[same] = with_plans([page for page in seen if page.reader not in selecting])
            order = None
            if on_device is not None and not in_order:
                plans = [on_device, _pages_of(rows[selecting])]
                plans += [plan for _, plan in made[same]]
                order = _order(plans, window, self._upload)
            by_kind[window, selecting] = LayerDecodes(rows[selecting], made[same], order)
        layers = [by_kind[kind] for kind in kinds]
        if on_device is None or not in_order:
            return _Decodes(on_device, layers, None)
        borders = [sequence.stored_range.start * self._chunk for sequence in decodes]
        before, behind = _halves(on_device, np.repeat(borders, counts or 1))
        return _Decodes(before, layers, behind)

    def _rows_plan(
        self,
        decodes: Rows[Sequence],
        selecting: frozenset[int],
        queries: list[int],
        counts: list[int] | None,
    ) -> RowPlan | None:
        """Plan attention to the rows that selections fetched; None if no sequence has any."""
        readers: list[tuple[int, SequenceReads]] = []
        for number in sorted(selecting):
            reads = decodes[number].reads
            if reads is None:
                raise RuntimeError("a sequence without screens reads by selection")
            readers.append((number, reads))
        return RowPlan.of(
            readers,
            queries,
            windows=self._windows,
            chunk_tokens=self._chunk,
            device=self._device,
            upload=self._upload,
            query_counts=counts,
        )

    def _takes_many_parts(
        self,
        on_device: Rows[DecodePlan | None],
        pages: Rows[StoredPage],
        queries: Rows[int],
        counts: Rows[int],
    ) -> bool:
        """Return True if a layer's parts must be merged as they come: see `UnitParts`."""
        most = [_most_units(plan) for plan in on_device if plan is not None]
        widest = max(self._windows, key=lambda window: window or math.inf)
        read = sum(counts[page.reader] for page in self._seen(pages, queries, widest))
        return any(most) and not may_wait(read, self._chunk, sum(most))

    def _plan_of(self, tile: Tile, queries: list[int], counts: list[int] | None) -> DecodePlan:
        return DecodePlan.of_pages(
            range(len(tile.pages)),
            owners=[page.reader for page in tile.pages],
            first_positions=[page.first_position for page in tile.pages],
            query_positions=queries,
            chunk_tokens=self._chunk,
            windows=set(self._windows),
            device=self._device,
            upload=self._upload,
            query_counts=counts,
        )

    # -- both ----------------------------------------------------------------------------

    def _stored_pages(self, sequence: Sequence, reader: int) -> list[StoredPage]:
        chunk, split = self._chunk, sequence.step_split(self._chunk)
        pages: list[StoredPage] = []
        if sequence.has_pool:
            return pages  # all layers read by selection, and none of it is a chunk
        for index in sequence.stored_range:
            is_kept = index < sequence.kept_inputs
            rebuilt_rows = chunk if is_kept else min(max(split - index * chunk, 0), chunk)
            stored = sequence.stored[index]
            pages.append(StoredPage(reader, stored, index * chunk, rebuilt_rows, is_kept=is_kept))
        return pages

    def _by_window(
        self,
        pages: list[StoredPage],
        queries: Rows[int],
        make: Callable[[list[StoredPage]], Result],
    ) -> dict[Window, Result]:
        """Return `make` of the pages that queries see in layers of each window.

        Called once for windows that see the same pages.
        """
        made: dict[int, Result] = {}
        by_window: dict[Window, Result] = {}
        for window in set(self._windows):
            seen = self._seen(pages, queries, window)
            # A larger window sees more of each sequence, so equal counts are equal pages.
            if len(seen) not in made:
                made[len(seen)] = make(seen)
            by_window[window] = made[len(seen)]
        return by_window

    def _seen(
        self, pages: Iterable[StoredPage], queries: Rows[int], window: Window
    ) -> list[StoredPage]:
        last = self._chunk - 1
        return [
            page
            for page in pages
            if is_seen(window, queries[page.reader], page.first_position + last)
        ]

    def _transfers(
        self,
        pages: list[StoredPage],
        sequences: Rows[Sequence],
        tile_pages: int,
        make_tiles: MakeTiles,
    ) -> list[TileTransfer]:
        """Return tiles with what their transfers need. A tile's chunks are of one arena.

        There are two arenas while a replaced store is still read from.
        """
        by_transfer: dict[int, list[StoredPage]] = {}
        transfers: dict[int, CacheTransfer] = {}
        for page in pages:
            transfer = transfer_of(sequences[page.reader])
            transfers[id(transfer)] = transfer
            by_transfer.setdefault(id(transfer), []).append(page)
        return [
            self._tile_transfer(tile, transfers[key], sequences)
            for key, listed in by_transfer.items()
            for tile in make_tiles(listed, tile_pages, self._chunk)
        ]

    def _tile_transfer(
        self, tile: Tile, transfer: CacheTransfer, sequences: Rows[Sequence]
    ) -> TileTransfer:
        chunks = tuple(page.chunk for page in tile.pages)
        places = tuple(range(len(chunks)))
        loaded = None
        if tile.is_loaded:
            loaded = Part(chunks, places, len(chunks) * self._chunk)
        if not tile.rebuilt_rows:
            return TileTransfer(tile, transfer, loaded, None, None)
        positions: list[int] = []
        token_ids: list[int] = []
        for page in tile.pages:
            span = slice(page.first_position, page.first_position + page.rebuilt_rows)
            positions += range(span.start, span.stop)
            token_ids += sequences[page.reader].tokens[span]
        rebuilt = Part(chunks, places, len(positions), self._tensor(positions))
        copy_inputs = self._kept_inputs(tile, sequences).copy if tile.is_kept else None
        return TileTransfer(tile, transfer, loaded, rebuilt, self._tensor(token_ids), copy_inputs)

    def _kept_inputs(self, tile: Tile, sequences: Rows[Sequence]) -> _KeptInputs:
        halves = []
        for half in (0, 1):
            places, pages = [], []
            for place, page in enumerate(tile.pages):
                chunk = page.first_position // self._chunk
                if chunk % 2 == half:
                    places.append(place)
                    pages.append(sequences[page.reader].row_pages[chunk // 2])
            if places:
                halves.append((half, self._tensor(places), self._tensor(pages)))
        return _KeptInputs(self._cache, halves)

    def _kept(self, sequence: Sequence, chunks: range, end: int) -> list[DevicePages]:
        """Return device pages of chunks up to position `end`, in pieces like tiles."""
        pieces = []
        for first in range(chunks.start, chunks.stop, PREFILL_TILE_PAGES):
            last = min(first + PREFILL_TILE_PAGES, chunks.stop)
            rows = min(last * self._chunk, end) - first * self._chunk
            pages = [sequence.page(index) for index in range(first, last)]
            if rows > 0:
                pieces.append(DevicePages(first * self._chunk, rows, self._tensor(pages)))
        return pieces

    def _tensor(self, values: Iterable[int]) -> torch.Tensor:
        return self._upload.table(list(values))


def _pages_of(rows: RowPlan | None) -> DecodePlan | None:
    return None if rows is None else rows.pages


def _most_units(plan: DecodePlan) -> int:
    """Return the units of the plan's largest view; 0 if it has none."""
    views = (view for view in plan.views.values() if isinstance(view, UnitView))
    return max((len(view.owners) for view in views), default=0)


def _order(plans: Rows[DecodePlan | None], window: Window, upload: Upload) -> UnitOrder | None:
    """Return the order of the units of all plans, as they are attended; None: there are none."""
    kinds = (UnitView, SpanView) if adds_in_one_order() else UnitView
    present = [plan for plan in plans if plan is not None]
    views = (plan.views[window] for plan in present)
    units = [view for view in views if isinstance(view, kinds)]
    return UnitOrder.of(units, present[0].query_count, upload) if units else None


def _halves(plan: DecodePlan, borders: npt.NDArray[np.int64]) -> tuple[DecodePlan, DecodePlan]:
    """Return the units before position `borders[b]` of each query b, and those behind."""
    halves = {
        window: view.halves(borders)
        for window, view in plan.views.items()
        if isinstance(view, UnitView)
    }
    before, behind = (
        replace(plan, views={window: both[half] for window, both in halves.items()})
        for half in (0, 1)
    )
    return before, behind

"""Lays out what one step reads from the store: tiles, and what each transfer needs.

Layers with a sliding window read only what some query sees. Built once per step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from worker_service.device.cache import DeviceCache
from worker_service.device.memory import PREFILL_TILE_PAGES, largest_tile
from worker_service.device.upload import Upload
from worker_service.engine.sequence import Segment, Sequence
from worker_service.engine.streamed import (
    DevicePages,
    StreamedPrefill,
    StreamedStep,
    Window,
    is_seen,
    query_counts,
    transfer_of,
)
from worker_service.kernels.gpu_order import adds_in_one_order
from worker_service.kernels.units import UnitOrder, UnitView, may_wait, prefills_in_units
from worker_service.model.attention_plan import DecodePlan
from worker_service.model.span_attention import SpanView
from worker_service.pipeline.prefetch import TileTransfer
from worker_service.pipeline.tiles import (
    StoredPage,
    StreamedTokens,
    Tile,
    decode_tiles,
    ordered_tiles,
    prefill_tiles,
)
from worker_service.pipeline.transfer import CacheTransfer, Part

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
    tiles: Mapping[Window, list[tuple[TileTransfer, DecodePlan]]]
    behind: DecodePlan | None
    orders: Mapping[Window, UnitOrder]


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
    ) -> StreamedStep | None:
        """Return what the step reads from the store; None if that is nothing.

        `decode_plan`: for all device pages of the decoding sequences.
        """
        planned = self._decodes(decodes, decode_plan)
        layers = [
            [
                *(tile_transfer for tile_transfer, _ in planned.tiles[window]),
                *(
                    tile_transfer
                    for _, prefill in prefills
                    for tile_transfer in prefill.tile_transfers[window]
                ),
            ]
            for window in self._windows
        ]
        if not any(layers):
            return None
        sequences = [sequence for sequence in decodes if sequence.stored_range]
        sequences += [sequence for sequence, _ in prefills]
        # A layer without a window sees everything.
        widest = max(range(len(layers)), key=lambda layer: self._windows[layer] or math.inf)
        tiles = (tile_transfer.tile for tile_transfer in layers[widest])
        tokens = StreamedTokens.of(tiles, self._chunk)
        return StreamedStep(
            sequences,
            self._tile_pages,
            layers,
            tokens,
            before=planned.before,
            decodes=planned.tiles,
            behind=planned.behind,
            orders=planned.orders,
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

    def _decodes(self, decodes: Rows[Sequence], on_device: DecodePlan | None) -> _Decodes:
        pages = [
            page
            for row, sequence in enumerate(decodes)
            for page in self._stored_pages(sequence, row)
        ]
        # The first query of a sequence sees the most.
        queries = [sequence.computed for sequence in decodes]
        counts = query_counts(decodes)
        in_order = on_device is not None and self._takes_many_parts(
            on_device, pages, queries, counts or [1] * len(decodes)
        )
        make_tiles = ordered_tiles if in_order else decode_tiles

        def with_plans(seen: list[StoredPage]) -> list[tuple[TileTransfer, DecodePlan]]:
            tile_transfers = self._transfers(seen, decodes, self._tile_pages, make_tiles)
            return [(each, self._plan_of(each.tile, queries, counts)) for each in tile_transfers]

        tiles = self._by_window(pages, queries, with_plans)
        if on_device is None or not in_order:
            return _Decodes(on_device, tiles, None, _orders(on_device, tiles, self._upload))
        borders = [sequence.stored_range.start * self._chunk for sequence in decodes]
        before, behind = _halves(on_device, np.repeat(borders, counts or 1))
        return _Decodes(before, tiles, behind, {})

    def _takes_many_parts(
        self,
        on_device: DecodePlan,
        pages: Rows[StoredPage],
        queries: Rows[int],
        counts: Rows[int],
    ) -> bool:
        """Return True if a layer's parts must be merged as they come: see `UnitParts`."""
        views = [view for view in on_device.views.values() if isinstance(view, UnitView)]
        widest = max(self._windows, key=lambda window: window or math.inf)
        read = sum(counts[page.reader] for page in self._seen(pages, queries, widest))
        own = max((len(view.owners) for view in views), default=0)
        return bool(views) and not may_wait(read, self._chunk, own)

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
        pages = []
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


def _orders(
    on_device: DecodePlan | None,
    tiles: Mapping[Window, list[tuple[TileTransfer, DecodePlan]]],
    upload: Upload,
) -> dict[Window, UnitOrder]:
    """Return the orders of the units of all plans, in which they are attended; none: no units."""
    if on_device is None:
        return {}
    orders = {}
    kinds = (UnitView, SpanView) if adds_in_one_order() else UnitView
    for window, planned in tiles.items():
        views = [plan.views[window] for plan in (on_device, *(plan for _, plan in planned))]
        units = [view for view in views if isinstance(view, kinds)]
        if units:
            orders[window] = UnitOrder.of(units, on_device.query_count, upload)
    return orders


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

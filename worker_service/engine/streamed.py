"""What one step attends of streamed sequences: tiles from the store, and pages kept here.

Decoding sequences share tiles: one product attends pages of many of them, and the
results are merged with those of the pages on the device by online softmax. A prefill's
tiles are its own. Layers with a sliding window read only what some query sees. Built
once per step; the tiles come through a prefetcher.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from splitpoint.errors import ChunkLost
from worker_service.device.cache import DeviceCache
from worker_service.device.cost_watch import StepTraffic
from worker_service.device.memory import PREFILL_TILE_PAGES, largest_tile
from worker_service.engine.sequence import Segment, Sequence
from worker_service.model.attention import Partial, decode_partial, prefill_partial, tile_rows
from worker_service.model.attention_plan import DecodePlan
from worker_service.model.layer import DecoderLayer
from worker_service.pipeline.prefetch import Prefetcher, TileTransfer
from worker_service.pipeline.tiles import (
    StoredPage,
    StreamedTokens,
    Tile,
    decode_tiles,
    prefill_tiles,
)
from worker_service.pipeline.transfer import CacheTransfer, Part
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk, SuspectChunks
from worker_service.store.verifier import Check, Verifier, differing

Result = TypeVar("Result")
Window = int | None
MakeTiles = Callable[[list[StoredPage], int, int], list[Tile]]


@dataclass(frozen=True, slots=True)
class LostSequence:
    """A sequence that lost chunks while a step read them."""

    sequence: Sequence
    cause: ChunkLost


@dataclass(frozen=True, slots=True)
class DevicePages:
    """Consecutive pages of a sequence on the device: `rows` tokens from `first_position` on."""

    first_position: int
    rows: int
    pages: torch.Tensor


@dataclass(frozen=True, slots=True)
class StreamedPrefill:
    """New tokens after a prefix part of which is in the store.

    Attributes:
        kept: what of the prefix is on the device, before and behind what is stored,
            the new tokens' own pages included.
        tile_transfers: the stored rest, for layers of each window.
    """

    first_row: int
    count: int
    start: int
    kept: list[DevicePages]
    tile_transfers: Mapping[Window, list[TileTransfer]]

    def attend(
        self,
        cache: DeviceCache,
        prefetcher: Prefetcher,
        index: int,
        layer: DecoderLayer,
        queries: torch.Tensor,
    ) -> torch.Tensor:
        """`queries` `[count, n_q, d]` over everything before them: `[count, n_q * d]`."""
        merged = _Merged()

        def attend(keys: torch.Tensor, values: torch.Tensor, rows: int, first: int) -> None:
            merged.add(
                prefill_partial(
                    queries,
                    tile_rows(keys, rows),
                    tile_rows(values, rows),
                    query_position=self.start,
                    key_position=first,
                    window=layer.window,
                    scale=layer.scale,
                    cap=layer.cap,
                )
            )

        for here in self.kept:
            if not is_seen(layer.window, self.start, here.first_position + here.rows - 1):
                continue
            keys = cache.keys[index].index_select(0, here.pages)
            values = cache.values[index].index_select(0, here.pages)
            prefetcher.compute(
                "attend", index, partial(attend, keys, values, here.rows, here.first_position)
            )
        for tile_transfer in self.tile_transfers[layer.window]:
            pages = tile_transfer.tile.pages
            count, first = len(pages), pages[0].first_position
            rows = count * cache.layout.chunk_tokens

            def attend_tile(
                keys: torch.Tensor,
                values: torch.Tensor,
                count: int = count,
                rows: int = rows,
                first: int = first,
            ) -> None:
                attend(keys[:count], values[:count], rows, first)

            prefetcher.consume(index, tile_transfer, attend_tile)
        return merged.partial.attended(queries.dtype)


@dataclass(frozen=True, slots=True)
class StreamedStep:
    """Everything that one step reads from the store.

    Attributes:
        sequences: whose.
        tile_pages: pages of the largest tile.
        layers: what each layer reads, in the order in which it takes it.
        tokens: what the layer reads that sees most.
        decodes: the tiles of decoding sequences, for layers of each window.
    """

    sequences: list[Sequence]
    tile_pages: int
    layers: list[list[TileTransfer]]
    tokens: StreamedTokens
    decodes: Mapping[Window, list[tuple[TileTransfer, DecodePlan]]]

    def attend_decodes(
        self,
        prefetcher: Prefetcher,
        index: int,
        layer: DecoderLayer,
        queries: torch.Tensor,
        on_device: Partial,
    ) -> Partial:
        """What the device's own pages gave, merged with every tile; `queries` `[B, n_q, d]`."""
        merged = _Merged(on_device)
        for tile_transfer, plan in self.decodes[layer.window]:

            def attend(keys: torch.Tensor, values: torch.Tensor, plan: DecodePlan = plan) -> None:
                merged.add(
                    decode_partial(
                        queries,
                        keys,
                        values,
                        plan,
                        window=layer.window,
                        scale=layer.scale,
                        cap=layer.cap,
                    )
                )

            prefetcher.consume(index, tile_transfer, attend)
        return merged.partial

    def traffic(self) -> StepTraffic:
        """What the prefetcher will move and rebuild, before it does."""
        copies: list[float] = []
        rebuilds: list[float] = []
        for layer, tile_transfers in enumerate(self.layers):
            for tile_transfer in tile_transfers:
                copies += tile_transfer.copies(layer)
                rebuilds += tile_transfer.rebuilds()
        return StepTraffic(tuple(copies), tuple(rebuilds))

    def begin_checks(self, verifier: Verifier) -> list[Check]:
        """Compare what the step reads, what several sequences share once."""
        read: dict[ArenaTensors, dict[StoredChunk, None]] = {}
        for sequence in self.sequences:
            chunks = read.setdefault(transfer_of(sequence).tensors, {})
            chunks.update(dict.fromkeys(sequence.read_chunks))
        begun = (verifier.begin(tensors, chunks) for tensors, chunks in read.items())
        return [check for check in begun if check is not None]

    def lost(self, checks: Iterable[Check]) -> list[LostSequence]:
        """Sequences of which a chunk is not what it was, or not what it should be.

        Generations only grow: a chunk that is current now was current all the time.
        """
        damaged: set[StoredChunk] = set()
        for check in checks:
            try:
                check.wait()
            except SuspectChunks as error:
                damaged.update(error.chunks)
        lost = []
        for sequence in self.sequences:
            chunks = sequence.read_chunks
            try:
                transfer_of(sequence).tensors.check_current(chunks)
                if not damaged.isdisjoint(chunks):
                    raise differing([chunk for chunk in chunks if chunk in damaged])
            except ChunkLost as error:
                lost.append(LostSequence(sequence, error))
        return lost


class _Merged:
    """Partial attention that grows tile by tile."""

    def __init__(self, partial: Partial | None = None) -> None:
        self._partial = partial

    def add(self, partial: Partial) -> None:
        self._partial = partial if self._partial is None else self._partial.merge(partial)

    @property
    def partial(self) -> Partial:
        if self._partial is None:
            raise RuntimeError("a query attends nothing, not even itself")
        return self._partial


class StreamedBuilder:
    """Lays out what a step reads from the store."""

    def __init__(
        self,
        cache: DeviceCache,
        windows: Rows[Window],
        tile_pages: int,
    ) -> None:
        self._cache = cache
        self._chunk = cache.layout.chunk_tokens
        self._device = cache.device
        # Of each layer, in order.
        self._windows = windows
        self._tile_pages = min(tile_pages, largest_tile(cache.plan.staging_pages))

    def step(
        self, decodes: Rows[Sequence], prefills: Rows[tuple[Sequence, StreamedPrefill]]
    ) -> StreamedStep | None:
        """None when nothing of the step is in the store."""
        planned = self._decodes(decodes)
        layers = [
            [
                *(tile_transfer for tile_transfer, _ in planned[window]),
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
        # A layer without a window sees all, any other as far as its window.
        widest = max(range(len(layers)), key=lambda layer: self._windows[layer] or math.inf)
        tiles = (tile_transfer.tile for tile_transfer in layers[widest])
        tokens = StreamedTokens.of(tiles, self._chunk)
        return StreamedStep(sequences, self._tile_pages, layers, tokens, planned)

    def prefill(self, segment: Segment, first_row: int) -> StreamedPrefill:
        sequence = segment.sequence
        tile_pages = min(self._tile_pages, PREFILL_TILE_PAGES)
        pages = self._stored_pages(sequence, 0)
        tile_transfers = self._by_window(
            pages,
            [segment.start],
            lambda seen: self._ship(seen, [sequence], tile_pages, prefill_tiles),
        )
        return StreamedPrefill(
            first_row,
            segment.count,
            segment.start,
            self._kept(sequence, segment.start + segment.count),
            tile_transfers,
        )

    # -- decodes ---------------------------------------------------------------------------

    def _decodes(
        self, decodes: Rows[Sequence]
    ) -> Mapping[Window, list[tuple[TileTransfer, DecodePlan]]]:
        pages = [
            page
            for row, sequence in enumerate(decodes)
            for page in self._stored_pages(sequence, row)
        ]
        queries = [sequence.computed for sequence in decodes]

        def ship(seen: list[StoredPage]) -> list[tuple[TileTransfer, DecodePlan]]:
            tile_transfers = self._ship(seen, decodes, self._tile_pages, decode_tiles)
            return [(each, self._plan_of(each.tile, queries)) for each in tile_transfers]

        return self._by_window(pages, queries, ship)

    def _plan_of(self, tile: Tile, queries: list[int]) -> DecodePlan:
        return DecodePlan.of_pages(
            range(len(tile.pages)),
            owners=[page.reader for page in tile.pages],
            first_positions=[page.first_position for page in tile.pages],
            query_positions=queries,
            chunk_tokens=self._chunk,
            windows=set(self._windows),
            device=self._device,
        )

    # -- both ----------------------------------------------------------------------------

    def _stored_pages(self, sequence: Sequence, reader: int) -> list[StoredPage]:
        chunk = self._chunk
        split = sequence.admission.step_split(sequence.computed, chunk)
        return [
            StoredPage(
                reader,
                sequence.stored[index],
                index * chunk,
                chunk
                if index < sequence.kept_inputs
                else min(max(split - index * chunk, 0), chunk),
                is_kept=index < sequence.kept_inputs,
            )
            for index in sequence.stored_range
        ]

    def _by_window(
        self,
        pages: list[StoredPage],
        queries: Rows[int],
        make: Callable[[list[StoredPage]], Result],
    ) -> dict[Window, Result]:
        """`make` of what the queries see in layers of each window; made once where equal."""
        made: dict[int, Result] = {}
        by_window: dict[Window, Result] = {}
        for window in set(self._windows):
            seen = [
                page
                for page in pages
                if is_seen(window, queries[page.reader], page.first_position + self._chunk - 1)
            ]
            # A larger window sees more of each sequence: as many pages are the same pages.
            if len(seen) not in made:
                made[len(seen)] = make(seen)
            by_window[window] = made[len(seen)]
        return by_window

    def _ship(
        self,
        pages: list[StoredPage],
        sequences: Rows[Sequence],
        tile_pages: int,
        make_tiles: MakeTiles,
    ) -> list[TileTransfer]:
        """Tiles and what their work needs. A tile's chunks are of one arena.

        There are two while a store that was replaced is still read from.
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
        copy_inputs = self._taking(tile, sequences) if tile.is_kept else None
        return TileTransfer(tile, transfer, loaded, rebuilt, self._tensor(token_ids), copy_inputs)

    def _taking(self, tile: Tile, sequences: Rows[Sequence]) -> Callable[[int, torch.Tensor], None]:
        """Puts X of the tile's pages from where it is kept on the device into staging pages."""
        halves: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        for half in (0, 1):
            places, pages = [], []
            for place, page in enumerate(tile.pages):
                chunk = page.first_position // self._chunk
                if chunk % 2 == half:
                    places.append(place)
                    pages.append(sequences[page.reader].row_pages[chunk // 2])
            if places:
                halves.append((half, self._tensor(places), self._tensor(pages)))
        cache = self._cache

        def take(layer: int, staging: torch.Tensor) -> None:
            rooms = cache.inputs_in_pages(layer)
            for half, places, pages in halves:
                staging.index_copy_(0, places, rooms[half].index_select(0, pages))

        return take

    def _kept(self, sequence: Sequence, end: int) -> list[DevicePages]:
        """Device pages up to position `end`, in pieces that a tile's scores have room for."""
        stored = sequence.stored_range
        pieces = []
        for span in (range(stored.start), range(stored.stop, len(sequence.pages))):
            for first in range(span.start, span.stop, PREFILL_TILE_PAGES):
                last = min(first + PREFILL_TILE_PAGES, span.stop)
                rows = min(last * self._chunk, end) - first * self._chunk
                pages = [sequence.page(index) for index in range(first, last)]
                if rows > 0:
                    pieces.append(DevicePages(first * self._chunk, rows, self._tensor(pages)))
        return pieces

    def _tensor(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self._device)


def is_seen(window: Window, query_position: int, last_position: int) -> bool:
    """Whether a query that stands behind rows up to `last_position` sees any of them."""
    return window is None or query_position - last_position < window


def transfer_of(sequence: Sequence) -> CacheTransfer:
    """What reads the arena that the sequence's chunks are in."""
    if sequence.transfer is None:
        raise RuntimeError("a streamed sequence without a mapped arena")
    return sequence.transfer

"""Attention of one step over the parts of sequences that are in the store.

Decoding sequences share tiles: one attention call reads pages of many sequences, and the
results are merged with those of the pages on the device. A prefill has
tiles of its own. `streamed_builder` lays the tiles out; they come through a prefetcher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial

import torch

from splitpoint.errors import ChunkLost
from worker_service.device.cache import DeviceCache
from worker_service.engine.selected_step import SelectedStep
from worker_service.engine.sequence import Sequence
from worker_service.kernels.units import UnitOrder
from worker_service.lanes.cost_watch import StepTraffic
from worker_service.model.attention_parts import DecodeParts, PrefillParts
from worker_service.model.attention_plan import DecodePlan
from worker_service.model.model import Layer
from worker_service.pipeline.executor import Attend, Prefetcher
from worker_service.pipeline.task_work import TileTransfer
from worker_service.pipeline.tiles import StreamedTokens
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.retrieval.row_plan import RowPlan
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk, SuspectChunks
from worker_service.store.verifier import Check, Verifier, differing

# How many positions back a query sees; None if it sees all.
Window = int | None


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
    """New tokens after a prefix that is partly in the store.

    Attributes:
        before, behind: device pages before and after the stored part; the new
            tokens' own pages included.
        tile_transfers: the stored rest, for layers of each window.
    """

    first_row: int
    count: int
    start: int
    before: list[DevicePages]
    tile_transfers: Mapping[Window, list[TileTransfer]]
    behind: list[DevicePages]

    def attend(
        self,
        cache: DeviceCache,
        prefetcher: Prefetcher,
        index: int,
        layer: Layer,
        queries: torch.Tensor,
    ) -> torch.Tensor:
        """Attend everything before the queries `[count, n_q, d]`; return `[count, n_q * d]`."""
        parts = PrefillParts(
            queries,
            first_position=self.start,
            window=layer.window,
            scale=layer.scale,
            cap=layer.cap,
            sinks=layer.sinks,
        )

        def attend_own(pages: list[DevicePages]) -> None:
            for here in pages:
                if is_seen(layer.window, self.start, here.first_position + here.rows - 1):
                    call = partial(
                        parts.add,
                        cache.keys[index],
                        cache.values[index],
                        pages=here.pages,
                        rows=here.rows,
                        first_position=here.first_position,
                    )
                    prefetcher.compute("attend", index, call)

        attend_own(self.before)
        for tile_transfer in self.tile_transfers[layer.window]:
            pages = tile_transfer.tile.pages
            attend = partial(
                parts.add,
                pages=None,
                rows=len(pages) * cache.layout.chunk_tokens,
                first_position=pages[0].first_position,
            )
            prefetcher.consume(index, tile_transfer, attend)
        attend_own(self.behind)
        return prefetcher.compute("attend", index, parts.attended)


@dataclass(frozen=True, slots=True)
class LayerDecodes:
    """What decoding sequences attend in a layer beside the pages that they have on the device.

    Attributes:
        rows: row pages of sequences that select; None: none selects here.
        tiles: all that the others have in the store, and what attends each tile.
        order: in which order the parts are merged, if not as they come: those of the device's
            own pages, of `rows`, then of the tiles.
    """

    rows: RowPlan | None
    tiles: list[tuple[TileTransfer, DecodePlan]]
    order: UnitOrder | None


@dataclass(frozen=True, slots=True)
class StreamedStep:
    """Everything that one step reads from the store.

    Attributes:
        sequences: those that it reads for.
        tile_pages: pages of the largest tile.
        layers: the tiles of each layer, in the order in which it consumes them.
        tokens: what the layer that reads most reads; layers with sliding windows read less.
        before: the device's own pages of decoding sequences, which are attended before the tiles;
            None: no sequence decodes.
        decodes: what decoding sequences attend beside them in each layer.
        behind: further device pages, which are attended after the tiles; None: there are none.
        selected: what they read by selection, and what is built for it.
    """

    sequences: list[Sequence]
    tile_pages: int
    layers: list[list[TileTransfer]]
    tokens: StreamedTokens
    before: DecodePlan | None
    decodes: list[LayerDecodes]
    behind: DecodePlan | None
    selected: SelectedStep

    def attend_decodes(
        self,
        cache: DeviceCache,
        prefetcher: Prefetcher,
        index: int,
        layer: Layer,
        queries: torch.Tensor,
    ) -> torch.Tensor:
        """Attend the device's own pages and every tile; return `[N, n_q * d]`.

        `queries`: `[N, n_q, d]`, all rows of all decoding sequences.
        """
        here = self.decodes[index]
        parts = DecodeParts(
            queries,
            window=layer.window,
            scale=layer.scale,
            cap=layer.cap,
            sinks=layer.sinks,
            order=here.order,
        )
        own = partial(parts.add, cache.keys[index], cache.values[index])
        if self.before is not None:
            prefetcher.compute("attend", index, partial(own, plan=self.before))
        if here.rows is not None:
            arriving = self.selected.arriving(index)
            attend_rows = partial(own, plan=here.rows.pages, seen=here.rows.seen(index))
            prefetcher.compute("attend", index, attend_rows, arriving)
        builds = self.selected.building(index)
        for tile_transfer, plan in here.tiles:
            attend: Attend = partial(parts.add, plan=plan)
            if builds is not None:
                attend = builds.taking(tile_transfer.tile, attend)
            prefetcher.consume(index, tile_transfer, attend)
        if builds is not None:
            prefetcher.compute("build screens", index, builds.finish)
        if self.behind is not None:
            prefetcher.compute("attend", index, partial(own, plan=self.behind))
        return prefetcher.compute("attend", index, parts.attended)

    def traffic(self) -> StepTraffic:
        """Return what the prefetcher moves and rebuilds: the tiles alone decide it."""
        copies: list[float] = []
        rebuilds: list[float] = []
        for layer, tile_transfers in enumerate(self.layers):
            for tile_transfer in tile_transfers:
                copies += tile_transfer.copies(layer)
                rebuilds += tile_transfer.rebuilds()
        return StepTraffic(tuple(copies), tuple(rebuilds))

    def begin_checks(self, verifier: Verifier) -> list[Check]:
        """Begin to compare checksums of what the step reads; of shared chunks once."""
        read: dict[ArenaTensors, dict[StoredChunk, None]] = {}
        for sequence in self.sequences:
            chunks = read.setdefault(transfer_of(sequence).tensors, {})
            # Rows of a pool change: they have no checksum.
            sealed = [chunk for chunk in sequence.read_chunks if chunk.is_sealed]
            chunks.update(dict.fromkeys(sealed))
        begun = (verifier.begin(tensors, chunks) for tensors, chunks in read.items())
        return [check for check in begun if check is not None]

    def lost(self, checks: Iterable[Check]) -> list[LostSequence]:
        """Return the sequences that read a chunk which was replaced or is damaged.

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


def is_seen(window: Window, query_position: int, last_position: int) -> bool:
    """Return True if a query at `query_position` attends to any key up to `last_position`."""
    return window is None or query_position - last_position < window


def query_counts(decodes: Rows[Sequence]) -> list[int] | None:
    """Return how many rows each decoding sequence computes; None if all compute one."""
    if not any(sequence.drafts for sequence in decodes):
        return None
    return [1 + len(sequence.drafts) for sequence in decodes]


def transfer_of(sequence: Sequence) -> CacheTransfer:
    """Return the transfer of the arena that holds the sequence's chunks."""
    if sequence.transfer is None:
        raise RuntimeError("a streamed sequence without a mapped arena")
    return sequence.transfer

"""What one step reads by selection, and what selections are built from.

A sequence that selects attends rows of its stored tokens, which `SequenceReads` brings into device
pages, where a layer would else read all of them as tiles. While a layer computes, the rows of the
next one are chosen from the residual that enters it, and fetched. Before that, a decode step reads
everything: from the keys that pass, and the newest queries, the screens are built.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from splitpoint.observe.logs import for_request
from splitpoint.selection import SelectionUsage
from worker_service.device.upload import Upload
from worker_service.engine.sequence import Segment, Sequence
from worker_service.lanes.lanes import Event
from worker_service.model.model import CarryOut, Enter, Model
from worker_service.pipeline.executor import Attend
from worker_service.pipeline.tiles import Tile
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.retrieval.ahead import RowReader, RowsAhead
from worker_service.retrieval.sequence_reads import SequenceReads
from worker_service.selection.screen import OBSERVED_QUERIES
from worker_service.store.arena_tensors import StoredChunk

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reader(RowReader):
    """A decoding sequence that reads by selection; the row is its newest token's in the batch.

    Attributes:
        number: its place among the decoding sequences.
    """

    number: int
    sequence: Sequence

    def usage(self) -> SelectionUsage:
        """Return what the step has read, once it is done."""
        return usage_of(self.reads, range(self.position, self.position + 1))


def usage_of(reads: SequenceReads, positions: range) -> SelectionUsage:
    """Return what queries at these positions have read, which are all since the last call."""
    counts = reads.new_counts()
    visible = sum(positions) + len(positions)
    # The mean over layers and KV heads; several queries of a draft read what was chosen once.
    skipped = 1 - counts.read / counts.visible if counts.visible else 1.0
    return SelectionUsage(
        step_count=len(positions),
        visible_token_count=visible,
        read_token_count=visible - round(len(positions) * reads.stored_tokens * skipped),
        fetched_row_count=counts.fetched,
        reused_row_count=counts.reused,
        link_bytes=counts.link_bytes,
        evicted_token_count=counts.evicted,
        pool_bytes=reads.pool_bytes,
    )


@dataclass(frozen=True, slots=True)
class Build:
    """A decoding sequence that reads everything in this step, of which screens are built.

    Attributes:
        number: its place among the decoding sequences.
        chunks: all that it has in the store, in order, the first one's first token at `start`.
        position: of its newest token, which is computed in this step.
    """

    number: int
    reads: SequenceReads
    transfer: CacheTransfer
    chunks: list[StoredChunk]
    start: int
    position: int


@dataclass(frozen=True, slots=True)
class _Observed:
    """Rows [first, end) of the batch, whose queries a screen may learn from."""

    first: int
    end: int
    reads: SequenceReads


class SelectedStep:
    """The selections of one step.

    Attributes:
        readers: sequences that read by selection.
    """

    def __init__(
        self, readers: list[Reader], builds: list[Build], observed: list[_Observed], upload: Upload
    ) -> None:
        """`upload` sends the step's tables before anything of it runs."""
        self.readers = readers
        self._builds = builds
        self._observed = observed
        # A graph has no tables of rows that are read by selection.
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        if readers:
            rows = upload.table([each.row for each in readers])
            self._tables = rows, upload.table([each.position for each in readers])
        self._ahead: RowsAhead | None = None

    @classmethod
    def of(
        cls, decodes: Iterable[Sequence], segments: Iterable[Segment], chunk: int, upload: Upload
    ) -> SelectedStep:
        """Return the selections of a step that has these rows, of chunks of this many tokens."""
        readers: list[Reader] = []
        builds: list[Build] = []
        observed: list[_Observed] = []
        row = 0
        for number, sequence in enumerate(decodes):
            reads, end = sequence.reads, row + 1 + len(sequence.drafts)
            if reads is not None and reads.is_built and not _is_current(sequence, reads):
                with for_request(sequence.admission.request_id):
                    log.error("its screens are of other chunks than it has stored")
                reads.drop()
            if reads is not None and reads.is_built:
                if sequence.selects:
                    pages = upload.table(sequence.ranked_pages)
                    readers.append(Reader(row, sequence.computed, reads, pages, number, sequence))
            elif reads is not None:
                # Queries of drafts that may be wrong teach nothing.
                observed.append(_Observed(row, row + 1, reads))
                stored = sequence.stored_range
                taken = reads.building_bytes(len(stored) * chunk) + sum(
                    each.reads.building_bytes(len(each.chunks) * chunk) for each in builds
                )
                # One alone has room, or the sequence would not select.
                has_room = taken <= reads.building_room or not builds
                if stored and sequence.transfer is not None and has_room:
                    chunks = sequence.stored[stored.start : stored.stop]
                    start = stored.start * chunk
                    position = sequence.computed
                    builds.append(Build(number, reads, sequence.transfer, chunks, start, position))
            row = end
        for segment in segments:
            reads, end = segment.sequence.reads, row + segment.count
            if reads is not None and not reads.is_built:
                observed.append(_Observed(max(row, end - OBSERVED_QUERIES), end, reads))
            row = end
        return cls(readers, builds, observed, upload)

    @property
    def takes_part(self) -> bool:
        """True if the step reads by selection or builds screens: it takes another time."""
        return bool(self.readers or self._builds)

    def selecting(self, layer: int) -> frozenset[int]:
        """Return the numbers of the decoding sequences that read by selection in a layer."""
        return frozenset(each.number for each in self.readers if each.reads.selects(layer))

    # -- reading --------------------------------------------------------------------------

    def fetching(self, model: Model, carry_out: CarryOut) -> Enter | None:
        """Return what fetches rows of each layer ahead of it; None if there is nothing to fetch."""
        if self._tables is None:
            return None
        rows, positions = self._tables
        self._ahead = RowsAhead(model, self.readers, rows, positions, carry_out)
        return self._ahead.enter

    def arriving(self, layer: int) -> list[Event]:
        """Return the events before which the rows of a layer must not be attended."""
        return [] if self._ahead is None else self._ahead.arriving(layer)

    def drop(self) -> None:
        """Forget screens and rows of which the step, which failed, may have left a part out."""
        for reads in [each.reads for each in self.readers] + [each.reads for each in self._builds]:
            reads.drop()

    # -- building -------------------------------------------------------------------------

    def observe(self, layer: int, queries: torch.Tensor) -> None:
        """Remember what screens learn from: queries `[N, n_q, d]` of a layer, after RoPE."""
        for each in self._observed:
            each.reads.observe(layer, queries[each.first : each.end])

    def building(self, layer: int) -> LayerBuilds | None:
        """Return what collects a layer's tokens for screens; None if none is built."""
        builds = [build for build in self._builds if build.reads.selects(layer)]
        return LayerBuilds(layer, builds) if builds else None


class LayerBuilds:
    """K of one layer's stored tokens, collected from the tiles that pass."""

    def __init__(self, layer: int, builds: list[Build]) -> None:
        self._layer = layer
        self._builds = builds
        # `[chunks, C, n_kv, d]` for each.
        self._keys: dict[int, torch.Tensor] = {}

    def taking(self, tile: Tile, attend: Attend) -> Attend:
        """Return what attends a tile, and then takes its rows."""

        def call(keys: torch.Tensor, values: torch.Tensor) -> None:
            attend(keys, values)
            for build in self._builds:
                if not build.reads.selection.method.keeps_inputs:
                    self._take(build, tile, keys)

        return call

    def finish(self) -> None:
        """Build the screens, once all tiles of the layer have passed."""
        for build in self._builds:
            keys = self._keys.pop(build.number, None)
            build.reads.build(
                self._layer,
                torch.empty(0) if keys is None else keys.flatten(0, 1),
                build.transfer,
                build.chunks,
                build.start,
                position=build.position,
            )

    def _take(self, build: Build, tile: Tile, keys: torch.Tensor) -> None:
        """Copy K of a build's pages, from `[tile pages, n_kv, C, d]`."""
        _, heads, chunk, width = keys.shape
        if build.number not in self._keys:
            self._keys[build.number] = keys.new_empty((len(build.chunks), chunk, heads, width))
        collected = self._keys[build.number]
        for place, page in enumerate(tile.pages):
            if page.reader == build.number:
                index = (page.first_position - build.start) // chunk
                collected[index].copy_(keys[place].transpose(0, 1))


def _is_current(sequence: Sequence, reads: SequenceReads) -> bool:
    """Return True if the screens are of the tokens that the sequence has stored."""
    if sequence.has_pool:
        return True
    stored = sequence.stored_range
    return reads.chunks == sequence.stored[stored.start : stored.stop]

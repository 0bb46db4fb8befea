"""What one step reads by selection, and what selections are built from.

A sequence that selects attends rows of its stored tokens, which `SequenceReads` brings into device
pages, where a layer would else read all of them as tiles. While a layer computes, the rows of the
next one are chosen from the residual that enters it, and fetched. Before that, a decode step reads
everything: from the keys that pass, and the newest queries, the screens are built.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from splitpoint.planning.weight_schedule import WeightPiece
from worker_service.device.upload import Upload
from worker_service.engine.sequence import Segment, Sequence
from worker_service.lanes.lanes import Event
from worker_service.model.decoder import Decoder
from worker_service.model.rope import Rotary
from worker_service.pipeline.prefetch import Attend, Prefetcher
from worker_service.pipeline.tiles import Tile
from worker_service.retrieval.sequence_reads import OBSERVED_QUERIES, SequenceReads
from worker_service.selection.guess import guess_of
from worker_service.selection.screen import Guess
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk


@dataclass(frozen=True, slots=True)
class Reader:
    """A decoding sequence that reads by selection.

    Attributes:
        number: its place among the decoding sequences.
        row: of its newest token in the batch.
    """

    number: int
    row: int
    sequence: Sequence
    reads: SequenceReads


@dataclass(frozen=True, slots=True)
class Build:
    """A decoding sequence that reads everything in this step, of which screens are built.

    Attributes:
        number: its place among the decoding sequences.
        chunks: all that it has in the store, in order, the first one's first token at `start`.
    """

    number: int
    reads: SequenceReads
    tensors: ArenaTensors
    chunks: list[StoredChunk]
    start: int


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
        # Rows and positions of the readers' newest tokens, int64. A graph has no such tables.
        self._tables: list[torch.Tensor] = []
        if readers:
            self._tables = [
                upload.table([each.row for each in readers]),
                upload.table([each.sequence.computed for each in readers]),
            ]
        self._rotary: Rotary | None = None
        self._arrived: dict[int, list[Event]] = {}

    @classmethod
    def of(
        cls, decodes: Iterable[Sequence], segments: Iterable[Segment], chunk: int, upload: Upload
    ) -> SelectedStep:
        """Return the selections of a step that has these rows, of chunks of so many tokens."""
        readers: list[Reader] = []
        builds: list[Build] = []
        observed: list[_Observed] = []
        row = 0
        for number, sequence in enumerate(decodes):
            reads, end = sequence.reads, row + 1 + len(sequence.drafts)
            if reads is not None and reads.is_built:
                _check(sequence, reads)
                if sequence.selects:
                    readers.append(Reader(number, row, sequence, reads))
            elif reads is not None:
                # Queries of drafts that may be wrong teach nothing.
                observed.append(_Observed(row, row + 1, reads))
                if sequence.stored_range and sequence.transfer is not None:
                    stored, tensors = sequence.stored_range, sequence.transfer.tensors
                    chunks = sequence.stored[stored.start : stored.stop]
                    builds.append(Build(number, reads, tensors, chunks, stored.start * chunk))
            row = end
        for segment in segments:
            reads, end = segment.sequence.reads, row + segment.count
            if reads is not None and not reads.is_built:
                observed.append(_Observed(max(row, end - OBSERVED_QUERIES), end, reads))
            row = end
        return cls(readers, builds, observed, upload)

    def selecting(self, layer: int) -> frozenset[int]:
        """Return the numbers of the decoding sequences that read by selection in a layer."""
        return frozenset(each.number for each in self.readers if each.reads.selects(layer))

    # -- reading --------------------------------------------------------------------------

    def enter(
        self, model: Decoder, prefetcher: Prefetcher, index: int, hidden: torch.Tensor
    ) -> None:
        """Choose and fetch for the next layer, given the residual `[N, h]` that enters this one.

        What no earlier residual foretells is chosen when its layer begins: the first layer, and
        layers whose weights are on the host.
        """
        if not model.is_resident:
            self._begin(model, prefetcher, index, hidden)
            return
        if index == 0:
            self._begin(model, prefetcher, 0, hidden)
        if index + 1 < len(model.layers):
            self._begin(model, prefetcher, index + 1, hidden)

    def arrived(self, layer: int) -> list[Event]:
        """Return the events before the rows of a layer may be attended."""
        return self._arrived.pop(layer)

    def _begin(
        self, model: Decoder, prefetcher: Prefetcher, index: int, hidden: torch.Tensor
    ) -> None:
        readers = [each for each in self.readers if each.reads.selects(index)]
        if not readers:
            return
        layer = model.layers[index]
        layer.await_weights(WeightPiece.QUERY)
        rows, positions = self._tables
        if self._rotary is None:
            self._rotary = model.rotary(positions)

        def call() -> Guess:
            return guess_of(hidden.index_select(0, rows), layer, layer, self._rotary, 0)

        guess = prefetcher.compute("guess", index, call)
        places = {reader.number: place for place, reader in enumerate(self.readers)}
        self._arrived[index] = [
            reader.reads.begin(index, _of_row(guess, places[reader.number], reader.sequence))
            for reader in readers
        ]

    # -- building -------------------------------------------------------------------------

    def observe(self, layer: int, queries: torch.Tensor) -> None:
        """Remember what screens learn from: queries `[N, n_q, d]` of a layer, after RoPE."""
        for each in self._observed:
            each.reads.observe(layer, queries[each.first : each.end])

    def building(self, layer: int) -> LayerBuilds | None:
        """Return what collects K of a layer for screens; None if none is built."""
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
        """Return what attends a tile, and then takes its keys."""

        def call(keys: torch.Tensor, values: torch.Tensor) -> None:
            attend(keys, values)
            for build in self._builds:
                self._take(build, tile, keys)

        return call

    def finish(self) -> None:
        """Build the screens, once all tiles of the layer have passed."""
        for build in self._builds:
            keys = self._keys.pop(build.number)
            build.reads.build(
                self._layer, keys.flatten(0, 1), build.tensors, build.chunks, build.start
            )

    def _take(self, build: Build, tile: Tile, keys: torch.Tensor) -> None:
        """Copy K of a build's pages, from `[tile pages, n_kv, C, d]`."""
        if build.number not in self._keys:
            _, heads, chunk, width = keys.shape
            self._keys[build.number] = keys.new_empty((len(build.chunks), chunk, heads, width))
        collected = self._keys[build.number]
        for place, page in enumerate(tile.pages):
            if page.reader == build.number:
                index = (page.first_position - build.start) // keys.shape[2]
                collected[index].copy_(keys[place].transpose(0, 1))


def _of_row(guess: Guess, place: int, sequence: Sequence) -> Guess:
    """Return the guess of one sequence among those of all readers."""
    row = slice(place, place + 1)
    return Guess(guess.inputs[row], guess.queries[row], sequence.computed)


def _check(sequence: Sequence, reads: SequenceReads) -> None:
    """Raise RuntimeError unless the screens are of the tokens that the sequence has stored."""
    stored = sequence.stored_range
    if reads.chunks != sequence.stored[stored.start : stored.stop]:
        raise RuntimeError("a sequence's screens are of other chunks than it has stored")

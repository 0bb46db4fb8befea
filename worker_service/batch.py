"""One step's rows: what each token is, where its K and V go, what it attends to.

Rows are flat: first one for each decoding sequence, then the prompt tokens of
each prefill segment. Built once per step, used by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import cast

import torch

from splitpoint.errors import ChunkLost
from worker_service.attention import (
    Partial,
    decode_partial,
    prefill,
    prefill_partial,
    tile_rows,
)
from worker_service.attention_plan import DecodePlan, PrefillPlan
from worker_service.device_cache import DeviceCache
from worker_service.model.layer import DecoderLayer
from worker_service.puller import Puller, Tile, tiles
from worker_service.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[start, start + count)` of a sequence, computed in this step."""

    sequence: Sequence
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class InputRows:
    """Rows whose X is kept, and the X page and row each goes to."""

    index: torch.Tensor
    pages: torch.Tensor
    rows: torch.Tensor


class SequenceLost(Exception):
    """A chunk that this sequence reads from the store is gone; the step came to nothing."""

    def __init__(self, sequence: Sequence, cause: ChunkLost) -> None:
        super().__init__(cause.message)
        self.sequence = sequence


@dataclass(frozen=True, slots=True)
class StreamedDecode:
    """A decoding sequence whose front is in the store: its row, and its tiles."""

    sequence: Sequence
    row: int
    puller: Puller
    tiles: list[tuple[Tile, DecodePlan]]


@dataclass(frozen=True, slots=True)
class ResidentPrefill:
    first_row: int
    count: int
    plan: PrefillPlan


@dataclass(frozen=True, slots=True)
class StreamedPrefill:
    """New tokens after a prefix that is in the store up to `device_start`."""

    sequence: Sequence
    first_row: int
    count: int
    start: int
    puller: Puller
    tiles: list[Tile]
    device_start: int
    device_pages: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything a step needs beside the weights.

    Attributes:
        sequences, counts: who computes how many tokens; decodes first.
        token_ids, positions, pages, rows: int64 `[N]` per token.
        logit_rows: int64, the last row of each sequence that will have computed
            all it has, in order: those a token follows for.
    """

    sequences: list[Sequence]
    counts: list[int]
    token_ids: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    rows: torch.Tensor
    logit_rows: torch.Tensor
    inputs: InputRows | None
    decode_plan: DecodePlan | None
    streamed_decodes: list[StreamedDecode]
    prefills: list[ResidentPrefill | StreamedPrefill]

    def write(
        self,
        cache: DeviceCache,
        layer: int,
        inputs: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Put this step's K and V, and X where it is kept, into the cache."""
        cache.write(layer, self.pages, self.rows, keys, values)
        if self.inputs is not None:
            kept = inputs.index_select(0, self.inputs.index)
            cache.write_inputs(layer, self.inputs.pages, self.inputs.rows, kept)

    def attend(
        self,
        cache: DeviceCache,
        index: int,
        layer: DecoderLayer,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of all rows over the cache: `[N, n_q * d]`. Raises SequenceLost."""
        parts = []
        if self.decode_plan is not None:
            parts.append(self._attend_decodes(cache, index, layer, queries))
        for segment in self.prefills:
            span = slice(segment.first_row, segment.first_row + segment.count)
            if isinstance(segment, ResidentPrefill):
                attended = prefill(
                    queries[span],
                    keys[span],
                    values[span],
                    cache.keys[index],
                    cache.values[index],
                    segment.plan,
                    window=layer.window,
                    scale=layer.scale,
                )
            else:
                attended = _attend_streamed_prefill(cache, index, layer, queries[span], segment)
            parts.append(attended)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decodes(
        self, cache: DeviceCache, index: int, layer: DecoderLayer, queries: torch.Tensor
    ) -> torch.Tensor:
        if self.decode_plan is None:
            raise RuntimeError("no decoding sequence in this batch")
        queries = queries[: self.decode_plan.query_count]
        whole = decode_partial(
            queries,
            cache.keys[index],
            cache.values[index],
            self.decode_plan,
            window=layer.window,
            scale=layer.scale,
        )
        for streamed in self.streamed_decodes:
            row = slice(streamed.row, streamed.row + 1)
            puller = streamed.puller
            partial = Partial(whole.weighted[row], whole.peak[row], whole.total[row])
            for tile, plan in streamed.tiles:
                _stage(streamed.sequence, puller, index, tile)
                partial = partial.merge(
                    decode_partial(
                        queries[row],
                        puller.keys,
                        puller.values,
                        plan,
                        window=layer.window,
                        scale=layer.scale,
                    )
                )
            whole.weighted[row] = partial.weighted
            whole.peak[row] = partial.peak
            whole.total[row] = partial.total
        return whole.attended(queries.dtype)


def _stage(sequence: Sequence, puller: Puller, layer: int, tile: Tile) -> None:
    """One tile of one layer into the staging buffers. Raises SequenceLost."""
    try:
        puller.pull(layer, tile, puller.keys, puller.values, range(len(tile.chunks)))
    except ChunkLost as error:
        raise SequenceLost(sequence, error) from error


def _attend_streamed_prefill(
    cache: DeviceCache,
    index: int,
    layer: DecoderLayer,
    queries: torch.Tensor,
    segment: StreamedPrefill,
) -> torch.Tensor:
    """The device's own rows first, then the store's tiles, merged as they come."""
    row_count = segment.start + segment.count - segment.device_start
    partial = prefill_partial(
        queries,
        tile_rows(cache.keys[index].index_select(0, segment.device_pages), row_count),
        tile_rows(cache.values[index].index_select(0, segment.device_pages), row_count),
        query_position=segment.start,
        key_position=segment.device_start,
        window=layer.window,
        scale=layer.scale,
    )
    puller = segment.puller
    for tile in segment.tiles:
        count = len(tile.chunks)
        _stage(segment.sequence, puller, index, tile)
        rows = count * cache.layout.chunk_tokens
        partial = partial.merge(
            prefill_partial(
                queries,
                tile_rows(puller.keys[:count], rows),
                tile_rows(puller.values[:count], rows),
                query_position=segment.start,
                key_position=tile.first_token,
                window=layer.window,
                scale=layer.scale,
            )
        )
    return partial.attended(queries.dtype)


def build_batch(
    decodes: Rows[Sequence],
    segments: Rows[Segment],
    cache: DeviceCache,
    windows: set[int | None],
) -> Batch:
    """Lay out one step. Every sequence has pages for the tokens it computes."""
    return _Builder(cache, windows).build(decodes, segments)


class _Builder:
    def __init__(self, cache: DeviceCache, windows: set[int | None]) -> None:
        self._cache = cache
        self._chunk = cache.layout.chunk_tokens
        self._windows = windows
        self._device = cache.device

    def build(self, decodes: Rows[Sequence], segments: Rows[Segment]) -> Batch:
        pieces = [Segment(sequence, sequence.computed, 1) for sequence in decodes]
        pieces += segments
        token_ids: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        logit_rows: list[int] = []
        for piece in pieces:
            span = range(piece.start, piece.start + piece.count)
            token_ids += piece.sequence.tokens[span.start : span.stop]
            positions += span
            pages += [self._page(piece.sequence, position // self._chunk) for position in span]
            if span.stop == len(piece.sequence.tokens):
                logit_rows.append(len(positions) - 1)
        return Batch(
            sequences=[piece.sequence for piece in pieces],
            counts=[piece.count for piece in pieces],
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            pages=self._tensor(pages),
            rows=self._tensor([position % self._chunk for position in positions]),
            logit_rows=self._tensor(logit_rows),
            inputs=self._input_rows(pieces),
            decode_plan=self._decode_plan(decodes) if decodes else None,
            streamed_decodes=[
                self._streamed_decode(row, sequence)
                for row, sequence in enumerate(decodes)
                if sequence.stored_front
            ],
            prefills=self._prefills(segments, len(decodes)),
        )

    def _input_rows(self, pieces: Rows[Segment]) -> InputRows | None:
        index: list[int] = []
        pages: list[int] = []
        rows: list[int] = []
        first_row = 0
        for piece in pieces:
            if piece.sequence.input_pages:
                for offset in range(piece.count):
                    position = piece.start + offset
                    index.append(first_row + offset)
                    pages.append(piece.sequence.input_pages[position // self._chunk])
                    rows.append(position % self._chunk)
            first_row += piece.count
        if not index:
            return None
        return InputRows(self._tensor(index), self._tensor(pages), self._tensor(rows))

    def _decode_plan(self, decodes: Rows[Sequence]) -> DecodePlan:
        """All device pages of all decoding sequences, in one plan."""
        if not any(sequence.is_streamed for sequence in decodes):
            return DecodePlan.of_sequences(
                [cast(list[int], sequence.pages) for sequence in decodes],
                [sequence.computed + 1 for sequence in decodes],
                chunk_tokens=self._chunk,
                windows=self._windows,
                device=self._device,
            )
        pages: list[int] = []
        owners: list[int] = []
        first_positions: list[int] = []
        for owner, sequence in enumerate(decodes):
            for index in range(sequence.stored_front, len(sequence.pages)):
                pages.append(self._page(sequence, index))
                owners.append(owner)
                first_positions.append(index * self._chunk)
        return self._plan_of(
            pages, owners, first_positions, [sequence.computed for sequence in decodes]
        )

    def _plan_of(
        self, pages: list[int], owners: list[int], firsts: list[int], queries: list[int]
    ) -> DecodePlan:
        return DecodePlan.of_pages(
            pages,
            owners=owners,
            first_positions=firsts,
            query_positions=queries,
            chunk_tokens=self._chunk,
            windows=self._windows,
            device=self._device,
        )

    def _streamed_decode(self, row: int, sequence: Sequence) -> StreamedDecode:
        planned = []
        for tile in self._tiles(sequence):
            count = len(tile.chunks)
            firsts = [tile.first_token + index * self._chunk for index in range(count)]
            plan = self._plan_of(list(range(count)), [0] * count, firsts, [sequence.computed])
            planned.append((tile, plan))
        return StreamedDecode(sequence, row, self._puller_of(sequence), planned)

    def _prefills(
        self, segments: Rows[Segment], first_row: int
    ) -> list[ResidentPrefill | StreamedPrefill]:
        prefills: list[ResidentPrefill | StreamedPrefill] = []
        for segment in segments:
            sequence = segment.sequence
            if sequence.stored_front:
                prefills.append(self._streamed_prefill(segment, first_row))
            else:
                plan = PrefillPlan.of_prefix(
                    [page for page in sequence.pages if page is not None],
                    segment.start,
                    segment.count,
                    chunk_tokens=self._chunk,
                    windows=self._windows,
                    device=self._device,
                )
                prefills.append(ResidentPrefill(first_row, segment.count, plan))
            first_row += segment.count
        return prefills

    def _streamed_prefill(self, segment: Segment, first_row: int) -> StreamedPrefill:
        sequence = segment.sequence
        front = sequence.stored_front
        return StreamedPrefill(
            sequence=sequence,
            first_row=first_row,
            count=segment.count,
            start=segment.start,
            puller=self._puller_of(sequence),
            tiles=self._tiles(sequence),
            device_start=front * self._chunk,
            device_pages=self._tensor(
                [self._page(sequence, index) for index in range(front, len(sequence.pages))]
            ),
        )

    def _tiles(self, sequence: Sequence) -> list[Tile]:
        chunks = sequence.stored[: sequence.stored_front]
        return list(tiles(chunks, 0, sequence.admission.split_tokens, self._chunk))

    def _puller_of(self, sequence: Sequence) -> Puller:
        if sequence.puller is None:
            raise RuntimeError("a streamed sequence without a mapped arena")
        return sequence.puller

    def _page(self, sequence: Sequence, index: int) -> int:
        page = sequence.pages[index]
        if page is None:
            raise RuntimeError(f"chunk {index} is needed on the device but is in the store")
        return page

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

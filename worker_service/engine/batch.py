"""The rows of one step: token ids, where their K and V go, and what they attend.

Rows are flat: first those of each decoding sequence (its newest token, then its drafts),
then the prompt tokens of each prefill segment. Built once per step, used by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from worker_service.device.cache import DeviceCache
from worker_service.device.upload import Upload
from worker_service.engine.selected_step import SelectedStep
from worker_service.engine.sequence import Segment, Sequence, device_pages
from worker_service.engine.streamed_builder import StreamedBuilder
from worker_service.engine.streamed_step import StreamedPrefill, StreamedStep, query_counts
from worker_service.graphs.decode_graphs import DecodeGraphs, GraphSlot
from worker_service.kernels.row_wise import write
from worker_service.model.attention import decode, prefill
from worker_service.model.attention_plan import DecodePlan, PrefillPlan
from worker_service.model.model import Layer
from worker_service.model.span_attention import SpanView
from worker_service.pipeline.executor import Prefetcher, compute


@dataclass(frozen=True, slots=True)
class InputRows:
    """Rows whose X is kept, with the X page and row of each."""

    index: torch.Tensor
    pages: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class ResidentPrefill:
    first_row: int
    count: int
    plan: PrefillPlan


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything that a step needs beside the weights.

    Attributes:
        started: when its layout began, by `time.perf_counter`.
        sequences, counts: how many tokens each sequence computes; decodes first.
        token_ids, positions, pages, rows: int64 `[N]` per token.
        logit_rows: int64, the rows that tokens are chosen from, in order.
        logit_counts: how many of these each sequence has: none if it will not have computed
            all it has, else its last row, and those of its drafts.
        slot: the place of a step that a CUDA graph may compute, with padding rows behind the
            tokens' own; None: it is computed eagerly.
    """

    started: float
    sequences: list[Sequence]
    counts: list[int]
    token_ids: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    rows: torch.Tensor
    logit_rows: torch.Tensor
    logit_counts: list[int]
    inputs: InputRows | None
    decode_plan: DecodePlan | None
    streamed: StreamedStep | None
    prefills: list[ResidentPrefill | StreamedPrefill]
    selected: SelectedStep
    slot: GraphSlot | None = None

    @property
    def decode_count(self) -> int:
        return len(self.counts) - len(self.prefills)

    @property
    def graph_tables(self) -> list[torch.Tensor]:
        """All tables that the layers read."""
        tables = [self.token_ids, self.positions, self.pages, self.rows]
        if self.inputs is not None:
            tables += [self.inputs.index, self.inputs.pages, self.inputs.rows]
        if self.decode_plan is not None:
            for view in self.decode_plan.views.values():
                if isinstance(view, SpanView):
                    tables += view.tables
        return tables

    def write(
        self,
        cache: DeviceCache,
        layer: int,
        inputs: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write this step's K and V, and X where it is kept, into the cache."""
        planes = (cache.keys[layer], cache.values[layer])
        write(*planes, self.pages, self.rows, keys, values)
        if self.inputs is not None:
            kept = inputs.index_select(0, self.inputs.index)
            cache.write_inputs(layer, self.inputs.pages, self.inputs.rows, kept)

    def attend(
        self,
        cache: DeviceCache,
        index: int,
        layer: Layer,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        prefetcher: Prefetcher | None,
    ) -> torch.Tensor:
        """Return the attention of all rows over the cache: `[N, n_q * d]`.

        `prefetcher` brings what is in the store; None if nothing of the step is.
        """
        self.selected.observe(index, queries)
        parts = []
        if self.decode_plan is not None:
            parts.append(self._attend_decodes(cache, index, layer, queries, prefetcher))
        for segment in self.prefills:
            span = slice(segment.first_row, segment.first_row + segment.count)
            if isinstance(segment, ResidentPrefill):
                call = partial(
                    prefill,
                    queries[span],
                    keys[span],
                    values[span],
                    cache.keys[index],
                    cache.values[index],
                    segment.plan,
                    window=layer.window,
                    scale=layer.scale,
                    cap=layer.cap,
                    sinks=layer.sinks,
                )
                attended = compute(prefetcher, "attend", index, call)
            elif prefetcher is not None:
                attended = segment.attend(cache, prefetcher, index, layer, queries[span])
            else:
                raise RuntimeError("a streamed prefill needs a prefetcher")
            parts.append(attended)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decodes(
        self,
        cache: DeviceCache,
        index: int,
        layer: Layer,
        queries: torch.Tensor,
        prefetcher: Prefetcher | None,
    ) -> torch.Tensor:
        if self.decode_plan is None:
            raise RuntimeError("no decoding sequence in this batch")
        queries = queries[: self.decode_plan.query_count]
        if self.streamed is not None and prefetcher is not None:
            return self.streamed.attend_decodes(cache, prefetcher, index, layer, queries)
        planes = (cache.keys[index], cache.values[index])
        call = partial(decode, queries, *planes, self.decode_plan, layer)
        return compute(prefetcher, "attend", index, call)


def build_batch(
    decodes: Rows[Sequence],
    segments: Rows[Segment],
    cache: DeviceCache,
    windows: Rows[int | None],
    *,
    tile_pages: int,
    started: float,
    graphs: DecodeGraphs | None = None,
) -> Batch:
    """Lay out one step. Every sequence has pages for the tokens it computes.

    Args:
        windows: the window of each layer.
        tile_pages: pages of a streamed tile, if memory has room.
        started: see `Batch`.
        graphs: give steps that only decode from the device a place of their size.
    """
    slot = None
    if graphs is not None and not segments and not any(each.is_streamed for each in decodes):
        slot = graphs.slot(_row_lengths(decodes))
    return _Builder(cache, windows, tile_pages, slot).build(decodes, segments, started)


def _row_lengths(decodes: Rows[Sequence]) -> list[int]:
    """Return how many tokens each row of decoding sequences sees, its own included."""
    return [
        sequence.computed + 1 + row
        for sequence in decodes
        for row in range(1 + len(sequence.drafts))
    ]


class _Builder:
    def __init__(
        self,
        cache: DeviceCache,
        windows: Rows[int | None],
        tile_pages: int,
        slot: GraphSlot | None,
    ) -> None:
        self._cache = cache
        self._slot = slot
        self._chunk = cache.layout.chunk_tokens
        self._windows = set(windows)
        self._device = cache.device
        # All small tables of the step cross in one copy.
        self._upload = Upload(cache.device) if slot is None else slot.upload
        self._streamed = StreamedBuilder(cache, windows, tile_pages, self._upload)

    def build(self, decodes: Rows[Sequence], segments: Rows[Segment], started: float) -> Batch:
        pieces = [
            Segment(sequence, sequence.computed, 1 + len(sequence.drafts)) for sequence in decodes
        ]
        prefills = self._prefills(segments, sum(piece.count for piece in pieces))
        pieces += segments
        token_ids: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        logit_rows: list[int] = []
        logit_counts: list[int] = []
        for piece in pieces:
            span = range(piece.start, piece.start + piece.count)
            sequence = piece.sequence
            token_ids += sequence.tokens[span.start : span.stop]
            token_ids += sequence.drafts
            positions += span
            pages += [sequence.page(position // self._chunk) for position in span]
            count = 0
            if span.stop == len(sequence.tokens) + len(sequence.drafts):
                count = 1 + len(sequence.drafts)
                logit_rows += range(len(positions) - count, len(positions))
            logit_counts.append(count)
        if self._slot is not None:
            token_ids, positions = (self._slot.padded(each, 0) for each in (token_ids, positions))
            pages = self._slot.padded(pages, self._slot.page)
        decode_plan = self._decode_plan(decodes) if decodes else None
        selected = SelectedStep.of(decodes, segments, self._chunk, self._upload)
        batch = Batch(
            started=started,
            sequences=[piece.sequence for piece in pieces],
            counts=[piece.count for piece in pieces],
            token_ids=self._tensor(token_ids),
            positions=self._tensor(positions),
            pages=self._tensor(pages),
            rows=self._tensor([position % self._chunk for position in positions]),
            inputs=self._input_rows(pieces),
            decode_plan=decode_plan,
            streamed=self._streamed.step(
                decodes,
                decode_plan,
                [
                    (segment.sequence, prefill)
                    for segment, prefill in zip(segments, prefills, strict=True)
                    if isinstance(prefill, StreamedPrefill)
                ],
                selected,
            ),
            prefills=prefills,
            selected=selected,
            slot=self._slot,
            # Behind the tables that a graph reads, which keep their place.
            logit_rows=self._tensor(logit_rows),
            logit_counts=logit_counts,
        )
        self._upload.send()
        return batch

    def _input_rows(self, pieces: Rows[Segment]) -> InputRows | None:
        index: list[int] = []
        pages: list[int] = []
        rows: list[int] = []
        first_row = 0
        for piece in pieces:
            # X of a restore's front is in the store.
            if piece.sequence.input_pages and piece.sequence.restoring is None:
                for offset in range(piece.count):
                    position = piece.start + offset
                    index.append(first_row + offset)
                    pages.append(piece.sequence.input_pages[position // self._chunk])
                    rows.append(position % self._chunk)
            first_row += piece.count
        if self._slot is not None and self._cache.inputs:
            # A graph stores X of every row somewhere.
            kept = dict(zip(index, zip(pages, rows, strict=True), strict=True))
            index = list(range(self._slot.key.rows))
            places = [kept.get(row, (self._slot.input_page, 0)) for row in index]
            pages, rows = [page for page, _ in places], [row for _, row in places]
        if not index:
            return None
        return InputRows(self._tensor(index), self._tensor(pages), self._tensor(rows))

    def _decode_plan(self, decodes: Rows[Sequence]) -> DecodePlan:
        """Plan attention over all device pages of all decoding sequences, for all their rows."""
        if not any(sequence.is_streamed for sequence in decodes):
            # Each row is a query of its own length.
            page_tables = [
                cast(list[int], sequence.pages)
                for sequence in decodes
                for _ in range(1 + len(sequence.drafts))
            ]
            lengths = _row_lengths(decodes)
            if self._slot is not None:
                lengths = self._slot.padded(lengths, 1)
                page_tables += [[self._slot.page]] * (len(lengths) - len(page_tables))
            return DecodePlan.of_sequences(
                page_tables,
                lengths,
                chunk_tokens=self._chunk,
                windows=self._windows,
                device=self._device,
                upload=self._upload,
                padded_spans=None if self._slot is None else self._slot.spans,
            )
        pages, owners, first_positions = device_pages(decodes, self._chunk)
        return DecodePlan.of_pages(
            pages,
            owners=owners,
            first_positions=first_positions,
            query_positions=[sequence.computed for sequence in decodes],
            chunk_tokens=self._chunk,
            windows=self._windows,
            device=self._device,
            upload=self._upload,
            query_counts=query_counts(decodes),
        )

    def _prefills(
        self, segments: Rows[Segment], first_row: int
    ) -> list[ResidentPrefill | StreamedPrefill]:
        prefills: list[ResidentPrefill | StreamedPrefill] = []
        for segment in segments:
            sequence = segment.sequence
            if sequence.stored_range:
                prefills.append(self._streamed.prefill(segment, first_row))
            else:
                plan = PrefillPlan.of_prefix(
                    [page for page in sequence.pages if page is not None],
                    segment.start,
                    segment.count,
                    chunk_tokens=self._chunk,
                    windows=self._windows,
                    device=self._device,
                    upload=self._upload,
                )
                prefills.append(ResidentPrefill(first_row, segment.count, plan))
            first_row += segment.count
        return prefills

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return self._upload.table(values)

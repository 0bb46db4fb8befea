"""Brings an admitted sequence's prefix in: pages, the way that was planned, the account of it.

How bytes move is `restore.py`'s and `meeting.py`'s business; which requests run, and
when, the engine's. Belongs to the engine's thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from splitpoint.planning.planner import RestoreMethod
from splitpoint.planning.schedule import Lane
from splitpoint.shapes import chunks_of
from worker_service.device.cache import DeviceCache
from worker_service.device.cost_watch import CostWatch
from worker_service.engine.messages import RestoreEvent
from worker_service.engine.pages import PageManager
from worker_service.engine.sequence import Sequence
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.timeline import Span, Trace
from worker_service.model.decoder import Decoder
from worker_service.pipeline.both_ends import restore_from_both_ends
from worker_service.pipeline.gather import gatherer_of
from worker_service.pipeline.restore import Prefix, restore
from worker_service.pipeline.staging import Staging
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.client import Match
from worker_service.store.verifier import Verifier

# Pages of X in a tile where the plan leaves it to the worker.
TILE_PAGES = 4


@dataclass(slots=True)
class _Brought:
    """Tokens whose K and V came onto the device, by how, and what ran when."""

    loaded: int = 0
    rebuilt: int = 0
    recomputed: int = 0
    spans: list[Span] = field(default_factory=list)


class Restorer:
    """Restores of one device.

    Attributes:
        trace: gets the spans; None: nobody wants them.
        costs: learns from them and predicts; None: nobody measured any.
    """

    def __init__(
        self,
        model: Decoder,
        cache: DeviceCache,
        page_manager: PageManager,
        lanes: Lanes,
        staging: Staging,
        *,
        block_tokens: int,
        verifier: Verifier | None = None,
    ) -> None:
        self.trace: Trace | None = None
        self.costs: CostWatch | None = None
        self._model = model
        self._cache = cache
        self._page_manager = page_manager
        self._lanes = lanes
        self._staging = staging
        self._block_tokens = block_tokens
        self._verifier = verifier
        self._chunk = cache.layout.chunk_tokens
        self._gatherer = gatherer_of(cache.device)
        self._transfer: CacheTransfer | None = None

    def forget_arena(self) -> None:
        """Let go of the arena that was read last; sequences that still read it keep it."""
        self._transfer = None

    def restore(self, sequence: Sequence) -> RestoreEvent | None:
        """Bring the matched prefix in; None: there is no room for it yet. Raises ChunkLost.

        Whether its bytes are right is known once `sequence.check` was waited for.
        """
        match = sequence.match
        if match is None:
            sequence.restored = True
            return RestoreEvent(sequence.key, 0, 0, RestoreMethod.NONE, 0.0)
        started = time.perf_counter()
        # The last token is computed anew whatever is cached: its logits are needed.
        cached = min(match.cached_tokens, len(sequence.tokens) - 1)
        if cached % self._chunk and not self._page_manager.may_take_input_page:
            return None  # its tail needs an X page; write-back will give some back
        sequence.restored = True
        chunks = match.chunks[: chunks_of(cached, self._chunk)]
        split = min(sequence.admission.split_tokens, cached)
        predicted = self._predicted(sequence, self._transfer_for(match), split, cached)
        self._begin_check(sequence, match, chunks, cached)
        brought = self._bring_pages(sequence, match, chunks, cached, split)
        full = cached // self._chunk
        sequence.computed = cached
        sequence.stored = list(chunks[:full])
        sequence.written_chunks = full
        sequence.writes_back = True
        ended = time.perf_counter()
        self._learn(brought.spans)
        is_handed = sequence.admission.method is not RestoreMethod.TOKENS
        if self.costs is not None and cached and is_handed and not sequence.is_streamed:
            self.costs.took(ended - started, brought.spans, self._lanes.schedule)
        event = _report(sequence, cached, split, ended - started, brought, predicted)
        if cached and sequence.admission.spans is not None:
            sequence.admission.spans.restored(
                started,
                ended,
                brought.spans,
                method=event.method.value,
                cached_tokens=cached,
                split_tokens=split,
                recomputed_tokens=event.recomputed_tokens,
                predicted_seconds=predicted or None,
                measured_seconds=event.seconds,
            )
        return event

    def _begin_check(
        self, sequence: Sequence, match: Match, chunks: tuple[StoredChunk, ...], cached: int
    ) -> None:
        """Compare what comes onto the device; of a streamed prefix the steps compare the rest."""
        if self._verifier is None:
            return
        full = cached // self._chunk
        read = chunks
        if sequence.is_streamed:
            kept = max(sequence.kept_chunks, sequence.kept_inputs)
            read = (*chunks[: min(kept, full)], *chunks[full:])
        # The rows of a partial chunk are sealed anew with those that follow them.
        sequence.check = self._verifier.begin(match.connection.tensors, read, always=chunks[full:])

    def _bring_pages(
        self,
        sequence: Sequence,
        match: Match,
        chunks: tuple[StoredChunk, ...],
        cached: int,
        split: int,
    ) -> _Brought:
        """A resident prefix comes in whole; of a streamed one what stays on the device."""
        transfer = sequence.transfer = self._transfer_for(match)
        full = cached // self._chunk
        stored = range(0)
        if sequence.is_streamed:
            stored = range(min(sequence.kept_chunks, full), full)
        self._page_manager.take_for_prefix(sequence, stored, len(chunks))
        front = stored.start * self._chunk
        ends = [(0, front), (stored.stop, cached)] if stored else [(0, cached)]
        brought = _Brought()
        for first, end in ends:
            listed = chunks[: chunks_of(end, self._chunk)]
            part = Prefix(listed, first, sequence.pages, sequence.tokens, end, min(split, end))
            self._bring_in(sequence, transfer, part, brought)
        kept = chunks[: min(sequence.kept_inputs, full)]
        brought.spans += self._bring_inputs(sequence, transfer, kept)
        if cached % self._chunk and self._cache.inputs:
            # The tail's chunk will be sealed anew with more tokens, X included.
            page = self._page_manager.take_input_page(sequence, full)
            for work in transfer.send_inputs(chunks[full:], self._cache.inputs, [page]):
                self._lanes.run(Lane.LINK_IN, work)
            brought.spans += self._lanes.finish()
            transfer.tensors.check_current(chunks[full:])
        return brought

    def _bring_inputs(
        self, sequence: Sequence, transfer: CacheTransfer, chunks: tuple[StoredChunk, ...]
    ) -> list[Span]:
        """X of the first chunks, to stay on the device. Raises ChunkLost."""
        if not chunks:
            return []
        self._page_manager.take_row_pages(sequence, len(chunks))
        rooms = [self._cache.inputs_in_pages(layer) for layer in range(len(self._model.layers))]
        for half in (0, 1):
            some = chunks[half::2]
            pages = sequence.row_pages[: len(some)]
            for work in transfer.send_inputs(some, [room[half] for room in rooms], pages):
                self._lanes.run(Lane.LINK_IN, work)
        spans = self._lanes.finish()
        transfer.tensors.check_current(chunks)
        return spans

    def _bring_in(
        self, sequence: Sequence, transfer: CacheTransfer, prefix: Prefix, brought: _Brought
    ) -> None:
        """K and V of the prefix into its pages, by the method that was planned."""
        first, end = prefix.first_chunk * self._chunk, prefix.cached_tokens
        admission, keys, values = sequence.admission, self._cache.keys, self._cache.values
        if admission.method is RestoreMethod.TOKENS:
            met = restore_from_both_ends(
                transfer,
                self._lanes,
                prefix,
                keys,
                values,
                block_tokens=self._block_tokens,
                expected_tokens=admission.recomputed_tokens,
            )
            brought.recomputed += met.recomputed_tokens
            brought.loaded += end - met.recomputed_tokens
            brought.spans += met.spans
            return
        tile = self._tile_tokens(sequence)
        brought.spans += restore(transfer, self._lanes, prefix, keys, values, tile_tokens=tile)
        rebuilt = max(0, prefix.split_tokens - first)
        brought.rebuilt += rebuilt
        brought.loaded += end - first - rebuilt

    def _tile_tokens(self, sequence: Sequence) -> int:
        return sequence.admission.tile_tokens or TILE_PAGES * self._chunk

    def _predicted(
        self, sequence: Sequence, transfer: CacheTransfer, split: int, cached: int
    ) -> float:
        """Seconds for what was found; 0: nothing is predicted of what streams instead."""
        if self.costs is None or sequence.is_streamed or not cached:
            return 0.0
        if sequence.admission.method is RestoreMethod.TOKENS:
            return sequence.admission.predicted_restore_seconds
        # What the staging memory makes of the tile that was asked for.
        transfer.divide(self._tile_tokens(sequence))
        return self.costs.restore_seconds(
            self._model.shape,
            self._cache.layout,
            split=split,
            cached=cached,
            schedule=self._lanes.schedule,
            tile_tokens=transfer.tile_tokens,
            slots=transfer.slot_count,
            extra_operations=len(self._cache.inputs) if cached % self._chunk else 0,
        )

    def _learn(self, spans: list[Span]) -> None:
        if self.trace is not None:
            self.trace.extend(spans)
        if self.costs is not None:
            self.costs.restored(spans)

    def _transfer_for(self, match: Match) -> CacheTransfer:
        """One for each mapped arena; in practice one until the store restarts."""
        tensors = match.connection.tensors
        if self._transfer is None or self._transfer.tensors is not tensors:
            self._transfer = CacheTransfer(self._model, tensors, self._staging, self._gatherer)
        return self._transfer


def _report(
    sequence: Sequence,
    cached: int,
    split: int,
    seconds: float,
    brought: _Brought,
    predicted: float,
) -> RestoreEvent:
    link = [span for span in brought.spans if span.lane is Lane.LINK_IN]
    compute = [span for span in brought.spans if span.lane is Lane.COMPUTE]
    return RestoreEvent(
        sequence.key,
        cached,
        split,
        _method_of(sequence.admission.method, split, cached),
        seconds,
        recomputed_tokens=brought.recomputed,
        predicted_seconds=predicted,
        link_bytes=int(sum(span.amount for span in link)),
        link_busy_seconds=sum(span.seconds for span in link),
        compute_busy_seconds=sum(span.seconds for span in compute),
        loaded_tokens=brought.loaded,
        rebuilt_tokens=brought.rebuilt,
    )


def _method_of(planned: RestoreMethod, split: int, cached: int) -> RestoreMethod:
    """What a restore did, from what was asked for and what was there."""
    if cached and planned is RestoreMethod.TOKENS:
        return planned
    return RestoreMethod.of(split, cached)

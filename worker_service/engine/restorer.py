"""Restores the cached prefix of an admitted sequence: pages, then K and V, then X.

`pipeline/` moves the bytes; the engine decides which requests run, and when. Used by the
engine's thread only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from splitpoint.planning.plan import RestoreMethod
from splitpoint.planning.schedule import Lane
from splitpoint.planning.split_costs import PipelineOptions, SplitCosts
from splitpoint.shapes import chunks_of
from worker_service.device.cache import DeviceCache
from worker_service.engine.cost_watch import Observers
from worker_service.engine.messages import RestoreEvent
from worker_service.engine.pages import PageManager
from worker_service.engine.sequence import Sequence
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.timeline import Span
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
class _Restore:
    """One restore: what is wanted, and what was done so far.

    Attributes:
        chunks: the chunks of the prefix, the partial last one included.
        cached_tokens: tokens of the prefix; [0, split_tokens) is rebuilt, except those of
            `first_chunk`.
        first_chunk: the chunks before it were on the device.
        full_count: full chunks.
        stored: full chunks of a streamed sequence that stay in the store.
        loaded, rebuilt, recomputed: tokens whose K and V came onto the device, by method.
    """

    sequence: Sequence
    transfer: CacheTransfer
    chunks: tuple[StoredChunk, ...]
    cached_tokens: int
    split_tokens: int
    tile_tokens: int
    first_chunk: int
    full_count: int
    stored: range
    loaded: int = 0
    rebuilt: int = 0
    recomputed: int = 0
    spans: list[Span] = field(default_factory=list)

    @property
    def tail(self) -> tuple[StoredChunk, ...]:
        """The partial last chunk, if there is one."""
        return self.chunks[self.full_count :]

    @property
    def device_end(self) -> int:
        """Tokens of the chunks that were on the device."""
        return self.first_chunk * self.transfer.chunk_tokens

    @property
    def reported_split(self) -> int:
        """The split, if anything is rebuilt before it."""
        return self.split_tokens if self.split_tokens > self.device_end else 0

    @property
    def missing_tokens(self) -> int:
        """Cached tokens that were not on the device."""
        return max(0, self.cached_tokens - self.sequence.device_tokens)

    @property
    def planned_method(self) -> RestoreMethod:
        """The planned method; a prefix is restored from both ends only as a whole."""
        method = self.sequence.admission.method
        if method is RestoreMethod.TOKENS and self.first_chunk:
            return self._split_method
        return method

    @property
    def _split_method(self) -> RestoreMethod:
        here = self.device_end
        return RestoreMethod.of(max(0, self.split_tokens - here), self.cached_tokens - here)

    @property
    def method(self) -> RestoreMethod:
        """What the restore does, from what was planned and what was found."""
        if not self.missing_tokens:
            return RestoreMethod.NONE
        if self.planned_method is RestoreMethod.TOKENS:
            return self.planned_method
        return self._split_method


class Restorer:
    """Restores prefixes on one device."""

    def __init__(
        self,
        model: Decoder,
        cache: DeviceCache,
        page_manager: PageManager,
        lanes: Lanes,
        staging: Staging,
        observers: Observers,
        *,
        block_tokens: int,
        verifier: Verifier | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._page_manager = page_manager
        self._lanes = lanes
        self._staging = staging
        self._observers = observers
        self._block_tokens = block_tokens
        self._verifier = verifier
        self._chunk = cache.layout.chunk_tokens
        self._gatherer = gatherer_of(cache.device)
        self._transfer: CacheTransfer | None = None

    def forget_arena(self) -> None:
        """Drop the arena that was read last; sequences that still read it keep it."""
        self._transfer = None

    def restore(self, sequence: Sequence) -> RestoreEvent | None:
        """Restore the matched prefix; None if there is no room for it yet. Raises ChunkLost.

        Whether its bytes are right is known once `sequence.check` was waited for.
        """
        if sequence.match is not None and not self._page_manager.has_input_page:
            return None  # for a partial last chunk, or the next one; write-back will free one
        started = time.perf_counter()
        self._page_manager.take_prefix(sequence)
        sequence.restored = True
        if sequence.match is None:
            here = sequence.device_tokens
            return RestoreEvent(sequence.key, here, 0, RestoreMethod.NONE, 0.0, device_tokens=here)
        work = self._begin(sequence, sequence.match)
        sequence.transfer = work.transfer
        predicted = self._predict(work)
        self._begin_check(work)
        self._allocate_pages(work)
        self._copy_kv(work)
        self._copy_inputs(work)
        sequence.computed = max(work.cached_tokens, sequence.device_tokens)
        sequence.stored = list(work.chunks[: work.full_count])
        sequence.written_chunks = work.full_count
        sequence.writes_back = True
        return self._report(work, started, predicted)

    def _begin(self, sequence: Sequence, match: Match) -> _Restore:
        admission = sequence.admission
        # The last token is always computed: its logits are needed.
        cached = min(match.cached_tokens, len(sequence.tokens) - 1)
        full = cached // self._chunk
        stored = range(0)
        if sequence.is_streamed:
            stored = range(min(sequence.kept_chunks, full), full)
        first = min(sequence.checked_chunks, full)
        here = first * self._chunk
        split = min(admission.split_tokens, cached)
        if here:
            # The planned share of what is missing.
            split = here + split * (cached - here) // cached
        chunks = match.chunks[: chunks_of(cached, self._chunk)]
        if sequence.device_tokens >= cached:
            chunks = chunks[:full]
        return _Restore(
            sequence,
            self._transfer_for(match),
            chunks,
            cached,
            split,
            admission.tile_tokens or TILE_PAGES * self._chunk,
            first,
            full,
            stored,
        )

    def _transfer_for(self, match: Match) -> CacheTransfer:
        """Return the transfer of the mapped arena; there is one until the store restarts."""
        tensors = match.connection.tensors
        if self._transfer is None or self._transfer.tensors is not tensors:
            self._transfer = CacheTransfer(self._model, tensors, self._staging, self._gatherer)
        return self._transfer

    def _begin_check(self, work: _Restore) -> None:
        """Compare checksums of what comes onto the device; steps compare what they stream."""
        sequence, read = work.sequence, work.chunks[work.first_chunk :]
        if sequence.is_streamed:
            kept = max(sequence.kept_chunks, sequence.kept_inputs)
            read = (*read[: min(kept, work.full_count)], *work.tail)
        if self._verifier is not None:
            # The rows of a partial chunk are sealed anew with those that follow them.
            sequence.check = self._verifier.begin(work.transfer.tensors, read, always=work.tail)
        compared = () if sequence.check is None else sequence.check.chunks
        unsure = (index for index, chunk in enumerate(read) if chunk not in compared)
        offset = next(unsure, None)
        sequence.first_unsure_chunk = None if offset is None else work.first_chunk + offset

    # -- the three steps ------------------------------------------------------------

    def _allocate_pages(self, work: _Restore) -> None:
        """Allocate pages for all that comes onto the device."""
        sequence = work.sequence
        self._page_manager.allocate_prefix(sequence, work.stored, len(work.chunks))
        kept_inputs = min(sequence.kept_inputs, work.full_count)
        self._page_manager.allocate_row_pages(sequence, kept_inputs)
        if work.tail and self._cache.inputs:
            self._page_manager.allocate_input_page(sequence, work.full_count)

    def _copy_kv(self, work: _Restore) -> None:
        """Bring K and V: a resident prefix whole, of a streamed one both ends that stay."""
        sequence, stored = work.sequence, work.stored
        ends = [(work.first_chunk, work.cached_tokens)] if work.missing_tokens else []
        if stored:
            ends = [(0, stored.start * self._chunk), (stored.stop, work.cached_tokens)]
        for first_chunk, end in ends:
            prefix = Prefix(
                work.chunks[: chunks_of(end, self._chunk)],
                first_chunk,
                sequence.pages,
                sequence.tokens,
                end,
                min(work.split_tokens, end),
            )
            if work.planned_method is RestoreMethod.TOKENS:
                self._restore_from_both_ends(work, prefix)
            else:
                self._restore_split(work, prefix)

    def _restore_split(self, work: _Restore, prefix: Prefix) -> None:
        """Rebuild K and V up to the split point, and load the rest."""
        cache = self._cache
        work.spans += restore(
            work.transfer,
            self._lanes,
            prefix,
            cache.keys,
            cache.values,
            tile_tokens=work.tile_tokens,
        )
        first = prefix.first_chunk * self._chunk
        rebuilt = max(0, prefix.split_tokens - first)
        work.rebuilt += rebuilt
        work.loaded += prefix.cached_tokens - first - rebuilt

    def _restore_from_both_ends(self, work: _Restore, prefix: Prefix) -> None:
        """Recompute K and V from token ids at the front while the back is loaded."""
        restored = restore_from_both_ends(
            work.transfer,
            self._lanes,
            prefix,
            self._cache.keys,
            self._cache.values,
            block_tokens=self._block_tokens,
            expected_tokens=work.sequence.admission.recomputed_tokens,
        )
        work.spans += restored.spans
        work.recomputed += restored.recomputed_tokens
        work.loaded += prefix.cached_tokens - restored.recomputed_tokens

    def _copy_inputs(self, work: _Restore) -> None:
        """Bring X that stays on the device: of the kept chunks, and of the partial last one."""
        sequence, cache, transfer = work.sequence, self._cache, work.transfer
        if not cache.inputs:
            return
        copies = []
        kept = work.chunks[: min(sequence.kept_inputs, work.full_count)]
        if kept:
            planes = [cache.inputs_in_pages(layer) for layer in range(len(self._model.layers))]
            for half in (0, 1):
                chunks = kept[half::2]
                targets = [plane[half] for plane in planes]
                copies += transfer.send_inputs(chunks, targets, sequence.row_pages[: len(chunks)])
        if work.tail:
            # The chunk will be sealed anew with more tokens, X included.
            page = sequence.input_pages[work.full_count]
            copies += transfer.send_inputs(work.tail, cache.inputs, [page])
        if copies:
            for copy in copies:
                self._lanes.run(Lane.LINK_IN, copy)
            work.spans += self._lanes.finish()
            transfer.tensors.check_current((*kept, *work.tail))

    # -- prediction and report --------------------------------------------------------

    def _predict(self, work: _Restore) -> float:
        """Return the seconds that the restore should take; 0 if the prefix is streamed."""
        sequence, costs = work.sequence, self._observers.costs
        if costs is None or sequence.is_streamed or not work.missing_tokens:
            return 0.0
        if work.planned_method is RestoreMethod.TOKENS:
            return sequence.admission.predicted_restore_seconds
        # The staging memory may shrink the tile.
        work.transfer.divide(work.tile_tokens)
        options = PipelineOptions(
            self._lanes.schedule,
            work.transfer.tile_tokens,
            work.transfer.slot_count,
            extra_operations=len(self._cache.inputs) if work.tail else 0,
            chunk_tokens=self._chunk,
        )
        split_costs = SplitCosts.of(self._model.shape, costs.fits, self._cache.layout.encoding)
        rebuilt = max(0, work.split_tokens - work.device_end)
        return split_costs.seconds(rebuilt, work.missing_tokens, options)

    def _report(self, work: _Restore, started: float, predicted: float) -> RestoreEvent:
        """Let the costs learn from the restore, and return its event."""
        ended = time.perf_counter()
        sequence, missing = work.sequence, work.missing_tokens
        cached = max(work.cached_tokens, sequence.device_tokens)
        link = [span for span in work.spans if span.lane is Lane.LINK_IN]
        compute = [span for span in work.spans if span.lane is Lane.COMPUTE]
        event = RestoreEvent(
            sequence.key,
            cached,
            work.reported_split,
            work.method,
            ended - started,
            recomputed_tokens=work.recomputed,
            predicted_restore_seconds=predicted,
            link_bytes=int(sum(span.amount for span in link)),
            link_busy_seconds=sum(span.seconds for span in link),
            compute_busy_seconds=sum(span.seconds for span in compute),
            loaded_tokens=work.loaded,
            rebuilt_tokens=work.rebuilt,
            device_tokens=sequence.device_tokens,
        )
        trace, costs = self._observers.trace, self._observers.costs
        if trace is not None:
            trace.extend(work.spans)
        if costs is not None:
            costs.restored(work.spans)
            by_split = work.planned_method is not RestoreMethod.TOKENS
            if missing and by_split and not sequence.is_streamed:
                costs.took(event.restore_seconds, work.spans, self._lanes.schedule)
        if missing and sequence.spans is not None:
            sequence.spans.restored(
                started,
                ended,
                work.spans,
                method=event.method.value,
                cached_tokens=cached,
                split_tokens=work.split_tokens,
                recomputed_tokens=work.recomputed,
                predicted_seconds=predicted or None,
                measured_seconds=event.restore_seconds,
            )
        return event

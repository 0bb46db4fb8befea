"""Restores the cached prefixes of admitted sequences, beside the steps of others.

A restore is a stage of its sequence (`sequence.restoring`). The link draws its copies by
itself; the restorer computes its products between steps, for a share of the time while other
requests run, and tells the engine when it is over. It never waits for a lane. `pipeline/`
moves the bytes; the engine decides which requests run, and when. Used by the engine's thread
only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Rows

from splitpoint.errors import SplitpointError
from splitpoint.planning.plan import RestoreMethod
from splitpoint.planning.schedule import Lane
from splitpoint.planning.split_costs import PipelineOptions, SplitCosts
from splitpoint.shapes import chunks_of
from worker_service.device.cache import DeviceCache
from worker_service.engine.messages import RestoreEvent
from worker_service.engine.pages import PageManager
from worker_service.engine.sequence import Sequence, Stage
from worker_service.lanes.cost_watch import Observers
from worker_service.lanes.groups import Claim, ComputeShare, by_claim
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.work import Work
from worker_service.model.model import Model
from worker_service.pipeline.executor import PIECE_BYTES, RestoreRun
from worker_service.pipeline.gather import gatherer_of
from worker_service.pipeline.restore_state import Restoring, Wanted
from worker_service.pipeline.staging import Staging
from worker_service.pipeline.task_work import Prefix, Target
from worker_service.pipeline.transfer import CacheTransfer, Part
from worker_service.pipeline.two_ends import TwoEnds
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.client import Match
from worker_service.store.verifier import Check, Verifier

# Pages of X in a tile where the plan leaves it to the worker.
TILE_PAGES = 4
# Seconds that products are computed for at once if nothing else can run: commands wait.
_SLICE_SECONDS = 0.01
# Seconds that one copy of a restore takes at most: a step's copies wait for it.
_PIECE_SECONDS = 5e-3
_LEAST_PIECE_BYTES = 1 << 20
_MOST_PIECE_BYTES = 16 << 20
# Rates for the claims of restores while the worker has measured none; only ratios count.
_LINK_RATE, _FLOP_RATE = 1e10, 1e12


class Restorer:
    """Restores prefixes on one device.

    Attributes:
        has_more: products are ready that the last `advance` had no time for.
    """

    def __init__(
        self,
        model: Model,
        cache: DeviceCache,
        page_manager: PageManager,
        lanes: Lanes,
        staging: Staging,
        observers: Observers,
        *,
        block_tokens: int,
        on_change: Callable[[], None],
        verifier: Verifier | None = None,
    ) -> None:
        """`on_change` is called from any thread whenever a restore got further."""
        self.has_more = False
        self._model = model
        self._cache = cache
        self._page_manager = page_manager
        self._lanes = lanes
        self._staging = staging
        self._observers = observers
        self._block_tokens = block_tokens
        self._on_change = on_change
        self._verifier = verifier
        self._chunk = cache.layout.chunk_tokens
        self._gatherer = gatherer_of(cache.device)
        self._transfer: CacheTransfer | None = None
        self._compute_share = ComputeShare()
        self._advanced = time.perf_counter()
        # The restore that may use the X memory of restores.
        self._slot_holder: RestoreRun | None = None

    def forget_arena(self) -> None:
        """Drop the arena that was read last; sequences that still read it keep it."""
        self._transfer = None

    # -- begin ----------------------------------------------------------------------

    def begin(self, sequence: Sequence) -> RestoreEvent | None:
        """Begin to restore the matched prefix, if there is room for it.

        Returns an event at once if the store was not asked for a prefix.
        """
        if sequence.match is not None and not self._page_manager.has_input_page:
            return None  # for a partial last chunk, or the next one; write-back will free one
        self._page_manager.take_prefix(sequence)
        if sequence.match is None:
            sequence.enter(Stage.RUNNING)
            here = sequence.device_tokens
            return RestoreEvent(sequence.key, here, 0, RestoreMethod.NONE, 0.0, device_tokens=here)
        wanted = self._wanted(sequence, sequence.match)
        sequence.transfer = wanted.transfer
        first_use = self._cache.first_use_bytes
        self._allocate_pages(sequence, wanted)
        first_use = self._cache.first_use_bytes - first_use
        read, check = self._begin_check(sequence, wanted)
        ends = self._ends_of(sequence, wanted)
        run = self._run_of(sequence, wanted, ends)
        predicted = self._predicted(sequence, wanted, run)
        sequence.restoring = Restoring(run, wanted, read, predicted, check, ends, first_use)
        sequence.enter(Stage.RESTORING)
        if self._lanes.overlapping:
            run.begin()
            return None
        # The serial twin: everything at once, in order.
        run.lend_slots()
        run.begin()
        while run.compute() is not None:
            continue
        return None

    def _wanted(self, sequence: Sequence, match: Match) -> Wanted:
        """Return what is to come onto the device."""
        admission = sequence.admission
        # The last token is always computed: its logits are needed.
        cached = min(match.cached_tokens, len(sequence.tokens) - 1)
        full = cached // self._chunk
        stored = self._page_manager.stored_chunks(sequence, full)
        first = min(sequence.checked_chunks, full)
        here = first * self._chunk
        split = min(admission.split_tokens, cached)
        if here:
            # The planned share of what is missing.
            split = here + split * (cached - here) // cached
        chunks = match.chunks[: chunks_of(cached, self._chunk)]
        if sequence.device_tokens >= cached:
            chunks = chunks[:full]
        from_both_ends = (
            admission.method is RestoreMethod.TOKENS
            and not sequence.is_streamed
            # The device may hold more than the store; then nothing is left to compute here.
            and sequence.device_tokens < cached
        )
        return Wanted(
            self._transfer_for(match),
            chunks,
            cached,
            split,
            first,
            full,
            stored,
            max(0, cached - sequence.device_tokens),
            from_both_ends=from_both_ends,
        )

    def _transfer_for(self, match: Match) -> CacheTransfer:
        """Return the transfer of the mapped arena; there is one until the store restarts."""
        tensors = match.connection.tensors
        if self._transfer is None or self._transfer.tensors is not tensors:
            self._transfer = CacheTransfer(self._model, tensors, self._staging, self._gatherer)
        return self._transfer

    def _allocate_pages(self, sequence: Sequence, wanted: Wanted) -> None:
        """Allocate pages for all that comes onto the device."""
        full = wanted.full_count
        self._page_manager.allocate_prefix(sequence, wanted.stored, len(wanted.chunks))
        self._page_manager.allocate_row_pages(sequence)
        self._page_manager.allocate_selection(sequence)
        if wanted.tail and self._cache.inputs:
            self._page_manager.allocate_input_page(sequence, full)

    def _begin_check(
        self, sequence: Sequence, wanted: Wanted
    ) -> tuple[tuple[StoredChunk, ...], Check | None]:
        """Compare checksums of what comes onto the device; steps compare what they stream.

        Returns the chunks that come, and the comparison; None if nothing is due.
        """
        read = wanted.chunks[wanted.first_chunk :]
        if wanted.stored:
            front = max(wanted.stored.start, min(sequence.kept_inputs, wanted.full_count))
            read = (*read[:front], *read[max(front, wanted.stored.stop) :])
        check = None
        if self._verifier is not None:
            # The rows of a partial chunk are sealed anew with those that follow them.
            check = self._verifier.begin(wanted.transfer.tensors, read, always=wanted.tail)
        if check is not None:
            check.call_when_done(self._on_change)
        compared = () if check is None else check.chunks
        unsure = (index for index, chunk in enumerate(read) if chunk not in compared)
        offset = next(unsure, None)
        sequence.first_unsure_chunk = None if offset is None else wanted.first_chunk + offset
        return read, check

    def _ends_of(self, sequence: Sequence, wanted: Wanted) -> TwoEnds | None:
        """Return the two ends of a prefix whose front is computed; None for another prefix."""
        if not wanted.from_both_ends:
            return None
        return TwoEnds.over_link(
            first_chunk=wanted.first_chunk,
            cached_tokens=wanted.cached_tokens,
            chunk_tokens=self._chunk,
            block_tokens=self._block_tokens,
            expected_tokens=sequence.admission.recomputed_tokens,
            in_turn=not self._lanes.overlapping,
        )

    def _run_of(self, sequence: Sequence, wanted: Wanted, ends: TwoEnds | None) -> RestoreRun:
        """Return the pieces of a restore."""
        admission, target = sequence.admission, Target(self._cache.keys, self._cache.values)
        end = wanted.cached_tokens
        if wanted.stored:
            end = wanted.stored.start * self._chunk
        prefix = Prefix(
            wanted.chunks[: chunks_of(end, self._chunk)] if wanted.missing_tokens else (),
            wanted.first_chunk,
            sequence.pages,
            sequence.tokens,
            end if wanted.missing_tokens else wanted.first_chunk * self._chunk,
            min(wanted.split_tokens, end),
        )
        return RestoreRun(
            wanted.transfer,
            self._lanes,
            prefix,
            target,
            tile_tokens=admission.tile_tokens or TILE_PAGES * self._chunk,
            ends=ends,
            copies=self._copies(sequence, wanted),
            piece_bytes=self._piece_bytes(),
            on_change=self._on_change,
        )

    def _predicted(self, sequence: Sequence, wanted: Wanted, run: RestoreRun) -> float:
        """Return the seconds that the restore should take; 0 if the prefix is streamed."""
        costs = self._observers.costs
        if costs is None or sequence.is_streamed or not wanted.missing_tokens:
            return 0.0
        if wanted.from_both_ends:
            # The plan was for the whole prefix.
            return 0.0 if wanted.first_chunk else sequence.admission.predicted_restore_seconds
        options = PipelineOptions(
            self._lanes.schedule,
            run.slots.slot_pages * self._chunk,
            run.slots.count,
            extra_operations=len(self._cache.inputs) if wanted.tail else 0,
            chunk_tokens=self._chunk,
        )
        split_costs = SplitCosts.of(self._model.shape, costs.fits, self._cache.layout.encoding)
        rebuilt = max(0, wanted.split_tokens - wanted.first_chunk * self._chunk)
        return split_costs.seconds(rebuilt, wanted.missing_tokens, options)

    def _piece_bytes(self) -> int:
        costs = self._observers.costs
        if costs is None:
            return PIECE_BYTES
        wanted = int(_PIECE_SECONDS * costs.fits.link_bytes_per_second)
        return min(max(wanted, _LEAST_PIECE_BYTES), _MOST_PIECE_BYTES)

    def _copies(self, sequence: Sequence, wanted: Wanted) -> list[Work]:
        """Return the copies beside K and V of the prefix up to what is streamed.

        These are the window and the partial last chunk of a streamed sequence, and X that
        stays on the device: of the kept chunks, and of the partial last one.
        """
        cache, transfer, full = self._cache, wanted.transfer, wanted.full_count
        copies: list[Work] = []
        tail, first = wanted.tail, wanted.stored.stop
        if wanted.stored and first < len(wanted.chunks):
            pages = [sequence.page(index) for index in range(first, len(wanted.chunks))]
            rows = wanted.cached_tokens - first * self._chunk
            part = Part(wanted.chunks[first:], pages, rows)
            copies += [
                transfer.load(layer, part, keys, values)
                for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True))
            ]
        if not cache.inputs:
            return copies
        kept = wanted.chunks[: min(sequence.kept_inputs, full)]
        if kept:
            planes = [cache.inputs_in_pages(layer) for layer in range(len(self._model.layers))]
            for half in (0, 1):
                mine = kept[half::2]
                targets = [plane[half] for plane in planes]
                copies += transfer.send_inputs(mine, targets, sequence.row_pages[: len(mine)])
        if tail:
            # The chunk will be sealed anew with more tokens, X included.
            copies += transfer.send_inputs(tail, cache.inputs, [sequence.input_pages[full]])
        return copies

    # -- advance ----------------------------------------------------------------------

    def advance(self, running: Iterable[Sequence], batch: Rows[Sequence]) -> None:
        """Compute what is ready of the restores that are under way, before the batch runs.

        While there is a batch, products get a share of the time, and restores load what would
        wait for them. An empty batch leaves them all of it.
        """
        now = time.perf_counter()
        self._compute_share.pass_time(now - self._advanced)
        self._advanced = now
        self.has_more = False
        restoring = list(_restoring(running))
        if not restoring:
            return
        for sequence, each in restoring:
            others = (*batch, *(other for other, _ in restoring))
            each.is_alone = each.is_alone and all(other is sequence for other in others)
            each.run.group.claim = self._claim(each)
        runs = [each.run for _, each in restoring]
        runs = [runs[index] for index in by_claim([run.group.claim_at(now) for run in runs])]
        for run in runs:
            run.contend(bool(batch) and self._lanes.overlapping)
        self._lend_slots(runs)
        for run in runs:
            self._compute(run, has_batch=bool(batch), deadline=now + _SLICE_SECONDS)

    def _compute(self, run: RestoreRun, *, has_batch: bool, deadline: float) -> None:
        """Compute products until none is ready or the time for them is over."""
        while True:
            started = time.perf_counter()
            if has_batch and not self._compute_share.has_seconds:
                return
            tokens = run.compute()
            if tokens is None:
                return
            ended = time.perf_counter()
            if has_batch:
                # On a GPU the host only gives the product to the device.
                self._compute_share.spend(max(ended - started, self._rebuild_seconds(tokens)))
            elif ended > deadline:
                self.has_more = True
                return

    def _lend_slots(self, runs: Rows[RestoreRun]) -> None:
        """Give the X memory of restores to the first that needs it, until it does not any more."""
        holder = self._slot_holder
        if holder is not None and not holder.group.is_closed and holder.needs_slots:
            return
        self._slot_holder = next((run for run in runs if run.needs_slots), None)
        if self._slot_holder is not None:
            self._slot_holder.lend_slots()

    def _claim(self, restoring: Restoring) -> Claim:
        """Return the restore's claim on the link."""
        shape, copied, rebuilt = self._model.shape, *restoring.run.left_tokens
        costs = self._observers.costs
        link = _LINK_RATE if costs is None else costs.fits.link_bytes_per_second
        flops = _FLOP_RATE if costs is None else costs.fits.prefill_flops_per_second
        left = copied * shape.kv_bytes_per_token_layer / link + self._rebuild_seconds(rebuilt)
        return Claim(shape.fill_flops(restoring.wanted.cached_tokens) / flops - left, left)

    def _rebuild_seconds(self, tokens: int) -> float:
        """Return the seconds to rebuild this many tokens times layers."""
        costs = self._observers.costs
        rate = _FLOP_RATE if costs is None else costs.fits.rebuild_flops_per_second
        return tokens * self._model.shape.rebuild_flops_per_token_layer / rate

    def stepped(self, batch: Rows[Sequence], counts: Rows[int], seconds: float) -> None:
        """Note a step of this many seconds, which may have computed fronts of restores."""
        for sequence, count in zip(batch, counts, strict=True):
            if sequence.restoring is not None:
                sequence.restoring.front_seconds += seconds * count / sum(counts)

    # -- the end ------------------------------------------------------------------------

    def settle(
        self, running: Iterable[Sequence]
    ) -> Iterator[tuple[Sequence, RestoreEvent | SplitpointError]]:
        """Yield the restores that are over: what was done, or why it cannot be used.

        A sequence whose restore succeeded may run. Raises an error of a lane.
        """
        for sequence, restoring in list(_restoring(running)):
            if sequence.restoring is not restoring or restoring.run.group.is_closed:
                continue  # one that was yielded before has made it start over
            spans = self._lanes.count_spans(restoring.run.group.take_spans())
            restoring.spans += spans
            if self._observers.trace is not None:
                self._observers.trace.extend(spans)
            if not restoring.is_over(sequence.computed):
                continue
            restoring.run.close()
            try:
                restoring.result()
            except SplitpointError as error:
                yield sequence, error
                continue
            wanted = restoring.wanted
            sequence.computed = max(wanted.cached_tokens, sequence.device_tokens)
            sequence.stored = list(wanted.chunks[: wanted.full_count])
            sequence.written_chunks = wanted.full_count
            sequence.writes_back = True
            sequence.restoring = None
            sequence.enter(Stage.RUNNING)
            yield sequence, self._report(sequence, restoring)

    def _report(self, sequence: Sequence, restoring: Restoring) -> RestoreEvent:
        """Let the costs learn from the restore, and return its event."""
        ended = time.perf_counter()
        spans, wanted = restoring.spans, restoring.wanted
        rebuilt = sum(span.tokens for span in spans if span.name == "rebuild")
        rebuilt //= len(self._model.layers)
        recomputed = restoring.recomputed_tokens
        predicted = restoring.predicted_seconds if restoring.is_alone else 0.0
        event = RestoreEvent(
            sequence.key,
            max(wanted.cached_tokens, sequence.device_tokens),
            wanted.reported_split,
            wanted.method,
            ended - restoring.started,
            recomputed_tokens=recomputed,
            predicted_restore_seconds=predicted,
            link_bytes=int(sum(span.amount for span in spans if span.lane is Lane.LINK_IN)),
            link_busy_seconds=restoring.seconds_of(Lane.LINK_IN),
            compute_busy_seconds=restoring.seconds_of(Lane.COMPUTE) + restoring.front_seconds,
            loaded_tokens=wanted.brought_tokens - rebuilt - recomputed,
            rebuilt_tokens=rebuilt,
            device_tokens=sequence.device_tokens,
            first_use_bytes=restoring.first_use_bytes,
        )
        costs = self._observers.costs
        if costs is not None:
            is_first_use = restoring.first_use_bytes > 0
            costs.restored(spans, is_first_use=is_first_use)
            is_whole = restoring.ends is None and not sequence.is_streamed
            if is_whole and restoring.is_alone and wanted.missing_tokens and not is_first_use:
                costs.took(event.restore_seconds, spans, self._lanes.schedule)
        if wanted.missing_tokens and sequence.spans is not None:
            sequence.spans.restored(
                restoring.started,
                ended,
                spans,
                method=event.method.value,
                cached_tokens=event.cached_tokens,
                split_tokens=event.split_tokens,
                recomputed_tokens=recomputed,
                predicted_seconds=predicted or None,
                measured_seconds=event.restore_seconds,
            )
        return event


def _restoring(running: Iterable[Sequence]) -> Iterator[tuple[Sequence, Restoring]]:
    """Yield the sequences whose restores are under way."""
    for sequence in running:
        if sequence.restoring is not None and not sequence.restoring.run.group.is_closed:
            yield sequence, sequence.restoring

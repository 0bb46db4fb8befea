"""The engine: one step for all running requests, again and again.

`Engine.step` is the whole story: take commands, admit, restore, form a batch,
run the model, sample, hand finished chunks to write-back. It talks to nobody:
commands come in through `post`, everything that leaves is in the `StepOutput`.
It runs in one thread; store calls and streams are the runtime's business.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.costs.profile import Profile
from splitpoint.errors import ChunkLost, Internal, SplitpointError
from splitpoint.observe import tracing
from splitpoint.observe.logs import for_request
from splitpoint.planning.planner import plan_batch
from splitpoint.planning.schedule import Lane
from worker_service.device.cache import DeviceCache
from worker_service.device.cost_watch import CostWatch
from worker_service.device.memory import MemoryPlan, largest_tile
from worker_service.engine.batch import Batch, build_batch
from worker_service.engine.messages import (
    Admit,
    Call,
    Cancel,
    Command,
    FinishEvent,
    Matched,
    SetPaused,
    StepEvent,
    StepOutput,
    Stop,
    TokenEvent,
)
from worker_service.engine.pages import PageManager
from worker_service.engine.queues import SequenceQueues
from worker_service.engine.restorer import Restorer
from worker_service.engine.sampling import Choice, NonFiniteLogits, SamplingRow, choose
from worker_service.engine.sequence import Segment, Sequence, Suspects
from worker_service.engine.streamed import LostSequence
from worker_service.lanes.lanes import Lanes, lanes_of
from worker_service.lanes.spans import LaneUse, add_lanes
from worker_service.lanes.timeline import Span, StepTimes, Trace
from worker_service.model.decoder import Decoder
from worker_service.model.forward import through_layers
from worker_service.model.layer import DecoderLayer
from worker_service.pipeline.prefetch import Prefetcher, compute
from worker_service.pipeline.staging import Staging
from worker_service.store.arena_tensors import SuspectChunks
from worker_service.store.verifier import Check, Verifier
from worker_service.store.write_back import ChunksStored, Flushed, WriteEnded, WriteFailed

log = logging.getLogger(__name__)

_MOST_TOLD = 10_000


class Engine:
    """Runs requests on one device. `step` and `run` belong to one thread; `post` to any.

    Attributes:
        tile_pages: pages that a streamed step attends at once, if its memory has room.
        last_step: times of the latest step that ran the model; None before the first.
        restorer: brings prefixes in.
        verifier: compares what is read from the arena; None: nothing does.
    """

    def __init__(
        self,
        model: Decoder,
        cache: DeviceCache,
        *,
        max_batch_size: int,
        max_batched_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
        lanes: Lanes | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        self.model = model
        self.lanes = lanes if lanes is not None else lanes_of(cache.device)
        model.use_lanes(self.lanes)
        self.cache = cache
        self.verifier = verifier
        self.plan: MemoryPlan = cache.plan
        self.page_manager = PageManager(cache)
        self.chunk_tokens = cache.layout.chunk_tokens
        self.max_batch_size = max_batch_size
        self.max_batched_tokens = max_batched_tokens
        self.eos_token_ids = eos_token_ids
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.queues = SequenceQueues(cache, self.page_manager, tokenizer, max_batch_size)
        self._windows = [layer.window for layer in model.layers]
        self.staging = Staging(cache.layout, self.plan.staging_pages, cache.device)
        self.tile_pages = largest_tile(self.plan.staging_pages)
        self.last_step: StepTimes | None = None
        self.restorer = Restorer(
            model,
            cache,
            self.page_manager,
            self.lanes,
            self.staging,
            block_tokens=max_batched_tokens,
            verifier=verifier,
        )
        # Slots and generations of chunks whose loss the log has.
        self._told: set[tuple[int, int]] = set()
        self._costs: CostWatch | None = None
        # When compute of the step under way began, if its end will be one span; else None.
        self._computing_since: float | None = None
        # How many streamed sequences the split line was drawn for, if more than one.
        self._sharing = 0
        self._stopped = False

    # -- the loop ---------------------------------------------------------------

    def post(self, command: Command) -> None:
        """Queue a command for the next step; from any thread."""
        self._commands.put(command)

    def run(self, deliver: Callable[[StepOutput], None]) -> None:
        """Step until `Stop`, then end the lanes; sleeps while nothing can run."""
        try:
            while not self._stopped:
                output = self.step()
                if not output.is_empty:
                    deliver(output)
                if not output.ran and not self._stopped:
                    # Whatever lets a request go on arrives as a command.
                    self._take(self._commands.get())
        finally:
            self.lanes.close()
            if self.verifier is not None:
                self.verifier.close()

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """One iteration over everything that can run."""
        self._take_commands()
        self.queues.admit_waiting()
        self._restore_admitted()
        self._plan_streamed(costs_changed=False)
        started = time.perf_counter()
        batch = self._form_batch()
        if batch is not None:
            predicted = self._predict(batch)
            spans = self._run_batch(batch, started)
            self.last_step = StepTimes.of(time.perf_counter() - started, spans, predicted)
            self._learn(batch, self.last_step, spans)
            self.queues.output.step = _report(batch, self.last_step)
        return self._hand_over()

    @property
    def computing_seconds(self) -> float:
        """Compute of the step under way that no span shows yet; from any thread."""
        since = self._computing_since
        return 0.0 if since is None else max(0.0, time.perf_counter() - since)

    @property
    def is_idle(self) -> bool:
        """Nothing running, waiting, or being written back."""
        return self.queues.is_empty

    def forget_arena(self) -> None:
        """Let go of the arena that was read last; sequences that still read it keep it."""
        self.restorer.forget_arena()

    # -- what is measured ------------------------------------------------------------

    @property
    def trace(self) -> Trace | None:
        """Gets the spans of restores and streamed steps; None: nobody wants them."""
        return self.restorer.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self.restorer.trace = trace

    def watch_costs(self, profile: Profile) -> None:
        """Predict by this profile, and refit it from now on; changes are in StepOutputs."""
        self._costs = self.restorer.costs = CostWatch(profile)

    def _predict(self, batch: Batch) -> float | None:
        """Seconds of a step that only decodes, some of it streamed; None for any other."""
        if self._costs is None or batch.streamed is None or batch.prefills:
            return None
        return self._costs.step_seconds(batch.streamed.traffic())

    def _plan_streamed(self, *, costs_changed: bool) -> None:
        """One line for all that stream, but for those whose split was asked for.

        The scheduler planned each as if alone; who shares the step, and what it costs now,
        is known here.
        """
        if self._costs is None:
            return
        followers = [
            sequence
            for sequence in self.queues.running
            if sequence.is_streamed and sequence.admission.split_line is not None
        ]
        shared = len(followers) if len(followers) > 1 else 0
        if not followers or (shared == self._sharing and not costs_changed):
            return
        self._sharing = shared
        layout = self.cache.layout
        plan = plan_batch(
            self.model.shape,
            self._costs.profile,
            [len(sequence.tokens) for sequence in followers],
            has_activations=layout.has_activations,
            schedule=self.lanes.schedule,
            chunk_tokens=self.chunk_tokens,
            staging_tokens=self.staging.page_count * self.chunk_tokens,
            encoding=layout.encoding,
            # What stays was decided at admission: its pages are claimed.
            resident_tokens=sum(each.kept_chunks for each in followers) * self.chunk_tokens,
        )
        for sequence in followers:
            sequence.admission = replace(sequence.admission, split_line=plan.line)

    def _learn(self, batch: Batch, times: StepTimes, spans: list[Span]) -> None:
        if self.trace is not None:
            self.trace.extend(spans)
        if self._costs is not None and batch.streamed is not None:
            self._costs.stepped(times, spans, only_decodes=not batch.prefills)

    # -- commands ---------------------------------------------------------------

    def _take_commands(self) -> None:
        while not self._commands.empty():
            self._take(self._commands.get())

    def _take(self, command: Command) -> None:
        match command:
            case Admit():
                self.queues.waiting.append(command)
            case Cancel(key):
                self.queues.cancel(key)
            case SetPaused(request_id, paused):
                self.queues.set_paused(request_id, paused)
            case ChunksStored(key):
                owner = self.queues.find(key)
                if owner is not None:
                    self.page_manager.chunks_stored(owner, command)
            case WriteFailed(key, error):
                misled = self.queues.write_failed(key, error)
                if misled is not None:
                    self._lose(misled, error)
            case WriteEnded(key):
                self.queues.write_ended(key)
            case Flushed(key):
                self.queues.flushed(key)
            case Matched(key, match, error):
                self.queues.matched_again(key, match, error)
            case Call(function):
                function()
            case Stop():
                self._stopped = True

    # -- restore ------------------------------------------------------------------

    def _restore_admitted(self) -> None:
        for sequence in list(self.queues.running):
            if not sequence.restored and not sequence.awaits_match:
                try:
                    event = self.restorer.restore(sequence)
                    if event is not None:
                        self.queues.output.restores.append(event)
                except ChunkLost as error:
                    self._lose(sequence, error)
                except SplitpointError as error:
                    self.queues.finish(sequence, FinishEvent(sequence.key, error=error))

    # -- the batch -------------------------------------------------------------------

    def _form_batch(self) -> Batch | None:
        """Every decoding request, and prompt tokens up to the prefill budget."""
        decodes: list[Sequence] = []
        segments: list[Segment] = []
        budget = self.max_batched_tokens
        for sequence in self.queues.running:
            if sequence.paused or not sequence.restored or sequence.awaits_match:
                continue
            remaining = len(sequence.tokens) - sequence.computed
            if remaining == 1:
                if self.page_manager.grow(sequence, 1):
                    decodes.append(sequence)
            elif budget:
                count = self.page_manager.grow(sequence, min(remaining, budget))
                if count:
                    segments.append(Segment(sequence, sequence.computed, count))
                    budget -= count
        if not decodes and not segments:
            return None
        return build_batch(decodes, segments, self.cache, self._windows, tile_pages=self.tile_pages)

    # -- the model ----------------------------------------------------------------------

    def _run_batch(self, batch: Batch, started: float) -> list[Span]:
        """Returns what ran when. `started`: the step, by the clock."""
        decoded = [
            each
            for each in batch.sequences
            if each.is_streamed and len(each.tokens) - each.computed == 1
        ]
        checks: list[Check] = []
        if batch.streamed is not None and self.verifier is not None:
            checks = batch.streamed.begin_checks(self.verifier)
        prefetcher = self._prefetcher_of(batch)
        began = time.perf_counter()
        self._computing_since = began if prefetcher is None else None
        try:
            logits, finite, spans = self._forward(batch, prefetcher)
        except BaseException:
            # Between steps no copy may be under way, also when the engine ends here.
            self.lanes.settle()
            raise
        lost = self._lost(batch, checks)
        if lost:
            self._computing_since = None
            # Nobody's tokens were counted yet: the others run again next step.
            for each in lost:
                self._lose(each.sequence, each.cause)
            return spans
        if tracing.is_on():
            self._trace_step(batch, started, spans)
        finishes = self._sample(batch, logits, finite)
        if prefetcher is None:
            # Nothing but compute: one span, where a prefetcher leaves one for each part.
            spans += self.lanes.counted([_span_of(batch, began, time.perf_counter())])
            self._computing_since = None
        # Before anyone leaves: the step that ends a request is one of its steps.
        seconds = time.perf_counter() - started
        for sequence in decoded:
            sequence.step_count += 1
            sequence.step_seconds += seconds
        for sequence in batch.sequences:
            self.queues.write_back(sequence)
        for sequence, event in finishes:
            self.queues.finish(sequence, event)
        return spans

    def _trace_step(self, batch: Batch, started: float, spans: list[Span]) -> None:
        now = time.perf_counter()
        lanes: dict[Lane, LaneUse] = {}
        add_lanes(lanes, spans)
        for sequence, count in zip(batch.sequences, batch.counts, strict=True):
            admission = sequence.admission
            if admission.spans is not None:
                is_prefill = sequence.generated_count == len(admission.delivered)
                admission.spans.stepped(started, now, count, lanes, is_prefill=is_prefill)

    def _lost(self, batch: Batch, checks: list[Check]) -> list[LostSequence]:
        """Sequences of the batch that computed with bytes that must not be used."""
        lost = [] if batch.streamed is None else batch.streamed.lost(checks)
        for sequence in batch.sequences:
            check, sequence.check = sequence.check, None
            if check is None:
                continue
            try:
                check.wait()
            except ChunkLost as error:
                if all(each.sequence is not sequence for each in lost):
                    lost.append(LostSequence(sequence, error))
        return lost

    def _lose(
        self, sequence: Sequence, cause: SplitpointError, *, fatal: SplitpointError | None = None
    ) -> None:
        """Begin anew, once the store has inspected what the sequence read.

        `fatal` ends the request if all of that is intact.
        """
        with for_request(sequence.admission.request_id):
            log.log(self._level_of(cause), "%s; the request starts over", cause.message)
        # What it computed or restored from another chunk's bytes may hold a NaN.
        self.page_manager.clear_unwritten(sequence)
        suspects = None
        if sequence.match is not None and (chunks := sequence.cached_chunks):
            suspects = Suspects(sequence.match.connection, chunks, fatal)
        self.queues.lose(sequence, suspects)

    def _level_of(self, cause: SplitpointError) -> int:
        """Many requests may lose one chunk; it is worth one warning."""
        if not isinstance(cause, SuspectChunks):
            return logging.WARNING
        # Those behind it went with it.
        first = cause.chunks[0].slot, cause.chunks[0].generation
        if first in self._told:
            return logging.DEBUG
        if len(self._told) > _MOST_TOLD:
            self._told.clear()
        self._told.add(first)
        return logging.WARNING

    def _forward(
        self, batch: Batch, prefetcher: Prefetcher | None
    ) -> tuple[torch.Tensor, list[bool], list[Span]]:
        """Logits `[sampled, vocabulary]`, for each row whether it is finite, and spans.

        A NaN stays in its token's row from the layer where it arises to the end.
        """
        model, cache = self.model, self.cache

        def attend(
            index: int,
            layer: DecoderLayer,
            inputs: torch.Tensor,
            queries: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
        ) -> torch.Tensor:
            write = partial(batch.write, cache, index, inputs, keys, values)
            compute(prefetcher, "write", index, write)
            return batch.attend(cache, index, layer, queries, keys, values, prefetcher)

        hidden = model.embed(batch.token_ids, batch.positions)
        hidden = through_layers(
            model.visit(),
            hidden,
            model.rotary(batch.positions),
            attend,
            partial(compute, prefetcher),
        )
        finite = hidden.isfinite().all(dim=1)
        logits = model.logits(hidden[batch.logit_rows])
        # Weights may be on their way for the next step; everything else is done.
        spans = self.lanes.collect()
        return logits, finite.tolist(), spans

    def _prefetcher_of(self, batch: Batch) -> Prefetcher | None:
        """Fills while the step begins to compute; None when nothing is streamed.

        Without tiles it still leaves a span of each part, beside weights that come.
        """
        streamed = batch.streamed
        if streamed is not None:
            prefetcher = Prefetcher(self.lanes, self.staging, streamed.tile_pages, streamed.layers)
        elif not self.model.is_resident:
            prefetcher = Prefetcher(self.lanes, self.staging, 1, ())
        else:
            return None
        prefetcher.start()
        return prefetcher

    # -- sampling ---------------------------------------------------------------------

    def _sample(
        self, batch: Batch, logits: torch.Tensor, finite: list[bool]
    ) -> list[tuple[Sequence, FinishEvent]]:
        """Append one token to every sequence that has computed all it has."""
        finishes: list[tuple[Sequence, FinishEvent]] = []
        sampled: list[Sequence] = []
        rows: list[int] = []
        first_row = logit_row = 0
        for sequence, count in zip(batch.sequences, batch.counts, strict=True):
            sequence.computed += count
            is_finite = all(finite[first_row : first_row + count])
            first_row += count
            is_whole = sequence.computed == len(sequence.tokens)
            if not is_finite:
                finishes += self._non_finite(sequence)
            elif is_whole:
                rows.append(logit_row)
                sampled.append(sequence)
            logit_row += is_whole
        if not sampled:
            return finishes
        chosen = logits if len(rows) == len(logits) else logits[rows]
        choices = choose(chosen, [self._sampling_row(sequence) for sequence in sampled])
        for sequence, choice in zip(sampled, choices, strict=True):
            if isinstance(choice, NonFiniteLogits):
                finishes += self._non_finite(sequence)
                continue
            event = self._append(sequence, choice)
            if event is not None:
                finishes.append((sequence, event))
        return finishes

    def _append(self, sequence: Sequence, choice: Choice) -> FinishEvent | None:
        """Deliver one token; the finish it causes, if any."""
        index = sequence.generated_count
        sequence.losses = 0
        sequence.tokens.append(choice.token_id)
        self.queues.output.tokens.append(TokenEvent(sequence.key, index, choice))
        sampling = sequence.admission.sampling
        count = index + 1
        if count >= sampling.min_tokens:
            is_eos = choice.token_id in self.eos_token_ids and not sampling.ignore_eos
            if is_eos or choice.token_id in sampling.stop_token_ids:
                return FinishEvent(sequence.key, "stop")
        if sequence.text is not None:
            sequence.text.push([choice.token_id])
            if sequence.text.matched_stop is not None:
                return FinishEvent(sequence.key, "stop", sequence.text.matched_stop)
        if count >= sampling.max_tokens:
            return FinishEvent(sequence.key, "length")
        return None

    def _sampling_row(self, sequence: Sequence) -> SamplingRow:
        admission = sequence.admission
        return SamplingRow(
            admission.sampling, sequence.tokens, len(admission.prompt), self.eos_token_ids
        )

    def _non_finite(self, sequence: Sequence) -> list[tuple[Sequence, FinishEvent]]:
        """Nothing of it may be sealed or left behind: the cache may hold its NaN.

        One that read cached chunks starts over if the store finds any of them damaged.
        """
        error = Internal("the model produced NaN or infinite logits", reason="NON_FINITE_LOGITS")
        if sequence.match is not None and sequence.cached_chunks:
            self._lose(sequence, error, fatal=error)
            return []
        sequence.writes_back = False
        self.page_manager.clear_unwritten(sequence)
        return [(sequence, FinishEvent(sequence.key, error=error))]

    def _hand_over(self) -> StepOutput:
        output, self.queues.output = self.queues.output, StepOutput()
        output.work = self.lanes.pop_totals()
        if self._costs is not None:
            output.profile = self._costs.settle()
            if output.profile is not None:
                self._plan_streamed(costs_changed=True)
        output.running_count = len(self.queues.running)
        output.cache_used_bytes = self.cache.used_bytes
        return output


def _span_of(batch: Batch, start: float, end: float) -> Span:
    """A step that only computes: the model and sampling."""
    decodes = len(batch.counts) - len(batch.prefills)
    kind = "decode" if not batch.prefills else "mixed" if decodes else "prefill"
    return Span(Lane.COMPUTE, f"{kind} step", start, end, tokens=sum(batch.counts))


def _report(batch: Batch, times: StepTimes) -> StepEvent:
    prefilled = sum(batch.counts[len(batch.counts) - len(batch.prefills) :])
    return StepEvent(
        times,
        prefilled_tokens=prefilled,
        decoded_tokens=len(batch.counts) - len(batch.prefills),
        streamed=None if batch.streamed is None else batch.streamed.tokens,
    )

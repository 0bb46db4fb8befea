"""The engine: one step for all running requests, again and again.

Commands come in through `post`; everything that leaves is in a `StepOutput`. The engine runs
in one thread and makes no calls to the store: those are the runtime's business.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from itertools import islice
from types import MappingProxyType

import torch

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.costs.profile import Profile
from splitpoint.errors import ChunkLost
from splitpoint.speculation import DraftMethod
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import MemoryPlan, largest_tile
from worker_service.drafts.drafter import Drafter
from worker_service.drafts.speculator import Speculator, most_tokens
from worker_service.engine.batch import Batch, build_batch
from worker_service.engine.messages import (
    Call,
    Cancel,
    Command,
    FinishEvent,
    Matched,
    PrefillEvent,
    RestoreEvent,
    SetPaused,
    StepEvent,
    StepOutput,
    Stop,
    Wake,
)
from worker_service.engine.model_runner import ModelRunner, StepResult
from worker_service.engine.pages import PageManager
from worker_service.engine.postprocessor import Postprocessor
from worker_service.engine.queues import SequenceQueues
from worker_service.engine.restorer import Restorer
from worker_service.engine.sampling import NonFiniteLogits
from worker_service.engine.sequence import Admission, Sequence, Stage
from worker_service.graphs.decode_graphs import DecodeGraphs
from worker_service.graphs.support import EagerReason
from worker_service.hardware.streams import make_current
from worker_service.kernels.units import limit_parts
from worker_service.lanes.cost_watch import CostWatch, Observers
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.select import lanes_of
from worker_service.lanes.spans import RequestSpans
from worker_service.lanes.timeline import StepTimes, Trace
from worker_service.model.model import Model
from worker_service.pipeline.shared_split import SharedSplit
from worker_service.pipeline.staging import Staging
from worker_service.pipeline.two_ends import TwoEnds
from worker_service.retrieval.selector import ScreensOf, ScreenSource, Selector
from worker_service.store.client import Match
from worker_service.store.verifier import Verifier
from worker_service.store.write_back import (
    ChunksStored,
    Flushed,
    PoolStarted,
    PoolWritten,
    StoreLimitReached,
    WriteFailed,
)
from worker_service.structured.masks import MaskTotals
from worker_service.structured.matcher import GrammarMatcher


class Engine:
    """Runs requests on one device. `step` and `run` belong to one thread.

    Attributes:
        max_batched_tokens: prompt tokens that one step computes at most.
        tile_pages: pages that a streamed step attends at once, if its memory has room.
        last_step: times of the latest step that ran the model; None before the first.
        tokenizer: the model's; None if it has none.
        restorer: brings cached prefixes onto the device.
        verifier: compares checksums of what is read from the arena; None if nothing does.
        graphs: compute decoding steps on a GPU; None: `eager_reason` says why there are none.
    """

    def __init__(
        self,
        model: Model,
        cache: DeviceCache,
        *,
        max_batch_size: int,
        max_batched_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
        lanes: Lanes | None = None,
        verifier: Verifier | None = None,
        shares_prefixes: bool = True,
        drafters: Mapping[DraftMethod, Drafter[Sequence]] = MappingProxyType({}),
        graphs: DecodeGraphs | None = None,
        eager_reason: EagerReason = EagerReason.NOT_ASKED,
        screens_of: ScreensOf | None = None,
    ) -> None:
        """`screens_of`: makes the screens of selections; None: those that need no artefacts."""
        if drafters and not cache.plan.draft_tokens:
            raise ValueError("drafts need a memory plan with draft_tokens")
        self.graphs = graphs
        self._eager_reason = eager_reason
        self.model = model
        self.lanes = lanes if lanes is not None else lanes_of(cache.device)
        model.use_lanes(self.lanes)
        self.cache = cache
        self.verifier = verifier
        self.memory_plan: MemoryPlan = cache.plan
        limit_parts(cache.plan.attention_parts)
        self.chunk_tokens = cache.layout.chunk_tokens
        self.max_batch_size = max_batch_size
        self.max_batched_tokens = max_batched_tokens
        self.eos_token_ids = eos_token_ids
        self.tokenizer = tokenizer
        self.staging = Staging(cache.layout, self.memory_plan.staging_pages, cache.device)
        self.tile_pages = largest_tile(self.memory_plan.staging_pages)
        self.last_step: StepTimes | None = None
        self._observers = Observers()
        selector = self._selector(screens_of or ScreenSource(model.config, {}).screens)
        self.page_manager = PageManager(cache, shares_prefixes=shares_prefixes, selector=selector)
        self.queues = SequenceQueues(cache, self.page_manager, tokenizer, max_batch_size)
        self.restorer = Restorer(
            model,
            cache,
            self.page_manager,
            self.lanes,
            self.staging,
            self._observers,
            block_tokens=max_batched_tokens,
            on_change=lambda: self.post(Wake()),
            verifier=verifier,
        )
        self._runner = ModelRunner(
            model,
            cache,
            self.lanes,
            self.staging,
            eos_token_ids=eos_token_ids,
            verifier=verifier,
            graphs=graphs,
            on_masks=lambda: self.post(Wake()),
            most_scored=max_batch_size,
        )
        self._postprocessor = Postprocessor(self.queues, self.page_manager, eos_token_ids)
        self._shared_split = SharedSplit(
            model.shape,
            cache.layout,
            self.lanes.schedule,
            self.staging.page_count * self.chunk_tokens,
        )
        self._speculator = (
            Speculator(drafters, step_tokens=self.memory_plan.draft_tokens) if drafters else None
        )
        self._drafting_seconds = 0.0
        self._windows = [layer.window for layer in model.layers]
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._stopped = False

    def _selector(self, screens_of: ScreensOf) -> Selector:
        """Return what decides which requests read by selection, by the present costs."""
        model, observers = self.model, self._observers
        return Selector(
            model.config,
            model.shape,
            self.cache,
            self.lanes,
            screens_of,
            lambda: None if observers.costs is None else observers.costs.profile,
            can_draft=model.is_resident,
        )

    # -- the loop ---------------------------------------------------------------

    def admit(
        self,
        admission: Admission,
        match: Match | None = None,
        spans: RequestSpans | None = None,
        matcher: GrammarMatcher | None = None,
        ends: TwoEnds | None = None,
    ) -> None:
        """Queue a request with its leased prefix for the next step; from any thread.

        `matcher`: of the admission's grammar, behind what was delivered. `ends`: its front, and
        what a tier brings; it must be resident.
        """
        self.post(Sequence(admission, match, spans, matcher, ends))

    def post(self, command: Command) -> None:
        """Queue a command for the next step; from any thread."""
        self._commands.put(command)

    def run(self, deliver: Callable[[StepOutput], None]) -> None:
        """Step until `Stop`, then end the lanes; sleep while nothing can run."""
        make_current(self.cache.device)
        try:
            while not self._stopped:
                output = self.step()
                if not output.is_empty:
                    deliver(output)
                if not self._stopped and not self.can_go_on(output):
                    self.wait()
        finally:
            self.lanes.close()
            self._runner.close()
            if self.verifier is not None:
                self.verifier.close()

    @torch.inference_mode()
    def wait(self, timeout: float | None = None) -> None:
        """Sleep until a command arrives, at most `timeout` seconds, and carry it out.

        Whatever lets a request go on arrives as a command.
        """
        with contextlib.suppress(queue.Empty):
            self._apply(self._commands.get(timeout=timeout))

    def can_go_on(self, output: StepOutput) -> bool:
        """Return False if the next step has nothing to do before a command arrives."""
        return output.ran or self.restorer.has_more or not self._commands.empty()

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Run one iteration over everything that can run."""
        batch = self._schedule()
        result = None if batch is None else self._runner.run(batch)
        return self._postprocess(result)

    @property
    def computing_seconds(self) -> float:
        """Compute seconds of the step under way that no span shows yet; from any thread."""
        return self._runner.computing_seconds

    @property
    def mask_totals(self) -> MaskTotals:
        """What structured output has cost steps; from any thread."""
        return self._runner.mask_totals

    @property
    def eager_reason(self) -> EagerReason | None:
        """Why no decoding step is a CUDA graph; None if they are."""
        if self.graphs is None:
            return self._eager_reason
        return None if self.graphs.obstacle is None else EagerReason.RECORDING_FAILED

    @property
    def is_idle(self) -> bool:
        """True if nothing is running, waiting, or being written back."""
        return self.queues.is_empty

    @property
    def is_restoring(self) -> bool:
        """True if a prefix is coming onto the device."""
        return any(sequence.stage is Stage.RESTORING for sequence in self.queues.running)

    @property
    def trace(self) -> Trace | None:
        """Keeps the spans of restores and streamed steps; None if there is no trace file."""
        return self._observers.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._observers.trace = trace

    @property
    def profile(self) -> Profile:
        """The costs as reported last; set by `watch_costs`."""
        if self._observers.costs is None:
            raise RuntimeError("the engine watches no costs")
        return self._observers.costs.profile

    def watch_costs(self, profile: Profile) -> None:
        """Predict by this profile and refit it from now on; changes are in step outputs."""
        self._observers.costs = CostWatch(profile)

    # -- schedule ---------------------------------------------------------------

    def _schedule(self) -> Batch | None:
        """Carry out commands, admit requests, advance restores, and lay out what can run."""
        while not self._commands.empty():
            self._apply(self._commands.get())
        self.queues.let_go()
        self.queues.admit_waiting()
        self._begin_restores()
        self._settle_restores()
        self._settle_met_ends()
        self._plan_shared_split(costs_changed=False)
        self._runner.begin_slow_masks(self.queues.running)
        batch = self._form_batch()
        self.restorer.advance(self.queues.running, [] if batch is None else batch.sequences)
        return batch

    def _apply(self, command: Command) -> None:
        match command:
            case Sequence():
                self.queues.add(command)
            case Cancel(key):
                self.queues.cancel(key)
            case SetPaused(key, paused):
                self.queues.set_paused(key, paused)
            case ChunksStored(key):
                owner = self.queues.find(key)
                if owner is not None:
                    self.page_manager.chunks_stored(owner, command)
            case PoolStarted():
                self.queues.pool_started(command)
            case PoolWritten():
                self.queues.pool_written(command)
            case WriteFailed(key, error):
                self.queues.write_failed(key, error)
            case StoreLimitReached(key):
                self.queues.write_ended(key)
            case Flushed(key):
                self.queues.flushed(key)
            case Matched():
                self.queues.matched_again(command)
            case Call(function):
                function()
            case Wake():
                pass
            case Stop():
                self._stopped = True

    def _begin_restores(self) -> None:
        for sequence in list(self.queues.running):
            if sequence.stage not in (Stage.ADMITTED, Stage.AWAITING_PREFIX):
                continue  # or it has just left for one before it
            if self._awaits_prefix(sequence) or not self.queues.can_restore(sequence):
                continue
            event = self.restorer.begin(sequence)
            if event is not None:
                self.queues.output.restores.append(event)

    def _settle_restores(self) -> None:
        """Report the restores that are over, and start sequences over that lost chunks."""
        for sequence, result in self.restorer.settle(self.queues.running):
            if isinstance(result, RestoreEvent):
                if sequence.ends is None:  # else the restore that follows is reported
                    self.queues.output.restores.append(result)
            elif isinstance(result, ChunkLost):
                self.queues.restart_after_loss(sequence, result)
            else:
                self.queues.finish(sequence, FinishEvent(sequence.key, error=result))

    def _settle_met_ends(self) -> None:
        """Look the prefixes up again whose computed fronts have met what a tier brought."""
        for sequence in list(self.queues.running):
            ends = sequence.ends if sequence.stage is Stage.RUNNING else None
            if ends is not None and ends.has_met(sequence.computed):
                # No step has told write-back of what the device held already.
                self.queues.write_back(sequence)
                self.queues.look_up_again(sequence)

    def _awaits_prefix(self, sequence: Sequence) -> bool:
        """Return True while another sequence brings the prefix, or it is looked up again.

        After the wait the store may have more of it, which then need not be written again.
        """
        if self.page_manager.must_wait(sequence):
            if sequence.stage is Stage.ADMITTED:
                sequence.enter(Stage.AWAITING_PREFIX)
            return True
        if sequence.stage is Stage.AWAITING_PREFIX:
            sequence.enter(Stage.ADMITTED)
            if sequence.chain_is_open and self.page_manager.holds_more(sequence):
                self.queues.look_up_again(sequence)
                return True
        return False

    def _plan_shared_split(self, *, costs_changed: bool) -> None:
        """Give one split line to all streamed sequences, except those with a forced split."""
        costs = self._observers.costs
        if costs is None:
            return
        followers = [
            sequence
            for sequence in self.queues.running
            if sequence.is_streamed and sequence.split_line is not None
        ]
        line = self._shared_split.draw(
            costs.profile,
            [len(sequence.tokens) for sequence in followers],
            # What stays was decided at admission: its pages are claimed.
            resident_tokens=sum(each.kept_chunks + each.window_chunks for each in followers)
            * self.chunk_tokens,
            costs_changed=costs_changed,
        )
        if line is not None:
            for sequence in followers:
                sequence.split_line = line

    def _form_batch(self) -> Batch | None:
        """Lay out what the next step computes; None if nothing can run."""
        started = time.perf_counter()
        decodes, segments = self.queues.take_step(self.max_batched_tokens)
        if not decodes and not segments:
            return None
        if self._speculator is not None:
            used = sum(segment.count for segment in segments)
            self._draft(self._speculator, decodes, self.max_batched_tokens - used)
        return build_batch(
            decodes,
            segments,
            self.cache,
            self._windows,
            tile_pages=self.tile_pages,
            started=started,
            graphs=self.graphs,
        )

    def _draft(
        self, speculator: Speculator[Sequence], decodes: list[Sequence], budget: int
    ) -> None:
        """Let the drafters guess the next tokens of decoding sequences."""
        spare = [
            (sequence, self._draft_room(sequence))
            for sequence in decodes
            if sequence.speculation.is_on
            and not sequence.skips_drafts
            # Else its masks are computed already, without drafts.
            and (sequence.matcher is None or sequence.matcher.ahead is None)
        ]
        self._drafting_seconds = 0.0
        if not spare:
            return
        began = time.perf_counter()
        proposed = speculator.propose(
            spare,
            mix=_mix(decodes, sum(sequence.selects for sequence in decodes)),
            sequence_count=len(decodes),
            budget=budget,
        )
        for drafted in proposed:
            tokens, matcher = drafted.tokens, drafted.target.matcher
            if matcher is not None:
                tokens = tokens[: matcher.allowed_drafts(tokens)]
            drafted.target.drafts = tokens
            drafted.target.drafted_by = drafted.method
        self._drafting_seconds = time.perf_counter() - began

    def _draft_room(self, sequence: Sequence) -> int:
        """Return how many guesses of a decoding sequence fit its answer and have pages."""
        most = min(sequence.most_drafts, most_tokens(sequence.speculation))
        return self.page_manager.grow_for_drafts(sequence, most)

    # -- postprocess --------------------------------------------------------------------

    def _postprocess(self, result: StepResult | None) -> StepOutput:
        """Apply what the model gave, and return everything that leaves the engine."""
        if result is not None:
            batch, seconds = result.batch, time.perf_counter() - result.batch.started
            self.restorer.stepped(batch.sequences, batch.counts, seconds)
            self._postprocessor.apply(result)
            if self._speculator is not None and not self._speculator.is_idle:
                self._learn(self._speculator, result, seconds)
            self._measure(result)
        output, self.queues.output = self.queues.output, StepOutput()
        output.work = self.lanes.pop_totals()
        if self._observers.costs is not None:
            output.profile = self._observers.costs.changed_profile()
            if output.profile is not None:
                self._plan_shared_split(costs_changed=True)
        if self._speculator is not None:
            self._speculator.keep(
                (sequence.key for sequence in self.queues.running),
                away=(sequence.key for sequence in self.queues.away),
            )
        output.running_count = len(self.queues.running)
        output.cache_used_bytes = self.cache.used_bytes
        return output

    def _learn(self, speculator: Speculator[Sequence], result: StepResult, seconds: float) -> None:
        """Let the choice of drafts learn from a step of this many seconds."""
        drafts, batch = self.queues.output.drafts, result.batch
        for event in drafts:
            speculator.observe_draft(event.key, event.method, event.drafted, event.accepted)
        if not batch.prefills and not result.lost:
            verified = sum(event.drafted for event in drafts)
            seconds -= self._drafting_seconds
            mix = _mix(batch.sequences, len(batch.selected.readers))
            speculator.observe_step(mix, verified, seconds)

    def _measure(self, result: StepResult) -> None:
        """Report the step, and let the costs learn from it."""
        batch, spans, costs = result.batch, result.spans, self._observers.costs
        only_decodes = not batch.prefills and not batch.selected.takes_part
        predicted = None
        if costs is not None and batch.streamed is not None and only_decodes:
            predicted = costs.step_seconds(batch.streamed.traffic())
        times = StepTimes.of(time.perf_counter() - batch.started, spans, predicted)
        if self._observers.trace is not None:
            self._observers.trace.extend(spans)
        if costs is not None and batch.streamed is not None:
            costs.stepped(
                times,
                spans,
                only_decodes=only_decodes,
                drafting_seconds=self._drafting_seconds,
            )
        elif costs is not None:
            costs.computed(result.compute_spans)
        self.last_step = times
        prefilled = zip(batch.sequences, batch.counts, strict=True)
        self.queues.output.prefills = prefills = [
            PrefillEvent(sequence.key, count)
            for sequence, count in islice(prefilled, batch.decode_count, None)
        ]
        self.queues.output.step = StepEvent(
            times,
            prefilled_tokens=sum(event.token_count for event in prefills),
            decoded_tokens=sum(
                len(choices)
                for choices in result.choices[: batch.decode_count]
                if not isinstance(choices, NonFiniteLogits)
            ),
            streamed=None if batch.streamed is None else batch.streamed.tokens,
        )


def _mix(decodes: list[Sequence], selecting: int) -> tuple[int, int, int]:
    """Return what the time of a plain step depends on most.

    That is how many sequences are resident, how many are streamed, and how many of these select.
    """
    streamed = sum(sequence.is_streamed for sequence in decodes)
    return len(decodes) - streamed, streamed, selecting

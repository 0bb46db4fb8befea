"""Applies the result of a step: tokens, finishes, lost chunks, and what goes to write-back."""

from __future__ import annotations

import time

from splitpoint.errors import Internal
from splitpoint.observe import tracing
from splitpoint.planning.schedule import Lane
from splitpoint.speculation import DraftMethod
from worker_service.engine.batch import Batch
from worker_service.engine.messages import (
    DraftEvent,
    FinishEvent,
    PromptEvent,
    SelectionEvent,
    TokenEvent,
)
from worker_service.engine.model_runner import StepResult
from worker_service.engine.pages import PageManager
from worker_service.engine.queues import SequenceQueues
from worker_service.engine.sampling import Choice, NonFiniteLogits
from worker_service.engine.selected_step import usage_of
from worker_service.engine.sequence import Sequence, Stage
from worker_service.lanes.spans import LaneUse, add_lanes
from worker_service.lanes.timeline import Span
from worker_service.structured.matcher import GrammarMatcher


class Postprocessor:
    """Applies step results to the sequences. Used by the engine's thread only."""

    def __init__(
        self, queues: SequenceQueues, page_manager: PageManager, eos_token_ids: tuple[int, ...]
    ) -> None:
        self._queues = queues
        self._page_manager = page_manager
        self._eos_token_ids = eos_token_ids

    def apply(self, result: StepResult) -> None:
        """Append tokens, hand full chunks to write-back, and end requests that are done.

        If sequences lost chunks, only they change: they start over. `result` keeps only the
        choices that were delivered.
        """
        batch = result.batch
        for each in result.lost:
            self._queues.restart_after_loss(each.sequence, each.cause)
        if result.lost:
            for sequence in batch.sequences:
                if sequence.stage is Stage.RUNNING:
                    self._page_manager.shrink(sequence)
                    if sequence.drafts:
                        self._page_manager.clear_spare_rows(sequence)
                sequence.drafts = []
            return
        if tracing.is_on():
            _trace_step(batch, result.lane_spans)
        finishes: list[tuple[Sequence, FinishEvent]] = []
        failed: list[Sequence] = []
        for place, (sequence, count, choices) in enumerate(
            zip(batch.sequences, batch.counts, result.choices, strict=True)
        ):
            sequence.is_back = False
            event = None
            if isinstance(choices, NonFiniteLogits):
                sequence.computed += count - len(sequence.drafts)
                failed.append(sequence)
                event = self._non_finite(sequence)
            else:
                taken, event = self._take(sequence, choices)
                if sequence.matcher is not None and event is None:
                    event = _grammar_failure(sequence, sequence.matcher)
                # What follows the end of a request was neither delivered nor accepted.
                choices = result.choices[place] = choices[:taken]
                # A decoding sequence has computed what plain decoding would have by now. One
                # whose first mask is late computes its newest token again.
                is_late = not choices and batch.logit_counts[place] > 0
                done = taken if place < batch.decode_count else count - is_late
                sequence.computed += done
            sequence.skips_drafts = False
            if sequence.drafts:
                self._settle_drafts(sequence, choices)
            if event is not None:
                finishes.append((sequence, event))
        self._report_prompts(result, failed)
        self._count_selected(batch, failed)
        for sequence in result.spoiled:
            self._page_manager.clear_spare_rows(sequence)
        # Also of requests that end here: this step is one of theirs.
        seconds = time.perf_counter() - batch.started
        for sequence in batch.sequences[: batch.decode_count]:
            if sequence.speculation.is_on:
                self._page_manager.free_unused(sequence)
            if sequence.is_streamed:
                sequence.step_count += 1
                sequence.step_seconds += seconds
        for sequence in batch.sequences:
            if sequence not in failed:
                self._page_manager.step_passed(sequence)
            self._queues.write_back(sequence)
        for sequence, event in finishes:
            self._queues.finish(sequence, event)

    def _report_prompts(self, result: StepResult, failed: list[Sequence]) -> None:
        """Report log-probabilities of prompt tokens, each of them once."""
        for sequence, scores in result.scores:
            if sequence not in failed:
                sequence.scored_tokens = scores.first_index + len(scores.logprobs)
                self._queues.output.prompts.append(PromptEvent(sequence.key, scores))

    def _count_selected(self, batch: Batch, failed: list[Sequence]) -> None:
        """Report what a step read by selection; its rows of K and V are approximate."""
        for reader in batch.selected.readers:
            sequence = reader.sequence
            if sequence not in failed:
                if sequence.first_approximate is None:
                    sequence.first_approximate = reader.position
                self._queues.output.selections.append(SelectionEvent(sequence.key, reader.usage()))

    def _take(self, sequence: Sequence, choices: list[Choice]) -> tuple[int, FinishEvent | None]:
        """Deliver tokens up to one that ends the request; return how many, and the end."""
        for count, choice in enumerate(choices, 1):
            event = self._append(sequence, choice)
            if event is not None:
                return count, event
        return len(choices), None

    def _settle_drafts(self, sequence: Sequence, choices: list[Choice] | NonFiniteLogits) -> None:
        """Report how many drafts of a step were right, and forget them."""
        drafts, chosen = sequence.drafts, [] if isinstance(choices, NonFiniteLogits) else choices
        accepted = sum(
            choice.token_id == draft for choice, draft in zip(chosen, drafts, strict=False)
        )
        self._queues.output.drafts.append(
            DraftEvent(sequence.key, sequence.drafted_by, len(drafts), accepted)
        )
        self._count_drafted(sequence, sequence.computed - len(chosen))
        sequence.skips_drafts = not chosen
        sequence.drafts = []

    def _count_drafted(self, sequence: Sequence, first: int) -> None:
        """Report what drafts read by selection, the first of them at this position."""
        reads = sequence.reads
        if reads is None or sequence.drafted_by is not DraftMethod.SELF:
            return
        usage = usage_of(reads, range(first, first + len(sequence.drafts)))
        # The step that builds screens verifies drafts that read no rows.
        if usage.fetched_row_count or usage.reused_row_count:
            self._queues.output.selections.append(SelectionEvent(sequence.key, usage))

    def _append(self, sequence: Sequence, choice: Choice) -> FinishEvent | None:
        """Deliver one token; return the finish that it causes, if any."""
        index = sequence.generated_count
        sequence.losses = 0
        sequence.tokens.append(choice.token_id)
        self._queues.output.tokens.append(TokenEvent(sequence.key, index, choice))
        sampling = sequence.admission.sampling
        count = index + 1
        if count >= sampling.min_tokens:
            is_eos = choice.token_id in self._eos_token_ids and not sampling.ignore_eos
            if is_eos or choice.token_id in sampling.stop_token_ids:
                return FinishEvent(sequence.key, "stop")
        if sequence.text is not None:
            sequence.text.push([choice.token_id])
            if sequence.text.matched_stop is not None:
                return FinishEvent(sequence.key, "stop")
        if sequence.matcher is not None:
            sequence.matcher.accept(choice.token_id)
            if sequence.matcher.is_complete:
                return FinishEvent(sequence.key, "stop")
        if count >= sampling.max_tokens:
            return FinishEvent(sequence.key, "length")
        return None

    def _non_finite(self, sequence: Sequence) -> FinishEvent | None:
        """End a sequence whose pages may hold NaN, without sealing any of it.

        One that read cached chunks starts over if the store finds any of them damaged.
        """
        error = Internal("the model produced NaN or infinite logits", reason="NON_FINITE_LOGITS")
        if sequence.match is not None and sequence.cached_chunks:
            self._queues.restart_after_loss(sequence, error, fatal=error)
            return None
        sequence.writes_back = False
        self._page_manager.forget(sequence)
        self._page_manager.clear_unwritten(sequence)
        return FinishEvent(sequence.key, error=error)


def _grammar_failure(sequence: Sequence, matcher: GrammarMatcher) -> FinishEvent | None:
    """Return the end of a request whose grammar lets nothing follow; None if it goes on."""
    error = None if matcher.is_awaited else matcher.error
    return None if error is None else FinishEvent(sequence.key, error=error)


def _trace_step(batch: Batch, spans: list[Span]) -> None:
    """Add the step to the spans of its traced requests."""
    now = time.perf_counter()
    lanes: dict[Lane, LaneUse] = {}
    add_lanes(lanes, spans)
    for sequence, count in zip(batch.sequences, batch.counts, strict=True):
        if sequence.spans is not None:
            is_prefill = sequence.generated_count == len(sequence.admission.delivered)
            sequence.spans.stepped(batch.started, now, count, lanes, is_prefill=is_prefill)

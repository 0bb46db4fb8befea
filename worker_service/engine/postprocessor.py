"""Applies the result of a step: tokens, finishes, lost chunks, and what goes to write-back."""

from __future__ import annotations

import time

from splitpoint.errors import Internal
from splitpoint.observe import tracing
from splitpoint.planning.schedule import Lane
from worker_service.engine.batch import Batch
from worker_service.engine.messages import FinishEvent, TokenEvent
from worker_service.engine.model_runner import StepResult
from worker_service.engine.pages import PageManager
from worker_service.engine.queues import SequenceQueues
from worker_service.engine.sampling import Choice, NonFiniteLogits
from worker_service.engine.sequence import Sequence
from worker_service.lanes.spans import LaneUse, add_lanes
from worker_service.lanes.timeline import Span


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

        If sequences lost chunks, only they change: they start over.
        """
        batch = result.batch
        for each in result.lost:
            self._queues.restart_after_loss(each.sequence, each.cause)
        if result.lost:
            for sequence in batch.sequences:
                if sequence.restored and not sequence.awaits_match:
                    self._page_manager.shrink(sequence)
            return
        if tracing.is_on():
            _trace_step(batch, result.lane_spans)
        finishes: list[tuple[Sequence, FinishEvent]] = []
        spoiled: list[Sequence] = []
        for sequence, count, choice in zip(
            batch.sequences, batch.counts, result.choices, strict=True
        ):
            sequence.computed += count
            sequence.is_back = False
            event = None
            if isinstance(choice, NonFiniteLogits):
                spoiled.append(sequence)
                event = self._non_finite(sequence)
            elif choice is not None:
                event = self._append(sequence, choice)
            if event is not None:
                finishes.append((sequence, event))
        # Also of requests that end here: this step is one of theirs.
        seconds = time.perf_counter() - batch.started
        for sequence in batch.sequences[: batch.decode_count]:
            if sequence.is_streamed:
                sequence.step_count += 1
                sequence.step_seconds += seconds
        for sequence in batch.sequences:
            if sequence not in spoiled:
                self._page_manager.step_passed(sequence)
            self._queues.write_back(sequence)
        for sequence, event in finishes:
            self._queues.finish(sequence, event)

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
                return FinishEvent(sequence.key, "stop", sequence.text.matched_stop)
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


def _trace_step(batch: Batch, spans: list[Span]) -> None:
    """Add the step to the spans of its traced requests."""
    now = time.perf_counter()
    lanes: dict[Lane, LaneUse] = {}
    add_lanes(lanes, spans)
    for sequence, count in zip(batch.sequences, batch.counts, strict=True):
        if sequence.spans is not None:
            is_prefill = sequence.generated_count == len(sequence.admission.delivered)
            sequence.spans.stepped(batch.started, now, count, lanes, is_prefill=is_prefill)

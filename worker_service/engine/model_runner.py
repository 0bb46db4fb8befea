"""Runs the model on a batch: its cache reads and writes, the layers, and the choice of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

import torch

from splitpoint.planning.schedule import Lane
from worker_service.device.cache import DeviceCache
from worker_service.engine.batch import Batch
from worker_service.engine.sampling import (
    Choice,
    HostChoices,
    NonFiniteLogits,
    PendingChoices,
    PromptScores,
    SamplingRow,
    accepted,
)
from worker_service.engine.sequence import Sequence
from worker_service.engine.streamed_step import LostSequence
from worker_service.graphs.decode_graphs import DecodeGraphs
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.timeline import Span
from worker_service.model.model import Layer, Model
from worker_service.pipeline.executor import Prefetcher, compute
from worker_service.pipeline.staging import Staging
from worker_service.store.verifier import Check, Verifier
from worker_service.store.write_back import SequenceKey
from worker_service.structured.masks import PATIENCE_SECONDS, MaskFiller, MaskTotals, mask_with
from worker_service.structured.matcher import GrammarMatcher, Mask

# By the key of each sequence that a grammar rules: masks behind its newest token and each draft.
# As many rows of it can be used: none if its matcher has an error, or they are not ready.
StepMasks = dict[SequenceKey, list[Mask]]
# Rows of a prompt whose logits exist at once; fewer where a step never has as many.
_SCORED_ROWS = 64


@dataclass(frozen=True, slots=True)
class StepResult:
    """What running the model on a batch gave.

    Attributes:
        lane_spans: work of the lanes.
        compute_spans: the whole step as one span, if nothing ran on lanes.
        choices: for each sequence of the batch its next tokens: none if some of its prompt is
            still to be computed, several if drafts were right. [] also of a decoding sequence
            whose drafts spoiled its newest token's row: nothing of it holds; of one whose grammar
            lets nothing follow, which its matcher's error says; and of one whose mask is late.
        scores: log-probabilities of the prompt tokens that follow the rows of some sequences.
        spoiled: sequences whose drafts left rows behind that are not finite.
        lost: sequences that computed with bytes that must not be used. If there are any,
            no token was chosen.
    """

    batch: Batch
    lane_spans: list[Span]
    compute_spans: list[Span] = field(default_factory=list)
    choices: list[list[Choice] | NonFiniteLogits] = field(default_factory=list)
    spoiled: list[Sequence] = field(default_factory=list)
    scores: list[tuple[Sequence, PromptScores]] = field(default_factory=list)
    lost: list[LostSequence] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        return self.lane_spans + self.compute_spans


class ModelRunner:
    """Runs batches on one device. All but `computing_seconds` belongs to the engine's thread."""

    def __init__(
        self,
        model: Model,
        cache: DeviceCache,
        lanes: Lanes,
        staging: Staging,
        *,
        eos_token_ids: tuple[int, ...],
        verifier: Verifier | None,
        graphs: DecodeGraphs | None,
        on_masks: Callable[[], None],
        most_scored: int,
    ) -> None:
        """`on_masks`: called by any thread when masks are ready that came late for a step.

        `most_scored`: rows of logits that a step has room for, at least.
        """
        self._model = model
        self._cache = cache
        self._lanes = lanes
        self._staging = staging
        self._eos_token_ids = eos_token_ids
        self._verifier = verifier
        self._graphs = graphs
        self._scored_rows = min(_SCORED_ROWS, most_scored)
        self._mask_filler = MaskFiller(model.shape.vocabulary_size, on_masks)
        # Start of a step under way that will leave a single span.
        self._computing_since: float | None = None

    @property
    def mask_totals(self) -> MaskTotals:
        """What structured output has cost steps; from any thread."""
        return self._mask_filler.totals

    def begin_slow_masks(self, sequences: Iterable[Sequence]) -> None:
        """Begin the masks that a step should not wait for; their sequences wait for them."""
        for sequence in sequences:
            if sequence.matcher is not None:
                self._mask_filler.begin_slow(sequence.matcher)

    def close(self) -> None:
        self._mask_filler.close()

    @property
    def computing_seconds(self) -> float:
        """Seconds of the step under way that no span shows yet; from any thread."""
        since = self._computing_since
        return 0.0 if since is None else max(0.0, time.perf_counter() - since)

    def run(self, batch: Batch) -> StepResult:
        """Run the model and choose tokens for each sequence that has computed all it has."""
        checks: list[Check] = []
        if batch.streamed is not None and self._verifier is not None:
            checks = batch.streamed.begin_checks(self._verifier)
        prefetcher = self._start_prefetcher(batch)
        began = time.perf_counter()
        self._computing_since = began if prefetcher is None else None
        try:
            ruled = _ruled(batch)
            for sequence, matcher in ruled:
                self._mask_filler.begin(matcher, sequence.drafts)
            hidden, finite = self._forward(batch, prefetcher)
            # Before the step's own logits take their memory.
            scores = self._score_prompts(batch, hidden)
            final = self._model.final(hidden[batch.logit_rows])
            logits = self._model.head(final)
            masks = self._masks(ruled)
            pending = self._begin_choice(batch, logits, finite, masks)
            # Weights may be on their way for the next step; everything else is done.
            spans = self._lanes.collect()
        except BaseException:
            # Between steps no copy may be under way, also when the engine ends here.
            self._lanes.finish_after_error()
            batch.selected.drop()
            raise
        lost = _lost(batch, checks)
        if lost:
            # No token is counted yet: the other sequences run again in the next step.
            self._computing_since = None
            return StepResult(batch, spans, lost=lost)
        choices, spoiled = self._choose(batch, logits, finite, pending, masks)
        _add_hidden_states(batch, final, choices)
        whole = []
        if prefetcher is None:
            whole = self._lanes.count_spans([self._step_span(batch, began, time.perf_counter())])
        self._computing_since = None
        return StepResult(batch, spans, whole, choices, spoiled, scores)

    def _start_prefetcher(self, batch: Batch) -> Prefetcher | None:
        """Fill staging slots while the step begins to compute; None if nothing is streamed.

        Without tiles it still leaves a span of each part, beside weights that come.
        """
        streamed = batch.streamed
        if streamed is not None:
            prefetcher = Prefetcher(
                self._lanes, self._staging, streamed.tile_pages, streamed.layers
            )
        elif not self._model.is_resident:
            prefetcher = Prefetcher(self._lanes, self._staging, 1, ())
        else:
            return None
        prefetcher.start()
        return prefetcher

    def _forward(
        self, batch: Batch, prefetcher: Prefetcher | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last hidden `[N, h]`, and bool `[N]`: whether a row is finite.

        A NaN stays in its token's row from the layer where it arises to the end.
        """
        if batch.slot is not None and self._graphs is not None:
            hidden = self._graphs.run(
                batch.slot, batch.graph_tables, partial(self._hidden, batch, None)
            )[: sum(batch.counts)]
        else:
            hidden = self._hidden(batch, prefetcher)
        return hidden, hidden.isfinite().all(dim=1)

    def _hidden(self, batch: Batch, prefetcher: Prefetcher | None) -> torch.Tensor:
        """Return the last hidden `[rows, h]`, of padding rows as well.

        It depends on the step through the memory of its tables alone, if nothing streams.
        """
        model, cache = self._model, self._cache

        def attend(
            index: int,
            layer: Layer,
            inputs: torch.Tensor,
            queries: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
        ) -> torch.Tensor:
            write = partial(batch.write, cache, index, inputs, keys, values)
            compute(prefetcher, "write", index, write)
            return batch.attend(cache, index, layer, queries, keys, values, prefetcher)

        carry_out = partial(compute, prefetcher)
        enter = batch.selected.fetching(model, carry_out)
        return model.run(batch.token_ids, batch.positions, attend, carry_out, enter)

    def _score_prompts(
        self, batch: Batch, hidden: torch.Tensor
    ) -> list[tuple[Sequence, PromptScores]]:
        """Return the scores of `StepResult`: the row of position p has the logits of p + 1."""
        scores = []
        row = 0
        for sequence, count in zip(batch.sequences, batch.counts, strict=True):
            start, row = sequence.computed, row + count
            reported = sequence.admission.sampling.prompt_logprobs
            if reported is None or not sequence.scores_prompt:
                continue
            first = max(sequence.scored_tokens, start + 1)
            end = min(start + count + 1, sequence.prompt_length)
            found = PromptScores(first)
            for index in range(first, end, self._scored_rows):
                tokens = sequence.tokens[index : min(index + self._scored_rows, end)]
                place = row - count + index - 1 - start
                rows = hidden[place : place + len(tokens)]
                logits = self._model.head(self._model.final(rows))
                found.add(logits, torch.tensor(tokens, device=logits.device), reported)
            if found.logprobs:
                scores.append((sequence, found))
        return scores

    def _masks(self, ruled: list[tuple[Sequence, GrammarMatcher]]) -> StepMasks:
        """Return the masks of the rows that grammars rule, as far as they are ready."""
        if not ruled:
            return {}
        filled = self._mask_filler.fill(
            [(matcher, sequence.drafts) for sequence, matcher in ruled], PATIENCE_SECONDS
        )
        return dict(zip((sequence.key for sequence, _ in ruled), filled, strict=True))

    def _begin_choice(
        self, batch: Batch, logits: torch.Tensor, finite: torch.Tensor, masks: StepMasks
    ) -> PendingChoices | None:
        """Issue the choices of all rows on a GPU; None on a CPU, which chooses at the end."""
        if not logits.is_cuda:
            return None
        rows = [
            self._sampling_row(sequence, row, masks)
            for sequence, count in zip(batch.sequences, batch.logit_counts, strict=True)
            for row in range(count)
        ]
        return PendingChoices(logits, finite, rows)

    def _choose(
        self,
        batch: Batch,
        logits: torch.Tensor,
        on_device: torch.Tensor,
        pending: PendingChoices | None,
        masks: StepMasks,
    ) -> tuple[list[list[Choice] | NonFiniteLogits], list[Sequence]]:
        """Return the choices and the spoiled sequences of `StepResult`.

        On a CPU a token is only chosen where all drafts before it are right.
        """
        finite, chosen = (on_device.tolist(), None) if pending is None else pending.read()
        on_host = HostChoices(logits) if chosen is None and len(logits) else None
        choices: list[list[Choice] | NonFiniteLogits] = []
        spoiled: list[Sequence] = []
        row = logit_row = 0
        for sequence, count, logit_count in zip(
            batch.sequences, batch.counts, batch.logit_counts, strict=True
        ):
            regular = finite[row : row + count]
            is_finite = all(regular)
            usable = logit_count
            if not is_finite and sequence.drafts:
                # In plain decoding these drafts would not be there.
                spoiled.append(sequence)
                usable = regular.index(False)
            usable = min(usable, len(masks.get(sequence.key, [None] * usable)))
            if not is_finite and not sequence.drafts:
                choices.append(NonFiniteLogits())
            elif not usable:
                choices.append([])
            elif chosen is not None:
                choices.append(accepted(chosen[logit_row : logit_row + usable], sequence.drafts))
            elif on_host is not None:
                lazily = (
                    on_host.choice(logit_row + index, self._sampling_row(sequence, index, masks))
                    for index in range(usable)
                )
                choices.append(accepted(lazily, sequence.drafts))
            row += count
            logit_row += logit_count
        return choices, spoiled

    def _step_span(self, batch: Batch, start: float, end: float) -> Span:
        """Return the span of a step that only computes: the model and sampling.

        One that only computes fronts of restores counts as their prefill. Of one that only
        prefills and reads every token the FLOP are known, too.
        """
        kind = "decode" if not batch.prefills else "mixed" if batch.decode_count else "prefill"
        name, count_flops = f"{kind} step", self._model.shape.prefill_flops
        if all(sequence.restoring is not None for sequence in batch.sequences):
            name, count_flops = "prefill", self._model.shape.fill_flops
        flops = 0
        if name.startswith("prefill") and not batch.selected.takes_part:
            flops = sum(
                count_flops(count, sequence.computed)
                for sequence, count in zip(batch.sequences, batch.counts, strict=True)
            )
        return Span(Lane.COMPUTE, name, start, end, tokens=sum(batch.counts), amount=flops)

    def _sampling_row(self, sequence: Sequence, draft_count: int, masks: StepMasks) -> SamplingRow:
        """Return what the choice depends on that follows the first `draft_count` drafts."""
        admission, mask = sequence.admission, None
        if sequence.matcher is not None:
            # Nothing will be chosen for a row that has none.
            mask = next(islice(masks.get(sequence.key, ()), draft_count, None), None)
        elif ids := admission.sampling.allowed_token_ids:
            if sequence.allowed is None:
                sequence.allowed = mask_with(ids, self._model.shape.vocabulary_size)
            mask = sequence.allowed
        return SamplingRow(
            admission.sampling,
            sequence.tokens,
            len(admission.prompt),
            self._eos_token_ids,
            sequence.drafts[:draft_count],
            mask,
        )


def _add_hidden_states(
    batch: Batch, final: torch.Tensor, choices: list[list[Choice] | NonFiniteLogits]
) -> None:
    """Give the choices of requests that want it the state of their row in `final`."""
    row = 0
    for sequence, count, chosen in zip(batch.sequences, batch.logit_counts, choices, strict=True):
        wants = sequence.admission.sampling.returns_hidden_state
        if wants and chosen and not isinstance(chosen, NonFiniteLogits):
            state = final[row].to("cpu", torch.float32).numpy().astype("<f4", copy=False)
            chosen[0] = replace(chosen[0], hidden_state=state.tobytes())
        row += count


def _ruled(batch: Batch) -> list[tuple[Sequence, GrammarMatcher]]:
    """Return the sequences that get a token which a grammar rules."""
    return [
        (sequence, sequence.matcher)
        for sequence, count in zip(batch.sequences, batch.logit_counts, strict=True)
        if sequence.matcher is not None and count
    ]


def _lost(batch: Batch, checks: list[Check]) -> list[LostSequence]:
    """Wait for the checks; return sequences that computed with bytes that must not be used."""
    return [] if batch.streamed is None else batch.streamed.lost(checks)

"""Drafts with the model itself, which attends only to what is on the device.

A streamed sequence has its first chunk, its window and its tail there. One that selects attends
rows of its other tokens, too, once its screens are built: those that each layer wants for the
first token of a draft are fetched into the sequence's row pages, and serve the tokens that follow.
So no layer of a draft reads everything, and the step that verifies does.

A round is one decode row for each sequence: its K and V go to the spare rows behind the text,
where the next round finds them and the step that verifies them overwrites them. Nothing is
sealed, no X is kept, and no screen learns from a draft. Without a selection nothing crosses the
link.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from splitpoint.speculation import DraftMethod
from worker_service.device.cache import DeviceCache
from worker_service.device.upload import Upload
from worker_service.drafts.drafter import TargetKey
from worker_service.engine.sampling import (
    NonFiniteLogits,
    SamplingRow,
    choose_with_flags,
)
from worker_service.engine.sequence import Sequence, device_pages
from worker_service.kernels.row_wise import write
from worker_service.lanes.lanes import Lanes
from worker_service.model.attention_parts import DecodeParts
from worker_service.model.attention_plan import DecodePlan
from worker_service.model.model import Layer, Model
from worker_service.retrieval.ahead import RowReader, RowsAhead
from worker_service.retrieval.row_plan import RowPlan
from worker_service.retrieval.sequence_reads import SequenceReads
from worker_service.speculation.growing_draft import (
    GrowingDraft,
    count_drafts,
    drafting_sampling,
)

# Tokens of a draft that attend the same fetched rows. To choose rows for every token makes 2 % more
# of them right, and costs more than that unless choosing takes less than 1/50 of a pull.
ROWS_SERVE = 8


@dataclass(slots=True, eq=False, kw_only=True)
class _Draft(GrowingDraft):
    """A draft, and the sequence that it is for."""

    sequence: Sequence

    @property
    def position(self) -> int:
        """Position of the row that gives the next draft."""
        return self.sequence.computed + len(self.tokens)

    @property
    def newest(self) -> int:
        """The token of that row."""
        return self.tokens[-1] if self.tokens else self.sequence.tokens[self.sequence.computed]

    @property
    def reads(self) -> SequenceReads | None:
        """The rows of stored tokens that it attends; None if it attends none."""
        reads = self.sequence.reads
        return reads if reads is not None and reads.is_built else None


class SelfDrafter:
    """Drafts for streamed sequences. Used by the engine's thread, within inference mode."""

    method = DraftMethod.SELF

    def __init__(
        self,
        model: Model,
        cache: DeviceCache,
        lanes: Lanes,
        *,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        """`lanes` count the compute time of drafts; they run none of it."""
        self._model = model
        self._cache = cache
        self._lanes = lanes
        self._eos_token_ids = eos_token_ids
        self._chunk = cache.layout.chunk_tokens
        self._windows = {layer.window for layer in model.layers}

    def propose(self, wanted: Rows[tuple[Sequence, int]]) -> list[list[int]]:
        """Return drafts for each sequence, at most as many as are wanted.

        A resident sequence gets none: the drafts would cost what they save. Nor does any if
        weights are on the host: each round would stream them.
        """
        started = time.perf_counter()
        drafts = [
            _Draft(drafting_sampling(sequence), self._most(sequence, most), sequence=sequence)
            for sequence, most in wanted
        ]
        growing = [draft for draft in drafts if draft.wants_more]
        if growing:
            try:
                while growing:
                    self._draft_one(growing)
                    growing = [draft for draft in growing if draft.wants_more]
            except BaseException:
                # Rows that were to come may be missing: no step may attend them.
                self._lanes.finish_after_error()
                for draft in drafts:
                    if draft.reads is not None:
                        draft.reads.drop()
                raise
            count_drafts(self._lanes, started, drafts)
        return [draft.tokens for draft in drafts]

    def forget(self, key: TargetKey, *, has_ended: bool) -> None:
        """Do nothing: all that is kept for a sequence is in its own pages."""

    def _most(self, sequence: Sequence, wanted: int) -> int:
        """Return how many of the wanted drafts have a row behind those of the text."""
        if not sequence.is_streamed or not self._model.is_resident:
            return 0
        return max(0, min(wanted, len(sequence.pages) * self._chunk - sequence.computed))

    def _draft_one(self, rows: Rows[_Draft]) -> None:
        """Run the model on one row of each sequence, and append the token that it gives."""
        hidden = self._forward(rows)
        finite = hidden.isfinite().all(dim=1)
        logits = self._model.logits(hidden)
        sampling = [self._sampling_row(draft) for draft in rows]
        are_finite, choices = choose_with_flags(logits, finite, sampling)
        for draft, is_finite, choice in zip(rows, are_finite, choices, strict=True):
            if not is_finite or isinstance(choice, NonFiniteLogits):
                self._clear_row(draft)
                draft.has_ended = True
            else:
                draft.append(choice.token_id, self._eos_token_ids)

    def _forward(self, rows: Rows[_Draft]) -> torch.Tensor:
        """Return the last hidden `[rows, h]`; write the rows' K and V into their pages."""
        cache, model = self._cache, self._model
        places = [divmod(draft.position, self._chunk) for draft in rows]
        own_pages = [
            draft.sequence.page(index) for draft, (index, _) in zip(rows, places, strict=True)
        ]
        # One copy, for which the host does not wait.
        upload = Upload(cache.device)
        token_ids = upload.table([draft.newest for draft in rows])
        positions = upload.table([draft.position for draft in rows])
        page_table, page_rows = upload.table(own_pages), upload.table([row for _, row in places])
        readers = [
            RowReader(
                row,
                draft.position,
                draft.reads,
                upload.table(draft.sequence.ranked_pages),
            )
            for row, draft in enumerate(rows)
            if draft.reads is not None
        ]
        renewed = [each for each in readers if not len(rows[each.row].tokens) % ROWS_SERVE]
        ahead = RowsAhead(
            model,
            renewed,
            upload.table([each.row for each in renewed]),
            upload.table([each.position for each in renewed]),
        )
        row_plans = self._row_plans(readers, [draft.position for draft in rows], upload)
        pages, owners, first_positions = device_pages(
            (draft.sequence for draft in rows), self._chunk
        )
        plan = DecodePlan.of_pages(
            pages,
            owners=owners,
            first_positions=first_positions,
            query_positions=[draft.position for draft in rows],
            chunk_tokens=self._chunk,
            windows=self._windows,
            device=cache.device,
            upload=upload,
        )
        upload.send()

        def attend(
            index: int,
            layer: Layer,
            _inputs: torch.Tensor,
            queries: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
        ) -> torch.Tensor:
            planes = (cache.keys[index], cache.values[index])
            write(*planes, page_table, page_rows, keys, values)
            for event in ahead.arriving(index):
                self._lanes.wait_event(event)
            parts = DecodeParts(
                queries,
                window=layer.window,
                scale=layer.scale,
                cap=layer.cap,
                sinks=layer.sinks,
                order=None,
            )
            planes = cache.keys[index], cache.values[index]
            parts.add(*planes, plan=plan)
            chosen = row_plans[index]
            if chosen is not None:
                parts.add(*planes, plan=chosen.pages, seen=chosen.seen(index))
            return parts.attended()

        return model.run(token_ids, positions, attend, enter=ahead.enter)

    def _row_plans(
        self, readers: Rows[RowReader], positions: list[int], upload: Upload
    ) -> list[RowPlan | None]:
        """Plan each layer's attention to rows of stored tokens."""
        plans: list[RowPlan | None] = []
        made: dict[tuple[int, ...], RowPlan | None] = {}
        for index in range(len(self._model.layers)):
            selecting = [reader for reader in readers if reader.reads.selects(index)]
            key = tuple(reader.row for reader in selecting)
            if key not in made:
                made[key] = RowPlan.of(
                    [(reader.row, reader.reads) for reader in selecting],
                    positions,
                    windows=self._windows,
                    chunk_tokens=self._chunk,
                    device=self._cache.device,
                    upload=upload,
                )
            plans.append(made[key])
        return plans

    def _sampling_row(self, draft: _Draft) -> SamplingRow:
        """Return what the choice depends on: the same seed and position as in verification."""
        sequence = draft.sequence
        return SamplingRow(
            draft.sampling,
            sequence.tokens,
            sequence.prompt_length,
            self._eos_token_ids,
            draft.tokens,
        )

    def _clear_row(self, draft: _Draft) -> None:
        """Zero the row of a draft that is not finite: a masked NaN spoils its page's readers."""
        index, row = divmod(draft.position, self._chunk)
        page = draft.sequence.page(index)
        for plane in (*self._cache.keys, *self._cache.values):
            plane[page, :, row] = 0

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

import torch

from splitpoint.errors import (
    DataLoss,
    Internal,
    ResourceExhausted,
    SplitpointError,
    Unavailable,
)
from splitpoint.planner import RestoreMethod
from splitpoint.shapes import chunks_of
from splitpoint.text import TextStream, Tokenizer
from worker_service.arena_tensors import ChunkLost, StoredChunk
from worker_service.batch import Batch, Segment, build_batch
from worker_service.device_cache import DeviceCache
from worker_service.memory import MemoryPlan
from worker_service.messages import (
    Admit,
    Call,
    Cancel,
    Command,
    FinishEvent,
    Matched,
    RestoreEvent,
    SetPaused,
    StepOutput,
    Stop,
    TokenEvent,
)
from worker_service.model.decoder import Decoder
from worker_service.paging import Pager
from worker_service.restore import Puller, restore
from worker_service.sampling import Choice, NonFiniteLogits, SamplingRow, choose
from worker_service.sequence import Sequence
from worker_service.store_client import Match
from worker_service.write_back import ChunksStored, Flushed, SequenceKey, WriteFailed

log = logging.getLogger(__name__)

# A sequence whose chunks vanish this often is given up: its store is in trouble.
MAX_LOSSES = 3


class Engine:
    """Runs requests on one device. `step` and `run` belong to one thread; `post` to any."""

    def __init__(
        self,
        model: Decoder,
        cache: DeviceCache,
        *,
        max_batch_size: int,
        prefill_chunk_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.plan: MemoryPlan = cache.plan
        self.pager = Pager(cache)
        self.chunk_tokens = cache.layout.chunk_tokens
        self.max_batch_size = max_batch_size
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.eos_token_ids = eos_token_ids
        self.tokenizer = tokenizer
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._waiting: list[Admit] = []
        self._running: list[Sequence] = []
        self._paused_waiting: set[str] = set()
        # Finished or reset, until write-back lets go of their pages.
        self._flushing: dict[SequenceKey, tuple[Sequence, FinishEvent | None]] = {}
        self._windows = {layer.window for layer in model.layers}
        self._puller: Puller | None = None
        self._output = StepOutput()
        self._stopped = False

    # -- the loop ---------------------------------------------------------------

    def post(self, command: Command) -> None:
        """Queue a command for the next step; from any thread."""
        self._commands.put(command)

    def run(self, deliver: Callable[[StepOutput], None]) -> None:
        """Step until `Stop`; sleeps while nothing can run."""
        while not self._stopped:
            output = self.step()
            if not output.is_empty:
                deliver(output)
            if not output.ran and not self._stopped:
                # Whatever lets a request go on arrives as a command.
                self._take(self._commands.get())

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """One iteration over everything that can run."""
        self._take_commands()
        self._admit_waiting()
        self._restore_admitted()
        batch = self._form_batch()
        if batch is not None:
            self._run_batch(batch)
        return self._hand_over(ran=batch is not None)

    @property
    def is_idle(self) -> bool:
        """Nothing running, waiting, or being written back."""
        return not (self._waiting or self._running or self._flushing)

    # -- commands ---------------------------------------------------------------

    def _take_commands(self) -> None:
        while not self._commands.empty():
            self._take(self._commands.get())

    def _take(self, command: Command) -> None:
        match command:
            case Admit():
                self._waiting.append(command)
            case Cancel(key):
                self._cancel(key)
            case SetPaused(request_id, paused):
                self._set_paused(request_id, paused)
            case ChunksStored(key):
                owner = self._find(key)
                if owner is not None:
                    self.pager.chunks_stored(owner, command)
            case WriteFailed(key, error):
                self._write_failed(key, error)
            case Flushed(key):
                self._flushed(key)
            case Matched(key, match):
                self._matched_again(key, match)
            case Call(function):
                function()
            case Stop():
                self._stopped = True

    def _cancel(self, key: SequenceKey) -> None:
        event = FinishEvent(key, "cancelled")
        for admit in self._waiting:
            if admit.admission.key == key:
                self._waiting.remove(admit)
                self._discard(admit, event)
                return
        for sequence in self._running:
            if sequence.key == key:
                self._finish(sequence, event)
                return

    def _set_paused(self, request_id: str, paused: bool) -> None:
        for sequence in self._running:
            if sequence.admission.request_id == request_id:
                sequence.paused = paused
                return
        if any(admit.admission.request_id == request_id for admit in self._waiting):
            (self._paused_waiting.add if paused else self._paused_waiting.discard)(request_id)

    # -- admission and restore ----------------------------------------------------

    def _admit_waiting(self) -> None:
        """First come, first served: a request that must wait holds those behind it."""
        while self._waiting and len(self._running) < self.max_batch_size:
            admit = self._waiting[0]
            claim = self.pager.claim_of(admit.admission)
            if claim > self.plan.page_count:
                del self._waiting[0]
                self._discard(admit, FinishEvent(admit.admission.key, error=self._too_big(claim)))
                continue
            if not self.cache.try_claim(claim):
                return
            del self._waiting[0]
            self._running.append(self._begin(admit, claim))

    def _too_big(self, claim: int) -> ResourceExhausted:
        return ResourceExhausted(
            f"the request needs {claim} pages of {self.plan.page_bytes} bytes, "
            f"this worker has {self.plan.page_count}",
            reason="NEVER_FITS",
            needed_bytes=claim * self.plan.page_bytes,
            capacity_bytes=self.plan.cache_capacity_bytes,
        )

    def _discard(self, admit: Admit, event: FinishEvent) -> None:
        """End a request that never ran; its lease is given up through its chain."""
        self._paused_waiting.discard(admit.admission.request_id)
        if admit.match is not None:
            self._output.flushes.append(event.key)
        self._output.finishes.append(event)

    def _begin(self, admit: Admit, claim: int) -> Sequence:
        admission = admit.admission
        text = None
        if admission.sampling.stop and self.tokenizer is not None:
            text = TextStream(
                self.tokenizer,
                admission.sampling.stop,
                min_tokens=admission.sampling.min_tokens,
            )
        paused = admission.request_id in self._paused_waiting
        self._paused_waiting.discard(admission.request_id)
        return Sequence(
            admission=admission,
            paused=paused,
            tokens=[*admission.prompt, *admission.delivered],
            claimed_pages=claim,
            text=text,
            match=admit.match,
            chain_is_open=admit.match is not None,
        )

    def _restore_admitted(self) -> None:
        for sequence in list(self._running):
            if not sequence.restored and not sequence.awaits_match:
                self._restore(sequence)

    def _restore(self, sequence: Sequence) -> None:
        """Bring the matched prefix in; on a lost chunk, look it up again."""
        match = sequence.match
        sequence.restored = True
        if match is None:
            self._report_restore(sequence, 0, 0, 0.0)
            return
        started = time.perf_counter()
        # The last token is computed anew whatever is cached: its logits are needed.
        cached = min(match.cached_tokens, len(sequence.tokens) - 1)
        chunks = match.chunks[: chunks_of(cached, self.chunk_tokens)]
        split = min(sequence.admission.split_tokens, cached)
        try:
            self._restore_pages(sequence, match, chunks, cached, split)
        except ChunkLost as error:
            log.warning("%s: %s", sequence.admission.request_id, error.message)
            self._lose(sequence)
            return
        full = cached // self.chunk_tokens
        sequence.computed = cached
        sequence.stored = list(chunks[:full])
        sequence.written_chunks = full
        sequence.writes_back = True
        self._report_restore(sequence, cached, split, time.perf_counter() - started)

    def _restore_pages(
        self,
        sequence: Sequence,
        match: Match,
        chunks: tuple[StoredChunk, ...],
        cached: int,
        split: int,
    ) -> None:
        """A resident prefix comes in whole; of a streamed one only a partial tail."""
        puller = self._puller_for(match)
        sequence.puller = puller
        full = cached // self.chunk_tokens
        first = full if sequence.is_streamed else 0
        self.pager.take_for_prefix(sequence, first, len(chunks))
        restore(puller, chunks, first, split, self.cache.keys, self.cache.values, sequence.pages)
        if cached % self.chunk_tokens and self.cache.inputs:
            # The tail's chunk will be sealed anew with more tokens, X included.
            page = self.pager.take_input_page(sequence, full)
            puller.pull_inputs(chunks[full], self.cache.inputs, page)

    def _report_restore(self, sequence: Sequence, cached: int, split: int, seconds: float) -> None:
        method = RestoreMethod.of(split, cached)
        self._output.restores.append(RestoreEvent(sequence.key, cached, split, method, seconds))

    def _puller_for(self, match: Match) -> Puller:
        """One for each mapped arena; in practice one until the store restarts."""
        tensors = match.connection.tensors
        if self._puller is None or self._puller.tensors is not tensors:
            self._puller = Puller(self.model, tensors, self.cache.device)
        return self._puller

    # -- the batch -------------------------------------------------------------------

    def _form_batch(self) -> Batch | None:
        """Every decoding request, and prompt tokens up to the prefill budget."""
        decodes: list[Sequence] = []
        segments: list[Segment] = []
        budget = self.prefill_chunk_tokens
        for sequence in self._running:
            if sequence.paused or not sequence.restored or sequence.awaits_match:
                continue
            remaining = len(sequence.tokens) - sequence.computed
            if remaining == 1:
                if self.pager.grow(sequence, 1):
                    decodes.append(sequence)
            elif budget:
                count = self.pager.grow(sequence, min(remaining, budget))
                if count:
                    segments.append(Segment(sequence, sequence.computed, count))
                    budget -= count
        if not decodes and not segments:
            return None
        return build_batch(decodes, segments, self.cache, self._windows)

    # -- the model ----------------------------------------------------------------------

    def _run_batch(self, batch: Batch) -> None:
        try:
            logits = self._forward(batch)
        except ChunkLost as error:
            # Only a streamed read can lose a chunk; which one is asked again.
            log.warning("a streamed chunk was lost: %s", error.message)
            for sequence in batch.sequences:
                if sequence.stored_front:
                    self._lose(sequence)
            return
        finishes = self._sample(batch, logits)
        for sequence in batch.sequences:
            self._write_back(sequence)
        for sequence, event in finishes:
            self._finish(sequence, event)

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Logits `[sequences, vocabulary]` of each sequence's last token in the batch."""
        model = self.model
        hidden = model.embed(batch.token_ids, batch.positions)
        rotary = model.rotary(batch.positions)
        for index, layer in enumerate(model.layers):
            inputs = layer.attention_input(hidden)
            queries, keys, values = layer.project(inputs, rotary)
            batch.write(self.cache, index, inputs, keys, values)
            attended = batch.attend(self.cache, index, layer, queries, keys, values)
            hidden = layer.finish(hidden, attended)
        return model.logits(hidden[batch.logit_rows])

    # -- sampling ---------------------------------------------------------------------

    def _sample(self, batch: Batch, logits: torch.Tensor) -> list[tuple[Sequence, FinishEvent]]:
        """Append one token to every sequence that has computed all it has."""
        finishes: list[tuple[Sequence, FinishEvent]] = []
        rows: list[int] = []
        for row, (sequence, count) in enumerate(zip(batch.sequences, batch.counts, strict=True)):
            sequence.computed += count
            if sequence.computed == len(sequence.tokens):
                rows.append(row)
            elif not bool(logits[row].isfinite().all()):
                finishes.append((sequence, self._non_finite(sequence)))
        if not rows:
            return finishes
        chosen = logits if len(rows) == len(batch.sequences) else logits[rows]
        sequences = [batch.sequences[row] for row in rows]
        choices = choose(chosen, [self._sampling_row(sequence) for sequence in sequences])
        for sequence, choice in zip(sequences, choices, strict=True):
            if isinstance(choice, NonFiniteLogits):
                finishes.append((sequence, self._non_finite(sequence)))
                continue
            event = self._append(sequence, choice)
            if event is not None:
                finishes.append((sequence, event))
        return finishes

    def _append(self, sequence: Sequence, choice: Choice) -> FinishEvent | None:
        """Deliver one token; the finish it causes, if any."""
        index = sequence.generated_count
        sequence.tokens.append(choice.token_id)
        self._output.tokens.append(TokenEvent(sequence.key, index, choice))
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

    def _non_finite(self, sequence: Sequence) -> FinishEvent:
        """Nothing of it may be sealed or left behind: the cache may hold its NaN."""
        sequence.writes_back = False
        self.pager.clear_pages(sequence)
        error = Internal("the model produced NaN or infinite logits", reason="NON_FINITE_LOGITS")
        return FinishEvent(sequence.key, error=error)

    # -- write-back and the end -----------------------------------------------------------

    def _write_back(self, sequence: Sequence, *, tail: bool = False) -> None:
        """Hand over every chunk that became full; with `tail`, the partial one too."""
        if sequence.writes_back:
            jobs = self.pager.full_chunks(sequence, tail=tail)
            if jobs:
                self._output.writes.append((sequence.key, jobs))

    def _finish(self, sequence: Sequence, event: FinishEvent) -> None:
        """Take a sequence out; its end is reported once write-back let go of its pages.

        So whoever sees the end finds the chunks in the store.
        """
        self._running.remove(sequence)
        if sequence.key in self._flushing:
            self._flushing[sequence.key] = (sequence, event)
        elif sequence.chain_is_open:
            self._write_back(sequence, tail=True)
            self._flush(sequence, event)
        else:
            self.pager.free(sequence)
            self._output.finishes.append(event)

    def _flush(self, sequence: Sequence, event: FinishEvent | None) -> None:
        self._flushing[sequence.key] = (sequence, event)
        self._output.flushes.append(sequence.key)

    def _flushed(self, key: SequenceKey) -> None:
        entry = self._flushing.pop(key, None)
        if entry is None:
            return  # a discarded request's chain
        sequence, event = entry
        sequence.chain_is_open = False
        if event is not None:
            self.pager.free(sequence)
            self._output.finishes.append(event)
            return
        self.pager.give_pages(sequence)
        sequence.forget()
        self._output.lookups.append((key, sequence.admission.salt, list(sequence.tokens)))

    def _lose(self, sequence: Sequence) -> None:
        """Chunks vanished: start over from what the store still has, tokens kept."""
        if sequence.awaits_match:
            return  # it is starting over already
        sequence.losses += 1
        sequence.writes_back = False
        if sequence.losses > MAX_LOSSES:
            error = DataLoss(
                f"cached chunks were lost {sequence.losses} times", reason="CHUNK_LOST"
            )
            self._finish(sequence, FinishEvent(sequence.key, error=error))
            return
        sequence.awaits_match = True
        self._flush(sequence, None)

    def _matched_again(self, key: SequenceKey, match: Match | None) -> None:
        for sequence in self._running:
            if sequence.key == key:
                sequence.match = match
                sequence.chain_is_open = match is not None
                sequence.awaits_match = False
                if match is None and sequence.is_streamed:
                    error = Unavailable("the KV store went away", reason="STORE_LOST")
                    self._finish(sequence, FinishEvent(key, error=error))
                return
        if match is not None:
            self._output.flushes.append(key)  # cancelled meanwhile

    def _write_failed(self, key: SequenceKey, error: SplitpointError) -> None:
        sequence = self._find(key)
        if sequence is None:
            return
        sequence.writes_back = False
        self.pager.give_input_pages(sequence)
        if not sequence.is_streamed or sequence not in self._running:
            return
        if isinstance(error, ResourceExhausted):
            # Its cache has nowhere to go, neither here nor in the store.
            self._finish(sequence, FinishEvent(key, error=error))
        else:
            self._lose(sequence)

    def _find(self, key: SequenceKey) -> Sequence | None:
        for sequence in self._running:
            if sequence.key == key:
                return sequence
        entry = self._flushing.get(key)
        return entry[0] if entry is not None else None

    def _hand_over(self, *, ran: bool) -> StepOutput:
        output, self._output = self._output, StepOutput()
        output.ran = ran
        output.running_count = len(self._running)
        output.cache_used_bytes = self.cache.used_bytes
        return output

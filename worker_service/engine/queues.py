"""Which request is where: waiting, running, or finished but still being written back.

Every way in and out of the engine is one method here. A sequence that holds pages
leaves through `_release`, at once or after a flush, so nothing can be forgotten. What must
leave the engine is added to `output`. Runs on the engine's thread.
"""

from __future__ import annotations

from dataclasses import replace

from splitpoint.checkpoint.text import TextStream, Tokenizer
from splitpoint.errors import DataLoss, ResourceExhausted, SplitpointError, Unavailable
from worker_service.device.cache import DeviceCache
from worker_service.engine.messages import Admit, FinishEvent, Lookup, StepOutput
from worker_service.engine.pages import PageManager
from worker_service.engine.sequence import Sequence, Suspects
from worker_service.store.client import Match
from worker_service.store.write_back import SequenceKey

# A sequence whose chunks vanish this often is given up: its store is in trouble.
MAX_LOSSES = 3


class SequenceQueues:
    """All requests of one engine.

    Attributes:
        waiting: not admitted yet, first come first.
        running: admitted, in order of admission; at most `max_batch_size`.
        output: what the present step hands over; the engine replaces it.
    """

    def __init__(
        self,
        cache: DeviceCache,
        page_manager: PageManager,
        tokenizer: Tokenizer | None,
        max_batch_size: int,
    ) -> None:
        self.waiting: list[Admit] = []
        self.running: list[Sequence] = []
        self.output = StepOutput()
        self._cache = cache
        self._page_manager = page_manager
        self._tokenizer = tokenizer
        self._max_batch_size = max_batch_size
        self._paused_waiting: set[str] = set()
        # Ended (with how it ended) or starting over (None), until write-back
        # lets go of their pages.
        self._flushing: dict[SequenceKey, tuple[Sequence, FinishEvent | None]] = {}

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.running or self._flushing)

    def find(self, key: SequenceKey) -> Sequence | None:
        """A running or flushing sequence."""
        for sequence in self.running:
            if sequence.key == key:
                return sequence
        entry = self._flushing.get(key)
        return entry[0] if entry is not None else None

    # -- in -----------------------------------------------------------------------

    def admit_waiting(self) -> None:
        """First come, first served: a request that must wait holds those behind it."""
        while self.waiting and len(self.running) < self._max_batch_size:
            admit = self.waiting[0]
            claim = self._page_manager.claim_of(admit.admission)
            if claim > self._cache.plan.page_count:
                del self.waiting[0]
                self._discard(admit, FinishEvent(admit.admission.key, error=self._too_big(claim)))
                continue
            if not self._cache.try_claim(claim):
                return
            del self.waiting[0]
            self.running.append(self._begin(admit, claim))

    def matched_again(
        self, key: SequenceKey, match: Match | None, error: SplitpointError | None = None
    ) -> None:
        """The prefix of a sequence that starts over was looked up; `error` ends it."""
        for sequence in self.running:
            if sequence.key == key:
                sequence.match = match
                sequence.chain_is_open = match is not None
                sequence.awaits_match = False
                if error is None and match is None and sequence.is_streamed:
                    error = Unavailable("the KV store went away", reason="STORE_LOST")
                if error is not None:
                    self.finish(sequence, FinishEvent(key, error=error))
                return
        if match is not None:
            self.output.flushes.append(key)  # cancelled meanwhile

    def set_paused(self, request_id: str, paused: bool) -> None:
        for sequence in self.running:
            if sequence.admission.request_id == request_id:
                sequence.paused = paused
                return
        if any(admit.admission.request_id == request_id for admit in self.waiting):
            (self._paused_waiting.add if paused else self._paused_waiting.discard)(request_id)

    # -- out ----------------------------------------------------------------------

    def cancel(self, key: SequenceKey) -> None:
        """Unknown keys are ignored: the request may just have ended."""
        event = FinishEvent(key, "cancelled")
        for admit in self.waiting:
            if admit.admission.key == key:
                self.waiting.remove(admit)
                self._discard(admit, event)
                return
        for sequence in self.running:
            if sequence.key == key:
                self.finish(sequence, event)
                return

    def finish(self, sequence: Sequence, event: FinishEvent) -> None:
        """Take a sequence out; its end is reported once write-back let go of its pages.

        So whoever sees the end finds the chunks in the store.
        """
        self.running.remove(sequence)
        if sequence.key in self._flushing:
            self._flushing[sequence.key] = (sequence, event)
        elif sequence.chain_is_open:
            self.write_back(sequence, tail=True)
            self._flush(sequence, event)
        else:
            self._release(sequence, event)

    def lose(self, sequence: Sequence, suspects: Suspects | None = None) -> None:
        """Chunks vanished: start over from what the store still has, tokens kept.

        The store inspects the suspects first.
        """
        if sequence.awaits_match:
            return  # it is starting over already
        sequence.suspects = suspects
        sequence.losses += 1
        sequence.writes_back = False
        if sequence.losses > MAX_LOSSES:
            error = DataLoss(
                f"cached chunks were lost {sequence.losses} times", reason="CHUNK_LOST"
            )
            self.finish(sequence, FinishEvent(sequence.key, error=error))
            return
        sequence.awaits_match = True
        self.output.loss_count += 1
        self._flush(sequence, None)

    # -- write-back -----------------------------------------------------------------

    def write_back(self, sequence: Sequence, *, tail: bool = False) -> None:
        """Hand over every chunk that became full; with `tail`, the partial one too."""
        if sequence.writes_back:
            jobs = self._page_manager.full_chunks(sequence, tail=tail)
            if jobs:
                self.output.writes.append((sequence.key, jobs))

    def write_failed(self, key: SequenceKey, error: SplitpointError) -> Sequence | None:
        """A resident sequence goes on unstored; a streamed one cannot.

        Returns one that read a damaged chunk: what it computes is wrong, stored or not.
        """
        sequence = self.find(key)
        if sequence is None:
            return None
        sequence.writes_back = False
        is_running = sequence in self.running
        if is_running and error.reason == "CHUNK_LOST":
            return sequence if not sequence.awaits_match else None
        self._page_manager.give_input_pages(sequence)
        if not sequence.is_streamed or not is_running:
            return None
        if isinstance(error, ResourceExhausted):
            # Its cache has nowhere to go, neither here nor in the store.
            self.finish(sequence, FinishEvent(key, error=error))
        else:
            self.lose(sequence)
        return None

    def write_ended(self, key: SequenceKey) -> None:
        """The store keeps no more of a resident sequence, which goes on all the same."""
        sequence = self.find(key)
        if sequence is not None:
            sequence.writes_back = False
            self._page_manager.give_input_pages(sequence)

    def flushed(self, key: SequenceKey) -> None:
        """Write-back holds nothing of this sequence any more."""
        entry = self._flushing.pop(key, None)
        if entry is None:
            return  # a discarded request's chain
        sequence, event = entry
        sequence.chain_is_open = False
        if event is not None:
            self._release(sequence, event)
            return
        self._page_manager.give_pages(sequence)
        sequence.forget()
        tokens, suspects = list(sequence.tokens), sequence.suspects
        self.output.lookups.append(
            Lookup(key, sequence.admission.salt, tokens, sequence.is_streamed, suspects)
        )

    # -- below ------------------------------------------------------------------------

    def _begin(self, admit: Admit, claim: int) -> Sequence:
        admission = admit.admission
        text = None
        if admission.sampling.stop and self._tokenizer is not None:
            text = TextStream(
                self._tokenizer,
                admission.sampling.stop,
                min_tokens=admission.sampling.min_tokens,
            )
            # What an earlier attempt delivered may hold the start of a stop string.
            text.push(admission.delivered)
        paused = admission.request_id in self._paused_waiting
        self._paused_waiting.discard(admission.request_id)
        return Sequence(
            admission=admission,
            tokens=[*admission.prompt, *admission.delivered],
            claimed_pages=claim,
            kept_chunks=self._page_manager.kept_chunks(admission),
            kept_inputs=self._page_manager.kept_inputs(admission),
            text=text,
            match=admit.match,
            paused=paused,
            chain_is_open=admit.match is not None,
        )

    def _discard(self, admit: Admit, event: FinishEvent) -> None:
        """End a request that never ran; its lease is given up through its chain."""
        self._paused_waiting.discard(admit.admission.request_id)
        if admit.match is not None:
            self.output.flushes.append(event.key)
        self.output.finishes.append(event)

    def _flush(self, sequence: Sequence, event: FinishEvent | None) -> None:
        self._flushing[sequence.key] = (sequence, event)
        self.output.flushes.append(sequence.key)

    def _release(self, sequence: Sequence, event: FinishEvent) -> None:
        self._page_manager.free(sequence)
        self.output.finishes.append(replace(event, mean_step_seconds=sequence.mean_step_seconds))

    def _too_big(self, claim: int) -> ResourceExhausted:
        plan = self._cache.plan
        return ResourceExhausted(
            f"the request needs {claim} pages of {plan.page_bytes} bytes, "
            f"this worker has {plan.page_count}",
            reason="NEVER_FITS",
            needed_bytes=claim * plan.page_bytes,
            capacity_bytes=plan.cache_capacity_bytes,
        )

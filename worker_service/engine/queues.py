"""The requests of an engine: waiting, running, or finished but still being written back.

Each way in and out of the engine is one method here. A sequence that holds pages leaves
through `_release`, at once or after a flush. What leaves the engine is added to `output`.
Used by the engine's thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from splitpoint.checkpoint.text import TextStream, Tokenizer
from splitpoint.errors import DataLoss, ResourceExhausted, SplitpointError, Unavailable
from splitpoint.observe.logs import for_request
from worker_service.device.cache import DeviceCache
from worker_service.engine.messages import FinishEvent, Lookup, Matched, StepOutput
from worker_service.engine.pages import PageManager
from worker_service.engine.sequence import Sequence, Suspects
from worker_service.store.arena_tensors import SuspectChunks
from worker_service.store.write_back import SequenceKey

log = logging.getLogger(__name__)

# A sequence that loses chunks more often is given up: its store is in trouble.
MAX_LOSSES = 3
# Lost chunks that are remembered, so that each is logged as a warning once.
MAX_LOGGED_LOSSES = 10_000


class SequenceQueues:
    """All requests of one engine.

    Attributes:
        waiting: not admitted yet, in order of arrival.
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
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.output = StepOutput()
        self._cache = cache
        self._page_manager = page_manager
        self._tokenizer = tokenizer
        self._max_batch_size = max_batch_size
        # Sequences that write-back still holds pages of, with how they ended; None if they
        # start over.
        self._flushing: dict[SequenceKey, tuple[Sequence, FinishEvent | None]] = {}
        # What happens to sequences once no lane works on their restores any more.
        self._leaving: dict[SequenceKey, tuple[Sequence, Callable[[], None]]] = {}
        # Slot and generation of lost chunks that were logged.
        self._logged_losses: set[tuple[int, int]] = set()

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.running or self._flushing)

    def find(self, key: SequenceKey) -> Sequence | None:
        """Return the running or flushing sequence with this key; None if there is none."""
        for sequence in self.running:
            if sequence.key == key:
                return sequence
        entry = self._flushing.get(key)
        return entry[0] if entry is not None else None

    # -- in -----------------------------------------------------------------------

    def admit_waiting(self) -> None:
        """Admit in order of arrival. A request that must wait blocks those behind it."""
        while self.waiting and len(self.running) < self._max_batch_size:
            sequence = self.waiting[0]
            claim = self._page_manager.claim_of(sequence.admission)
            if claim > self._cache.plan.page_count:
                self._discard(sequence, FinishEvent(sequence.key, error=self._too_big(claim)))
                continue
            if not self._page_manager.claim(sequence):
                return
            del self.waiting[0]
            sequence.text = self._stop_search(sequence)
            self.running.append(sequence)

    def matched_again(self, matched: Matched) -> None:
        """Continue a sequence that starts over, from the prefix that the store still has."""
        key, match, error = matched.key, matched.match, matched.error
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
        for sequence in (*self.running, *self.waiting):
            if sequence.admission.request_id == request_id:
                sequence.paused = paused
                return

    # -- out ----------------------------------------------------------------------

    def cancel(self, key: SequenceKey) -> None:
        """End a request; an unknown key is ignored, since its request may just have ended."""
        event = FinishEvent(key, "cancelled")
        for sequence in self.waiting:
            if sequence.key == key:
                self._discard(sequence, event)
                return
        for sequence in self.running:
            if sequence.key == key:
                self.finish(sequence, event)
                return

    def finish(self, sequence: Sequence, event: FinishEvent) -> None:
        """Take a sequence out, and report its end once write-back released its pages.

        A client that sees the end therefore finds the chunks in the store.
        """
        if self._postpone(sequence, partial(self.finish, sequence, event), is_end=True):
            return
        if sequence.restoring is not None:
            # What came so far may hold a NaN.
            self._page_manager.clear_unwritten(sequence)
        self.running.remove(sequence)
        if sequence.key in self._flushing:
            self._flushing[sequence.key] = (sequence, event)
        elif sequence.chain_is_open:
            self.write_back(sequence, tail=True)
            self._flush(sequence, event)
        else:
            self._release(sequence, event)

    def restart_after_loss(
        self, sequence: Sequence, cause: SplitpointError, *, fatal: SplitpointError | None = None
    ) -> None:
        """Start a sequence over, once the store has inspected the chunks that it read.

        Those that share pages with the lost chunks start over, too. `fatal` ends the request
        if all of them are intact; then its own results are in doubt, and no others'.
        """
        named = cause.chunks if isinstance(cause, SuspectChunks) else ()
        tainted = self._page_manager.forget(sequence, named)
        self._start_over(sequence, cause, fatal)
        if fatal is None:
            for other in list(self.running):
                if not other.awaits_match and not tainted.isdisjoint(other.pages):
                    self._start_over(other, cause, None)

    def _start_over(
        self, sequence: Sequence, cause: SplitpointError, fatal: SplitpointError | None
    ) -> None:
        if self._postpone(sequence, partial(self._start_over, sequence, cause, fatal)):
            return
        with for_request(sequence.admission.request_id):
            log.log(self._level_of(cause), "%s; the request starts over", cause.message)
        # What it computed or restored from another chunk's bytes may hold a NaN.
        self._page_manager.clear_unwritten(sequence)
        suspects = None
        if sequence.match is not None and (chunks := sequence.cached_chunks):
            suspects = Suspects(sequence.match.connection, chunks, fatal)
        self._restart(sequence, suspects)

    def look_up_again(self, sequence: Sequence) -> None:
        """Look a waiting sequence's prefix up again: another one has stored more of it."""
        sequence.awaits_match = True
        sequence.suspects = None
        self._flush(sequence, None)

    def let_go(self) -> None:
        """Take out the sequences that waited for the lanes to leave their pages."""
        for key, (sequence, leave) in list(self._leaving.items()):
            if sequence.restoring is None or sequence.restoring.run.group.is_quiet:
                del self._leaving[key]
                leave()

    def _postpone(
        self, sequence: Sequence, leave: Callable[[], None], *, is_end: bool = False
    ) -> bool:
        """Return True if `leave` waits until no lane works on the sequence's pages.

        The end of a request replaces a new start that waits.
        """
        restoring = sequence.restoring
        if restoring is None:
            return False
        restoring.run.close()
        if restoring.run.group.is_quiet:
            return False
        if is_end or sequence.key not in self._leaving:
            self._leaving[sequence.key] = sequence, leave
        return True

    # -- write-back -----------------------------------------------------------------

    def write_back(self, sequence: Sequence, *, tail: bool = False) -> None:
        """Hand over every chunk that became full; with `tail`, the partial one too."""
        if sequence.writes_back:
            jobs = self._page_manager.full_chunks(sequence, tail=tail)
            if jobs:
                self.output.writes.append((sequence.key, jobs))

    def write_failed(self, key: SequenceKey, error: SplitpointError) -> None:
        """Continue a resident sequence unstored; end or restart a streamed one.

        A running sequence that read a damaged chunk starts over: its results are wrong.
        """
        sequence = self.find(key)
        if sequence is None:
            return
        sequence.writes_back = False
        is_running = sequence in self.running
        if is_running and error.reason == "CHUNK_LOST":
            if not sequence.awaits_match:
                self.restart_after_loss(sequence, error)
            return
        self._page_manager.free_input_pages(sequence)
        if not sequence.is_streamed or not is_running:
            return
        if isinstance(error, ResourceExhausted):
            # Neither the device nor the store has room for its cache.
            self.finish(sequence, FinishEvent(key, error=error))
        else:
            self._restart(sequence, None)

    def write_ended(self, key: SequenceKey) -> None:
        """Continue a resident sequence of which the store keeps no more chunks."""
        sequence = self.find(key)
        if sequence is not None:
            sequence.writes_back = False
            self._page_manager.free_input_pages(sequence)

    def flushed(self, key: SequenceKey) -> None:
        """Release or restart a sequence that write-back is done with."""
        entry = self._flushing.pop(key, None)
        if entry is None:
            return  # the chain of a discarded request
        sequence, event = entry
        sequence.chain_is_open = False
        if event is not None:
            self._release(sequence, event)
            return
        self._page_manager.free_pages(sequence)
        sequence.reset()
        self.output.lookups.append(
            Lookup(
                key,
                sequence.admission.salt,
                list(sequence.tokens),
                sequence.is_streamed,
                sequence.suspects,
            )
        )

    # -- below ------------------------------------------------------------------------

    def _stop_search(self, sequence: Sequence) -> TextStream | None:
        admission = sequence.admission
        if not admission.sampling.stop or self._tokenizer is None:
            return None
        text = TextStream(
            self._tokenizer, admission.sampling.stop, min_tokens=admission.sampling.min_tokens
        )
        # Tokens of an earlier attempt may hold the start of a stop string.
        text.push(admission.delivered)
        return text

    def _restart(self, sequence: Sequence, suspects: Suspects | None) -> None:
        """Flush a sequence, to look its prefix up again with its tokens kept."""
        if sequence.awaits_match:
            return  # it is starting over already
        if self._postpone(sequence, partial(self._restart, sequence, suspects)):
            return
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

    def _level_of(self, cause: SplitpointError) -> int:
        """Return WARNING once for each lost chunk, which many requests may share, then DEBUG."""
        if not isinstance(cause, SuspectChunks):
            return logging.WARNING
        # The chunks behind the first one are lost with it.
        first = cause.chunks[0].slot, cause.chunks[0].generation
        if first in self._logged_losses:
            return logging.DEBUG
        if len(self._logged_losses) > MAX_LOGGED_LOSSES:
            self._logged_losses.clear()
        self._logged_losses.add(first)
        return logging.WARNING

    def _discard(self, sequence: Sequence, event: FinishEvent) -> None:
        """End a waiting request; its lease is released through its chain."""
        self.waiting.remove(sequence)
        if sequence.chain_is_open:
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

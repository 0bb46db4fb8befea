"""The requests of an engine: waiting, running, or leaving the device while written back.

Each way in and out of the engine is one method here. A request is admitted when the pages
of its known tokens are spare, and grows page by page. If none is spare, the sequence with
the least claim leaves the device (a preemption): its chunks and its tail are written back,
its pages are freed, and it waits at its old place. What leaves the engine is added to
`output`. Used by the engine's thread only.
"""

from __future__ import annotations

import logging
import math
from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from operator import attrgetter

from splitpoint.checkpoint.text import TextStream, Tokenizer
from splitpoint.errors import DataLoss, ResourceExhausted, SplitpointError, Unavailable
from splitpoint.observe.logs import for_request
from worker_service.device.cache import DeviceCache
from worker_service.engine.messages import FinishEvent, Lookup, Matched, StepOutput
from worker_service.engine.pages import PageManager
from worker_service.engine.sequence import Segment, Sequence, Stage, Suspects
from worker_service.store.arena_tensors import StoredChunk, SuspectChunks
from worker_service.store.write_back import PoolStarted, PoolWritten, SequenceKey

log = logging.getLogger(__name__)

# A sequence that loses chunks more often is given up: its store is in trouble.
MAX_LOSSES = 3
# Spare pages that an admission leaves for the growth of those that run, for each of them;
# and this many within a chunk's steps after a preemption, when all of them may grow.
HEADROOM = 0.25
HEADROOM_AFTER_PREEMPTION = 1.0
# Lost chunks that are remembered, so that each is logged as a warning once.
MAX_LOGGED_LOSSES = 10_000


class SequenceQueues:
    """All requests of one engine.

    Attributes:
        waiting: not admitted yet, or back from the device, in order of arrival.
        running: admitted, in order of arrival; at most `max_batch_size`.
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
        self._arrivals = 0
        # Sequences that write-back still holds pages of, with how they ended; None if they
        # go back to `waiting`.
        self._flushing: dict[SequenceKey, tuple[Sequence, FinishEvent | None]] = {}
        # What happens to sequences once no lane works on their restores any more.
        self._leaving: dict[SequenceKey, tuple[Sequence, Callable[[], None]]] = {}
        # Steps in which admissions leave more headroom, after a preemption.
        self._tight_steps = 0
        # Sequences that wait in this step for pages that are being freed.
        self._stalled = 0
        # Slot and generation of lost chunks that were logged.
        self._logged_losses: set[tuple[int, int]] = set()

    @property
    def is_empty(self) -> bool:
        return not (self.waiting or self.running or self._flushing)

    @property
    def away(self) -> list[Sequence]:
        """Sequences that are to run, or to run again, and are not on the device."""
        flushed = (sequence for sequence, event in self._flushing.values() if event is None)
        return [*self.waiting, *flushed]

    def find(self, key: SequenceKey) -> Sequence | None:
        """Return the running or flushing sequence with this key; None if there is none."""
        for sequence in self.running:
            if sequence.key == key:
                return sequence
        entry = self._flushing.get(key)
        return entry[0] if entry is not None else None

    # -- in -----------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Add a new request behind all others."""
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def admit_waiting(self) -> None:
        """Admit in order of arrival. A request that must wait blocks those behind it.

        One that is paused blocks nothing.
        """
        self._tight_steps = max(0, self._tight_steps - 1)
        self._stalled = 0
        for sequence in [each for each in self.waiting if not each.paused]:
            most = self._page_manager.claim_of(sequence.admission)
            if most > self._cache.plan.page_count:
                self._discard(sequence, FinishEvent(sequence.key, error=self._too_big(most)))
            elif sequence.stage is Stage.LOOKING_UP or not self._admit(sequence):
                return

    def _admit(self, sequence: Sequence) -> bool:
        """Admit a request if it has room; return False if it must wait."""
        while not self._has_room(sequence):
            # Requests that are paused can stay for long: they make room if nothing else will.
            if self._flushing or any(not each.paused for each in self.running):
                return False
            paused = self._last_to_leave(self.running)
            if paused is None:
                return False
            self.preempt(paused)
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=attrgetter("arrival"))
        sequence.enter(Stage.ADMITTED)
        if sequence.text is None:
            sequence.text = self._stop_search(sequence)
        return True

    def _has_room(self, sequence: Sequence) -> bool:
        """Claim pages for a request; return False if the batch or the memory is full."""
        if len(self.running) >= self._max_batch_size:
            return False
        growing = sum(not each.paused and not each.is_streamed for each in self.running)
        share = HEADROOM_AFTER_PREEMPTION if self._tight_steps else HEADROOM
        return self._page_manager.claim(sequence, headroom=math.ceil(share * growing))

    def matched_again(self, matched: Matched) -> None:
        """Let a sequence that left wait for its turn, with the prefix that the store has."""
        key, match, error = matched.key, matched.match, matched.error
        for sequence in self.waiting:
            if sequence.key == key and sequence.stage is Stage.LOOKING_UP:
                sequence.match = match
                sequence.chain_is_open = match is not None
                sequence.enter(Stage.WAITING)
                if error is None and match is None and sequence.is_streamed:
                    error = Unavailable("the KV store went away", reason="STORE_LOST")
                if error is not None:
                    self._discard(sequence, FinishEvent(key, error=error))
                return
        if match is not None:
            self.output.flushes.append(key)  # cancelled meanwhile

    def set_paused(self, key: SequenceKey, paused: bool) -> None:
        for sequence in (*self.running, *self.waiting, *self._flushed()):
            if sequence.key == key:
                sequence.paused = paused
                return

    # -- a step ---------------------------------------------------------------------

    def take_step(self, token_budget: int) -> tuple[list[Sequence], list[Segment]]:
        """Return the sequences that decode, and prompt tokens up to the budget.

        Earlier arrivals get pages first. A later one may leave the device for them.
        """
        decodes: list[Sequence] = []
        segments: list[Segment] = []
        for sequence in list(self.running):
            if sequence.is_lost:
                self.look_up_again(sequence)
                continue
            remaining = sequence.runnable_tokens
            if not remaining:
                continue  # or it has just left
            is_running = sequence.stage is Stage.RUNNING and sequence.ends is None
            if is_running and remaining == 1:
                if self._grow(sequence, 1):
                    decodes.append(sequence)
            elif token_budget and (count := self._grow(sequence, min(remaining, token_budget))):
                segments.append(Segment(sequence, sequence.computed, count))
                token_budget -= count
        return decodes, segments

    def _grow(self, sequence: Sequence, count: int) -> int:
        """Allocate pages for the next tokens; return how many of `count` have pages."""
        while True:
            grown = self._page_manager.grow(sequence, count)
            if grown or not self._page_manager.lacks_spare_page(sequence):
                return grown
            if not self._make_room_for(sequence):
                return 0

    # -- preemption ---------------------------------------------------------------

    def can_restore(self, sequence: Sequence) -> bool:
        """Return True if a running sequence finds all pages that its restore allocates."""
        pages = self._page_manager
        # Prefix pages that only a leaving sequence holds are in use no more: more are missing.
        while pages.spare_count < (missing := pages.missing_count(sequence)):
            if not self._make_room_for(sequence, missing):
                return False
        return True

    def _make_room_for(self, sequence: Sequence, count: int = 1) -> bool:
        """Free pages for a running sequence that finds too few spare.

        Return True if there are enough now. Otherwise it waits: for write-back to free the
        pages of others that leave, or for others to end.
        """
        pages = self._page_manager
        while pages.spare_count < count:
            coming = sum(map(pages.releasable, self._flushed()))
            if pages.spare_count + coming - self._stalled >= count:
                break
            behind = [
                each
                for each in self.running
                if each is not sequence and (each.paused or each.arrival > sequence.arrival)
            ]
            victim = self._last_to_leave(behind)
            if victim is None:
                break
            if not pages.give_up_kept(victim):
                self.preempt(victim)
        if pages.spare_count >= count:
            return True
        self._stalled += count
        return False

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence off the device, and put it back among the waiting ones.

        It keeps its tokens; its chunks are looked up again once they are in the store.
        """
        with for_request(sequence.admission.request_id):
            log.debug(
                "preempted after %d tokens: others need its %d pages",
                len(sequence.tokens),
                self._page_manager.releasable(sequence),
            )
        self.output.preemption_count += 1
        self._tight_steps = self._cache.layout.chunk_tokens
        sequence.is_back = True
        self.write_back(sequence, tail=True)
        self._step_back(sequence)

    def _last_to_leave(self, sequences: Iterable[Sequence]) -> Sequence | None:
        """Return the sequence with the least claim on its pages; None if none has any.

        Paused ones come first, then the latest arrival. One that is back on the device and
        has computed nothing since then comes last. Lanes write into the pages of restores.
        """
        return max(
            (
                each
                for each in sequences
                if each.restoring is None and self._page_manager.releasable(each)
            ),
            key=lambda each: (each.paused, not each.is_back, each.arrival),
            default=None,
        )

    def _flushed(self) -> list[Sequence]:
        return [sequence for sequence, _ in self._flushing.values()]

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
        leaving, end = self._flushing.get(key, (None, None))
        if leaving is not None and end is None:
            leaving.enter(Stage.FINISHED)
            self._flushing[key] = (leaving, event)

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
        sequence.enter(Stage.FINISHED)
        if sequence.chain_is_open:
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
        if not sequence.is_admitted:
            return  # it shares pages with one that has started over
        named = cause.chunks if isinstance(cause, SuspectChunks) else ()
        tainted = self._page_manager.forget(sequence, named)
        self._start_over(sequence, cause, fatal)
        if fatal is None:
            for other in list(self.running):
                if not tainted.isdisjoint(other.pages):
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
        """Look a sequence's prefix up again: the store has more of it by now."""
        sequence.suspects = None
        self._step_back(sequence)

    def let_go(self) -> None:
        """Take out the sequences that waited for the lanes to leave their pages."""
        for key, (sequence, leave) in list(self._leaving.items()):
            if sequence.restoring is None or sequence.restoring.run.group.is_quiet:
                del self._leaving[key]
                if sequence.is_admitted:
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
            jobs = self._page_manager.jobs(sequence, partial(self._used, sequence), tail=tail)
            if jobs:
                self.output.writes.append((sequence.key, jobs))

    def _used(self, sequence: Sequence) -> set[StoredChunk]:
        """Return the chunks that sequences on the device use, other than this one."""
        others = (each for each in self.running if each is not sequence)
        return {chunk for each in others for chunk in each.cached_chunks}

    def pool_started(self, command: PoolStarted) -> None:
        """Let a sequence read what its pool has left; the store may evict the rest."""
        sequence = self.find(command.key)
        if sequence is not None and sequence.is_admitted and not sequence.is_lost:
            release = self._page_manager.pool_started(sequence, command)
            if release is not None:
                self.output.writes.append((command.key, [release]))
            # It may have no page to go on with before what waited for this is written.
            self.write_back(sequence)

    def pool_written(self, command: PoolWritten) -> None:
        """Free the page of a chunk that has joined the pool of its sequence."""
        sequence = self.find(command.key)
        if sequence is not None and sequence.is_admitted and not sequence.is_lost:
            self._page_manager.pool_written(sequence, command)
            self.write_back(sequence)

    def write_failed(self, key: SequenceKey, error: SplitpointError) -> None:
        """Continue a resident sequence unstored; end or restart a streamed one.

        A running sequence that read a damaged chunk starts over: its results are wrong.
        """
        sequence = self.find(key)
        if sequence is None:
            return
        sequence.writes_back = False
        is_running = sequence.is_admitted
        if is_running and error.reason == "CHUNK_LOST":
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
        """Release a sequence that write-back is done with, or put it back to `waiting`."""
        entry = self._flushing.pop(key, None)
        if entry is None:
            return  # the chain of a discarded request
        sequence, event = entry
        sequence.chain_is_open = False
        if event is not None:
            self._release(sequence, event)
            return
        self._wait_again(sequence, Stage.LOOKING_UP)
        self.output.lookups.append(
            Lookup(
                key,
                sequence.admission.salt,
                list(sequence.tokens),
                sequence.is_streamed,
                sequence.suspects,
                sequence.scores_prompt,
            )
        )
        sequence.suspects = None

    # -- below ------------------------------------------------------------------------

    def _stop_search(self, sequence: Sequence) -> TextStream | None:
        """Return what ends the sequence at a stop string; None if it has none.

        The scheduler finds the same one, which it names and cuts from the text. Without this
        search the sequence would go on until the scheduler's command came.
        """
        admission = sequence.admission
        sampling = admission.sampling
        if not sampling.stop or self._tokenizer is None:
            return None
        text = TextStream(
            self._tokenizer,
            sampling.stop,
            min_tokens=sampling.min_tokens,
            keeps_special=sampling.keeps_special_tokens,
        )
        # Tokens of an earlier attempt may hold the start of a stop string.
        text.push(admission.delivered)
        return text

    def _restart(self, sequence: Sequence, suspects: Suspects | None) -> None:
        """Flush a running sequence, to look its prefix up again with its tokens kept."""
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
        self.output.loss_count += 1
        self._step_back(sequence)

    def _step_back(self, sequence: Sequence) -> None:
        """Take a running sequence off the device, at once or after a flush."""
        self.running.remove(sequence)
        if sequence.chain_is_open:
            sequence.enter(Stage.LEAVING)
            self._flush(sequence, None)
        else:
            self._wait_again(sequence, Stage.WAITING)

    def _wait_again(self, sequence: Sequence, stage: Stage) -> None:
        """Free what a sequence that left holds, and put it to its place in `waiting`."""
        self._page_manager.free(sequence)
        sequence.reset()
        sequence.enter(stage)
        insort(self.waiting, sequence, key=attrgetter("arrival"))

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
        sequence.enter(Stage.FINISHED)
        if sequence.chain_is_open:
            self.output.flushes.append(event.key)
        self.output.finishes.append(event)

    def _flush(self, sequence: Sequence, event: FinishEvent | None) -> None:
        self._flushing[sequence.key] = (sequence, event)
        self.output.flushes.append(sequence.key)

    def _release(self, sequence: Sequence, event: FinishEvent) -> None:
        self._page_manager.free(sequence)
        self.output.finishes.append(
            replace(
                event,
                mean_step_seconds=sequence.mean_step_seconds,
                selection_off_reason=sequence.selection_plan.off_reason,
            )
        )

    def _too_big(self, claim: int) -> ResourceExhausted:
        plan = self._cache.plan
        return ResourceExhausted(
            f"the request needs {claim} pages of {plan.page_bytes} bytes, "
            f"this worker has {plan.page_count}",
            reason="NEVER_FITS",
            needed_bytes=claim * plan.page_bytes,
            capacity_bytes=plan.cache_capacity_bytes,
        )

"""A restore under way: the state of a sequence whose prefix comes onto the device.

The engine's restorer begins and advances it; this module knows neither requests nor queues.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from splitpoint.planning.plan import RestoreMethod
from splitpoint.planning.schedule import Lane
from worker_service.lanes.timeline import Span
from worker_service.pipeline.executor import RestoreRun
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.pipeline.two_ends import TwoEnds
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.verifier import Check


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a restore is to bring.

    Attributes:
        chunks: the chunks of the prefix, the partial last one included, unless its tokens
            are on the device.
        cached_tokens: tokens of the prefix; [0, split_tokens) is rebuilt, except those of
            the first chunks.
        first_chunk: the chunks before it were on the device.
        full_count: full chunks.
        stored: full chunks of a streamed sequence that stay in the store.
        missing_tokens: cached tokens that were not on the device.
        from_both_ends: the front is computed from token ids.
    """

    transfer: CacheTransfer
    chunks: tuple[StoredChunk, ...]
    cached_tokens: int
    split_tokens: int
    first_chunk: int
    full_count: int
    stored: range
    missing_tokens: int
    from_both_ends: bool

    @property
    def tail(self) -> tuple[StoredChunk, ...]:
        """The partial last chunk, if there is one."""
        return self.chunks[self.full_count :]

    @property
    def brought_tokens(self) -> int:
        """Tokens that come onto the device; fewer than are missing if it is streamed."""
        return self.missing_tokens - len(self.stored) * self.transfer.chunk_tokens

    @property
    def reported_split(self) -> int:
        """The split, if anything is rebuilt before it."""
        here = self.first_chunk * self.transfer.chunk_tokens
        return self.split_tokens if self.split_tokens > here and not self.from_both_ends else 0

    @property
    def method(self) -> RestoreMethod:
        """What the restore does, from what was planned and what was found."""
        if not self.missing_tokens:
            return RestoreMethod.NONE
        if self.from_both_ends:
            return RestoreMethod.TOKENS
        here = self.first_chunk * self.transfer.chunk_tokens
        return RestoreMethod.of(max(0, self.split_tokens - here), self.cached_tokens - here)


@dataclass(slots=True)
class Restoring:
    """One restore, and what was done so far. Used by the engine's thread.

    Attributes:
        run: its pieces of work.
        wanted: what it brings.
        read: the chunks that come onto the device.
        predicted_seconds: 0 if there is no prediction.
        check: compares checksums of what is read; None if nothing is due.
        ends: how far its front and its back have come; None if steps compute no front of it.
        first_use_bytes: of its pages that nothing had used or populated before.
        is_alone: no other request used the lanes meanwhile.
        spans: its work on lanes so far.
        front_seconds: seconds of steps that computed its front.
        started: when it began, by `time.perf_counter`.
    """

    run: RestoreRun
    wanted: Wanted
    read: tuple[StoredChunk, ...]
    predicted_seconds: float
    check: Check | None
    ends: TwoEnds | None = None
    first_use_bytes: int = 0
    is_alone: bool = True
    spans: list[Span] = field(default_factory=list)
    front_seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def front_tokens(self, computed: int) -> int:
        """Return how many tokens a step may compute after the first `computed`; 0: none."""
        if self.ends is None or not self.run.group.is_open:
            return 0
        return self.ends.front_tokens(computed)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens of the front that steps have computed, or compute."""
        return 0 if self.ends is None else self.ends.recomputed_tokens

    def is_over(self, computed: int) -> bool:
        """Return True if it is done or failed, and no lane and no check works on it any more.

        `computed`: tokens of the front that steps have computed.
        """
        if self.run.group.error is None and (self.front_tokens(computed) or not self.run.is_done):
            return False
        return self.run.group.is_quiet and (self.check is None or self.check.is_done)

    def result(self) -> None:
        """Return if the result can be used; `is_over` is True.

        Raises ChunkLost if a chunk changed while it was read, or is damaged, and the error of
        a lane.
        """
        if self.run.group.error is not None:
            raise self.run.group.error
        if self.check is not None:
            self.check.wait()
        read: Sequence[StoredChunk] = self.read
        if self.ends is not None:
            # The last chunk's X is read, also if its K and V are computed.
            loaded = self.wanted.chunks[self.ends.first_loaded_chunk :]
            read = tuple(dict.fromkeys((*loaded, *self.wanted.tail)))
        # A slot's generation only grows: one that is current now was current all the time.
        self.wanted.transfer.tensors.check_current(read)

    def seconds_of(self, lane: Lane) -> float:
        """Return the seconds that a lane had work of this restore."""
        return sum(span.seconds for span in self.spans if span.lane is lane)

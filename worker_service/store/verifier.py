"""Verifies the chunks that a worker reads from an arena against the store's checksums.

A chunk is verified at this worker's first read of it, and later at a share of the reads. Threads
hash during the copies. The engine waits for the result before it uses the data.
"""

from __future__ import annotations

import os
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from splitpoint.options.worker import VERIFY_RATE
from worker_service.store.arena_tensors import ArenaTensors, DamagedChunks, StoredChunk

# Enough threads for the speed of a link to a GPU: a fast core hashes about 10 GB/s.
_MOST_THREADS = 4


class Check:
    """A running verification. Call `wait` before you use the data, at best once `is_done`."""

    def __init__(
        self, verifier: Verifier, tensors: ArenaTensors, chunks: Sequence[StoredChunk]
    ) -> None:
        self._verifier = verifier
        self._tensors = tensors
        self._chunks = chunks
        # Shared by all threads: popping is atomic.
        self._left = deque(chunks)
        self._parts: list[Future[list[StoredChunk]]] = []

    @property
    def chunks(self) -> Sequence[StoredChunk]:
        """The chunks that are compared."""
        return self._chunks

    def start(self, threads: ThreadPoolExecutor, count: int) -> None:
        for _ in range(min(count, len(self._chunks))):
            self._parts.append(threads.submit(self._compare))

    def _compare(self) -> list[StoredChunk]:
        """Hash chunks until none is left. Return those that differ."""
        found: list[StoredChunk] = []
        while True:
            try:
                chunk = self._left.popleft()
            except IndexError:
                return found
            if self._tensors.arena.checksum(chunk.slot) != chunk.checksum:
                found.append(chunk)

    @property
    def is_done(self) -> bool:
        """True if `wait` would return at once."""
        return all(part.done() for part in self._parts)

    def call_when_done(self, call: Callable[[], None]) -> None:
        """Call this from any thread whenever a part of the check is done."""
        for part in self._parts:
            part.add_done_callback(lambda _: call())

    def wait(self) -> None:
        """Wait for the result. Raises DamagedChunks if a chunk differs from its checksum.

        Raises SuspectChunks if a slot was reused meanwhile; then nothing is damaged.
        """
        differ = {chunk for part in self._parts for chunk in part.result()}
        arena = self._tensors.arena
        # Checked after hashing, since generations only grow.
        replaced = {
            chunk for chunk in differ if not arena.is_current([chunk.slot], [chunk.generation])
        }
        compared = [chunk for chunk in self._chunks if chunk not in replaced]
        found = [chunk for chunk in compared if chunk in differ]
        self._verifier.settle(self._tensors, compared, found)
        if found:
            raise differing(found)
        if replaced:
            self._tensors.check_current([c for c in self._chunks if c in replaced])


def differing(chunks: Sequence[StoredChunk]) -> DamagedChunks:
    """Return the error for chunks that differ from their checksums."""
    slots = ", ".join(str(chunk.slot) for chunk in chunks[:8])
    return DamagedChunks(
        f"{len(chunks)} cached chunks differ from their checksums: slots {slots}", chunks
    )


class Verifier:
    """The verifications of one worker. Only the engine's thread calls it.

    Attributes:
        intact_count, damaged_count: chunks verified since start, by result.
    """

    def __init__(self, rate: float = VERIFY_RATE.default, *, threads: int | None = None) -> None:
        """`rate`: share of the reads after a chunk's first one to verify, in [0, 1]."""
        self.rate = rate
        self.intact_count = 0
        self.damaged_count = 0
        cores = len(os.sched_getaffinity(0))
        self._thread_count = threads or max(1, min(_MOST_THREADS, cores // 4))
        self._threads = ThreadPoolExecutor(self._thread_count, thread_name_prefix="verify")
        self._random = random.Random()
        # Per arena: the verified generation of each slot.
        self._compared: weakref.WeakKeyDictionary[
            ArenaTensors, np.ndarray[tuple[int], np.dtype[np.int64]]
        ] = weakref.WeakKeyDictionary()

    def begin(
        self,
        tensors: ArenaTensors,
        chunks: Iterable[StoredChunk],
        always: Iterable[StoredChunk] = (),
    ) -> Check | None:
        """Start to verify chunks that are about to be read. None if none of them is due.

        Chunks in `always` are verified at every read, since their data is sealed again under
        another checksum.
        """
        compared = self._compared_in(tensors)
        due = [
            chunk
            for chunk in chunks
            if compared[chunk.slot] != chunk.generation or self._random.random() < self.rate
        ]
        due += [chunk for chunk in always if chunk not in due]
        if not due:
            return None
        check = Check(self, tensors, due)
        check.start(self._threads, self._thread_count)
        return check

    def settle(
        self,
        tensors: ArenaTensors,
        chunks: Sequence[StoredChunk],
        damaged: Sequence[StoredChunk],
    ) -> None:
        """Record the result of a check."""
        compared = self._compared_in(tensors)
        for chunk in chunks:
            compared[chunk.slot] = chunk.generation
        for chunk in damaged:
            compared[chunk.slot] = 0
        self.intact_count += len(chunks) - len(damaged)
        self.damaged_count += len(damaged)

    def close(self) -> None:
        """End the threads. No check may be running."""
        self._threads.shutdown(cancel_futures=True)

    def _compared_in(self, tensors: ArenaTensors) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        found = self._compared.get(tensors)
        if found is None:
            found = self._compared[tensors] = np.zeros(tensors.arena.slot_count, dtype=np.int64)
        return found

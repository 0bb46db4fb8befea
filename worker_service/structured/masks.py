"""The masks of one step: the ids that may be chosen from each row that a grammar rules.

What a mask costs cannot be told from its grammar: most take some µs, some take seconds. So threads
compute them beside the model. A step waits for them for a bounded time, and goes on without the
rows whose masks are not ready.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker_service.structured.matcher import GrammarMatcher, Mask, Masks

# Threads that compute masks of usual costs, and threads for all others.
QUICK_THREADS = max(2, min(8, os.cpu_count() or 1))
SLOW_THREADS = 2
# Seconds that a step waits for its masks once its logits are there.
PATIENCE_SECONDS = 0.01
# Processor seconds from which a mask is slow: the next one of its answer is computed before its
# sequence joins a step. Most that one may take: more ends its request.
SLOW_SECONDS = 0.004
MOST_SECONDS = 0.5


@dataclass(slots=True)
class MaskTotals:
    """Masks that steps used, and the processor seconds that they took; read by any thread."""

    count: int = 0
    seconds: float = 0.0


class MaskFiller:
    """Computes masks on threads. All methods belong to the engine's thread.

    Args:
        on_ready: called by any thread when masks are ready for which a step did not wait.
    """

    def __init__(self, vocabulary_size: int, on_ready: Callable[[], None] = lambda: None) -> None:
        self._size = vocabulary_size
        self._on_ready = on_ready
        self.totals = MaskTotals()
        self._quick = ThreadPoolExecutor(QUICK_THREADS, "masks")
        self._slow = slow_threads("slow-masks", SLOW_THREADS)

    def begin(self, matcher: GrammarMatcher, drafts: Sequence[int] = ()) -> None:
        """Begin to compute the masks that `fill` will be asked for, unless that has begun.

        All drafts must be allowed.
        """
        if _lacks(matcher, drafts):
            threads = self._slow if matcher.is_slow else self._quick
            matcher.ahead = threads.submit(masks_of, matcher, tuple(drafts), self._size)

    def begin_slow(self, matcher: GrammarMatcher) -> None:
        """Begin the next mask of an answer if it is expected to be slow."""
        if matcher.is_slow and matcher.ahead is None:
            self.begin(matcher)
            self._tell_when_ready(matcher)

    def fill(
        self,
        rows: Sequence[tuple[GrammarMatcher, Sequence[int]]],
        patience: float | None = None,
    ) -> list[list[Mask]]:
        """Return for each matcher the masks behind its answer and behind each of its drafts.

        Empty for one that has an error by now, and for one that is not ready after `patience`
        seconds: its `is_awaited` is True until it is. None waits for all, and computes here what
        has not begun.
        """
        for matcher, drafts in rows:
            if patience is not None:
                self.begin(matcher, drafts)
            elif _lacks(matcher, drafts):
                matcher.ahead = computed(masks_of(matcher, tuple(drafts), self._size))
        wait([matcher.ahead for matcher, _ in rows if matcher.ahead is not None], patience)
        return [self._taken(matcher, 1 + len(drafts)) for matcher, drafts in rows]

    def close(self) -> None:
        """Let the threads end; masks under way are given up."""
        for threads in (self._quick, self._slow):
            threads.shutdown(wait=False, cancel_futures=True)

    def _taken(self, matcher: GrammarMatcher, count: int) -> list[Mask]:
        """Return at most `count` masks of a matcher; none if they are not ready."""
        ahead = matcher.ahead
        if ahead is None or not ahead.done():
            self._tell_when_ready(matcher)
            return []
        found = ahead.result()
        self.totals.count += len(found.masks[:count])
        self.totals.seconds += found.seconds
        return found.masks[:count]

    def _tell_when_ready(self, matcher: GrammarMatcher) -> None:
        if matcher.ahead is not None:
            matcher.ahead.add_done_callback(lambda _: self._on_ready())


def _lacks(matcher: GrammarMatcher, drafts: Sequence[int]) -> bool:
    """Return True if nothing computes the masks of an answer with these drafts, nor did."""
    ahead = matcher.ahead
    return ahead is None or bool(drafts and ahead.done() and ahead.result().drafts != tuple(drafts))


def slow_threads(name: str, count: int) -> ThreadPoolExecutor:
    """Return threads for work that may take long, which give way to the engine's."""
    return ThreadPoolExecutor(count, name, initializer=_give_way)


def _give_way() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def computed(masks: Masks) -> Future[Masks]:
    """Return masks as a future that is done."""
    future: Future[Masks] = Future()
    future.set_result(masks)
    return future


def masks_of(matcher: GrammarMatcher, drafts: tuple[int, ...], vocabulary_size: int) -> Masks:
    """Compute masks; the matcher then knows whether they were slow, or took too long."""
    began = time.thread_time()
    inner = matcher.inner
    table = np.zeros((1 + len(drafts), vocabulary_size // 32 + 1), np.int32)
    for index, row in enumerate(table):
        inner.unsafe_compute_mask_ptr(row.ctypes.data, table.strides[0])
        if index < len(drafts):
            inner.consume_token(drafts[index])
    if drafts:
        inner.rollback(len(drafts))
    masks = _finished(matcher, table, vocabulary_size)
    seconds = time.thread_time() - began
    matcher.is_slow = seconds > SLOW_SECONDS
    if seconds > MOST_SECONDS:
        matcher.takes_too_long()
        masks = []
    return Masks(drafts, masks, seconds)


def _finished(
    matcher: GrammarMatcher, table: npt.NDArray[np.int32], vocabulary_size: int
) -> list[Mask]:
    """Set the bits of the ids that end the answer, where it may end."""
    if matcher.error is not None:
        return []
    bits = table.view(np.uint8)
    end, end_bit = vocabulary_size // 8, np.uint8(1 << vocabulary_size % 8)
    for index, row in enumerate(bits):
        may_end = bool(row[end] & end_bit)
        row[end] &= ~end_bit
        first = not matcher.count + index
        for token_id in (*matcher.ends, *(matcher.not_first if first else ())):
            row[token_id // 8] &= ~np.uint8(1 << token_id % 8)
        has_text = bool(row.any())
        if may_end and (matcher.count + index >= matcher.min_tokens or not has_text):
            for token_id in matcher.ends:
                row[token_id // 8] |= np.uint8(1 << token_id % 8)
        if not row.any():
            if index == 0:
                matcher.finds_no_token()
            # Plain decoding meets it in a later step, if it gets there.
            return list(table[:index])
    return list(table)


def allowed_ids(mask: Mask, vocabulary_size: int) -> npt.NDArray[np.int64]:
    """Return the ids that a mask allows, in order."""
    bits = np.unpackbits(mask.view(np.uint8), count=vocabulary_size, bitorder="little")
    return np.flatnonzero(bits)


def mask_with(ids: Sequence[int], vocabulary_size: int) -> Mask:
    """Return the mask that allows these ids."""
    bits = np.zeros(32 * (vocabulary_size // 32 + 1), np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)

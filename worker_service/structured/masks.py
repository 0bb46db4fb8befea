"""The masks of one step: the ids that may be chosen from each row that a grammar rules."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from worker_service.structured.matcher import GrammarMatcher

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

# So many masks take less time than waking threads does.
FEW = 8
# Bit i of a mask, least significant first, is set if id i may be chosen. `[words]`.
Mask = npt.NDArray[np.int32]


@dataclass(slots=True)
class MaskTotals:
    """Masks that were computed, and the seconds that steps spent on them; read by any thread."""

    count: int = 0
    seconds: float = 0.0


class MaskFiller:
    """Computes masks, many of them on threads. `fill` belongs to the engine's thread."""

    def __init__(self, vocabulary_size: int) -> None:
        self._size = vocabulary_size
        self._words = vocabulary_size // 32 + 1
        self.totals = MaskTotals()
        self._executor: LLExecutor | None = None

    def fill(self, rows: Sequence[tuple[GrammarMatcher, Sequence[int]]]) -> list[list[Mask]]:
        """Return for each matcher the masks behind its answer and behind each of its drafts.

        Empty for one that has an error by now. All drafts must be allowed.
        """
        from llguidance import LLExecutor

        began = time.perf_counter()
        if self._executor is None:
            self._executor = LLExecutor()
        places: list[int] = []
        plain: list[tuple[LLMatcher, int]] = []
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        count = 0
        for matcher, drafts in rows:
            places.append(count)
            if drafts:
                drafted.append((matcher.inner, count, list(drafts)))
            else:
                plain.append((matcher.inner, count))
            count += 1 + len(drafts)
        table = np.zeros((count, self._words), np.int32)
        where = table.ctypes.data, table.strides[0], count
        if len(plain) <= FEW:
            for inner, row in plain:
                inner.unsafe_compute_mask_ptr(table[row].ctypes.data, table.strides[0])
        else:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        finished = [
            self._finished(matcher, table[place : place + 1 + len(drafts)])
            for place, (matcher, drafts) in zip(places, rows, strict=True)
        ]
        self.totals.count += count
        self.totals.seconds += time.perf_counter() - began
        return finished

    def _finished(self, matcher: GrammarMatcher, table: npt.NDArray[np.int32]) -> list[Mask]:
        """Set the bits of the ids that end the answer, where it may end."""
        if matcher.error is not None:
            return []
        bits = table.view(np.uint8)
        end, end_bit = self._size // 8, np.uint8(1 << self._size % 8)
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

"""Progress of long operations in bytes: counted where it happens, reported at intervals.

A service with a supervisor prints such lines besides its READY line:

    PROGRESS loading 1073741824 16060522496
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

PROGRESS_PREFIX = "PROGRESS "


@dataclass(frozen=True, slots=True)
class Progress:
    """`done_bytes` of `total_bytes`; `what` is one word, such as "loading"."""

    what: str
    done_bytes: int
    total_bytes: int

    @property
    def line(self) -> str:
        return f"{PROGRESS_PREFIX}{self.what} {self.done_bytes} {self.total_bytes}"

    @property
    def is_complete(self) -> bool:
        return self.done_bytes >= self.total_bytes


def read_progress(line: str) -> Progress | None:
    """Parse a `Progress.line`; None for any other line."""
    words = line.split()
    if not line.startswith(PROGRESS_PREFIX) or len(words) != 4:
        return None
    _, what, done, total = words
    if not (done.isdecimal() and total.isdecimal()):
        return None
    return Progress(what, int(done), int(total))


class Ticker:
    """Reports progress after `seconds`, and then at most every `seconds`.

    An operation that ends sooner is never reported; the end of any other always is.
    """

    def __init__(
        self,
        report: Callable[[Progress], None],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._seconds = seconds
        self._clock = clock
        self._last = clock()
        self._has_reported = self._has_ended = False

    def at(self, progress: Progress) -> None:
        now = self._clock()
        is_due = now - self._last >= self._seconds
        if self._has_ended or not (is_due or (progress.is_complete and self._has_reported)):
            return
        self._last = now
        self._has_reported, self._has_ended = True, progress.is_complete
        self._report(progress)


class Counter:
    """Counts the bytes done and passes them to its tickers."""

    def __init__(self, what: str, total_bytes: int, tickers: Sequence[Ticker]) -> None:
        self._what = what
        self._total = total_bytes
        self._done = 0
        self._tickers = tickers

    def add(self, size_bytes: int) -> None:
        # Bytes that are read twice, as those of a tied head may be, count once.
        self._done = min(self._total, self._done + size_bytes)
        for ticker in self._tickers:
            ticker.at(Progress(self._what, self._done, self._total))

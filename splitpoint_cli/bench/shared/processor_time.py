"""Processor time of this process, and of others with their children."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

# Kind of clock in MAKE_PROCESS_CPUCLOCK of Linux: what its scheduler counted, in nanoseconds.
_CPUCLOCK_SCHED = 2


class ProcessorTime:
    """A clock of this process, of other ones, and of the children that they have now.

    Finding children takes milliseconds where there are many threads, so it is done once.
    """

    def __init__(self, process_ids: Sequence[int]) -> None:
        self._others = {each for process_id in process_ids for each in _with_children(process_id)}

    def seconds(self) -> float:
        """Return the seconds that all of them have computed. One that has ended counts 0."""
        return time.process_time() + sum(map(_seconds_of, self._others))


def _seconds_of(process_id: int) -> float:
    with suppress(OSError):
        return time.clock_gettime((~process_id << 3) | _CPUCLOCK_SCHED)
    return 0.0


def _with_children(process_id: int) -> Iterator[int]:
    yield process_id
    for children in Path(f"/proc/{process_id}/task").glob("*/children"):
        with suppress(OSError):  # a thread that ended meanwhile
            for child in children.read_text().split():
                yield from _with_children(int(child))

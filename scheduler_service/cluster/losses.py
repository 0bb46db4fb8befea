"""Counts how often each worker was lost, and remembers when it last was."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

# A lost worker that does not come back is forgotten after this long: operators have time
# to notice it, and the lists stay bounded.
_REMEMBER_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of one worker. `seconds_ago` is None if there was none."""

    count: int
    seconds_ago: float | None


class LossBook:
    """Losses by worker id."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[str, int] = {}
        self._last: dict[str, float] = {}

    def note(self, worker_id: str, known: Collection[str]) -> None:
        """Count a loss now. The losses of `known` workers are never forgotten."""
        now = self._clock()
        self._counts[worker_id] = self._counts.get(worker_id, 0) + 1
        self._last[worker_id] = now
        for name, last in list(self._last.items()):
            if name not in known and now - last > _REMEMBER_SECONDS:
                del self._counts[name], self._last[name]

    def of(self, worker_id: str) -> Losses:
        last = self._last.get(worker_id)
        ago = None if last is None else self._clock() - last
        return Losses(self._counts.get(worker_id, 0), ago)

    def counts(self) -> Iterator[tuple[str, int]]:
        """Yield (worker id, losses) of the workers that were ever lost."""
        yield from self._counts.items()

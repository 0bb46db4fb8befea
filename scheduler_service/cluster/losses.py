"""How often workers were lost, and when last. Pure but for the clock it is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

# A worker that was lost and has not come back is remembered this long, so that
# whoever looks now and then sees it, and no list grows with names for ever.
_REMEMBER_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Losses:
    """Of one worker. `seconds_ago` is None when there was none."""

    count: int
    seconds_ago: float | None


class LossBook:
    """By worker id."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._counts: dict[str, int] = {}
        self._last: dict[str, float] = {}

    def note(self, worker_id: str, known: Collection[str]) -> None:
        """It is lost now. `known`: the workers that are kept in mind however long ago
        they were lost."""
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
        """Worker ids and how often each was lost; those that never were are left out."""
        yield from self._counts.items()

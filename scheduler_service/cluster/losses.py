"""Counts how often each worker was lost, and remembers when it last was."""

from __future__ import annotations

from collections.abc import Callable, Collection

# A lost worker that does not come back is forgotten after this long: operators have time
# to notice it, and the lists stay bounded.
_REMEMBER_SECONDS = 3600.0


class WorkerLosses:
    """Losses by worker id."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Number of losses, and when the last one was.
        self._losses: dict[str, tuple[int, float]] = {}

    def note(self, worker_id: str, known: Collection[str]) -> None:
        """Count a loss now. The losses of `known` workers are never forgotten."""
        now = self._clock()
        self._losses[worker_id] = (self.count(worker_id) + 1, now)
        for name, (_, last) in list(self._losses.items()):
            if name not in known and now - last > _REMEMBER_SECONDS:
                del self._losses[name]

    def count(self, worker_id: str) -> int:
        return self._losses.get(worker_id, (0, 0.0))[0]

    def seconds_ago(self, worker_id: str) -> float | None:
        """Return the time since the worker was last lost; None if it never was."""
        found = self._losses.get(worker_id)
        return None if found is None else self._clock() - found[1]

    def counts(self) -> dict[str, int]:
        """Return the number of losses of the workers that were ever lost."""
        return {worker_id: count for worker_id, (count, _) in self._losses.items()}

"""Pauses before another try."""

from __future__ import annotations

from collections.abc import Callable

# Bounds of a pause, in seconds.
LEAST_PAUSE_SECONDS = 1.0
_MOST_PAUSE_SECONDS = 60.0


class Pause:
    """A pause that doubles with each error in a row.

    Attributes:
        seconds: length of the current or last pause.
    """

    def __init__(self, clock: Callable[[], float], first_seconds: float) -> None:
        self.first_seconds = first_seconds
        self.seconds = 0.0
        self._clock = clock
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        return self._clock() < self._until

    def begin(self) -> None:
        self.seconds = min(max(self.first_seconds, 2 * self.seconds), _MOST_PAUSE_SECONDS)
        self._until = self._clock() + self.seconds

    def end(self) -> None:
        self.seconds = self._until = 0.0

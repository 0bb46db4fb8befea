"""A bound on the bytes of all bodies that are being read at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from splitpoint.errors import ResourceExhausted


class ByteBudget:
    """So many bytes that requests share."""

    def __init__(self, most: int, retry_seconds: float) -> None:
        self._most = most
        self._retry_seconds = retry_seconds
        self.used = 0

    @contextmanager
    def taking(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes bytes; they are given back at the end of the block.

        It raises ResourceExhausted if there are too few.
        """
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            if self.used + size > self._most:
                raise ResourceExhausted(
                    "too many large bodies are being read",
                    reason="BODIES_TOO_LARGE",
                    retry_after_seconds=self._retry_seconds,
                )
            self.used += size
            taken += size

        try:
            yield take
        finally:
            self.used -= taken

"""Turns by name: calls of one name follow each other, calls of different names do not wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from splitpoint.errors import Unavailable

# How long a call waits for the one before it.
TURN_SECONDS = 30.0


class NamedTurns:
    """The turns of all names that are in use."""

    def __init__(self) -> None:
        self._turns: dict[bytes, asyncio.Lock] = {}
        self._users: dict[bytes, int] = {}

    @property
    def name_count(self) -> int:
        """Names that a call has or waits for."""
        return len(self._turns)

    @asynccontextmanager
    async def turn(self, name: bytes) -> AsyncIterator[None]:
        """Wait for a turn, and keep it inside the block. Raises Unavailable after a while."""
        lock = self._turns.setdefault(name, asyncio.Lock())
        self._users[name] = self._users.get(name, 0) + 1
        try:
            try:
                async with asyncio.timeout(TURN_SECONDS):
                    await lock.acquire()
            except TimeoutError:
                raise Unavailable(
                    f"another load of this prefix took longer than {TURN_SECONDS:g} s",
                    reason="LOAD_STALLED",
                ) from None
            try:
                yield
            finally:
                lock.release()
        finally:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._turns[name]

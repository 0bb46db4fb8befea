"""Several coroutines at a time, or one after another; calls that block, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

from splitpoint.errors import Unavailable

Result = TypeVar("Result")

# How long a call waits for the one before it.
TURN_SECONDS = 30.0


async def run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at the same time. The first error ends the rest, and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


class FileThread:
    """One thread for calls that block, such as those of a file: they run in their order.

    When the block of `async with` ends, also by an error, none of them runs any more.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "files")

    async def run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Return what a call returns."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        ending = asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
        await asyncio.shield(ending)


class NamedTurns:
    """Calls of one name follow each other; those of different names do not wait."""

    def __init__(self) -> None:
        self._turns: dict[bytes, asyncio.Lock] = {}
        self._users: dict[bytes, int] = {}

    @property
    def name_count(self) -> int:
        """Names that a call has or waits for."""
        return len(self._turns)

    async def begin(self, name: bytes, timeout: float | None) -> None:
        """Wait for a turn, which lasts until `end`. Raises Unavailable after `timeout` seconds.

        None: it waits without a limit.
        """
        lock = self._turns.setdefault(name, asyncio.Lock())
        self._users[name] = self._users.get(name, 0) + 1
        try:
            async with asyncio.timeout(timeout):
                await lock.acquire()
        except TimeoutError:
            self._leave(name)
            raise Unavailable(
                f"another load of this prefix took longer than {timeout:g} s",
                reason="LOAD_STALLED",
            ) from None
        except BaseException:
            self._leave(name)
            raise

    def end(self, name: bytes) -> None:
        """End a turn."""
        self._turns[name].release()
        self._leave(name)

    @asynccontextmanager
    async def turn(self, name: bytes) -> AsyncIterator[None]:
        """Wait for a turn, and keep it inside the block. Raises Unavailable after a while."""
        await self.begin(name, TURN_SECONDS)
        try:
            yield
        finally:
            self.end(name)

    def _leave(self, name: bytes) -> None:
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name], self._turns[name]

"""Gives back what the store granted to calls that were cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from splitpoint.errors import SplitpointError

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Cleanups:
    """Runs each task to its end, also if the call that started it is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task to its end, and wait for it."""
        await asyncio.shield(self.start(work))

    async def obtain(
        self,
        call: Coroutine[Any, Any, Result],
        give_back: Callable[[Result], Coroutine[Any, Any, None]],
    ) -> Result:
        """Return what a call grants. If cancelled, give it back when the call has ended.

        The store may carry out a call that is cancelled here.
        """
        task = asyncio.create_task(call)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self.start(_give_back(task, give_back))
            raise

    async def wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the running tasks."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except SplitpointError as error:
        # The session is gone, and what it held with it.
        log.info("giving back at the store failed: %s", error.message)


async def _give_back(
    task: asyncio.Task[Result], give_back: Callable[[Result], Coroutine[Any, Any, None]]
) -> None:
    await give_back(await task)

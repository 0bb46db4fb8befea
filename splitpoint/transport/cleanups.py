"""Gives back what the store granted to calls that were cancelled, or answered too late."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from splitpoint.errors import SplitpointError, Unavailable

Result = TypeVar("Result")

log = logging.getLogger(__name__)


class Cleanups:
    """Runs each task to its end, also if the call that started it is cancelled."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        # Calls that were given up by `obtain` and have no answer yet.
        self._late: set[asyncio.Task[Any]] = set()

    @property
    def has_late(self) -> bool:
        """True while a call that was late has no answer."""
        return bool(self._late)

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
        *,
        within: float | None = None,
    ) -> Result:
        """Return what a call grants. If cancelled or late, give it back when the call has ended.

        The store may carry out a call that is cancelled here. `within`: seconds after which the
        call is late; None: it never is. Raises Unavailable then.
        """
        task = asyncio.create_task(call)
        try:
            await asyncio.wait({task}, timeout=within)
        except asyncio.CancelledError:
            self.start(_give_back(task, give_back))
            raise
        if task.done():
            return task.result()
        self._late.add(task)
        task.add_done_callback(self._late.discard)
        self.start(_give_back(task, give_back))
        raise Unavailable(
            f"the KV store did not answer within {within:.3g} s", reason="STORE_SILENT"
        )

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

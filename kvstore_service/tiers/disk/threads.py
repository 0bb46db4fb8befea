"""Threads for calls that a disk may never answer: they keep no process from ending."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

Result = TypeVar("Result")
_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class DaemonThreads:
    """A few threads with one queue of calls. `close` ends those that are not in a call."""

    def __init__(self, count: int, name: str) -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        self._has_started = False
        self._unfinished = 0

    def submit(self, call: Callable[[], Result]) -> asyncio.Future[Result]:
        """Run a call in a thread. Cancelling the future does not end the call."""
        if not self._has_started:
            self._has_started = True
            for thread in self._threads:
                thread.start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._unfinished += 1
        self._queue.put((loop, future, call))
        return future

    def close(self) -> None:
        """End the threads after the calls that wait. Threads that are in a call are left to it."""
        if not self._has_started:
            return
        for _ in self._threads:
            self._queue.put(None)
        if not self._unfinished:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        while True:
            job = self._queue.get()
            if job is None:
                return
            loop, future, call = job
            result, error = None, None
            try:
                result = call()
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._settle, future, result, error)
            del job, future, call, result, error

    def _settle(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None
    ) -> None:
        self._unfinished -= 1
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

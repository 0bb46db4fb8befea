"""The system calls that read and write payloads, and the threads that wait for them.

A disk may never answer: a call that takes too long is given up, and its thread keeps no process
from ending. Tests replace `Files` to let calls fail.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

# Bytes of a slot in one plane, or a header.
Part = memoryview | bytes | bytearray

# Most parts of one call (IOV_MAX).
_MOST_PARTS = 1024


class Files:
    """Reads and writes at an offset from and into many parts. Raises OSError."""

    def read(self, fd: int, parts: Sequence[Part], offset: int) -> int:
        """Fill the parts one after another. Return the bytes read: fewer at the file's end."""
        done = 0
        for views in _calls(parts):
            while views:
                count = os.preadv(fd, views, offset + done)
                if count == 0:
                    return done
                done += count
                views = _after(views, count)
        return done

    def write(self, fd: int, parts: Sequence[Part], offset: int) -> None:
        """Write all parts one after another."""
        for views in _calls(parts):
            while views:
                count = os.pwritev(fd, views, offset)
                offset += count
                views = _after(views, count)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)


def _calls(parts: Sequence[Part]) -> Iterator[list[memoryview]]:
    """Yield the parts that one call takes."""
    for start in range(0, len(parts), _MOST_PARTS):
        yield [memoryview(part) for part in parts[start : start + _MOST_PARTS]]


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what follows the first `count` bytes."""
    for place, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[place + 1 :]]
        count -= len(view)
    return []


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


_READ_THREADS = 4
# A call that takes longer than this, and its bytes at the lowest rate, is given up.
STALL_SECONDS = 10.0
_LEAST_BYTES_PER_SECOND = 20e6


class NoAnswer(Exception):
    """The disk did not answer in time."""


class SlotHolds(Protocol):
    """Keeps slots of the arena from being reused; see `SlotGrants`."""

    def begin_copy(self, slots: Iterable[int]) -> None: ...

    def end_copy(self, slots: Iterable[int]) -> None: ...


class DiskCalls:
    """The calls of one folder.

    Args:
        holds: keeps slots that a call without an answer may still read or write.
        chunk_bytes: bytes that a call moves for each of its slots.
        stall_seconds: see `STALL_SECONDS`.

    Attributes:
        writer: one thread, so that its calls follow each other.
        readers: several threads.
    """

    def __init__(self, holds: SlotHolds, chunk_bytes: int, stall_seconds: float) -> None:
        self.writer = DaemonThreads(1, "disk-write")
        self.readers = DaemonThreads(_READ_THREADS, "disk-read")
        self._holds = holds
        self._chunk_bytes = chunk_bytes
        self._stall_seconds = stall_seconds
        self._waiting_bytes = 0
        # Calls that took too long, and may still use the folder and slots.
        self._stuck: set[asyncio.Future[Any]] = set()

    def close(self) -> None:
        self.writer.close()
        self.readers.close()

    async def run(
        self, threads: DaemonThreads, call: Callable[[], Result], slots: Sequence[int]
    ) -> Result:
        """Run a call that uses these slots. Raises what it raises, and NoAnswer.

        After NoAnswer the slots are held until the call ends.
        """
        size = len(slots) * self._chunk_bytes
        self._waiting_bytes += size
        limit = self._stall_seconds + self._waiting_bytes / _LEAST_BYTES_PER_SECOND
        future = threads.submit(call)
        try:
            async with asyncio.timeout(limit):
                return await asyncio.shield(future)
        except TimeoutError:
            if future.done():
                raise  # the call's own
        finally:
            self._waiting_bytes -= size
        self._holds.begin_copy(slots)
        self._stuck.add(future)
        future.add_done_callback(lambda ended: self._end_stuck(ended, slots))
        raise NoAnswer

    async def wait_for_stuck(self) -> None:
        """Return when all calls that were given up have ended."""
        while self._stuck:
            await asyncio.wait(self._stuck)
            await asyncio.sleep(0)  # for its callback

    def _end_stuck(self, ended: asyncio.Future[Any], slots: Sequence[int]) -> None:
        self._stuck.discard(ended)
        self._holds.end_copy(slots)
        if not ended.cancelled():
            ended.exception()  # so that asyncio does not report it


async def to_the_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Run work that a cancelled caller waits for, since threads use the caller's slots."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # so that asyncio does not report it
        raise

"""Runs validation and tokenization in threads, for only a few long texts at a time.

A text of 4 MB takes some seconds of one core. Without a bound, such texts would take cores
and memory from everything else, and those of one tenant would hold up all others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from scheduler_service.limits import Limits
from splitpoint.errors import ResourceExhausted

# A request of at most this many bytes is processed at once, on the event loop.
_SHORT_BYTES = 4 * 1024
# A text of more bytes waits for a place.
_LONG_TEXT_BYTES = 16 * 1024
# Short jobs that wait for another process at a time; further ones wait for them.
_BLOCKED_JOBS = 4

_Result = TypeVar("_Result")


def is_long(text_bytes: int) -> bool:
    """Return True if a text of this many bytes waits for a place."""
    return text_bytes > _LONG_TEXT_BYTES


class TextJobs:
    """Places and a queue for long texts. Belongs to one event loop.

    One tenant gets at most all places but one, and half of the queue: another tenant always
    finds room.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._running: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()
        self._place_freed = asyncio.Event()
        self._threads = ThreadPoolExecutor(limits.text_jobs, thread_name_prefix="long text")
        self._blocked_threads = ThreadPoolExecutor(_BLOCKED_JOBS, thread_name_prefix="chat")

    async def run(
        self,
        job: Callable[[], _Result],
        *,
        tenant: str,
        request_bytes: int,
        text_bytes: int,
        blocks: bool = False,
    ) -> _Result:
        """Run the job: at once, in a thread, or for a long text in a thread once there is a place.

        `blocks`: it waits for another process, so it runs neither on the event loop nor in the
        threads that other code shares.

        Raises what the job raises, and ResourceExhausted if too many texts wait already or
        the wait was too long.
        """
        if is_long(text_bytes):
            await self._take_place(tenant)
            return await self._run_in_place(job, tenant)
        if blocks:
            return await asyncio.wrap_future(self._blocked_threads.submit(job))
        if request_bytes > _SHORT_BYTES:
            return await asyncio.to_thread(job)
        return job()

    async def close(self) -> None:
        """Wait for the running jobs."""
        for threads in (self._threads, self._blocked_threads):
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)

    async def _take_place(self, tenant: str) -> None:
        if not self._has_place(tenant) and not self._may_wait(tenant):
            raise self._busy()
        self._waiting[tenant] += 1
        try:
            async with asyncio.timeout(self._limits.text_wait_seconds):
                while not self._has_place(tenant):
                    await self._place_freed.wait()
                self._running[tenant] += 1
        except TimeoutError:
            raise self._busy() from None
        finally:
            self._waiting -= Counter([tenant])

    def _may_wait(self, tenant: str) -> bool:
        queue = self._limits.text_queue
        return self._waiting.total() < queue and self._waiting[tenant] < max(1, queue // 2)

    def _has_place(self, tenant: str) -> bool:
        places = self._limits.text_jobs
        return self._running.total() < places and self._running[tenant] < max(1, places - 1)

    async def _run_in_place(self, job: Callable[[], _Result], tenant: str) -> _Result:
        """Run the job in its place. The job frees the place, since it outlives its caller."""
        loop = asyncio.get_running_loop()

        def done(_: Future[_Result]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._free_place, tenant)

        running = self._threads.submit(job)
        running.add_done_callback(done)
        return await asyncio.wrap_future(running)

    def _free_place(self, tenant: str) -> None:
        self._running -= Counter([tenant])
        self._place_freed.set()
        self._place_freed = asyncio.Event()

    def _busy(self) -> ResourceExhausted:
        return ResourceExhausted(
            "other long texts are being tokenized",
            reason="TOKENIZER_BUSY",
            retry_after_seconds=self._limits.retry_seconds,
        )

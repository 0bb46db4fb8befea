"""The services in a thread of their own: started, called from other threads, and stopped.

A process of its own removes their files if this one ends without closing them, kill -9 included.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import functools
import logging
import os
import shutil
import subprocess
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from splitpoint.client import AsyncClient
from splitpoint.config import remove_tree
from splitpoint.errors import FailedPrecondition
from splitpoint_offline.options import Settings

if TYPE_CHECKING:
    from splitpoint_offline.services import Services


# Waits for the end of its input, which the kernel brings about however the writer ends.
_SCRIPT = 'read -r line; rm -rf -- "$@"'


class Remover:
    """Folders that must not outlive this process.

    A small process of its own waits for the end of this one: a killed process removes nothing,
    and an arena in /dev/shm is memory.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        shell = shutil.which("sh")
        self._process = shell and subprocess.Popen(
            [shell, "-c", _SCRIPT, "splitpoint-remover", *map(str, folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # Ctrl-C and signals to this process's group do not reach it.
            start_new_session=True,
        )

    def leave_to_parent(self) -> None:
        """Close a forked process's end of the pipe, which would outlive the parent's."""
        if self._process and self._process.stdin is not None:
            self._process.stdin.close()

    def close(self) -> None:
        """Remove the folders now, and wait for the process that would have done so."""
        for folder in self._folders:
            remove_tree(folder)
        if self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()


log = logging.getLogger(__name__)

Result = TypeVar("Result")
Work = Callable[[AsyncClient], Coroutine[Any, Any, Result]]
_Future = concurrent.futures.Future[Any]

_running: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine:
    """`start`, `call`, `close`; every thread but the engine's own may call."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process_id = os.getpid()
        self._started: concurrent.futures.Future[Services] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._calls: set[asyncio.Task[Any]] = set()
        # Held to begin a call and to begin the end, so that no call begins after the end.
        self._lock = threading.Lock()
        self._is_closed = False
        # A daemon: an interpreter that ends joins other threads before it closes the engine.
        self._thread = threading.Thread(target=self._run, name="splitpoint", daemon=True)
        self._remover = Remover([settings.arena.parent, settings.runtime])

    def start(self) -> None:
        """Load the model and return once it is ready. Raises what a service raises."""
        _running.add(self)
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self.close()
            raise

    def call(self, work: Work[Result]) -> Result:
        """Run `work` on the engine's loop and return its result.

        An exception in this thread meanwhile, such as KeyboardInterrupt, cancels it, and is
        raised once it has ended. Raises FailedPrecondition after `close` and in a forked process,
        and the error of a service that failed.
        """
        # Before the lock, which another thread may have held as this process was forked.
        if self._is_elsewhere:
            raise FailedPrecondition(
                f"this LLM belongs to process {self._process_id}, from which this one was forked; "
                "make another one here",
                reason="LLM_OF_ANOTHER_PROCESS",
            )
        done: _Future = concurrent.futures.Future()
        tasks: list[asyncio.Task[Any]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(self._watched(work)))
            tasks[0].add_done_callback(functools.partial(_hand_over, done))
            tasks[0].add_done_callback(self._calls.discard)
            self._calls.add(tasks[0])

        with self._lock:
            if self._is_closed:
                raise _closed()
            self._loop.call_soon_threadsafe(begin)
        try:
            result: Result = done.result()
        except BaseException:
            if not done.done():
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                concurrent.futures.wait([done])
            raise
        return result

    def close(self) -> None:
        """Cancel what runs, stop the services, and remove their files. May be called again.

        In a forked process it does nothing: the files are the parent's.
        """
        if self._is_elsewhere:
            return
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            if is_first and self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread.ident is not None:
            self._thread.join()
        if is_first:
            _running.discard(self)
            self._remover.close()

    def leave_to_parent(self) -> None:
        """Give up, in a process that was just forked, what would keep the parent's files."""
        self._remover.leave_to_parent()

    @property
    def _is_elsewhere(self) -> bool:
        """True in a forked process, which has neither the threads nor the sockets."""
        return os.getpid() != self._process_id

    # -- on the engine's thread ------------------------------------------------------------

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        """Serve until `close`, or until the start has failed."""
        stopping = asyncio.create_task(self._stop.wait())
        work = asyncio.create_task(self._start_and_wait())
        await asyncio.wait({stopping, work}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        for call in self._calls:
            call.cancel()
        if self._calls:
            await asyncio.wait(self._calls)
        work.cancel()
        await asyncio.wait({work})
        error = None if work.cancelled() else work.exception()
        if not self._started.done():
            self._started.set_exception(error or _closed())
        elif error is not None:
            log.error("the services did not stop as they should: %s", error)

    async def _start_and_wait(self) -> None:
        from splitpoint_offline.services import serving

        async with serving(self._settings) as services:
            self._started.set_result(services)
            await asyncio.get_running_loop().create_future()  # until it is cancelled

    async def _watched(self, work: Work[Result]) -> Result:
        """Return the result of `work`; cancel it when a service fails, and raise its error."""
        services = self._started.result()
        task = asyncio.create_task(work(services.client))
        try:
            ends: set[asyncio.Future[Any]] = {task, services.failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if services.failure.done() and not task.done():
                services.failure.result()
            return await task
        finally:
            if task.cancel():
                await asyncio.wait({task})


def _hand_over(done: _Future, task: asyncio.Task[Any]) -> None:
    """Give the end of a task to the thread that waits for it."""
    if task.cancelled():
        done.set_exception(_closed())
    elif (error := task.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(task.result())


def _closed() -> FailedPrecondition:
    return FailedPrecondition("this LLM is closed", reason="LLM_CLOSED")


def _close_all() -> None:
    for engine in list(_running):
        engine.close()


def _after_fork() -> None:
    for engine in list(_running):
        engine.leave_to_parent()
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
# The services' stop needs thread pools. These refuse work as soon as the interpreter ends, before
# any function of `atexit`; functions that are registered here run before, the latest first. So
# those of concurrent.futures.thread, imported above, come later.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]

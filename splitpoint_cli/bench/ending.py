"""End a benchmark by a signal: it releases what it holds before the process exits.

SIGINT, SIGTERM and SIGHUP end it once, with exit code 128 and the signal's number. Later
ones are ignored until everything is cleaned up; only SIGKILL ends a benchmark at once. What such
a benchmark left in memory is removed by the next one.

A signal's handler runs between any two instructions of the main thread. Two places are no
good for its SystemExit. In a finalizer, a callback of the garbage collector or of C code,
Python reports the exception and drops it: the benchmark would go on, deaf to later signals.
Within a step of the engine it can come between noting work and giving it to a lane's thread:
closing the lanes, which waits for all noted work, would wait forever. So steps are `held`, and
the handler looks again, a few times a second, whether the process is ending, and raises anew if
it is not.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from splitpoint.config import SHARED_MEMORY, arena_path, remove_tree
from splitpoint.errors import SplitpointError

ARENA_PREFIX = "bench-"
MOST_ARENAS = 8
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds between two looks whether the process is ending.
_LOOK_SECONDS = 0.2
# A held block that takes longer is interrupted: it may never end.
_HOLD_SECONDS = 10.0

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Ended(SystemExit):
    """The end of the process by a signal. A type of its own, to be found among its causes."""


class _Ending:
    """The signal that ends this process, and whether the main thread may be interrupted."""

    def __init__(self) -> None:
        self.caught = 0
        self.is_over = False
        self.held = 0
        self._deadline = 0.0

    def catch(self, number: int, frame: FrameType | None) -> None:
        """Handle the first signal, and let SIGALRM come until the process ends; drop others."""
        if self.caught:
            return
        self.caught = number
        self._deadline = time.monotonic() + _HOLD_SECONDS
        if not self.is_over:
            signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
            self.look(number, frame)

    def look(self, number: int, frame: FrameType | None) -> None:
        """Raise the end unless it is under way, or a held block has time left."""
        if self.held and time.monotonic() < self._deadline:
            return
        if not self.is_over and not _is_ending():
            raise _Ended(128 + self.caught)

    def release(self) -> None:
        """Leave a held block; raise the end that came meanwhile."""
        self.held -= 1
        if self.caught and not self.held:
            self.look(self.caught, None)


# Signals belong to the process, and so does this.
_ending = _Ending()


def _is_ending() -> bool:
    """Return whether this thread is cleaning up behind a raised end."""
    waiting: list[BaseException | None] = [sys.exc_info()[1]]
    seen: set[int] = set()
    while waiting:
        error = waiting.pop()
        if error is None or id(error) in seen:
            continue
        if isinstance(error, _Ended):
            return True
        seen.add(id(error))
        waiting += [error.__context__, error.__cause__]
    return False


class held:
    """Let a signal end the process only behind this block, for _HOLD_SECONDS at most.

    For the main thread, around steps whose work is also that of other threads.
    """

    def __enter__(self) -> None:
        _ending.held += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _ending.release()


def own_arena_path(number: int = 0) -> Path:
    """Return where an arena of a benchmark in this process lies; there may be several."""
    return arena_path(f"{ARENA_PREFIX}{os.getpid()}" + (f"-{number}" if number else ""))


def bench_arena_path() -> Path:
    """Remove what killed benchmarks left in memory; return a free `own_arena_path`.

    The lock beside an arena tells whether a process uses it, in any container; the process id in
    its path only keeps two benchmarks apart.
    """
    for folder in SHARED_MEMORY.glob(f"splitpoint-{os.getuid()}-{ARENA_PREFIX}*"):
        _remove_abandoned(folder / "arena")
    paths = (own_arena_path(number) for number in range(MOST_ARENAS))
    return next(path for path in paths if not path.exists())


def _remove_abandoned(path: Path) -> None:
    from splitpoint.arena.owner import ArenaInUse, ArenaOwner  # needs an extra

    try:
        owner = ArenaOwner.lock(path)
    except ArenaInUse:
        return
    except SplitpointError:
        return  # not an arena of ours
    try:
        owner.remove_existing()
    finally:
        owner.give_up()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Unwind the block by SystemExit at the first signal; then remove this process's arenas.

    They are removed here, too, because a signal may come anywhere: between its making
    and the block that would remove it, or in the middle of removing it. For the main thread.
    """
    global _ending
    ending = _ending = _Ending()
    before = {signal.SIGALRM: signal.signal(signal.SIGALRM, ending.look)}
    # What was ignored stays so: nohup ignores SIGHUP.
    before |= {
        number: signal.signal(number, ending.catch)
        for number in _ENDINGS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        ending.is_over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number in range(MOST_ARENAS):
            remove_tree(own_arena_path(number).parent)
        for number, handler in before.items():
            # The process is about to end: nothing may change its exit code any more.
            signal.signal(number, signal.SIG_IGN if ending.caught else handler)


def ending_by_signals(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a command: it runs inside of `ended_by_signals`."""

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with ended_by_signals():
            return function(*args, **kwargs)

    return run


def run_until_signal(work: Coroutine[Any, Any, Result]) -> Result:
    """Do as `asyncio.run`, but a signal cancels `work`; SystemExit is raised after its clean-up.

    An exception out of a signal handler would end the event loop instead, and with it what
    still has to be awaited.
    """

    async def run() -> Result:
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)

        def end(number: int) -> None:
            if not caught:
                task.cancel()
            caught.append(number)

        for number in _ENDINGS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, end, number)
        try:
            return await task
        except BaseException as error:
            # The signal is the cause, whatever the cancelled work raises.
            if caught:
                raise SystemExit(128 + caught[0]) from error
            raise
        finally:
            if caught:
                # The loop takes its handlers away when it closes: until they are ignored below,
                # later signals would end the process with an exit code of theirs.
                signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)

    caught: list[int] = []
    try:
        return asyncio.run(run())
    finally:
        if caught:
            for number in _ENDINGS:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDINGS)

"""End a benchmark by a signal: it releases what it holds before the process exits.

SIGINT, SIGTERM and SIGHUP end it once, with exit code 128 and the signal's number. Later
ones are ignored until everything is cleaned up; only SIGKILL ends a benchmark at once.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from splitpoint.config import arena_path, remove_tree

ARENA_PREFIX = "bench-"
MOST_ARENAS = 8
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def own_arena_path(number: int = 0) -> Path:
    """Return where an arena of a benchmark in this process lies; there may be several."""
    return arena_path(f"{ARENA_PREFIX}{os.getpid()}" + (f"-{number}" if number else ""))


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Unwind the block by SystemExit at the first signal; then remove this process's arenas.

    They are removed here, too, because a signal may come anywhere: between its making
    and the block that would remove it, or in the middle of removing it. For the main thread.
    """
    is_over, caught = False, 0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal caught
        if not caught:
            caught = number
            if not is_over:
                raise SystemExit(128 + number)

    # What was ignored stays so: nohup ignores SIGHUP.
    before = {
        number: signal.signal(number, end)
        for number in _ENDINGS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        is_over = True
        for number in range(MOST_ARENAS):
            remove_tree(own_arena_path(number).parent)
        for number, handler in before.items():
            # The process is about to end: nothing may change its exit code any more.
            signal.signal(number, signal.SIG_IGN if caught else handler)


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

    caught: list[int] = []
    try:
        return asyncio.run(run())
    finally:
        if caught:
            for number in _ENDINGS:
                signal.signal(number, signal.SIG_IGN)

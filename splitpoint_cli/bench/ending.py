"""End a benchmark by a signal: what would stay behind it is removed, and the process exits at once.

What stays behind a process is its arenas and its temporary files; everything else ends with it. So
SIGINT, SIGTERM and SIGHUP unwind nothing, since an exception out of a signal's handler may come
anywhere: in a finalizer, which drops it, or between noting work and giving it to a thread that is
then waited for. The exit code is 128 and the signal's number. What a benchmark left that was killed
is removed by the next one.

Benchmarks that run services unwind (`run_until_signal`): these have to be stopped.
"""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from splitpoint.config import SHARED_MEMORY, arena_path, remove_tree
from splitpoint.errors import SplitpointError
from splitpoint_cli.signals import handled_by

ARENA_PREFIX = "bench-"
MOST_ARENAS = 8
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


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
    """Exit the process at the first signal within the block; later ones are ignored.

    Temporary files of the block lie in one folder. For the main thread.
    """
    # What was ignored stays so: nohup ignores SIGHUP.
    heeded = [each for each in _ENDINGS if signal.getsignal(each) is not signal.SIG_IGN]
    with TemporaryDirectory(prefix="splitpoint-bench-") as folder:

        def end(number: int, _frame: FrameType | None) -> None:
            for each in heeded:
                signal.signal(each, signal.SIG_IGN)
            for place in range(MOST_ARENAS):
                remove_tree(own_arena_path(place).parent)
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(128 + number)

        usual, tempfile.tempdir = tempfile.tempdir, folder
        try:
            with handled_by(end, *heeded):
                yield
        finally:
            tempfile.tempdir = usual


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

"""The folder of one running stack: its lock, its sockets, and what a killed `up` left there."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from splitpoint import config
from splitpoint.errors import FailedPrecondition

_LOCK = "lock"
# Idle services of a killed `up` are gone within a second; busy ones drain for longer.
_SILENCE_SECONDS = 5.0


@contextmanager
def exclusive(runtime: Path, instance: str) -> Iterator[None]:
    """Hold the instance's lock. Raises FailedPrecondition when another `up` has it.

    Sockets that a killed predecessor left behind are removed, but not while somebody
    still serves there: a server that stops unlinks its path, whoever owns that by then.
    """
    lock = _take(runtime)
    if lock is None:
        raise FailedPrecondition(
            f"a stack named {instance} is already running "
            "(choose another --listen port or --instance)"
        )
    try:
        _await_silence(runtime, instance)
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())  # for `splitpoint down`
        for stale in runtime.glob("*.sock"):
            stale.unlink()
        yield
    finally:
        os.close(lock)


def _await_silence(runtime: Path, instance: str) -> None:
    """Wait a little for the services of a killed `up`. Raises FailedPrecondition."""
    deadline = time.monotonic() + _SILENCE_SECONDS
    while alive := sorted(path.stem for path in runtime.glob("*.sock") if _answers(path)):
        if time.monotonic() > deadline:
            raise _still_stopping(instance, alive)
        time.sleep(0.1)


def _still_stopping(instance: str, alive: list[str]) -> FailedPrecondition:
    return FailedPrecondition(
        f"`splitpoint up` of {instance} was killed, and {', '.join(alive)} still stops: "
        "try again in a moment"
    )


def running_process(runtime: Path) -> int | None:
    """Process id of the `up` that holds the lock; None: there is none."""
    try:
        with (runtime / _LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _written_id(lock)
    except FileNotFoundError:
        pass
    return None


def _written_id(lock: TextIO) -> int | None:
    """The number in a held lock file; None if its holder does not get to writing it."""
    for _ in range(50):
        lock.seek(0)
        text = lock.read()
        if text.isdecimal():
            return int(text)
        time.sleep(0.1)  # taken, but not written yet
    return None


def clear_leftovers(runtime: Path, instance: str) -> bool:
    """Remove what a killed `up` left in its folder, and the folder; whether there was anything.

    Raises FailedPrecondition while services of it still answer: they end by
    themselves, once their running requests are done.
    """
    lock = _take(runtime)
    if lock is None:
        raise FailedPrecondition(f"a stack named {instance} is starting just now")
    try:
        left = [path for path in runtime.iterdir() if path.name != _LOCK]
        was_used = bool(left) or os.fstat(lock).st_size > 0
        alive = sorted(path.stem for path in left if path.suffix == ".sock" and _answers(path))
        if alive:
            raise _still_stopping(instance, alive)
        config.remove_tree(runtime)  # the lock last held: nobody starts in between
        return was_used
    finally:
        os.close(lock)


def _take(runtime: Path) -> int | None:
    """An open file that holds the lock, with its folder made; None: somebody else has it."""
    while True:
        config.make_private(runtime)
        path = runtime / _LOCK
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # the folder was removed in this moment
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        try:
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except FileNotFoundError:
            pass
        os.close(lock)  # its former holder removed the file before we had the lock


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True

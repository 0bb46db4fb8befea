"""The folder of one running stack: its locks, its sockets, and the remains of a killed `up`.

There are two locks. `up` alone holds `lock`, which contains its process id, and the address that
its scheduler listens at, once it does. `up` and each of
its services, which inherit the open file, hold `services`: it is free once the last of them
has ended, in whatever way.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from splitpoint import config
from splitpoint.errors import Cancelled, FailedPrecondition

_LOCK = "lock"
_SERVICES = "services"
# Of fixed length, so that one write replaces one id by another. Ids end at 2^22. The address
# follows in a line of its own.
_ID_DIGITS = 10
# Longest wait for a process that has the lock to write its id, which it does at once.
_ID_SECONDS = 2.0
# A worker drains for 30 s, then its store stops.
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.05


class Held:
    """Both locks of an instance, held by the `up` that runs it.

    Attributes:
        services: the open file that every service inherits.
    """

    def __init__(self, runtime: Path, lock: int) -> None:
        self._lock = lock
        os.pwrite(lock, f"{os.getpid():{_ID_DIGITS}}".encode(), 0)  # for `splitpoint down`
        os.ftruncate(lock, _ID_DIGITS)  # no address of a killed `up`
        self.services = _open(runtime / _SERVICES)

    def listens_at(self, address: str) -> None:
        """Note the schedulers' addresses, with commas between them, by which `splitpoint down`
        finds the stack."""
        os.pwrite(self._lock, f"\n{address}".encode(), _ID_DIGITS)


@contextmanager
def exclusive(runtime: Path, instance: str) -> Iterator[Held]:
    """Hold the instance's lock. Raises FailedPrecondition if another `up` has it.

    Await `predecessors_gone` before starting the first service.
    """
    lock = _take(runtime)
    if lock is None:
        raise FailedPrecondition(
            f"a stack named {instance} is already running "
            "(choose another --listen port or --instance)"
        )
    try:
        held = Held(runtime, lock)
        try:
            yield held
        finally:
            os.close(held.services)
    finally:
        os.close(lock)


async def predecessors_gone(
    services: int,
    runtime: Path,
    instance: str,
    *,
    stop: asyncio.Event,
    say: Callable[[str], None],
    seconds: float = _STOP_SECONDS,
) -> None:
    """Wait until no service of a killed `up` runs, then remove the sockets that they left.

    The services end by themselves after their running requests. Until then they use the
    arena, and each one unlinks its socket by name as it ends.

    Raises FailedPrecondition if they take longer than `seconds`, Cancelled if `stop` is set
    before.
    """
    deadline = time.monotonic() + seconds
    is_first = True
    while not _lock_at_once(services):
        if is_first:
            say(f"an earlier `splitpoint up` of {instance} was killed, its services still stop ...")
            is_first = False
        if time.monotonic() >= deadline:
            raise FailedPrecondition(f"{_leftover(runtime, instance)}, even after {seconds:g} s")
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), _POLL_SECONDS)
            raise Cancelled("stopped while starting")
    _unlink_sockets(runtime)


def _unlink_sockets(runtime: Path) -> None:
    for stale in runtime.glob("*.sock"):
        stale.unlink()


def running_process(runtime: Path, *, seconds: float = _ID_SECONDS) -> int | None:
    """Return the process id of the `up` that holds the lock; None without one."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with (runtime / _LOCK).open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    process_id = _id_in(lock.read())
                else:
                    return None
        except FileNotFoundError:
            return None
        if process_id is not None or time.monotonic() >= deadline:
            return process_id
        time.sleep(_POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class RunningStack:
    """A stack whose `up` runs.

    `address`: those of its schedulers, with commas between them; empty until they listen.
    """

    name: str
    process_id: int
    address: str

    @property
    def addresses(self) -> list[str]:
        return self.address.split(",")


def running_stacks(parent: Path) -> list[RunningStack]:
    """Return the stacks of this user whose folders lie in `parent`, by name.

    Takes no lock, which an `up` that starts in this moment would miss.
    """
    found = []
    for lock in sorted(parent.glob(f"*/{_LOCK}")):
        with suppress(OSError):  # it ended meanwhile
            process_id, _, address = lock.read_text().partition("\n")
            holder = _id_in(process_id)
            if holder is not None and holder in _users_of(lock, holder):
                found.append(RunningStack(lock.parent.name, holder, address.strip()))
    return found


def _id_in(text: str) -> int | None:
    """Return the id; None if the holder has not written it yet and the text is a dead one's."""
    try:
        process_id = int(text[:_ID_DIGITS])
    except ValueError:
        return None
    return process_id if Path(f"/proc/{process_id}").exists() else None


def clear_leftovers(runtime: Path, instance: str) -> bool:
    """Remove the folder of a killed `up`; return True if `up` had used it.

    Raises FailedPrecondition while its services still run: they end by themselves after
    their running requests.
    """
    lock = _take(runtime)
    if lock is None:
        raise FailedPrecondition(f"a stack named {instance} is starting just now")
    try:
        was_used = os.fstat(lock).st_size > 0 or any(
            path.name != _LOCK for path in runtime.iterdir()
        )
        services = _open(runtime / _SERVICES)
        try:
            if not _lock_at_once(services):
                raise FailedPrecondition(f"{_leftover(runtime, instance)}: try again in a moment")
        finally:
            os.close(services)
        config.remove_tree(runtime)  # while the lock is held: no `up` starts in between
        return was_used
    finally:
        os.close(lock)


def _leftover(runtime: Path, instance: str) -> str:
    running = ", ".join(map(str, sorted(_users_of(runtime / _SERVICES)))) or "?"
    return (
        f"`splitpoint up` of {instance} was killed, and its services still stop "
        f"(processes {running})"
    )


def _users_of(path: Path, process_id: int | None = None) -> set[int]:
    """Return the ids of other processes of this user that have the file open; of one if given."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*" if process_id is None else str(process_id)):
        with suppress(OSError):  # ended meanwhile, or not ours to look into
            if any(os.path.samefile(fd, path) for fd in (entry / "fd").iterdir() if fd.exists()):
                found.add(int(entry.name))
    return found - {os.getpid()}


def _take(runtime: Path) -> int | None:
    """Return an open file that holds the lock; None if another process has it. Makes the folder."""
    while True:
        config.make_runtime(runtime)
        path = runtime / _LOCK
        try:
            lock = _open(path)
        except FileNotFoundError:  # the folder was removed in this moment
            continue
        if not _lock_at_once(lock):
            os.close(lock)
            return None
        if _is_at(lock, path):
            return lock
        os.close(lock)  # the former holder removed the file before this lock


def _is_at(file: int, path: Path) -> bool:
    """Return True if the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _lock_at_once(file: int) -> bool:
    """Lock the open file without waiting; return True if it is locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

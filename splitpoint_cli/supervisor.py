"""Child processes: started, watched, stopped in order, and never left behind.

Knows commands, pipes and signals; what the services do is none of its
business. Three things make sure that nothing survives:

* every child inherits the read end of one pipe and stops when the kernel
  closes the other end, so even `kill -9` of this process ends them;
* every child leads its own process group: a Ctrl-C in the terminal reaches
  only this process, which then stops the children in the right order, and
  SIGKILL takes a child's own children with it;
* every wait has a bound, after which SIGKILL follows.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import splitpoint
from splitpoint.config import READY_PREFIX
from splitpoint.errors import SplitpointError

TAIL_LINES = 20
# Longer lines are cut; a traceback or a log record never needs more.
_LINE_LIMIT = 64 * 1024
# For the last lines of a dead child; its pipes close with its process group.
_READ_SECONDS = 2.0
_HEADER = re.compile(r"\S+Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")


class ServiceExited(SplitpointError):
    """A child ended although nobody asked it to. `tail` holds its last lines."""

    code = 14

    def __init__(self, name: str, status: int, tail: Sequence[str]) -> None:
        how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        super().__init__(f"{name} ended {how}", reason="SERVICE_EXITED", service=name)
        self.service = name
        self.status = status
        self.tail = tuple(tail)


class ServiceNotReady(SplitpointError):
    """A child did not become ready in time. `tail` holds its last lines."""

    code = 4

    def __init__(self, name: str, seconds: float, tail: Sequence[str]) -> None:
        super().__init__(f"{name} was not ready after {seconds:g} s", reason="SERVICE_NOT_READY")
        self.service = name
        self.tail = tuple(tail)


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """How to start one service.

    Attributes:
        name: what people see, such as "worker 0".
        arguments: after the interpreter, such as ("-m", "kvstore_service", ...).
            `--parent-fd N` is added.
        stop_seconds: how long it may take to stop after SIGTERM.
    """

    name: str
    arguments: Sequence[str]
    ready_seconds: float = 60.0
    stop_seconds: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line a child wrote. `important`: a warning or worse, or no log record at all."""

    service: str
    text: str
    important: bool


class Service:
    """One running child."""

    def __init__(self, command: ServiceCommand, process: Process) -> None:
        self.command = command
        self.process = process
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.readers: list[asyncio.Task[None]] = []
        # Set once the process and all of its group are dead and read out.
        self.gone = asyncio.Event()

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def status(self) -> int:
        """Exit status, negative for a signal; only when gone."""
        return self.process.returncode or 0


class Supervisor:
    """Owns a set of services; leaving the `async with` block stops them all.

    Args:
        interpreter: path of the Python that runs the services.
        show: called with every line a child writes.
    """

    def __init__(self, interpreter: str, show: Callable[[LogLine], None]) -> None:
        self._interpreter = interpreter
        self._show = show
        self._services: list[Service] = []
        self._exits: asyncio.Queue[Service] = asyncio.Queue()
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False
        self._hurry = asyncio.Event()
        # Held open until this process ends, however it does.
        self._alive_read, self._alive_write = os.pipe()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.stop()
        finally:
            os.close(self._alive_write)
            os.close(self._alive_read)

    # -- starting -----------------------------------------------------------------

    async def start(self, command: ServiceCommand) -> Service:
        """Start a service without waiting for it."""
        process = await asyncio.create_subprocess_exec(
            self._interpreter,
            *command.arguments,
            "--parent-fd",
            str(self._alive_read),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            limit=_LINE_LIMIT,
            pass_fds=(self._alive_read,),
            process_group=0,
            env=child_environment(command.environment),
        )
        service = Service(command, process)
        self._services.append(service)
        service.readers = [
            asyncio.create_task(self._read_lines(service, stream))
            for stream in (process.stdout, process.stderr)
            if stream is not None
        ]
        self._watchers.append(asyncio.create_task(self._watch(service)))
        return service

    async def ready(self, service: Service) -> str:
        """The address the service printed. Raises ServiceExited, ServiceNotReady."""
        bound = service.command.ready_seconds
        try:
            async with asyncio.timeout(bound):
                return await asyncio.shield(service.ready)
        except TimeoutError:
            raise ServiceNotReady(service.name, bound, service.tail) from None

    async def _read_lines(self, service: Service, stream: asyncio.StreamReader) -> None:
        important = True
        while True:
            try:
                raw = await stream.readline()
            except ValueError:  # longer than the limit: its first part is gone already
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            if line.startswith(READY_PREFIX) and not service.ready.done():
                service.ready.set_result(line.removeprefix(READY_PREFIX).strip())
                continue
            header = _HEADER.match(line)
            important = header is None or header[1] not in ("DEBUG", "INFO")
            service.tail.append(line)
            self._show(LogLine(service.name, line, important))

    async def _watch(self, service: Service) -> None:
        await _process_end(service.process)
        # asyncio calls a process finished only when its pipes are closed, and
        # a grandchild may hold them: the whole group goes with its leader.
        _kill_group(service.process)
        reaped = asyncio.create_task(service.process.wait())
        await asyncio.wait([reaped, *service.readers], timeout=_READ_SECONDS)
        reaped.cancel()
        service.gone.set()
        if not service.ready.done():
            service.ready.set_exception(self._exit_of(service))
            service.ready.exception()  # seen here: nobody may be waiting for it
        if not self._stopping:
            self._exits.put_nowait(service)

    # -- running ------------------------------------------------------------------

    async def first_exit(self) -> ServiceExited:
        """Wait until a service ends that nobody stopped, and say which and how."""
        return self._exit_of(await self._exits.get())

    @staticmethod
    def _exit_of(service: Service) -> ServiceExited:
        return ServiceExited(service.name, service.status, service.tail)

    # -- stopping -----------------------------------------------------------------

    def hurry(self) -> None:
        """Stop waiting politely: everything that is still there gets SIGKILL."""
        self._hurry.set()

    async def stop(self) -> None:
        """Stop all services, last started group first; returns when all are gone.

        Services whose commands started under one `name` prefix ("worker 0",
        "worker 1") stop together.
        """
        self._stopping = True
        groups: dict[str, list[Service]] = {}
        for service in self._services:
            groups.setdefault(service.name.split()[0], []).append(service)
        for services in reversed(list(groups.values())):
            await asyncio.gather(*(self._stop_one(service) for service in services))
        for watcher in self._watchers:
            await watcher
        for service in self._services:
            for reader in service.readers:
                reader.cancel()
            await asyncio.gather(*service.readers, return_exceptions=True)
        self._services.clear()
        self._watchers.clear()

    async def _stop_one(self, service: Service) -> None:
        if not service.gone.is_set() and not self._hurry.is_set():
            try:
                service.process.terminate()
            except ProcessLookupError:
                pass  # it ended just now; its watcher is about to say so
            await self._gone_within(service, service.command.stop_seconds)
        if not service.gone.is_set():
            self._show(LogLine(service.name, "did not stop in time: killed", True))
            _kill_group(service.process)
        await service.gone.wait()

    async def _gone_within(self, service: Service, seconds: float) -> None:
        waits = [
            asyncio.create_task(service.gone.wait()),
            asyncio.create_task(self._hurry.wait()),
        ]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def _process_end(process: Process) -> None:
    """Return when the process has ended, whoever still holds its pipes."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:  # ended and reaped already
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _kill_group(process: Process) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nobody is left in it


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with the packages' folder importable and output unbuffered."""
    root = str(Path(splitpoint.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    path = root if not inherited else f"{root}{os.pathsep}{inherited}"
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **extra}

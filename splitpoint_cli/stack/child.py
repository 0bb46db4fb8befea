"""One child process: its start, its output and its end.

Knows commands, pipes and process groups. The supervisor knows which children there are, and
stops them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import splitpoint
from splitpoint.errors import SplitpointError, from_code
from splitpoint.observe.logs import level_of
from splitpoint.progress import Progress, read_progress
from splitpoint.service import READY_PREFIX
from splitpoint.transport.statuses import read_failure
from splitpoint_cli.stack.options import API_KEY_VARIABLE

TAIL_LINES = 20
# Longer lines are cut; a traceback or a log record never needs more.
_LINE_LIMIT = 64 * 1024
# Longest wait for the last lines of a dead child, whose pipes close with its process group.
_READ_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """The command of one service.

    Attributes:
        name: shown to people, such as "worker 0".
        arguments: after the interpreter, such as ("-m", "kvstore_service", ...).
            `--parent-fd N` is added.
        stop_seconds: longest time between SIGTERM and its end.
        socket: the file that it listens at, removed between its death and its next start.
        stops_with: the kind of service that it stops together with, such as "scheduler". Empty:
            its own kind, the first word of its name.
    """

    name: str
    arguments: Sequence[str]
    ready_seconds: float = 60.0
    stop_seconds: float = 10.0
    environment: Mapping[str, str] = field(default_factory=dict)
    socket: Path | None = None
    stops_with: str = ""

    def listening_on(self, address: str) -> ServiceCommand:
        """Return the same command with this `--listen`, in place of port 0 for any port."""
        arguments = list(self.arguments)
        if "--listen" in arguments:
            arguments[arguments.index("--listen") + 1] = address
        return dataclasses.replace(self, arguments=tuple(arguments))

    def asking(self, schedulers: Sequence[str]) -> ServiceCommand:
        """Return the same command with these addresses as `--scheduler`."""
        arguments = (*self.arguments, "--scheduler", ",".join(schedulers))
        return dataclasses.replace(self, arguments=arguments)


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line that a child wrote.

    Attributes:
        important: True for a warning or worse, and for a text that is no log record.
        progress: None if the line is no report of progress.
    """

    service: str
    text: str
    important: bool
    progress: Progress | None = None


class ServiceNotStarted(SplitpointError):
    """The system could not start a service's process: too many processes, no memory, no files.

    Attributes:
        why: the system's message.
    """

    code = 8
    exit_code = 5

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"{name} cannot be started: {why}", reason="SERVICE_NOT_STARTED", service=name
        )
        self.service = name
        self.why = why
        self.tail: tuple[LogLine, ...] = ()


class ServiceExited(SplitpointError):
    """A child ended without being stopped.

    Attributes:
        tail: its last lines.
        failure: the error that it reported, with its name in front; None if it reported none.
    """

    code = 14

    def __init__(
        self,
        name: str,
        status: int,
        tail: Sequence[LogLine],
        *,
        and_then: str = "",
        failure: SplitpointError | None = None,
    ) -> None:
        how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        then = f", {and_then}" if and_then else ""
        super().__init__(f"{name} ended {how}{then}", reason="SERVICE_EXITED", service=name)
        self.service = name
        self.status = status
        self.tail = tuple(tail)
        self.failure = failure and from_code(
            failure.code, f"{self.message}: {failure.message}", failure.reason
        )


class ServiceNotReady(SplitpointError):
    """A child did not become ready in time. `tail` holds its last lines."""

    code = 4
    exit_code = 4

    def __init__(self, name: str, seconds: float, tail: Sequence[LogLine]) -> None:
        super().__init__(f"{name} was not ready after {seconds:g} s", reason="SERVICE_NOT_READY")
        self.service = name
        self.tail = tuple(tail)


class Service:
    """One started child, from `start` to `gone`.

    Attributes:
        tail: its last lines.
        failure: the error that it reported; None if it reported none.
        address: the address that it printed when it was ready; empty before.
        gone: set once the process and all of its group are dead and read out.
        ready_at, gone_at: on the loop's clock; None: not yet.
    """

    def __init__(
        self,
        command: ServiceCommand,
        process: Process,
        show: Callable[[LogLine], None],
        on_exit: Callable[[Service], None],
    ) -> None:
        self.command = command
        self.process = process
        self.tail: deque[LogLine] = deque(maxlen=TAIL_LINES)
        self.failure: SplitpointError | None = None
        self.address = ""
        self.gone = asyncio.Event()
        self.ready_at: float | None = None
        self.gone_at: float | None = None
        self._show = show
        self._on_exit = on_exit
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._readers = [
            asyncio.create_task(self._read_lines(stream))
            for stream in (process.stdout, process.stderr)
            if stream is not None
        ]
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        interpreter: str,
        command: ServiceCommand,
        alive_fd: int,
        show: Callable[[LogLine], None],
        on_exit: Callable[[Service], None],
        *,
        inherited: Sequence[int] = (),
    ) -> Self:
        """Start a child that ends when the pipe `alive_fd` is closed at its other end.

        `show` gets every line it writes; `on_exit` is called once it is gone.
        `inherited`: further open files that it keeps open. Raises ServiceNotStarted.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                interpreter,
                *command.arguments,
                "--parent-fd",
                str(alive_fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=PIPE,
                stderr=PIPE,
                limit=_LINE_LIMIT,
                pass_fds=(alive_fd, *inherited),
                process_group=0,
                env=child_environment(command.environment),
            )
        except OSError as error:
            raise ServiceNotStarted(command.name, error.strerror or str(error)) from error
        except RuntimeError as error:
            # asyncio may need a thread to watch it. A child that has come to life already
            # ends with this process.
            raise ServiceNotStarted(command.name, str(error)) from error
        return cls(command, process, show, on_exit)

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def status(self) -> int:
        """Exit status, negative for a signal; only when gone."""
        return self.process.returncode or 0

    @property
    def served_seconds(self) -> float:
        """From ready to gone; 0 when it never was ready. Only when gone."""
        if self.ready_at is None or self.gone_at is None:
            return 0.0
        return self.gone_at - self.ready_at

    def death(self, *, and_then: str = "") -> ServiceExited:
        """Return as an error how the process ended and what followed. It must have ended."""
        return ServiceExited(
            self.name, self.status, self.tail, and_then=and_then, failure=self.failure
        )

    async def ready(self) -> str:
        """Wait for READY and return its address. Raises ServiceExited, ServiceNotReady."""
        bound = self.command.ready_seconds
        try:
            async with asyncio.timeout(bound):
                return await asyncio.shield(self._ready)
        except TimeoutError:
            raise ServiceNotReady(self.name, bound, self.tail) from None

    def terminate(self) -> None:
        try:
            self.process.terminate()
        except ProcessLookupError:
            pass  # it ended just now; its watcher is about to say so

    def kill(self) -> None:
        """SIGKILL for the process and its whole group."""
        _kill_group(self.process)

    async def close(self) -> None:
        """Wait until it is gone and let go of its pipes, which strangers may hold open."""
        await self._watcher
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _read_lines(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await stream.readline()
            except ValueError:  # longer than the limit: its first part is gone already
                continue
            if not raw:
                return
            text = raw.decode(errors="replace").rstrip()
            if text.startswith(READY_PREFIX) and not self._ready.done():
                self.ready_at = asyncio.get_running_loop().time()
                self.address = text.removeprefix(READY_PREFIX).strip()
                self._ready.set_result(self.address)
                continue
            failure = read_failure(text)
            if failure is not None:
                self.failure = failure
                continue
            progress = read_progress(text)
            if progress is not None:
                self._show(LogLine(self.name, text, False, progress))
                continue
            important = level_of(text) not in ("DEBUG", "INFO")
            line = LogLine(self.name, text, important)
            self.tail.append(line)
            self._show(line)

    async def _watch(self) -> None:
        await _process_end(self.process)
        # asyncio calls a process finished only when its pipes are closed, and
        # a grandchild may hold them: the whole group goes with its leader.
        _kill_group(self.process)
        reaped = asyncio.create_task(self.process.wait())
        await asyncio.wait([reaped, *self._readers], timeout=_READ_SECONDS)
        reaped.cancel()
        self.gone_at = asyncio.get_running_loop().time()
        self.gone.set()
        if not self._ready.done():
            self._ready.set_exception(self.death())
            self._ready.exception()  # retrieved here: possibly no task waits for it
        self._on_exit(self)


async def _process_end(process: Process) -> None:
    """Return when the process has ended, even if a grandchild still holds its pipes."""
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
        pass  # no process is left in it


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment, with the packages importable and output unbuffered."""
    root = str(Path(splitpoint.__file__).resolve().parent.parent)
    inherited = os.environ.get("PYTHONPATH")
    path = root if not inherited else f"{root}{os.pathsep}{inherited}"
    # No service needs the key itself, and its children would inherit it.
    environment = {name: each for name, each in os.environ.items() if name != API_KEY_VARIABLE}
    return {**environment, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **extra}

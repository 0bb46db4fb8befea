"""Real service processes that start in a fraction of a second, so that hundreds can be killed.

    with ForkServer(folder) as server:
        worker = server.start("worker_service", "--listen", ..., failpoint="seal:3")
        worker.kill()

A process for each of FAMILIES imports its programs once for all tests, and then forks: each child
runs the `main` of its program, as `python -m` would, with its own process id, threads and sockets.
What tests start as `python -m`, and programs of theirs, are forked in the same way
(forked_python.py).

A failpoint `PLACE:N` ends the child with SIGKILL when it comes to the place for the Nth time
(failpoints.py).
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from splitpoint.service import READY_PREFIX

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 60
PR_SET_PDEATHSIG = 1
# Most bytes of an order, which has an environment in it.
_ORDER_BYTES = 1 << 20
# Most descriptors of an order.
_DESCRIPTORS = 64
# Most bytes of a command that other processes see.
_COMMAND_BYTES = 4096


class Child:
    """A service process, by its id and its file descriptor."""

    def __init__(self, process_id: int, descriptor: int, log: Path) -> None:
        self.process_id = process_id
        self.log = log
        self._descriptor = descriptor

    @property
    def is_running(self) -> bool:
        return not select.select([self._descriptor], [], [], 0)[0]

    def signal(self, number: int) -> None:
        """Send a signal; no effect if the process has ended."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> float:
        """kill -9; return the time before, on the monotonic clock."""
        now = time.monotonic()
        self.signal(signal.SIGKILL)
        self.wait_ended()
        return now

    def wait_ended(self) -> None:
        ended, _, _ = select.select([self._descriptor], [], [], SECONDS)
        assert ended, f"process {self.process_id} goes on"

    def wait_ready(self) -> str:
        """Return the address that it listens at."""
        deadline = time.monotonic() + SECONDS
        while True:
            is_running = self.is_running
            for line in self.log.read_text().splitlines():
                if line.startswith(READY_PREFIX):
                    return line.removeprefix(READY_PREFIX)
            assert is_running, f"ended early: {self.log.read_text()}"
            assert time.monotonic() < deadline, f"not ready: {self.log.read_text()}"
            time.sleep(0.01)

    def line_printed(self) -> str | None:
        """Return the first line of its log, empty if it ended without one; None: not yet."""
        is_running = self.is_running
        line, end, _ = self.log.read_text().partition("\n")
        return line if end or not is_running else None

    def first_line(self) -> str:
        """Wait for the first line of its log; empty if it ends without one."""
        deadline = time.monotonic() + SECONDS
        while (line := self.line_printed()) is None:
            assert time.monotonic() < deadline, "the service prints nothing"
            time.sleep(0.01)
        return line

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.kill()
        os.close(self._descriptor)


class ForkServer:
    """The children of one test or fixture, killed at its end. Their logs are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def start(self, module: str, *arguments: str, failpoint: str = "") -> Child:
        log = self.folder / f"{len(self.children)}-{module}.log"
        log.touch()
        child = parent_of(module).fork(module, arguments, log, errors=log, failpoint=failpoint)
        self.children.append(child)
        return child

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.close()


class Parent:
    """A process that has imported some services, and forks those that are asked for.

    It lasts as long as the tests, and is started by the first that needs it, in the main thread.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self.orders = Orders(dict(os.environ))
        try:
            self._process = self._start(modules)
        except OSError:
            self.orders.close()
            raise
        self.process_id = self._process.pid

    def _start(self, modules: Sequence[str]) -> subprocess.Popen[bytes]:
        paths = filter(None, [os.environ.get("PYTHONPATH")])
        with self.orders.theirs as theirs:
            return subprocess.Popen(
                # The last argument is the room for the commands of those that it forks.
                [sys.executable, __file__, str(theirs.fileno()), *modules, " " * _COMMAND_BYTES],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                # With the folders of this one: else nothing that it forks could start more.
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *paths])},
                pass_fds=[theirs.fileno()],
            )

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        log: Path,
        *,
        errors: Path | None = None,
        failpoint: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        """Start a service that prints to `log`.

        `errors`: file for its stderr, which else is that of the tests. `environment`: variables in
        addition to those of this process.
        """
        process_id, [descriptor] = self.orders.ask(
            # What it is now: pytest gives each test another one to read.
            *(() if errors is not None else (2,)),
            module=module,
            arguments=arguments,
            failpoint=failpoint,
            log=str(log),
            errors=None if errors is None else str(errors),
            environment={**os.environ, **(environment or {})},
        )
        return Child(process_id, descriptor, log)

    def code_of(self, process_id: int) -> int:
        """Return the exit code of a child that has ended; of a signal, its negative number."""
        code, _ = self.orders.ask(ended=process_id)
        return code

    def close(self) -> None:
        self.orders.close()
        self._process.wait(SECONDS)


class Orders:
    """The way to a process that forks.

    Attributes:
        environment: the variables with which it imported what it forks.
        theirs: its end.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._lock = threading.Lock()
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def ask(self, *descriptors: int, **order: Any) -> tuple[int, list[int]]:
        """Return the answer to an order, and the descriptors that came with it."""
        with self._lock:
            socket.send_fds(self._ours, [json.dumps(order).encode()], descriptors)
            answer, received, _, _ = socket.recv_fds(
                self._ours, _ORDER_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        assert answer, "the process that forks has ended"
        return int(answer), received

    def close(self) -> None:
        self._ours.close()


# A store must not be as large as torch, and the gateway has its own settings of gRPC, which reads
# them when it is imported. `splitpoint up` starts services itself: it is forked with them.
FAMILIES = (
    ("kvstore_service", "scheduler_service", "splitpoint_cli", "splitpoint_cli.request.probe"),
    ("gateway_service",),
    ("worker_service", "splitpoint_cli", "worker_service.profiling.page_costs"),
)
# Commands that compute as workers do, or start them; the others never load torch.
_COMPUTING = ("up", "bench", "eval", "calibrate")
# Programs of the tests, which are started by path. The first one starts others.
_FILES = [str(ROOT / "tests" / name) for name in ("cli/fake_stack.py", "cli/fake_service.py")]
_parents: dict[tuple[str, ...], Parent] = {}


def parent_of(module: str) -> Parent:
    """Return the process that forks a service. Call it in the main thread, which it ends with."""
    [family] = [family for family in FAMILIES if module in family]
    return _parent_of(family)


def _parent_of(family: tuple[str, ...]) -> Parent:
    if family not in _parents:
        _parents[family] = Parent(family)
    return _parents[family]


def orders_of(words: Sequence[str]) -> Orders | None:
    """Return the way to the process that forks a program; None if none can be asked for it.

    `words`: what follows `python`.
    """
    family = _family_of(words)
    can_start = threading.current_thread() is threading.main_thread()
    if family is not None and (family in _parents or can_start):
        return _parent_of(family).orders
    return None


def _family_of(words: Sequence[str]) -> tuple[str, ...] | None:
    if words[0] in _FILES:
        return FAMILIES[0]
    if words[0] != "-m" or len(words) < 2:
        return None
    computes = words[1] == "splitpoint_cli" and words[2:3] and words[2] in _COMPUTING
    return next(
        (each for each in FAMILIES if words[1] in each and not (computes and each is FAMILIES[0])),
        None,
    )


def parent_processes() -> set[int]:
    """Return the ids of the processes that fork."""
    return {parent.process_id for parent in _parents.values()}


def close_parents() -> None:
    """End the processes that fork, and what they have forked."""
    for parent in _parents.values():
        parent.close()
    _parents.clear()


# -- the process that forks -------------------------------------------------------------------


# Where a program's `main` is, if its `__main__` runs as soon as it is imported or it has none.
MAINS = {
    "splitpoint_cli": "splitpoint_cli.main",
    "splitpoint_cli.request.probe": "splitpoint_cli.request.probe",
    "worker_service.profiling.page_costs": "worker_service.profiling.page_costs",
}


@dataclass(frozen=True)
class Program:
    """A service's program.

    Attributes:
        environment: the variables that its import sets for libraries which read them later.
    """

    main: Callable[[], int]
    environment: dict[str, str]

    @classmethod
    def load(cls, module: str) -> Self:
        """Import it, and leave the environment as it is for other programs."""
        before = dict(os.environ)
        main = importlib.import_module(MAINS.get(module, f"{module}.__main__")).main
        own = {name: value for name, value in os.environ.items() if before.get(name) != value}
        for name in own:
            del os.environ[name]
        os.environ.update(before)
        return cls(main, own)


def main() -> None:
    descriptor, *modules, _ = sys.argv[1:]
    image = Image.load(modules)
    _end_with_parent()
    image.serve(socket.socket(fileno=int(descriptor)))


@dataclass(frozen=True)
class Image:
    """What a process that forks has imported.

    Attributes:
        environment: the variables with which its libraries were imported.
    """

    programs: Mapping[str, Program]
    environment: Mapping[str, str]

    @classmethod
    def load(cls, modules: Sequence[str]) -> Self:
        environment = dict(os.environ)
        programs = {name: Program.load(name) for name in modules}
        # What the import of the first has set, that of another would, too.
        first = programs[modules[0]].environment
        for program in programs.values():
            program.environment.update({**first, **program.environment})
        if "splitpoint_cli" in programs:
            from typer.testing import CliRunner

            from splitpoint_cli.main import COMMANDS, app

            for place in COMMANDS.values():
                importlib.import_module(place.partition(":")[0])
            # Typer and Rich import the most when they first read options and print a help.
            CliRunner().invoke(app, ["plan", "--help"])
            # What `splitpoint up` starts; these set no variables.
            programs |= {name: Program.load(name) for name in FAMILIES[0]}
        gc.enable()
        # Children share these pages: none of their collections writes to them.
        gc.freeze()
        return cls(programs, environment)

    def serve(self, orders: socket.socket) -> None:
        """Fork what is ordered until no process can order any more."""
        codes: dict[int, int] = {}

        def reap(*_: object) -> None:
            """Children that end are gone at once."""
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])

        signal.signal(signal.SIGCHLD, reap)
        while True:
            text, descriptors, _, _ = socket.recv_fds(orders, _ORDER_BYTES, _DESCRIPTORS)
            if not text:
                return
            order = json.loads(text)
            if "ended" in order:
                while order["ended"] not in codes:
                    time.sleep(0.001)
                orders.send(str(codes.pop(order["ended"])).encode())
                continue
            # A child that ends at once is reaped when it has a descriptor, by which its end is
            # seen.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            opened: list[int] = []
            if "command" in order:
                child = self._fork_for_asker(order, orders, descriptors)
            else:
                child = os.fork()
                if child == 0:
                    orders.close()
                    _run_to_end(self._be_service, order, descriptors)
                opened.append(os.pidfd_open(child))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            socket.send_fds(orders, [str(child).encode()], opened)
            for each in (*descriptors, *opened):
                os.close(each)

    def _be_service(self, order: dict[str, Any], errors: Sequence[int]) -> Any:
        """Be a service. `errors` has its stderr, unless the order names a file for it."""
        _default_signals()
        _end_with_parent()
        program = self.programs[order["module"]]
        os.environ.clear()
        os.environ.update({**program.environment, **order["environment"]})
        append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        files = [os.open(os.devnull, os.O_RDONLY), os.open(order["log"], append)]
        files += errors or [os.open(order["errors"], append)]
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        _show_command([sys.executable, "-m", order["module"], *order["arguments"]])
        sys.argv = [order["module"], *order["arguments"]]
        place, _, count = order["failpoint"].partition(":")
        if place:
            from failpoints import FAILPOINTS

            FAILPOINTS[place](int(count))
        return program.main()

    def _fork_for_asker(
        self, order: dict[str, Any], orders: socket.socket, descriptors: Sequence[int]
    ) -> int:
        """Start a command whose parent ends at once: the process that asks adopts it.

        Returns 0 if it did not come to its program.
        """
        answer, told = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork() == 0:
                orders.close()
                os.close(answer)
                _run_to_end(self._be_command, order, descriptors, told)
            os._exit(0)
        os.close(told)
        os.waitpid(between, 0)
        with open(answer, "rb") as file:
            return int(file.read() or 0)

    def _be_command(self, order: dict[str, Any], descriptors: Sequence[int], told: int) -> Any:
        """Be what `python` runs. `descriptors`: its standard streams, and what it inherits."""
        if order["is_session"]:
            os.setsid()
        elif order["group"] >= 0:
            os.setpgid(0, order["group"])
        [telling] = _moved_above([told], order["numbers"])
        _place_descriptors(order["numbers"], descriptors)
        _default_signals()
        os.chdir(order["folder"])
        words: list[str] = order["command"]
        program = self.programs[words[1]] if words[0] == "-m" else None
        os.environ.clear()
        os.environ.update({**(program.environment if program else {}), **order["environment"]})
        _renew_streams(is_unbuffered=bool(os.environ.get("PYTHONUNBUFFERED")))
        _show_command([sys.executable, *words])
        os.write(telling, str(os.getpid()).encode())
        os.close(telling)
        if words[0] == _FILES[0] or words[1:3] == ["splitpoint_cli", "up"]:
            self._fork_for_this_process()
        this: Any = types.ModuleType("__main__")
        sys.modules["__main__"] = this
        if program is None:
            return _run_file(words, this)
        _, module, *arguments = words
        loaded: Any = importlib.import_module(module)
        is_package = hasattr(loaded, "__path__")
        this.__package__ = module if is_package else module.rpartition(".")[0]
        file = f"{loaded.__path__[0]}/__main__.py" if is_package else loaded.__file__
        sys.argv = [file, *arguments]
        return program.main()

    def _fork_for_this_process(self) -> None:
        """Let another process fork what this one starts."""
        import forked_python

        orders = Orders(self.environment)
        if os.fork() == 0:
            _end_with_parent()
            _show_command(["forks"])
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nothing, stream)
            theirs = orders.theirs.fileno()
            os.closerange(3, theirs)
            os.closerange(theirs + 1, os.sysconf("SC_OPEN_MAX"))
            self.serve(orders.theirs)
            os._exit(0)
        orders.theirs.close()
        forked_python.install(
            lambda words: orders if words[0] != "-m" or words[1] in self.programs else None
        )


def _run_file(words: Sequence[str], this: Any) -> None:
    """Run a program of the tests as the module `this`."""
    this.__file__ = words[0]
    sys.argv = [*words]
    sys.path[0] = str(Path(words[0]).parent)
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), this.__dict__)


def _end_with_parent() -> None:
    """However the tests end, leave nothing."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _default_signals() -> None:
    """As a new interpreter has them, which nothing told to ignore some."""
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _place_descriptors(numbers: Sequence[int], descriptors: Sequence[int]) -> None:
    """Give each of these descriptors its number, and close them."""
    for number, each in zip(numbers, _moved_above(descriptors, numbers), strict=True):
        os.dup2(each, number)
        os.close(each)


def _moved_above(descriptors: Sequence[int], numbers: Sequence[int]) -> list[int]:
    """Give descriptors new numbers behind these and behind their own."""
    above = max(*numbers, *descriptors) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in descriptors]
    for each in descriptors:
        os.close(each)
    return moved


def _renew_streams(*, is_unbuffered: bool) -> None:
    """Set `sys.stdin`, `sys.stdout` and `sys.stderr` up as a new interpreter does."""
    streams: Any = sys
    streams.stdin = streams.__stdin__ = io.TextIOWrapper(
        io.BufferedReader(io.FileIO(0, closefd=False)), sys.stdin.encoding, sys.stdin.errors
    )
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        raw: Any = io.FileIO(descriptor, "w", closefd=False)
        new = io.TextIOWrapper(
            raw if is_unbuffered else io.BufferedWriter(raw),
            *(before.encoding, before.errors),
            line_buffering=descriptor == 2 or os.isatty(descriptor),
            write_through=is_unbuffered,
        )
        setattr(streams, name, new)
        setattr(streams, f"__{name}__", new)


def _show_command(words: Sequence[str]) -> None:
    """Be seen by other processes as the process of this command."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    command = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words)
    room = command[: end - start - 1].ljust(end - start, b"\0")
    ctypes.memmove(start, room, len(room))


def _run_to_end(run: Callable[..., Any], *arguments: Any) -> None:
    """Run a program and end as an interpreter does, except that memory is not freed.

    Threads keep it from ending.
    """
    code = 1
    interrupted = False
    try:
        code = run(*arguments) or 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        interrupted = isinstance(error, KeyboardInterrupt)
    interpreter: Any = threading
    interpreter._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 120
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


if __name__ == "__main__":
    main()

"""Real service processes that start in a fraction of a second, so that hundreds can be killed.

    with ForkServer(folder) as server:
        worker = server.start("worker_service", "--listen", ..., failpoint="seal:3")
        worker.kill()

A process for each of FAMILIES imports its services once for all tests, and then forks: each child
runs the `main` of its service, as `python -m` would, with its own process id, threads and sockets.

A failpoint `PLACE:N` ends the child with SIGKILL when it comes to the place for the Nth time
(failpoints.py).
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
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
            for line in self.log.read_text().splitlines():
                if line.startswith(READY_PREFIX):
                    return line.removeprefix(READY_PREFIX)
            assert self.is_running, f"ended early: {self.log.read_text()}"
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
        self._lock = threading.Lock()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                pass_fds=[theirs.fileno()],
            )
        self.process_id = self._process.pid

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
        process_id, [descriptor] = self._ask(
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
        code, _ = self._ask(ended=process_id)
        return code

    def close(self) -> None:
        self._orders.close()
        self._process.wait(SECONDS)

    def _ask(self, *descriptors: int, **order: Any) -> tuple[int, list[int]]:
        with self._lock:
            socket.send_fds(self._orders, [json.dumps(order).encode()], descriptors)
            answer, received, _, _ = socket.recv_fds(
                self._orders, _ORDER_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        assert answer, "the process that forks has ended"
        return int(answer), received


# A store must not be as large as torch, and the gateway has its own settings of gRPC, which reads
# them when it is imported.
FAMILIES = (("kvstore_service", "scheduler_service"), ("gateway_service",), ("worker_service",))
_parents: dict[str, Parent] = {}


def parent_of(module: str) -> Parent:
    """Return the process that forks a service. Call it in the main thread, which it ends with."""
    if module not in _parents:
        [family] = [family for family in FAMILIES if module in family]
        _parents.update(dict.fromkeys(family, Parent(family)))
    return _parents[module]


def parent_processes() -> set[int]:
    """Return the ids of the processes that fork."""
    return {parent.process_id for parent in _parents.values()}


def close_parents() -> None:
    """End the processes that fork, and what they have forked."""
    for parent in set(_parents.values()):
        parent.close()
    _parents.clear()


# -- the process that forks -------------------------------------------------------------------


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
        main = importlib.import_module(f"{module}.__main__").main
        own = {name: value for name, value in os.environ.items() if before.get(name) != value}
        for name in own:
            del os.environ[name]
        os.environ.update(before)
        return cls(main, own)


def main() -> None:
    descriptor, *modules = sys.argv[1:]
    programs = {name: Program.load(name) for name in modules}
    # Children share these pages: none of their collections writes to them.
    gc.freeze()
    _end_with_parent()
    codes: dict[int, int] = {}

    def reap(*_: object) -> None:
        """Children that end are gone at once."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])

    signal.signal(signal.SIGCHLD, reap)
    orders = socket.socket(fileno=int(descriptor))
    while True:
        text, descriptors, _, _ = socket.recv_fds(orders, _ORDER_BYTES, 1)
        if not text:
            return
        order = json.loads(text)
        if "ended" in order:
            while order["ended"] not in codes:
                time.sleep(0.001)
            orders.send(str(codes.pop(order["ended"])).encode())
            continue
        # A child that ends at once is reaped when it has a descriptor, by which its end is seen.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        child = os.fork()
        if child == 0:
            orders.close()
            _run(programs[order["module"]], order, descriptors)
        descriptors.append(os.pidfd_open(child))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        socket.send_fds(orders, [str(child).encode()], descriptors[-1:])
        for each in descriptors:
            os.close(each)


def _end_with_parent() -> None:
    """However the tests end, leave nothing."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(program: Program, order: dict[str, Any], errors: Sequence[int]) -> None:
    """Be a service to its end. `errors` has its stderr, unless the order names a file for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    _end_with_parent()
    os.environ.clear()
    os.environ.update({**program.environment, **order["environment"]})
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [os.open(os.devnull, os.O_RDONLY), os.open(order["log"], append)]
    files += errors or [os.open(order["errors"], append)]
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.argv = [order["module"], *order["arguments"]]
    code = 1
    try:
        place, _, count = order["failpoint"].partition(":")
        if place:
            from failpoints import FAILPOINTS

            FAILPOINTS[place](int(count))
        code = program.main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        _end(code)


def _end(code: int) -> None:
    """End as an interpreter does, except that memory is not freed: threads keep it from ending."""
    interpreter: Any = threading
    interpreter._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()

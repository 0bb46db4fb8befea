"""Real service processes that start in a fraction of a second, so that hundreds can be killed.

    with ForkServer(folder) as server:
        worker = server.start("worker_service", "--listen", ..., failpoint="seal:3")
        worker.kill()

A process of its own imports the services once and then forks: each child runs the `main` of its
service, as `python -m` would, with its own process id, threads and sockets.

A failpoint `PLACE:N` ends the child with SIGKILL when it comes to the place for the Nth time.
`FAILPOINTS` has the places; no code of the services knows them.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from splitpoint.service import READY_PREFIX

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 60
PR_SET_PDEATHSIG = 1


class Child:
    """A service process."""

    def __init__(self, process_id: int, log: Path) -> None:
        self.process_id = process_id
        self.log = log
        self._descriptor = os.pidfd_open(process_id)

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

    def close(self) -> None:
        self.signal(signal.SIGCONT)
        self.kill()
        os.close(self._descriptor)


class ForkServer:
    """The test's side. Children are killed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[Child] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return self

    def start(self, module: str, *arguments: str, failpoint: str = "") -> Child:
        log = self.folder / f"{len(self.children)}-{module}.log"
        log.touch()
        order = {
            "module": module,
            "arguments": arguments,
            "failpoint": failpoint,
            "log": str(log),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the fork server has ended"
        child = Child(int(line), log)
        self.children.append(child)
        return child

    def __exit__(self, *_: object) -> None:
        for child in self.children:
            child.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()


# -- the process that forks -------------------------------------------------------------------


def main() -> None:
    import gateway_service.__main__
    import kvstore_service.__main__
    import scheduler_service.__main__
    import worker_service.__main__

    mains = {
        "gateway_service": gateway_service.__main__.main,
        "kvstore_service": kvstore_service.__main__.main,
        "scheduler_service": scheduler_service.__main__.main,
        "worker_service": worker_service.__main__.main,
    }
    _end_with_parent()
    # Children that end are gone at once.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _run(mains[order["module"]], order)
        print(child, flush=True)


def _end_with_parent() -> None:
    """However the tests end, leave nothing."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _run(service: Callable[[], int], order: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _end_with_parent()
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    sys.argv = [order["module"], *order["arguments"]]
    code = 1
    try:
        place, _, count = order["failpoint"].partition(":")
        if place:
            FAILPOINTS[place](int(count))
        code = service()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


# -- failpoints -------------------------------------------------------------------------------


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SECONDS)  # never returns to the code that failed


def _countdown(count: int) -> Callable[[], bool]:
    left = [count]

    def is_due() -> bool:
        left[0] -= 1
        return left[0] == 0

    return is_due


def _in_prefill(count: int) -> None:
    """Before the results of a step with prefill leave the engine."""
    from worker_service.engine.engine import Engine

    is_due, real = _countdown(count), Engine._postprocess

    def postprocess(self: Any, result: Any) -> Any:
        if result is not None and max(result.batch.counts) > 1 and is_due():
            _die()
        return real(self, result)

    Engine._postprocess = postprocess  # type: ignore[method-assign]


def _after_a_seal(count: int) -> None:
    """When the store has sealed a chunk, and the worker does not know it yet."""
    from worker_service.store.client import StoreClient

    is_due, real = _countdown(count), StoreClient.seal

    async def seal(self: Any, *arguments: Any, **named: Any) -> Any:
        answer = await real(self, *arguments, **named)
        if is_due():
            _die()
        return answer

    StoreClient.seal = seal  # type: ignore[method-assign]


def _before_a_token_is_sent(count: int) -> None:
    """When a step has computed tokens, before a Run stream has them."""
    from worker_service.streams import RunStreams

    is_due, real = _countdown(count), RunStreams.emit

    def emit(self: Any, output: Any, busy: Any) -> Any:
        if output.tokens and is_due():
            _die()
        return real(self, output, busy)

    RunStreams.emit = emit  # type: ignore[method-assign]


def _mid_copy(count: int) -> None:
    """When a part of a chunk's bytes is in its slot of the arena."""
    import worker_service.store.write_back

    write_back: Any = worker_service.store.write_back
    is_due, real = _countdown(count), write_back.copy_runs

    def copy_runs(source: Any, plane: Any, pages: Any, slots: Any, **named: Any) -> Any:
        if is_due():
            half = max(1, len(plane[slots[0]]) // 2)
            plane[slots[0]][:half] = source[pages[0]][:half]
            _die()
        return real(source, plane, pages, slots, **named)

    write_back.copy_runs = copy_runs


FAILPOINTS: dict[str, Callable[[int], None]] = {
    "prefill": _in_prefill,
    "seal": _after_a_seal,
    "send": _before_a_token_is_sent,
    "copy": _mid_copy,
}


if __name__ == "__main__":
    main()

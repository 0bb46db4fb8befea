"""The service's end of its limited processes: starts them, asks them, replaces those that end.

It does not know what they compute.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection

from splitpoint.limited.child import MOST_SECONDS, BadFrame, receive, send

# A process that says nothing for this long is stopped or starved, not slow.
PATIENCE_SECONDS = 20.0
# How the kernel ends one that used up its time.
TOO_SLOW = -signal.SIGPROF


class ProcessEnded(Exception):
    """A limited process ended without an answer.

    `exit_code` is the negated signal that ended it, if one did; None if its answer was none.
    """

    def __init__(self, message: str, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class LimitedProcess:
    """One process, `python -m MODULE SECONDS`, which calls `splitpoint.limited.child.serve`.

    Args:
        most_seconds: seconds of the processor that one request may take.
    """

    def __init__(self, module: str, most_seconds: float = MOST_SECONDS) -> None:
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(most_seconds)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Nothing of the service's: its environment may hold tokens.
                env=_environment(),
                cwd="/",
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, *parts: str) -> list[str]:
        """Return the answer to one request. The process is ended if there is none.

        Raises TimeoutError, ProcessEnded.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        is_whole = False
        try:
            self._link.settimeout(PATIENCE_SECONDS)
            send(self._link, *parts)
            answer = receive(self._link, deadline)
            is_whole = True
        except TimeoutError:
            raise
        except (OSError, EOFError):
            raise self._why() from None
        except BadFrame as error:
            raise ProcessEnded(f"its answer is malformed: {error}") from None
        finally:
            if not is_whole:
                self.end()
        return answer

    def end(self) -> None:
        """End it, and wait for that. Repeating this has no effect."""
        self._link.close()
        self._process.kill()
        self._process.wait()

    def _why(self) -> ProcessEnded:
        """Return how a process ended that closed its end of the socket."""
        try:
            code = self._process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            return ProcessEnded("it does not answer")
        return ProcessEnded(f"exit code {code}", code)


class LimitedPool:
    """Processes that answer requests. Threads may share it; `ask` blocks.

    Args:
        start: returns a new process that can be asked; may raise what `ask` then raises, too.
        most: processes at a time. They start when requests come together.
        own_fault: exit codes by which a request itself ends a process, so that it is not asked
            again.
    """

    def __init__(
        self,
        start: Callable[[], LimitedProcess],
        *,
        most: int,
        own_fault: Collection[int] = (TOO_SLOW,),
    ) -> None:
        self._start = start
        self._own_fault = own_fault
        self._places = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._idle: list[LimitedProcess] = []
        self._is_closed = False

    @property
    def idle_pids(self) -> list[int]:
        with self._lock:
            return [process.pid for process in self._idle]

    def start_one(self) -> None:
        """Start a process before a request needs it. Raises what `start` raises."""
        process = self._start()
        if not self._keep(process):
            process.end()

    def ask(self, *parts: str) -> list[str]:
        """Return the answer to one request.

        Raises TimeoutError (no process was free in time, or the request's says nothing),
        ProcessEnded (two ended, or one by its limits).
        """
        if not self._places.acquire(timeout=PATIENCE_SECONDS):
            raise TimeoutError
        try:
            try:
                return self._answer(parts)
            except ProcessEnded as error:
                if error.exit_code in self._own_fault:
                    raise
                # Between two requests, or by a signal from outside: try a new one.
                return self._answer(parts)
        finally:
            self._places.release()

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _answer(self, parts: tuple[str, ...]) -> list[str]:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or self._start()
        answer = process.ask(*parts)
        if not self._keep(process):
            process.end()
        return answer

    def _keep(self, process: LimitedProcess) -> bool:
        with self._lock:
            if not self._is_closed:
                self._idle.append(process)
            return not self._is_closed


def _environment() -> dict[str, str]:
    """Return what Python needs to find this package, and the time zone that templates print."""
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TZ") if name in os.environ}
    found = [path for path in sys.path if path]
    return {**kept, "PYTHONPATH": os.pathsep.join(found), "PYTHONDONTWRITEBYTECODE": "1"}

"""Checks that grammars compile, in a process of its own.

What a schema takes to compile cannot be told from its size: some of a few hundred bytes take
minutes and gigabytes, and a thread that compiles one cannot be stopped. So every grammar that a
service has not seen is compiled first by a process with limits, which the kernel ends after 2
seconds of processor time.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from contextlib import suppress

from splitpoint.errors import InvalidArgument, ResourceExhausted, Unavailable
from splitpoint.structured.grammar import GrammarText
from splitpoint.structured.process import MOST_MEMORY_BYTES, MOST_SECONDS

# A process that says nothing for this long is stopped or starved, not slow.
_PATIENCE_SECONDS = 20.0
_MODULE = "splitpoint.structured.process"
# Verdicts that are remembered, and characters of a message that clients see.
_MOST_KNOWN = 4096
_MOST_CHARACTERS = 500


class GrammarChecker:
    """Processes that compile grammars. Threads may share it; `check` blocks.

    Args:
        most: processes at a time. They start when grammars come.
    """

    def __init__(self, *, most: int = 2) -> None:
        self._places = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._is_closed = False
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def knows(self, grammar: GrammarText) -> bool:
        """Return True if `check` needs no process."""
        with self._lock:
            return _digest(grammar) in self._known

    def check(self, grammar: GrammarText) -> None:
        """Raise InvalidArgument if a grammar cannot be compiled, or takes too much.

        Raises ResourceExhausted if no process was free in time, Unavailable if processes end.
        """
        digest = _digest(grammar)
        with self._lock:
            error = self._known.get(digest)
            if error is not None:
                self._known.move_to_end(digest)
        if error is None:
            error = self._compile(grammar)
            with self._lock:
                self._known[digest] = error
                while len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)
        if error:
            raise InvalidArgument(error, field=grammar.field, reason="BAD_GRAMMAR")

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def _compile(self, grammar: GrammarText) -> str:
        if not self._places.acquire(timeout=_PATIENCE_SECONDS):
            raise _busy()
        try:
            try:
                return self._answer(grammar)
            except _Ended:  # between two grammars, or by a signal from outside
                return self._answer(grammar)
        except _Ended as error:
            raise Unavailable(
                f"the process that compiles grammars ended: {error}", reason="GRAMMAR_PROCESS_LOST"
            ) from None
        finally:
            self._places.release()

    def _answer(self, grammar: GrammarText) -> str:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or _Process()
        is_whole = False
        try:
            answer = process.ask(grammar)
            is_whole = process.is_alive
        finally:
            if not is_whole or not self._keep(process):
                process.end()
        return answer

    def _keep(self, process: _Process) -> bool:
        with self._lock:
            if not self._is_closed:
                self._idle.append(process)
            return not self._is_closed


class _Ended(Exception):
    """The process ended without an answer, and not by its own limits."""


class _Process:
    """One compiling process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Nothing of the service's: its environment may hold tokens.
            env=_environment(),
            cwd="/",
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process has no pipes")
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, grammar: GrammarText) -> str:
        """Return why a grammar cannot be used; else "". Raises ResourceExhausted, _Ended."""
        line = json.dumps({"kind": grammar.kind.value, "text": grammar.text}) + "\n"
        try:
            self._stdin.write(line.encode())
            self._stdin.flush()
            answer = self._read_line(time.monotonic() + _PATIENCE_SECONDS)
        except (OSError, EOFError):
            return self._why()
        error: str = json.loads(answer)["error"]
        return _shortened(error)

    def end(self) -> None:
        """End it, and wait for that. Repeating this has no effect."""
        self._process.kill()
        self._process.wait()
        for end in (self._stdin, self._stdout):
            with suppress(OSError):  # what a broken pipe kept in its buffer
                end.close()

    def _read_line(self, deadline: float) -> bytes:
        source, found = self._stdout.fileno(), b""
        while not found.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([source], [], [], remaining)[0]:
                raise _busy()
            piece = os.read(source, 1 << 16)
            if not piece:
                raise EOFError
            found += piece
        return found

    def _why(self) -> str:
        """Return the error of a grammar that ended the process by its limits. Raises _Ended."""
        try:
            code = self._process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise _Ended("it does not answer") from None
        if code == -signal.SIGPROF:
            return f"it takes more than {MOST_SECONDS:g} s to compile"
        if code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, 1):
            # llguidance panics or aborts: the memory is used up, or the stack is.
            return f"compiling it fails, or takes more than {MOST_MEMORY_BYTES >> 20} MiB"
        raise _Ended(f"exit code {code}")


def _shortened(error: str) -> str:
    """Leave the middle of a long message out: grammars are quoted before what is wrong."""
    if len(error) <= _MOST_CHARACTERS:
        return error
    kept = (_MOST_CHARACTERS - 5) // 2
    return f"{error[:kept]} ... {error[-kept:]}"


def _digest(grammar: GrammarText) -> bytes:
    return hashlib.sha256(f"{grammar.kind.value}\n{grammar.text}".encode()).digest()


def _busy() -> ResourceExhausted:
    return ResourceExhausted(
        "other grammars are being compiled", reason="GRAMMARS_BUSY", retry_after_seconds=1.0
    )


def _environment() -> dict[str, str]:
    """Return what Python needs to find this package."""
    found = [path for path in sys.path if path]
    return {"PYTHONPATH": os.pathsep.join(found), "PYTHONDONTWRITEBYTECODE": "1", "LANG": "C.UTF-8"}

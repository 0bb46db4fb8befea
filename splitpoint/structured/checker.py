"""Checks that grammars compile, in a process of its own.

What a schema takes to compile cannot be told from its size: some of a few hundred bytes take
minutes and gigabytes, and a thread that compiles one cannot be stopped. So every grammar that a
service has not seen is compiled first by a process with limits, which the kernel ends after 2
seconds of processor time.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from collections import OrderedDict

from splitpoint.errors import InvalidArgument, ResourceExhausted, Unavailable
from splitpoint.limited.child import MOST_MEMORY_BYTES, MOST_SECONDS
from splitpoint.limited.pool import TOO_SLOW, LimitedPool, LimitedProcess, ProcessEnded
from splitpoint.structured.grammar import GrammarText

_MODULE = "splitpoint.structured.process"
# llguidance panics or aborts: the memory is used up, or the stack is.
_TOO_LARGE = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, 1)
# Verdicts that are remembered, and characters of a message that clients see.
_MOST_KNOWN = 4096
_MOST_CHARACTERS = 500


class GrammarChecker:
    """Processes that compile grammars. Threads may share it; `check` blocks.

    Args:
        most: processes at a time. They start when grammars come.
    """

    def __init__(self, *, most: int = 2) -> None:
        self._pool = LimitedPool(
            lambda: LimitedProcess(_MODULE), most=most, own_fault=(TOO_SLOW, *_TOO_LARGE)
        )
        self._lock = threading.Lock()
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
        self._pool.close()

    def _compile(self, grammar: GrammarText) -> str:
        """Return why a grammar cannot be used; else ""."""
        try:
            [error] = self._pool.ask(grammar.kind.value, grammar.text)
        except TimeoutError:
            raise ResourceExhausted(
                "other grammars are being compiled", reason="GRAMMARS_BUSY", retry_after_seconds=1.0
            ) from None
        except ProcessEnded as ended:
            if ended.exit_code == TOO_SLOW:
                return f"it takes more than {MOST_SECONDS:g} s to compile"
            if ended.exit_code in _TOO_LARGE:
                return f"compiling it fails, or takes more than {MOST_MEMORY_BYTES >> 20} MiB"
            raise Unavailable(
                f"the process that compiles grammars ended: {ended}", reason="GRAMMAR_PROCESS_LOST"
            ) from None
        return _shortened(error)


def _shortened(error: str) -> str:
    """Leave the middle of a long message out: grammars are quoted before what is wrong."""
    if len(error) <= _MOST_CHARACTERS:
        return error
    kept = (_MOST_CHARACTERS - 5) // 2
    return f"{error[:kept]} ... {error[-kept:]}"


def _digest(grammar: GrammarText) -> bytes:
    return hashlib.sha256(f"{grammar.kind.value}\n{grammar.text}".encode()).digest()

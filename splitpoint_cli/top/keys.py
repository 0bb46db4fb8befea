"""Single keys of a terminal, without Enter; the terminal's settings are always restored."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Wait = Callable[[float], bool]
# Signals that end a process without unwinding it, unless they are handled.
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def quitting_keys(keys: str = "qQ") -> Iterator[Wait]:
    """Give a function that waits some seconds or for a key of `keys`; it returns True for a key.

    Without a terminal to read from it only waits. Ctrl-C stays KeyboardInterrupt; SIGTERM
    and SIGHUP end the block by SystemExit, so that callers can restore the terminal.
    """
    before = {number: signal.signal(number, _end) for number in _ENDINGS}
    try:
        if not sys.stdin.isatty():
            yield _sleep
            return
        terminal = sys.stdin.fileno()
        settings = termios.tcgetattr(terminal)
        try:
            tty.setcbreak(terminal)
            yield lambda seconds: _wait(terminal, keys, seconds)
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, settings)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _wait(terminal: int, keys: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([terminal], [], [], left)
        if not ready:
            return False
        pressed = os.read(terminal, 1)
        if not pressed:  # the terminal is gone
            return True
        if pressed.decode("ascii", "replace") in keys:
            return True

"""Handlers of signals for the time of a block."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Let a handler have these signals within the block. For the main thread."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)

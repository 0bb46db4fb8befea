"""Waits for what must come: one limit for all of them, to which no busy machine comes."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

MOST_SECONDS = 100.0


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition, or what it returns to be awaited, is true."""
    deadline = time.monotonic() + MOST_SECONDS
    while True:
        found = condition()
        if await found if inspect.isawaitable(found) else found:
            return
        assert time.monotonic() < deadline, "the awaited state did not come"
        await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until the condition is true, in a test without a loop."""
    deadline = time.monotonic() + MOST_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the awaited state did not come"
        time.sleep(0.01)

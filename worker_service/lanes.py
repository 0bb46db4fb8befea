"""Lanes: executors of one thread, where copies take their turns off the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor


async def passed(lane: ThreadPoolExecutor) -> None:
    """Return once all that the lane was given until now is done: behind it is after it."""
    await asyncio.get_running_loop().run_in_executor(lane, _nothing)


def _nothing() -> None:
    """A place in the lane."""

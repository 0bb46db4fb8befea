"""Several coroutines at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def run_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines at the same time. The first error ends the rest, and is raised alone."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None

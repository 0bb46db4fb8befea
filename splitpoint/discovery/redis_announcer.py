"""A service's entry in Redis: kept while the service serves, removed as it stops.

Loading Redis's client takes a quarter of a store's start, so it is loaded only with --redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from splitpoint.discovery.redis_options import RedisOptions
from splitpoint.observe.logs import log_failure

if TYPE_CHECKING:
    from splitpoint.discovery.redis_link import RedisLink


class Announcer(Protocol):
    """Writes a service's entry into Redis."""

    async def run(self) -> None:
        """Write until cancelled; an unreachable Redis is no error."""

    async def withdraw(self) -> None:
        """Remove the entry, if Redis answers."""


@asynccontextmanager
async def announced(
    redis: RedisOptions | None, make: Callable[[RedisLink], Announcer], *, name: str
) -> AsyncIterator[RedisLink | None]:
    """Announce a service in this block, if it has a Redis; yield the link or None.

    Args:
        make: called once with the link; it imports its announcer itself.
        name: the task's name in the log.
    """
    if redis is None:
        yield None
        return
    from splitpoint.discovery.redis_link import RedisLink

    link = RedisLink(redis)
    announcer = make(link)
    running = asyncio.create_task(announcer.run(), name=name)
    running.add_done_callback(log_failure)
    try:
        yield link
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await announcer.withdraw()
        await link.close()

"""A service's place in Redis: kept while the service serves, taken out as it stops.

Does not know what stands there. Redis's client takes a quarter of the time in which
a store starts, so it is loaded only for those who name a Redis.
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
    """Writes into Redis what a service wants known."""

    async def run(self) -> None:
        """Until cancelled; Redis being away is no error."""

    async def withdraw(self) -> None:
        """Take out what was written, if Redis is there."""


@asynccontextmanager
async def announced(
    redis: RedisOptions | None, make: Callable[[RedisLink], Announcer], *, name: str
) -> AsyncIterator[RedisLink | None]:
    """In Redis, if there is one, for the length of the context; the connections, or None.

    Args:
        make: called once, with the connections; imports its announcer itself.
        name: of the task, for the log.
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

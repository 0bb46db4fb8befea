"""Reads from Redis who lives, once a heartbeat, and tells who wants to know.

What was read last stays while Redis is away: entries are hints, and a silent
Redis says nothing about workers and stores.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from splitpoint.discovery.directory import read_entries
from splitpoint.discovery.entries import (
    HEARTBEAT_SECONDS,
    STORES,
    WORKERS,
    StoreEntry,
    WorkerEntry,
)
from splitpoint.discovery.redis_link import RedisLink
from splitpoint.errors import Unavailable

_log = logging.getLogger(__name__)


class Directory:
    """`run` it as a task.

    Attributes:
        stores, workers: as of the last time that Redis answered.
    """

    def __init__(self, link: RedisLink) -> None:
        self.stores: tuple[StoreEntry, ...] = ()
        self.workers: tuple[WorkerEntry, ...] = ()
        self._link = link

    async def run(self, on_workers: Callable[[Sequence[WorkerEntry]], None]) -> None:
        """Until cancelled. `on_workers` hears of every reading."""
        while True:
            try:
                workers = await read_entries(self._link, WORKERS, WorkerEntry.from_json)
                stores = await read_entries(self._link, STORES, StoreEntry.from_json)
            except Unavailable:
                pass  # the link has said so
            else:
                self.workers, self.stores = tuple(workers), tuple(stores)
                on_workers(workers)
            await asyncio.sleep(HEARTBEAT_SECONDS)

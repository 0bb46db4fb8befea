"""Reads from Redis, once a heartbeat, which workers and stores are alive.

While Redis is away the last reading stays: a silent Redis says nothing about them.
"""

from __future__ import annotations

import asyncio
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


class Directory:
    """Workers and stores that Redis listed last. `run` it as a task."""

    def __init__(self, link: RedisLink) -> None:
        self.stores: tuple[StoreEntry, ...] = ()
        self.workers: tuple[WorkerEntry, ...] = ()
        self._link = link

    async def run(self, on_workers: Callable[[Sequence[WorkerEntry]], None]) -> None:
        """Read until cancelled. Calls `on_workers` after every reading."""
        while True:
            try:
                workers = await read_entries(self._link, WORKERS, WorkerEntry.from_json)
                stores = await read_entries(self._link, STORES, StoreEntry.from_json)
            except Unavailable:
                pass  # the link has logged it
            else:
                self.workers, self.stores = tuple(workers), tuple(stores)
                on_workers(workers)
            await asyncio.sleep(HEARTBEAT_SECONDS)

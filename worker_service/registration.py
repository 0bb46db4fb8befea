"""Announces a worker in Redis, so that schedulers find it.

The entry expires unless a heartbeat renews it. It is no error if Redis is away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import grpc
from redis.asyncio import Redis

from splitpoint.discovery.directory import add_announcement, add_withdrawal, prune
from splitpoint.discovery.entries import (
    BEATS_BETWEEN_PRUNES,
    HEARTBEAT_SECONDS,
    WORKERS,
    ModelName,
    WorkerEntry,
)
from splitpoint.discovery.redis_link import RedisLink
from splitpoint.errors import Unavailable
from splitpoint.transport.channels import open_channel
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc
from worker_service.startup.worker import LoadedWorker

log = logging.getLogger(__name__)

# The store may restart with another arena, so its identity is queried again.
BEATS_BETWEEN_QUERIES = 5
STORE_SECONDS = 0.25


class Registration:
    """Keeps a worker's entry: `run` as a task once it is loaded, `withdraw` before it stops.

    Args:
        identity: TLS identity towards the store.
        is_draining: whether the entry is no longer to be renewed.
    """

    def __init__(
        self,
        link: RedisLink,
        worker: LoadedWorker,
        address: str,
        identity: Identity = PLAIN,
        *,
        is_draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self._link = link
        self._worker = worker
        self._address = address
        self._identity = identity
        self._is_draining = is_draining
        self._store_instance_id = b""

    async def run(self) -> None:
        """Renew the entry until cancelled."""
        beats = 0
        while True:
            if beats % BEATS_BETWEEN_QUERIES == 0:
                await self._query_store()
            beats += 1
            try:
                if not self._is_draining():
                    await self._link.run(self._announce, is_heartbeat=True)
                if beats % BEATS_BETWEEN_PRUNES == 0:
                    await prune(self._link, WORKERS)
            except Unavailable:
                pass  # the link has logged it
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def withdraw(self) -> None:
        """Remove the entry, if Redis is reachable."""

        async def remove(redis: Redis) -> Any:
            async with redis.pipeline(transaction=True) as pipe:
                add_withdrawal(pipe, WORKERS, self._worker.instance_id)
                return await pipe.execute()

        try:
            await self._link.run(remove, is_heartbeat=True)
        except Unavailable as error:
            log.info("the entry in Redis is left to expire: %s", error.message)

    def entry(self) -> WorkerEntry:
        worker = self._worker
        shape, layout = worker.engine.model.shape, worker.engine.cache.layout
        return WorkerEntry(
            instance_id=worker.instance_id,
            worker_id=worker.worker_id,
            address=self._address,
            model=ModelName(
                shape.layer_count,
                shape.hidden_size,
                shape.vocabulary_size,
                shape.context_length,
            ),
            layout_hash=layout.layout_hash,
            model_fingerprint=layout.model_fingerprint,
            store_address=worker.store.address if worker.store is not None else "",
            store_instance_id=self._store_instance_id,
            profile=asdict(worker.profile),
        )

    async def _announce(self, redis: Redis) -> Any:
        async with redis.pipeline(transaction=True) as pipe:
            add_announcement(pipe, WORKERS, self.entry())
            return await pipe.execute()

    async def _query_store(self) -> None:
        """Query the store's instance id, since its address differs between hosts."""
        if self._worker.store is None:
            return
        async with open_channel(self._worker.store.address, self._identity) as channel:
            stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            try:
                stats = await stub.GetStats(kvstore_pb2.GetStatsRequest(), timeout=STORE_SECONDS)
            except grpc.RpcError:
                return  # the store client logs what is wrong
            self._store_instance_id = stats.instance_id

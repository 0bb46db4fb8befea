"""Tells Redis that this worker lives, so that schedulers find it.

An entry that expires, written anew with each heartbeat; Redis away is no error.
Reads what the worker is and changes nothing of it.
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
from worker_service.startup import LoadedWorker

log = logging.getLogger(__name__)

# The store may come back with another arena: its name is asked for again now and then.
BEATS_BETWEEN_QUESTIONS = 5
STORE_SECONDS = 0.25


class Registration:
    """`run` it as a task once the worker is loaded, `withdraw` before it stops.

    Args:
        identity: who the worker is to its store.
        is_draining: then nobody new should find it.
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
        """Until cancelled."""
        beats = 0
        while True:
            if beats % BEATS_BETWEEN_QUESTIONS == 0:
                await self._ask_store()
            beats += 1
            try:
                if not self._is_draining():
                    await self._link.run(self._announce, is_heartbeat=True)
                if beats % BEATS_BETWEEN_PRUNES == 0:
                    await prune(self._link, WORKERS)
            except Unavailable:
                pass  # the link has said so
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def withdraw(self) -> None:
        """The worker stops: take its entry out, if Redis is there."""

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

    async def _ask_store(self) -> None:
        """The name of the store's arena: the same store has other addresses elsewhere."""
        if self._worker.store is None:
            return
        async with open_channel(self._worker.store.address, self._identity) as channel:
            stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            try:
                stats = await stub.GetStats(kvstore_pb2.GetStatsRequest(), timeout=STORE_SECONDS)
            except grpc.RpcError:
                return  # the store client says what is wrong with it
            self._store_instance_id = stats.instance_id

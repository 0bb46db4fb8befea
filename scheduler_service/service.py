"""Assembles one scheduler: workers, request manager, gRPC server, health, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from scheduler_service.admin import ADMIN_SERVICE, AdminServicer
from scheduler_service.api.text_jobs import TextJobs
from scheduler_service.cluster.registry import Registry
from scheduler_service.metrics import Distributions, readings
from scheduler_service.options import SchedulerOptions
from scheduler_service.prefixes.lookup import (
    CachedPrefix,
    JoinedCatalogs,
    PrefixCatalog,
    find_prefix,
)
from scheduler_service.prefixes.stores import StoreCatalog
from scheduler_service.requests.counters import Counters
from scheduler_service.requests.lifecycle import RequestManager
from scheduler_service.server import INFERENCE_SERVICE, InferenceServicer
from splitpoint.discovery.redis_options import RedisOptions
from splitpoint.observe.logs import log_failure
from splitpoint.observe.meters import Meters
from splitpoint.observe.metrics import Service
from splitpoint.transport import servers
from splitpoint.transport.guard import count_calls
from splitpoint.v1 import scheduler_pb2_grpc

if TYPE_CHECKING:
    from scheduler_service.cluster.directory import Directory
    from splitpoint.discovery.redis_link import RedisLink

# Time for streams to deliver their last message after the last request ended.
_LAST_MESSAGES_SECONDS = 1.0

# Health, admin and reflection calls that may be open besides Generate calls.
_SPARE_CALLS = 128


class Scheduler:
    """`start`, then `stop`. Belongs to the event loop that makes it."""

    def __init__(
        self, options: SchedulerOptions, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._readiness_changed = asyncio.Event()
        self._stores = StoreCatalog(options.limits.lookup_seconds, options.identity)
        self.registry = Registry(
            options.worker_addresses, options.model.shape, self._stores, options.identity, clock
        )
        self._link: RedisLink | None = None
        self._directory: Directory | None = None
        self._catalog: PrefixCatalog = self._stores
        if options.redis is not None:
            self._use_redis(options.redis)
        self.meters = Meters(Service.SCHEDULER)
        self.manager = RequestManager(
            options,
            self.registry,
            self._find_prefix,
            Counters(clock(), Distributions(self.meters).observe),
            clock=clock,
            on_readiness=self._readiness_changed.set,
        )
        name = options.model.shape.name
        self.meters.read(lambda: readings(self.manager, name, self._link))
        calls = options.limits.concurrent_calls + _SPARE_CALLS
        self._text_jobs = TextJobs(options.limits)
        # All clients of a gateway may share one connection. Beyond its stream limit gRPC
        # resets streams (REFUSED_STREAM) without a reason, so the limit on calls, which
        # has a reason, must apply first.
        self.server = servers.create_server(
            max_concurrent_rpcs=calls,
            options=[("grpc.max_concurrent_streams", calls)],
            access=options.access,
            on_answer=count_calls(self.meters, [INFERENCE_SERVICE, ADMIN_SERVICE]),
        )
        self._inference = InferenceServicer(self.manager, self._text_jobs)
        scheduler_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, self.server)
        scheduler_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(self.manager, clock, self._link), self.server
        )
        self.health = servers.HealthReporter(self.server)
        if options.reflection:
            servers.enable_reflection(self.server, [INFERENCE_SERVICE, ADMIN_SERVICE])
        self._tasks: list[asyncio.Task[None]] = []

    def _use_redis(self, options: RedisOptions) -> None:
        """Find workers and prefixes in Redis, too."""
        # Imported here: the Redis client is a third of what a scheduler loads.
        from scheduler_service.cluster.directory import Directory
        from scheduler_service.prefixes.redis import RedisCatalog
        from splitpoint.discovery.redis_link import RedisLink

        self._link = RedisLink(options)
        self._directory = directory = Directory(self._link)
        found = RedisCatalog(self._link, lambda: directory.stores, self._stores)
        self._catalog = JoinedCatalogs([self._stores, found])

    async def start(self, address: str) -> str:
        """Serve, and return the address with its real port. Ready once a worker is."""
        bound = servers.listen(self.server, address, self._options.identity)
        await self.health.set(ADMIN_SERVICE, True)
        await self.health.set(INFERENCE_SERVICE, False)
        await self.server.start()
        self.registry.start(self.manager)
        self._tasks = [
            asyncio.create_task(self._report_health(), name="health"),
            asyncio.create_task(self.manager.tick_forever(), name="tick"),
        ]
        if self._directory is not None:
            reading = self._directory.run(self.registry.discovered)
            self._tasks.append(asyncio.create_task(reading, name="directory"))
            self._tasks[-1].add_done_callback(log_failure)
        return bound

    async def stop(self, grace_seconds: float) -> None:
        """Accept nothing new; running requests may end within the grace period."""
        await self.health.shut_down()
        # Still serving: new requests are told that the scheduler is draining.
        await self.manager.drain(grace_seconds)
        await self.server.stop(min(grace_seconds, _LAST_MESSAGES_SECONDS))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.manager.close()
        await self.registry.close()
        await self._stores.close()
        await self._text_jobs.close()
        await asyncio.to_thread(self._inference.close)
        if (chats := self._options.model.chats) is not None:
            await asyncio.to_thread(chats.close)
        if self._link is not None:
            await self._link.close()

    async def _find_prefix(self, tenant_salt: bytes, token_ids: Sequence[int]) -> CachedPrefix:
        return await find_prefix(
            self._catalog,
            self.registry.connected(),
            self._directory.stores if self._directory is not None else (),
            tenant_salt,
            token_ids,
        )

    async def _report_health(self) -> None:
        while True:
            await self.health.set(INFERENCE_SERVICE, bool(self.registry.ready()))
            await self._readiness_changed.wait()
            self._readiness_changed.clear()

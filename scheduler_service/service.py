"""One scheduler, assembled: connections to the workers, the manager, the gRPC server, health."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from scheduler_service.admin import ADMIN_SERVICE, AdminServicer
from scheduler_service.api.text_jobs import TextJobs
from scheduler_service.cluster.registry import Registry
from scheduler_service.limits import Limits
from scheduler_service.metrics import Distributions, readings
from scheduler_service.prefixes.catalog import JoinedCatalogs, PrefixCatalog
from scheduler_service.prefixes.lookup import Prefixes, find_prefixes
from scheduler_service.prefixes.stores import StoreCatalog
from scheduler_service.requests.accounts import Accounts
from scheduler_service.requests.manager import RequestManager
from scheduler_service.server import INFERENCE_SERVICE, InferenceServicer, ServedModel
from splitpoint.discovery.redis_options import RedisOptions
from splitpoint.observe.logs import log_failure
from splitpoint.observe.meters import Meters
from splitpoint.observe.metrics import Service
from splitpoint.planning.planner import Objective, Residency
from splitpoint.transport import servers
from splitpoint.transport.access import Access
from splitpoint.transport.calls import count_calls
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import scheduler_pb2_grpc

if TYPE_CHECKING:
    from scheduler_service.cluster.directory import Directory
    from splitpoint.discovery.redis_link import RedisLink

# For streams to deliver their last message once nothing runs any more.
_LAST_WORDS_SECONDS = 1.0

# Health, admin and reflection calls find room beside the Generate calls.
_SPARE_CALLS = 128


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What a scheduler is started with."""

    model: ServedModel
    # Workers that are not looked for; the others are found in Redis.
    worker_addresses: Sequence[str]
    # Secret from which the salts of chunk keys are derived.
    server_key: bytes
    eos_token_ids: frozenset[int] = frozenset()
    limits: Limits = field(default_factory=Limits)
    # For requests that leave it open. None: resident where that fits.
    default_residency: Residency | None = None
    # What plans are to be best at.
    objective: Objective = Objective.LATENCY
    reflection: bool = False
    # Who the scheduler is to clients, workers and stores.
    identity: Identity = PLAIN
    # Who may call. None: everybody.
    access: Access | None = None
    # None: only the workers above, and the stores that they name.
    redis: RedisOptions | None = None


class Scheduler:
    """`start`, then `stop`. Belongs to the event loop that makes it."""

    def __init__(
        self, options: SchedulerOptions, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._readiness_changed = asyncio.Event()
        self._peeker = StoreCatalog(options.limits.peek_seconds, options.identity)
        self.registry = Registry(
            options.worker_addresses, options.model.shape, self._peeker, options.identity, clock
        )
        self._link: RedisLink | None = None
        self._directory: Directory | None = None
        self._catalog: PrefixCatalog = self._peeker
        if options.redis is not None:
            self._use_redis(options.redis)
        self.meters = Meters(Service.SCHEDULER)
        self.manager = RequestManager(
            self.registry,
            self._find_prefixes,
            options.limits,
            Accounts(clock(), Distributions(self.meters).observe),
            tokenizer=options.model.tokenizer,
            eos_token_ids=options.eos_token_ids,
            server_key=options.server_key,
            default_residency=options.default_residency,
            objective=options.objective,
            clock=clock,
            on_readiness=self._readiness_changed.set,
        )
        name = options.model.shape.name
        self.meters.read(lambda: readings(self.manager, name, self._link))
        calls = options.limits.concurrent_calls + _SPARE_CALLS
        self._text_jobs = TextJobs(options.limits)
        # A gateway may bring all its clients over one connection. Beyond the
        # stream limit gRPC neither queues nor explains: it resets streams
        # (REFUSED_STREAM), so here the limit with a reason comes first.
        self.server = servers.create_server(
            max_concurrent_rpcs=calls,
            options=[("grpc.max_concurrent_streams", calls)],
            access=options.access,
            on_answer=count_calls(self.meters, [INFERENCE_SERVICE, ADMIN_SERVICE]),
        )
        scheduler_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(options.model, self.manager, self._text_jobs), self.server
        )
        scheduler_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(self.manager, clock, self._link), self.server
        )
        self.health = servers.HealthReporter(self.server)
        if options.reflection:
            servers.enable_reflection(self.server, [INFERENCE_SERVICE, ADMIN_SERVICE])
        self._tasks: list[asyncio.Task[None]] = []

    def _use_redis(self, options: RedisOptions) -> None:
        """Workers and prefixes are also found there."""
        # Here, because the client is a third of what a scheduler has to load.
        from scheduler_service.cluster.directory import Directory
        from scheduler_service.prefixes.redis import RedisCatalog
        from splitpoint.discovery.redis_link import RedisLink

        self._link = RedisLink(options)
        self._directory = Directory(self._link)
        found = RedisCatalog(self._link, self._directory, self._peeker)
        self._catalog = JoinedCatalogs([self._peeker, found])

    async def start(self, address: str) -> str:
        """Serves at once, ready once a worker is. Returns the address with its real port."""
        bound = servers.listen(self.server, address, self._options.identity)
        await self.health.set(ADMIN_SERVICE, True)
        await self.health.set(INFERENCE_SERVICE, False)
        await self.server.start()
        self.registry.start(self.manager)
        self._tasks = [
            asyncio.create_task(self._report_health(), name="health"),
            asyncio.create_task(self.manager.keep_house(), name="keep house"),
        ]
        if self._directory is not None:
            reading = self._directory.run(self.registry.discovered)
            self._tasks.append(asyncio.create_task(reading, name="directory"))
            self._tasks[-1].add_done_callback(log_failure)
        return bound

    async def stop(self, grace_seconds: float) -> None:
        """No new requests; running ones may end within the grace period."""
        await self.health.shut_down()
        # Still serving: whoever asks meanwhile hears that it is draining.
        await self.manager.drain(grace_seconds)
        await self.server.stop(min(grace_seconds, _LAST_WORDS_SECONDS))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.manager.close()
        await self.registry.close()
        await self._peeker.close()
        await self._text_jobs.close()
        if self._link is not None:
            await self._link.close()

    async def _find_prefixes(self, tenant_salt: bytes, token_ids: Sequence[int]) -> Prefixes:
        return await find_prefixes(
            self._catalog,
            self.registry.placed(),
            self._directory.stores if self._directory is not None else (),
            tenant_salt,
            token_ids,
        )

    async def _report_health(self) -> None:
        while True:
            await self.health.set(INFERENCE_SERVICE, bool(self.registry.ready()))
            await self._readiness_changed.wait()
            self._readiness_changed.clear()

"""AdminService: what operators ask about workers, the queue, and totals. Changes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.duration_pb2 import Duration

from scheduler_service.api.request import Request
from scheduler_service.cluster.connection import ReadyWorker, WorkerConnection
from scheduler_service.requests.counters import Limit
from scheduler_service.requests.lifecycle import RequestManager
from splitpoint.costs.bottleneck import kappa_crit
from splitpoint.transport.convert import profile_to_proto, selection_numbers
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import scheduler_pb2_grpc

if TYPE_CHECKING:
    from splitpoint.discovery.redis_link import RedisLink

ADMIN_SERVICE = "splitpoint.v1.AdminService"

# In the status of the scheduler.
_MOST_TENANTS = 100
# Requests that are explained without a break.
_EXPLAINED = 64

Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(scheduler_pb2_grpc.AdminServiceServicer):
    """Reads what the manager knows. `link` is None without Redis."""

    def __init__(
        self,
        manager: RequestManager,
        clock: Callable[[], float] = time.monotonic,
        link: RedisLink | None = None,
    ) -> None:
        self._manager = manager
        self._clock = clock
        self._link = link

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: Context
    ) -> pb.ListWorkersResponse:
        connections = self._manager.registry.connections
        return pb.ListWorkersResponse(workers=[self._worker(worker) for worker in connections])

    async def GetQueue(self, request: pb.GetQueueRequest, context: Context) -> pb.GetQueueResponse:
        admission = self._manager.admission
        response = pb.GetQueueResponse(capacity=admission.capacity)
        for position, waiting in enumerate(admission.in_turn()):
            if position % _EXPLAINED == _EXPLAINED - 1:
                await asyncio.sleep(0)  # let tokens pass
            if admission.policy.find(waiting.arrival) is not None:  # still, after the pauses
                response.requests.append(self._queued(waiting, position))
        return response

    async def GetSchedulerStatus(
        self, request: pb.GetSchedulerStatusRequest, context: Context
    ) -> pb.GetSchedulerStatusResponse:
        counters, admission = self._manager.counters, self._manager.admission
        return pb.GetSchedulerStatusResponse(
            uptime_seconds=self._clock() - counters.started,
            running_count=admission.running_count,
            waiting_count=admission.waiting_count,
            completed_count=counters.completed_count,
            failed_count=counters.failed_count,
            cancelled_count=counters.cancelled_count,
            rejected_count=counters.rejected_count,
            failover_count=counters.failover_count,
            prompt_token_count=counters.prompt_tokens,
            cached_token_count=counters.cached_tokens,
            generated_token_count=counters.generated_tokens,
            ttft_count=counters.ttft_count,
            ttft_seconds_sum=counters.ttft_seconds,
            itl_count=counters.itl_count,
            itl_seconds_sum=counters.itl_seconds,
            redis=None if self._link is None else self._link.status,
            oldest_wait_seconds=self._manager.oldest_wait_seconds(),
            resumed_count=sum(counters.resumed_counts.values()),
            link_bound_count=counters.placed_counts[Limit.LINK],
            link_bound_wait_seconds_sum=counters.waited_seconds[Limit.LINK],
            device_bound_count=counters.placed_counts[Limit.DEVICE],
            device_bound_wait_seconds_sum=counters.waited_seconds[Limit.DEVICE],
            tenants=self._tenants(),
            decision_counts={
                decision.value: count
                for decision, count in admission.policy.decision_counts.items()
            },
        )

    def _tenants(self) -> Iterator[pb.TenantStatus]:
        for facts in self._manager.tenants()[:_MOST_TENANTS]:
            yield pb.TenantStatus(
                tenant=facts.tenant,
                metrics_label=self._manager.tenant_labels.label(facts.tenant),
                weight=facts.weight,
                running_count=facts.running_count,
                waiting_count=facts.waiting_count,
                oldest_wait_seconds=facts.oldest_wait_seconds,
                service_byte_seconds=facts.service,
            )

    def _queued(self, waiting: Request, position: int) -> pb.QueuedRequest:
        explained = self._manager.admission.explain(waiting)
        shares, now, times = self._manager.admission.policy.shares, self._clock(), waiting.times
        entry = pb.QueuedRequest(
            request_id=waiting.client_request_id,
            tenant=waiting.tenant,
            position=position,
            footprint_bytes=explained.footprint_bytes,
            waited_duration=_duration(now - times.arrived),
            queued_duration=_duration(now - waiting.since),
            reason=explained.reason,
            waits_for=explained.cause.value,
            priority=waiting.priority,
            has_reservation=self._manager.admission.policy.is_reserved(waiting.arrival),
            tenant_weight=waiting.weight,
            tenant_share=shares.share(waiting.tenant),
            tenant_entitled_share=shares.entitled(waiting.tenant),
        )
        place = explained.place
        if place is not None:
            entry.worker_id = place.account.facts.worker_id
            entry.cached_tokens = place.need.cached_tokens
            entry.new_tokens = place.need.new_tokens
            entry.kappa_ratio = place.need.kappa_ratio
            entry.missing_bytes = place.missing_bytes
        return entry

    def _worker(self, worker: WorkerConnection) -> pb.WorkerStatus:
        is_draining = worker.ready is not None and worker.is_draining
        losses = self._manager.registry.losses
        entry = pb.WorkerStatus(
            worker_id=worker.worker_id,
            address=worker.address,
            ready=worker.takes_requests,
            draining=is_draining,
            message="draining" if is_draining else worker.message,
            telemetry=worker.telemetry,
            loss_count=losses.count(worker.worker_id),
            last_lost_seconds_ago=losses.seconds_ago(worker.worker_id),
        )
        known = worker.ready or worker.last_ready
        if known is not None:
            entry.MergeFrom(_facts_of(known))
        account = self._manager.admission.account(worker.worker_id)
        if account is not None:
            entry.cache_charged_bytes = account.charged_bytes
            entry.running_count = account.running_count
            entry.recent_kappa_ratio = account.kappa.ratio
            advice = account.advise_power(worker.telemetry)
            if advice is not None:
                entry.advised_power_watts = advice.watts
                entry.advised_power_reason = advice.reason
        return entry


def _facts_of(worker: ReadyWorker) -> pb.WorkerStatus:
    """Return what a worker last said of itself, and what follows from it."""
    info, facts = worker.info, worker.facts
    return pb.WorkerStatus(
        device=info.device,
        schedule=info.schedule,
        emulated_link_bytes_per_second=info.emulated_link_bytes_per_second,
        max_batch_size=info.max_batch_size,
        batch_reason=info.batch_reason,
        weights=info.weights,
        weight_format=info.weight_format,
        numerics=info.numerics,
        numerics_reason=info.numerics_reason,
        numerics_digest=info.numerics_digest,
        speculation=info.speculation if info.HasField("speculation") else None,
        selection_methods=selection_numbers(facts.selections),
        selection_method_names=list(facts.selections),
        cache_capacity_bytes=facts.cache_capacity_bytes,
        kvstore_address=facts.kvstore_address,
        profile=profile_to_proto(facts.profile),
        kappa_crit=kappa_crit(facts.shape, facts.profile, facts.encoding),
    )


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(max(0, int(seconds * 1e9)))
    return duration

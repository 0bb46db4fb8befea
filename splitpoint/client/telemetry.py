"""Counters of workers and the scheduler, as the clients return them.

Counters start at zero with their process. Two readings, divided by the difference of
`uptime_seconds`, give rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from splitpoint.transport.convert import from_message
from splitpoint.v1 import scheduler_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Counters of one worker, with units in their names; None: absent or unknown.

    The message of the same name in types.proto explains each field.
    """

    uptime_seconds: float
    step_count: int
    step_seconds: float
    prefilled_token_count: int
    generated_token_count: int
    link_in_bytes: int
    link_out_bytes: int
    link_in_busy_seconds: float
    link_out_busy_seconds: float
    compute_busy_seconds: float
    loaded_token_count: int
    rebuilt_token_count: int
    recomputed_token_count: int
    predicted_seconds: float
    measured_seconds: float
    cache_used_bytes: int
    split_tokens: int | None = None
    store_is_up: bool | None = None
    redis_is_up: bool | None = None
    link_ceiling_bytes_per_second: float | None = None
    pcie_rx_bytes: int | None = None
    pcie_tx_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    power_default_limit_watts: float | None = None
    energy_joules: float | None = None
    utilization_ratio: float | None = None
    device_message: str = ""
    cpu_energy_joules: float | None = None
    preemption_count: int = 0
    draft_count: int = 0
    draft_token_count: int = 0
    accepted_token_count: int = 0
    eager_message: str = ""
    selection_step_count: int = 0
    selection_visible_token_count: int = 0
    selection_read_token_count: int = 0
    scheduled_token_count: int = 0


@dataclass(frozen=True, slots=True)
class RedisStatus:
    """A service's connection to Redis. `address` has no user and no password."""

    address: str
    is_up: bool


@dataclass(frozen=True, slots=True)
class TenantStatus:
    """One tenant's requests. `service_byte_seconds`: device memory times how long they had it."""

    tenant: str
    metrics_label: str
    weight: float
    running_count: int
    waiting_count: int
    oldest_wait_seconds: float
    service_byte_seconds: float


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    """Counters of a scheduler since its start, and the requests that run and wait now.

    `failed_count` counts requests that ended with an error, `cancelled_count` those that
    their client gave up, `rejected_count` those that were never accepted. `redis` is None
    if the scheduler uses no Redis. A link-bound request's kappa_ratio was above its worker's
    kappa_crit when it was placed. `tenants`: the one with most service first. `decision_counts`:
    requests that started, by the policy's reason.
    """

    uptime_seconds: float
    running_count: int
    waiting_count: int
    completed_count: int
    failed_count: int
    rejected_count: int
    failover_count: int
    prompt_token_count: int
    cached_token_count: int
    generated_token_count: int
    ttft_count: int
    ttft_seconds_sum: float
    itl_count: int
    itl_seconds_sum: float
    cancelled_count: int = 0
    redis: RedisStatus | None = None
    oldest_wait_seconds: float = 0.0
    resumed_count: int = 0
    link_bound_count: int = 0
    link_bound_wait_seconds_sum: float = 0.0
    device_bound_count: int = 0
    device_bound_wait_seconds_sum: float = 0.0
    tenants: tuple[TenantStatus, ...] = ()
    decision_counts: Mapping[str, int] = field(default_factory=dict)


def telemetry_from_proto(message: types_pb2.Telemetry) -> Telemetry:
    return from_message(Telemetry, message)


def redis_status(message: types_pb2.RedisStatus) -> RedisStatus:
    return from_message(RedisStatus, message)


def scheduler_status(message: scheduler_pb2.GetSchedulerStatusResponse) -> SchedulerStatus:
    redis = redis_status(message.redis) if message.HasField("redis") else None
    return from_message(
        SchedulerStatus,
        message,
        redis=redis,
        tenants=tuple(from_message(TenantStatus, tenant) for tenant in message.tenants),
        decision_counts=dict(message.decision_counts),
    )

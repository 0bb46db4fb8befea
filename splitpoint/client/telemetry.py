"""What workers and the scheduler count, as the clients return it: plain dataclasses.

Counters run since the start of their process: two readings, and the seconds of
`uptime_seconds` between them, give rates.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from splitpoint.v1 import scheduler_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Of one worker. Bytes, seconds, tokens, watts, joules; None: absent, or not known.

    The fields, with what each one counts, are those of the message of this name.
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
    energy_joules: float | None = None
    utilization_ratio: float | None = None
    device_message: str = ""
    cpu_energy_joules: float | None = None


@dataclass(frozen=True, slots=True)
class RedisStatus:
    """How a service gets on with Redis. `address` without user and password."""

    address: str
    is_up: bool


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    """What a scheduler has done since it started, and what runs and waits now.

    `failed_count` includes requests whose readers left, `rejected_count` are those that
    were never accepted. `redis` is None when it uses none.
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
    redis: RedisStatus | None = None


_TELEMETRY_FIELDS = tuple(field.name for field in fields(Telemetry))
# Those that say when they are absent; zero is an answer for the others.
_OPTIONAL = frozenset(
    field.name for field in types_pb2.Telemetry.DESCRIPTOR.fields if field.has_presence
)
_STATUS_FIELDS = tuple(field.name for field in fields(SchedulerStatus) if field.name != "redis")


def telemetry_from_proto(message: types_pb2.Telemetry) -> Telemetry:
    return Telemetry(
        **{
            name: getattr(message, name)
            for name in _TELEMETRY_FIELDS
            if name not in _OPTIONAL or message.HasField(name)
        }
    )


def redis_status(message: types_pb2.RedisStatus) -> RedisStatus:
    return RedisStatus(message.address, message.is_up)


def scheduler_status(message: scheduler_pb2.GetSchedulerStatusResponse) -> SchedulerStatus:
    return SchedulerStatus(
        **{name: getattr(message, name) for name in _STATUS_FIELDS},
        redis=redis_status(message.redis) if message.HasField("redis") else None,
    )

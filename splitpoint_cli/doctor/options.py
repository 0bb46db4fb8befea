"""Options of `splitpoint doctor`: those of `up` that its checks depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitpoint.options import service, store, worker
from splitpoint.options.option import Option
from splitpoint_cli.checks.finding import Places
from splitpoint_cli.options import of
from splitpoint_cli.stack import options as up

_METRICS: Option[str | None] = Option(
    "metrics",
    str,
    None,
    "Address for metrics: a port as for `up`, or HOST:PORT as for a service; absent: none.",
    unit="PORT|HOST:PORT",
)


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Values of the options, as `splitpoint up` is to get them; `places` is for tests."""

    model: str | None = of(up.MODEL)
    workers: int | None = of(up.WORKERS)
    device: str = of(up.DEVICE)
    dtype: str = of(store.DTYPE)
    weights: str = of(store.WEIGHTS)
    speculative_config: str | None = of(worker.SPECULATIVE_CONFIG)
    draft_model: str | None = of(up.DRAFT_MODEL)
    device_memory: str | None = of(worker.DEVICE_MEMORY)
    host_memory: str | None = of(up.HOST_MEMORY)
    huge_pages: str = of(store.HUGE_PAGES)
    numa_node: str = of(store.NUMA_NODE)
    pin_limit: str | None = of(worker.PIN_LIMIT)
    tier_disk: str | None = of(up.TIER_DISK)
    tier_disk_size: str = of(store.TIER_DISK_SIZE)
    tier_mooncake: str | None = of(store.TIER_MOONCAKE)
    tier_mooncake_memory: str = of(store.TIER_MOONCAKE_MEMORY)
    tier_mooncake_replicas: int = of(store.TIER_MOONCAKE_REPLICAS)
    transfer: str = of(store.TRANSFER)
    transfer_interface: str | None = of(store.TRANSFER_INTERFACE)
    trusted_network: bool = of(store.TRUSTED_NETWORK)
    listen: str = of(up.LISTEN)
    schedulers: int = of(up.SCHEDULERS)
    http: str | None = of(up.HTTP)
    instance: str | None = of(up.INSTANCE)
    metrics: str | None = of(_METRICS)
    redis: str | None = of(service.REDIS)
    redis_password_file: str | None = of(service.REDIS_PASSWORD_FILE)
    redis_ca: str | None = of(service.REDIS_CA)
    tls_cert: str | None = of(service.TLS_CERT)
    tls_key: str | None = of(service.TLS_KEY)
    tls_ca: str | None = of(service.TLS_CA)
    tokens: str | None = of(service.TOKENS)
    places: Places = field(default_factory=Places)

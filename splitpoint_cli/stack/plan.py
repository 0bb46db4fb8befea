"""One host's whole stack as data: which processes, with which arguments, listening where.

Turns options into commands; starting them is the supervisor's business.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from splitpoint import config
from splitpoint.checkpoint.config import model_name, read_shape
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.discovery.redis_options import read_redis_options
from splitpoint.errors import InvalidArgument
from splitpoint.extras import need_all
from splitpoint.host.memory import memory_facts
from splitpoint.host.openmp import spin_environment
from splitpoint.observe.logs import LogFormat, LogLevel
from splitpoint.observe.tracing import collector_url
from splitpoint.shapes import DataType, ModelShape
from splitpoint.transport.access import read_tokens
from splitpoint.transport.tls import Identity, read_identity
from splitpoint_cli.devices import choose_devices, default_threads, worker_spin_count
from splitpoint_cli.files import check_output
from splitpoint_cli.stack.child import ServiceCommand
from splitpoint_cli.stack.metrics_ports import metrics_addresses

# Beyond the grace given to running requests; a worker also waits for write-back.
_SCHEDULER_STOP_SECONDS = 10.0
_WORKER_STOP_SECONDS = 40.0
_LOAD_SECONDS = 600.0  # a large checkpoint from a cold disk
_MOST_DEFAULT_HOST_MEMORY = 8 << 30


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What `splitpoint up` was asked for; None means "choose"."""

    model: str | None = None
    workers: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    device_memory: str | None = None
    host_memory: str | None = None
    chunk_tokens: int = 64
    listen: str = config.DEFAULT_ADDRESS
    residency: str = "auto"
    objective: str = "latency"
    activations: str = "auto"
    keep_arena: bool = False
    threads: int | None = None
    max_batched_tokens: int | None = None
    max_batch: int | None = None
    queue_capacity: int | None = None
    # How long running requests may go on once the stack is asked to stop.
    grace_seconds: float = 30.0
    reflection: bool = False
    instance: str | None = None
    # For the scheduler only: store and workers listen in a private folder.
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    tokens: str | None = None
    tenant_requests: int | None = None
    # The store's: how it keeps the cache, what stays in the arena, what that is made of.
    kv_encoding: str | None = None
    eviction: str | None = None
    evict_above: float | None = None
    evict_to: float | None = None
    admission: str | None = None
    lease_seconds: float | None = None
    scrub_seconds: float | None = None
    scrub_rate: str | None = None
    huge_pages: str | None = None
    numa_node: str | None = None
    # The workers': most of the arena that they page-lock, and how much they verify.
    pin_limit: str | None = None
    verify_rate: float | None = None
    # And what overlaps in them; `trace` gets the worker's id before its suffix.
    serial: bool = False
    link_rate: str | None = None
    trace: str | None = None
    # Of all services.
    redis: str | None = None
    redis_password_file: str | None = None
    redis_ca: str | None = None
    # Port of the scheduler's metrics; those of the others follow it.
    metrics: int | None = None
    log_format: LogFormat | None = None
    log_level: LogLevel | None = None
    otlp_endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """Everything that was decided, ready to start: store, then workers, then scheduler."""

    model: Path
    name: str
    shape: ModelShape
    devices: tuple[str, ...]
    host_memory_bytes: int
    instance: str
    runtime: Path
    arena: Path
    keep_arena: bool
    store_address: str
    worker_addresses: tuple[str, ...]
    listen: str
    # Who the scheduler is, for the check that it serves.
    identity: Identity
    has_tokens: bool
    # Where metrics are: of the scheduler, the store, and the workers in order. Empty: nowhere.
    metrics: tuple[str, ...]
    store: ServiceCommand
    workers: tuple[ServiceCommand, ...]
    scheduler: ServiceCommand
    # Of what services write, and of what is said of them.
    log_format: LogFormat = LogFormat.TEXT


def plan_stack(options: StackOptions) -> Stack:
    """Decide what is left open and spell out every command. Makes the runtime folder.

    Raises InvalidArgument for what cannot be, MissingExtra, and what `resolve_model` raises.
    """
    need_all("a stack")
    listen = config.check_listen_address(
        options.listen, has_tls=options.tls_cert is not None, has_tokens=options.tokens is not None
    )
    identity = read_identity(
        certificate=options.tls_cert, key=options.tls_key, authorities=options.tls_ca
    )
    if options.tokens is not None:
        read_tokens(options.tokens)  # said now, not after minutes of loading
    if options.device_memory is not None:
        config.parse_size(options.device_memory, field="device_memory")
    if options.pin_limit is not None:
        config.parse_size(options.pin_limit, field="pin_limit")
    if options.scrub_rate is not None:
        config.parse_rate(options.scrub_rate, field="scrub_rate")
    read_redis_options(
        options.redis, password_file=options.redis_password_file, ca_file=options.redis_ca
    )
    if options.otlp_endpoint is not None:
        collector_url(options.otlp_endpoint)
    folder = resolve_model(options.model)
    shape = model_shape(folder, options.dtype)
    devices = choose_devices(options.device, options.workers)
    _check_lanes(options, devices)
    metrics = metrics_addresses(options.metrics, listen, len(devices))
    instance = config.check_instance(options.instance or instance_of(listen))
    runtime = config.runtime_directory(instance)
    arena = config.arena_path(instance)
    host_memory = (
        # An arena that is there is adopted as it is: its own size fits it, whatever
        # is free now.
        (_size_of(arena) or default_host_memory())
        if options.host_memory is None
        else config.parse_size(options.host_memory, field="host_memory")
    )
    key = arena.parent / "key"
    if not options.keep_arena and not key.exists():
        key = runtime / "key"
    # No two starts share a name: a gRPC server unlinks its path as it ends, whosever it is then.
    start = secrets.token_hex(3)
    store_address = config.check_address(f"unix:{runtime}/store-{start}.sock")
    worker_addresses = tuple(
        config.check_address(f"unix:{runtime}/worker-{i}-{start}.sock") for i in range(len(devices))
    )
    common = [
        *(["--reflection"] if options.reflection else []),
        *_given("--redis", options.redis),
        *_given("--redis-password-file", options.redis_password_file),
        *_given("--redis-ca", options.redis_ca),
        *_given("--log-format", options.log_format),
        *_given("--log-level", options.log_level),
        *_given("--otlp-endpoint", options.otlp_endpoint),
    ]

    store = ServiceCommand(
        "store",
        [
            *("-m", "kvstore_service"),
            *("--listen", store_address),
            *("--model", str(folder)),
            *("--dtype", shape.data_type.value),
            *("--activations", options.activations),
            *("--chunk-tokens", str(options.chunk_tokens)),
            *("--host-memory", str(host_memory)),
            *("--arena", str(arena)),
            # Whoever keeps an arena wants to know that it does not fit; what a killed
            # stack left is only worth having if it does.
            "--keep-arena" if options.keep_arena else "--replace-arena",
            *_given("--kv-encoding", options.kv_encoding),
            *_given("--eviction", options.eviction),
            *_given("--evict-above", options.evict_above),
            *_given("--evict-to", options.evict_to),
            *_given("--admission", options.admission),
            *_given("--lease-seconds", options.lease_seconds),
            *_given("--scrub-seconds", options.scrub_seconds),
            *_given("--scrub-rate", options.scrub_rate),
            *_given("--huge-pages", options.huge_pages),
            *_given("--numa-node", options.numa_node),
            *_given("--metrics", metrics[1] if metrics else None),
            *common,
        ],
        # Every page of the arena is allocated before the store is ready.
        ready_seconds=60.0 + host_memory / 1e9,
        socket=socket_path(store_address),
    )
    threads = options.threads or default_threads(devices, devices[0])
    spinning: Mapping[str, str] = {}
    if threads is not None and devices[0] == "cpu":
        spinning = spin_environment(worker_spin_count(threads, len(devices)))
    workers = tuple(
        ServiceCommand(
            f"worker {i}",
            [
                *("-m", "worker_service"),
                *("--listen", worker_addresses[i]),
                *("--worker-id", str(i)),
                *("--model", str(folder)),
                *("--kvstore", store_address),
                *("--device", device),
                *("--dtype", shape.data_type.value),
                *_given("--device-memory", options.device_memory),
                *_given("--max-batch", options.max_batch),
                *_given("--max-batched-tokens", options.max_batched_tokens),
                *_given("--pin-limit", options.pin_limit),
                *_given("--verify-rate", options.verify_rate),
                *_given("--threads", threads),
                *(["--serial"] if options.serial else []),
                *_given("--link-rate", options.link_rate),
                *_given("--trace", trace_path(options.trace, i)),
                *_given("--metrics", metrics[2 + i] if metrics else None),
                "--progress-lines",
                *common,
            ],
            ready_seconds=_LOAD_SECONDS,
            stop_seconds=_WORKER_STOP_SECONDS,
            environment=spinning,
            socket=socket_path(worker_addresses[i]),
        )
        for i, device in enumerate(devices)
    )
    scheduler = ServiceCommand(
        "scheduler",
        [
            *("-m", "scheduler_service"),
            *("--listen", listen),
            *(part for address in worker_addresses for part in ("--worker", address)),
            *("--model", str(folder)),
            *("--dtype", shape.data_type.value),
            *("--grace-seconds", str(options.grace_seconds)),
            *_given("--queue-capacity", options.queue_capacity),
            *("--residency", options.residency),
            *("--objective", options.objective),
            *_given("--tenant-requests", options.tenant_requests),
            *_given("--tls-cert", options.tls_cert),
            *_given("--tls-key", options.tls_key),
            *_given("--tls-ca", options.tls_ca),
            *_given("--tokens", options.tokens),
            # Chunk keys depend on this secret: without it neither a scheduler that
            # is started again nor the next user of a kept arena finds a chunk.
            *("--server-key-file", str(key)),
            *_given("--metrics", metrics[0] if metrics else None),
            *common,
        ],
        stop_seconds=options.grace_seconds + _SCHEDULER_STOP_SECONDS,
        socket=socket_path(listen),
    )
    return Stack(
        model=folder,
        name=model_name(folder),
        shape=shape,
        devices=devices,
        host_memory_bytes=host_memory,
        instance=instance,
        runtime=runtime,
        arena=arena,
        keep_arena=options.keep_arena,
        store_address=store_address,
        worker_addresses=worker_addresses,
        listen=listen,
        identity=identity,
        has_tokens=options.tokens is not None,
        metrics=metrics,
        store=store,
        workers=workers,
        scheduler=scheduler,
        log_format=options.log_format or LogFormat.TEXT,
    )


def _size_of(arena: Path) -> int:
    """Bytes of an arena that an earlier stack left; 0: none."""
    try:
        return arena.stat().st_size
    except FileNotFoundError:
        return 0


def _check_lanes(options: StackOptions, devices: tuple[str, ...]) -> None:
    """What every worker would refuse, said before any is started."""
    if options.link_rate is not None:
        config.parse_rate(options.link_rate, field="link_rate")
        if any(device != "cpu" for device in devices):
            raise InvalidArgument("a link rate can only be emulated on a CPU", field="link_rate")
    if options.trace is not None:
        # As it was said, too: `/tmp` would become `/tmp-0`.
        check_output(Path(options.trace).absolute(), "trace")
        for worker in range(len(devices)):
            check_output(trace_path(options.trace, worker), "trace")


def trace_path(trace: str | None, worker: int) -> Path | None:
    """`trace.json` of worker 0 is `trace-0.json`: each has a file of its own."""
    if trace is None:
        return None
    path = Path(trace).absolute()
    return path.with_stem(f"{path.stem}-{worker}")


def socket_path(address: str) -> Path | None:
    """The file of a `unix:` address."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None


def _given(flag: str, value: object | None) -> list[str]:
    return [] if value is None else [flag, str(value)]


def model_shape(folder: Path, dtype: str) -> ModelShape:
    """The checkpoint's shape in the element type asked for; "auto" is the stored one.

    Decided here once, since store and workers must agree on it.
    """
    return read_shape(folder, data_type=parse_dtype(dtype))


def parse_dtype(text: str) -> DataType | None:
    """An element type by name; None for "auto". Raises InvalidArgument."""
    if text == "auto":
        return None
    try:
        return DataType(text)
    except ValueError:
        names = ", ".join(kind.value for kind in DataType)
        raise InvalidArgument(
            f"dtype {text!r} is not one of auto, {names}", field="dtype"
        ) from None


def default_host_memory(shm: Path = config.SHARED_MEMORY) -> int:
    """A quarter of the memory this process may use, at most 8 GiB and half of what
    /dev/shm has left: enough to be useful, little enough to live beside others."""
    free = os.statvfs(shm)
    shm_free = free.f_bavail * free.f_frsize
    return min(memory_facts().usable_bytes // 4, shm_free // 2, _MOST_DEFAULT_HOST_MEMORY)


def instance_of(listen: str) -> str:
    """A name that two stacks on one host cannot share by accident: the public port."""
    port = listen.rpartition(":")[2]
    if listen.startswith("unix:") or port == "0":
        return f"pid-{os.getpid()}"
    return f"port-{port}"

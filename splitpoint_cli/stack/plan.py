"""One host's whole stack as data: its processes, their arguments and addresses.

Turns options into commands, which the supervisor starts.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from splitpoint import config
from splitpoint.checkpoint.config import model_name
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.costs.page_choice import PageChoice
from splitpoint.discovery.redis_options import read_redis_options
from splitpoint.errors import InvalidArgument
from splitpoint.extras import need, need_all
from splitpoint.host.compiler import compiler
from splitpoint.host.memory import default_host_memory
from splitpoint.host.openmp import spin_environment
from splitpoint.numerics import Numerics
from splitpoint.observe.logs import LogFormat
from splitpoint.observe.tracing import collector_url
from splitpoint.options import gateway, scheduler, service, store, worker
from splitpoint.options.cpu_kernels import check_cpu_kernels, with_panels
from splitpoint.options.option import Option
from splitpoint.options.speculation import SpeculativeConfig, read_speculative_config
from splitpoint.shapes import Encoding, ModelShape, WeightFormat
from splitpoint.tiers import Transfer
from splitpoint.transport.access import read_tokens
from splitpoint.transport.tls import Identity, read_identity
from splitpoint_cli.checks.ports import (
    check_http_address,
    metrics_addresses,
    scheduler_addresses,
)
from splitpoint_cli.devices import choose_devices, default_threads, worker_spin_count
from splitpoint_cli.files import check_output
from splitpoint_cli.models import find_draft, model_shape
from splitpoint_cli.options import arguments_of, check_options
from splitpoint_cli.page_tokens import choose_pages, page_tokens_of
from splitpoint_cli.stack.child import ServiceCommand, child_environment
from splitpoint_cli.stack.options import StackOptions

# In addition to the grace of running requests; a worker also waits for write-back.
_GATEWAY_STOP_SECONDS = 10.0
_SCHEDULER_STOP_SECONDS = 10.0
_WORKER_STOP_SECONDS = 40.0
_LOAD_SECONDS = 600.0  # a large checkpoint from a cold disk


@dataclass(frozen=True, slots=True)
class Stack:
    """All decisions about a stack, ready to start: store, workers, schedulers, then a gateway."""

    model: Path
    name: str
    shape: ModelShape
    # The draft model's folder and shape; None: there is none.
    draft: tuple[Path, ModelShape] | None
    devices: tuple[str, ...]
    host_memory_bytes: int
    pages: PageChoice
    instance: str
    runtime: Path
    arena: Path
    keep_arena: bool
    # Folder of the disk tier and its largest size in bytes; None: there is none.
    tier_disk: tuple[Path, int] | None
    # File of the secret behind the chunk keys, and others that should have the same: that of a
    # kept arena, beside a disk tier's.
    key: Path
    other_keys: tuple[Path, ...]
    # Address of the Mooncake master; None: there is none.
    tier_mooncake: str | None
    store_address: str
    worker_addresses: tuple[str, ...]
    # Where the schedulers listen, in order.
    listens: tuple[str, ...]
    # Identity of the schedulers, for the check that they serve.
    identity: Identity
    has_tokens: bool
    # Addresses of metrics: the first scheduler's, the store's, the workers' in order, the other
    # schedulers', the gateway's; empty: none.
    metrics: tuple[str, ...]
    store: ServiceCommand
    workers: tuple[ServiceCommand, ...]
    schedulers: tuple[ServiceCommand, ...]
    # As given; None: the model's own, if it has one.
    chat_template: Path | None = None
    # Without the schedulers' addresses, which are known when they listen; None: no gateway.
    gateway: ServiceCommand | None = None
    # Where the gateway listens.
    http: str | None = None
    # Format of log lines of services and of `up`.
    log_format: LogFormat = LogFormat.TEXT
    # Of the served model; a draft model's are native.
    weights: WeightFormat = WeightFormat.NATIVE


@dataclass(frozen=True, slots=True)
class _Places:
    """Addresses and files of a stack.

    Attributes:
        key: file of the secret behind the chunk keys.
        other_keys: files that should have the same secret.
        listens: addresses of the schedulers.
        http: address of the gateway; None: there is none.
        metrics: addresses of the first scheduler, the store, each worker, the other schedulers
            and the gateway; empty: no metrics.
    """

    listens: tuple[str, ...]
    instance: str
    runtime: Path
    arena: Path
    key: Path
    other_keys: tuple[Path, ...]
    store: str
    workers: tuple[str, ...]
    http: str | None
    metrics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Model:
    """A checkpoint, and the shape in the element type that store and workers agree on."""

    folder: Path
    shape: ModelShape

    @property
    def arguments(self) -> list[str]:
        return ["--model", str(self.folder), "--dtype", self.shape.data_type.value]


def plan_stack(options: StackOptions) -> Stack:
    """Decide what is left open and spell out every command. Makes no file and no folder.

    Raises InvalidArgument for options that cannot be met, MissingExtra, and the errors of
    `resolve_model`.
    """
    need_all("a stack")
    if options.http is not None:
        need("a gateway (--http)", "gateway")
    identity = _check(options)
    if options.tier_disk is not None:
        options = replace(options, tier_disk=str(Path(options.tier_disk).absolute()))
    folder = resolve_model(options.model)
    model = _Model(folder, model_shape(folder, options.dtype))
    devices = choose_devices(options.device, options.workers)
    _check_lanes(options, devices)
    _check_weights(options, devices)
    speculation = read_speculative_config(options.speculative_config, options.draft_model)
    draft = None
    if speculation is not None and speculation.model is not None:
        draft = find_draft(speculation.model, folder, model.shape)
        speculation = replace(speculation, model=str(draft[0]))
    places = _places_of(options, len(devices))
    host_memory = (
        # An arena that exists is adopted with its size, whatever memory is free now.
        (arena_bytes(places.arena) or default_host_memory())
        if options.host_memory is None
        else config.parse_size(options.host_memory, field="host_memory")
    )
    threads = options.threads or default_threads(devices, devices[0])
    spinning: Mapping[str, str] = {}
    if threads is not None and devices[0] == "cpu":
        spinning = spin_environment(worker_spin_count(threads, len(devices)))
    pages = choose_pages(
        options.page_tokens,
        model.shape,
        arena=places.arena,
        arena_bytes=host_memory,
        device=devices[0],
        threads=threads,
        cpu_kernels=options.cpu_kernels,
        environment=child_environment(spinning),
    )
    return Stack(
        model=folder,
        name=model_name(folder),
        shape=model.shape,
        draft=draft,
        devices=devices,
        host_memory_bytes=host_memory,
        pages=pages,
        instance=places.instance,
        runtime=places.runtime,
        arena=places.arena,
        keep_arena=options.keep_arena,
        tier_disk=_tier_disk(options),
        key=places.key,
        other_keys=places.other_keys,
        tier_mooncake=options.tier_mooncake,
        store_address=places.store,
        worker_addresses=places.workers,
        listens=places.listens,
        identity=identity,
        has_tokens=options.tokens is not None,
        metrics=places.metrics,
        store=_store_command(options, model, places, host_memory, pages),
        workers=_worker_commands(options, model, speculation, places, devices, threads, spinning),
        schedulers=_scheduler_commands(options, model, places),
        gateway=_gateway_command(options, places),
        http=places.http,
        chat_template=None if options.chat_template is None else Path(options.chat_template),
        log_format=LogFormat(options.log_format),
        weights=WeightFormat(options.weights),
    )


def _check(options: StackOptions) -> Identity:
    """Check everything that needs no model and no device; return the scheduler's identity.

    Raises InvalidArgument, PermissionDenied.
    """
    config.check_listen_address(
        options.listen, has_tls=options.tls_cert is not None, has_tokens=options.tokens is not None
    )
    identity = read_identity(
        certificate=options.tls_cert, key=options.tls_key, authorities=options.tls_ca
    )
    if options.tokens is not None:
        read_tokens(options.tokens)  # before minutes of loading
    check_options(options)
    page_tokens_of(options.page_tokens)
    check_cpu_kernels(options.cpu_kernels)
    _check_numerics(options)
    _check_mooncake(options)
    read_redis_options(
        options.redis, password_file=options.redis_password_file, ca_file=options.redis_ca
    )
    if options.otlp_endpoint is not None:
        collector_url(options.otlp_endpoint)
    read_speculative_config(options.speculative_config, options.draft_model)
    return identity


def _places_of(options: StackOptions, worker_count: int) -> _Places:
    listens = scheduler_addresses(options.listen, options.schedulers)
    if options.http is not None:
        check_http_address(
            options.http,
            listens,
            has_tls=options.tls_cert is not None,
            has_tokens=options.tokens is not None,
        )
    metrics = metrics_addresses(options.metrics, listens, worker_count, http=options.http)
    instance = config.check_instance(options.instance or instance_of(options.listen))
    runtime = config.runtime_path(instance)
    arena = config.arena_path(instance)
    # Socket names differ between two starts: a gRPC server unlinks its path as it ends, even
    # if the socket there is another server's by then.
    start = secrets.token_hex(3)
    return _Places(
        listens=tuple(config.check_address(each) for each in listens),
        instance=instance,
        runtime=runtime,
        arena=arena,
        key=_key_file(options, arena, runtime),
        other_keys=_other_keys(options, arena),
        store=config.check_address(f"unix:{runtime}/store-{start}.sock"),
        workers=tuple(
            config.check_address(f"unix:{runtime}/worker-{i}-{start}.sock")
            for i in range(worker_count)
        ),
        http=options.http,
        metrics=metrics,
    )


def _key_file(options: StackOptions, arena: Path, runtime: Path) -> Path:
    """Return the file of the secret behind the chunk keys.

    It lives as long as the chunks whose keys it made: without it they are never found again.
    """
    if options.server_key_file is not None:
        return Path(options.server_key_file).absolute()
    if options.tier_disk is not None:
        return Path(options.tier_disk) / "server.key"
    beside = arena.parent / "key"
    return beside if options.keep_arena or beside.exists() else runtime / "key"


def _other_keys(options: StackOptions, arena: Path) -> tuple[Path, ...]:
    """Return the kept arena's own file beside a disk tier's.

    With the same secret in both, neither chunks of the arena nor those on the disk are lost when
    `--tier-disk` comes or goes.
    """
    beside = arena.parent / "key"
    has_two = options.tier_disk is not None and options.server_key_file is None
    return (beside,) if has_two and (options.keep_arena or beside.exists()) else ()


def _tier_disk(options: StackOptions) -> tuple[Path, int] | None:
    if options.tier_disk is None:
        return None
    return Path(options.tier_disk), config.parse_size(
        options.tier_disk_size, field="tier_disk_size"
    )


_OBSERVED: tuple[Option[object], ...] = (*service.LOGS.options, service.OTLP_ENDPOINT)
_COMMON: tuple[Option[object], ...] = (
    service.REFLECTION,
    *service.REDIS_SECTION.options,
    *_OBSERVED,
)
_STORE: tuple[Option[object], ...] = (
    store.ACTIVATIONS,
    store.KV_ENCODING,
    store.WEIGHTS,
    store.EVICTION,
    store.EVICT_ABOVE,
    store.EVICT_TO,
    store.ADMISSION,
    store.LEASE_SECONDS,
    store.SCRUB_SECONDS,
    store.SCRUB_RATE,
    store.HUGE_PAGES,
    store.NUMA_NODE,
    store.TIER_DISK,
    store.TIER_DISK_SIZE,
    store.TIER_MOONCAKE,
    store.TIER_MOONCAKE_MEMORY,
    store.TIER_MOONCAKE_REPLICAS,
    store.TIER_ADMISSION,
    store.TIER_RATE,
    store.TRANSFER,
    store.TRANSFER_INTERFACE,
    store.TRUSTED_NETWORK,
    *_COMMON,
)
_WORKER: tuple[Option[object], ...] = (
    worker.DEVICE_MEMORY,
    worker.MAX_BATCH,
    worker.MAX_BATCHED_TOKENS,
    worker.WEIGHT_OBJECTIVE,
    worker.CPU_KERNELS,
    worker.NUMERICS,
    store.WEIGHTS,
    worker.PIN_LIMIT,
    worker.VERIFY_RATE,
    worker.NO_DEVICE_PREFIX_CACHE,
    worker.ENFORCE_EAGER,
    worker.SERIAL,
    worker.LINK_RATE,
    worker.ARTIFACTS,
    *_COMMON,
)
_SCHEDULER: tuple[Option[object], ...] = (
    service.GRACE_SECONDS,
    scheduler.QUEUE_CAPACITY,
    scheduler.RESIDENCY,
    scheduler.OBJECTIVE,
    scheduler.ANSWER_CHARGE,
    scheduler.POLICY,
    scheduler.POLICY_AGING_SECONDS,
    scheduler.POLICY_LEAD_REQUESTS,
    scheduler.TENANT_REQUESTS,
    scheduler.CHAT_TEMPLATE,
    service.TLS_CERT,
    service.TLS_KEY,
    service.TLS_CA,
    service.TOKENS,
    *_COMMON,
)


_GATEWAY: tuple[Option[object], ...] = (
    service.GRACE_SECONDS,
    gateway.TLS_CERT,
    service.TLS_KEY,
    service.TOKENS,
    *_OBSERVED,
)


def _store_command(
    options: StackOptions, model: _Model, places: _Places, host_memory: int, pages: PageChoice
) -> ServiceCommand:
    return ServiceCommand(
        "store",
        [
            *("-m", "kvstore_service"),
            *("--listen", places.store),
            *model.arguments,
            *("--host-memory", str(host_memory)),
            *_given("--chunk-tokens", _unless_default(pages.tokens, store.CHUNK_TOKENS)),
            *_given("--page-reason", pages.reason or None),
            *("--arena", str(places.arena)),
            # A user who keeps an arena wants to know if it does not fit; one that a killed
            # stack left is replaced.
            "--keep-arena" if options.keep_arena else "--replace-arena",
            *_given("--metrics", places.metrics[1] if places.metrics else None),
            *arguments_of(_STORE, options),
        ],
        # Every page of the arena is allocated before the store is ready.
        ready_seconds=60.0 + host_memory / 1e9,
        socket=socket_path(places.store),
    )


def _worker_commands(
    options: StackOptions,
    model: _Model,
    speculation: SpeculativeConfig | None,
    places: _Places,
    devices: tuple[str, ...],
    threads: int | None,
    spinning: Mapping[str, str],
) -> tuple[ServiceCommand, ...]:
    drafts = None if speculation is None else speculation.text
    return tuple(
        ServiceCommand(
            f"worker {i}",
            [
                *("-m", "worker_service"),
                *("--listen", places.workers[i]),
                *("--worker-id", str(i)),
                *model.arguments,
                *("--kvstore", places.store),
                *("--device", device),
                *_given("--threads", threads),
                *_given("--trace", trace_path(options.trace, i)),
                *_given("--metrics", places.metrics[2 + i] if places.metrics else None),
                "--progress-lines",
                *_given("--speculative-config", drafts),
                *arguments_of(_WORKER, options),
            ],
            ready_seconds=_LOAD_SECONDS,
            stop_seconds=_WORKER_STOP_SECONDS,
            environment=spinning,
            socket=socket_path(places.workers[i]),
        )
        for i, device in enumerate(devices)
    )


def _scheduler_commands(
    options: StackOptions, model: _Model, places: _Places
) -> tuple[ServiceCommand, ...]:
    count = len(places.listens)
    # After the metrics of the first scheduler, the store and the workers.
    metrics = places.metrics[:1] + places.metrics[2 + len(places.workers) :][: count - 1]
    return tuple(
        _scheduler_command(
            options,
            model,
            places,
            name="scheduler" if count == 1 else f"scheduler {number}",
            listen=listen,
            metrics=metrics[number] if metrics else None,
        )
        for number, listen in enumerate(places.listens)
    )


def _scheduler_command(
    options: StackOptions,
    model: _Model,
    places: _Places,
    *,
    name: str,
    listen: str,
    metrics: str | None,
) -> ServiceCommand:
    return ServiceCommand(
        name,
        [
            *("-m", "scheduler_service"),
            *("--listen", listen),
            *(part for address in places.workers for part in ("--worker", address)),
            *model.arguments,
            # Chunk keys depend on this secret: without it neither another scheduler, nor one
            # that is started again, nor the next user of a kept arena finds a chunk.
            *("--server-key-file", str(places.key)),
            *_given("--metrics", metrics),
            *arguments_of(_SCHEDULER, options),
        ],
        stop_seconds=options.grace_seconds + _SCHEDULER_STOP_SECONDS,
        socket=socket_path(listen),
    )


def _gateway_command(options: StackOptions, places: _Places) -> ServiceCommand | None:
    if places.http is None:
        return None
    return ServiceCommand(
        "gateway",
        [
            *("-m", "gateway_service"),
            *("--listen", places.http),
            # Its own scheduler, whatever name the certificate was issued for.
            *_given("--scheduler-cert", options.tls_cert),
            *_given("--metrics", places.metrics[-1] if places.metrics else None),
            *arguments_of(_GATEWAY, options),
        ],
        stop_seconds=options.grace_seconds + _GATEWAY_STOP_SECONDS,
    )


def arena_bytes(arena: Path) -> int:
    """Return the size of an arena that an earlier stack left; 0 if there is none."""
    try:
        return arena.stat().st_size
    except FileNotFoundError:
        return 0


def _check_lanes(options: StackOptions, devices: tuple[str, ...]) -> None:
    """Raise InvalidArgument for an emulated link on a GPU, and for a trace without a place."""
    if options.link_rate is not None and any(device != "cpu" for device in devices):
        raise InvalidArgument("a link rate can only be emulated on a CPU", field="link_rate")
    if options.trace is not None:
        # Checked as given, too: `/tmp` would become `/tmp-0`.
        check_output(Path(options.trace).absolute(), "trace")
        for worker in range(len(devices)):
            check_output(trace_path(options.trace, worker), "trace")


def _check_numerics(options: StackOptions) -> None:
    """Raise InvalidArgument for a store that invariant numerics exclude."""
    encoding = Encoding(options.kv_encoding)
    if options.numerics == Numerics.INVARIANT and encoding.is_lossy:
        raise InvalidArgument(
            f"--numerics invariant needs --kv-encoding native: with {encoding.value}, what is "
            "reused differs from what was computed",
            field="numerics",
        )


def _check_mooncake(options: StackOptions) -> None:
    """Raise InvalidArgument for Mooncake beside tokens, unless its network is trusted.

    The store of a stack is private and gets no tokens, so it cannot refuse this by itself.
    """
    uses_mooncake = options.transfer == Transfer.MOONCAKE or options.tier_mooncake is not None
    if uses_mooncake and options.tokens is not None and not options.trusted_network:
        raise InvalidArgument(
            "Mooncake has neither encryption nor authentication, which --tokens would be for: "
            "give --trusted-network if no stranger reaches --transfer-interface, or leave "
            "Mooncake off (docs/tiers.md)",
            field="trusted_network",
        )


def _check_weights(options: StackOptions, devices: tuple[str, ...]) -> None:
    """Raise InvalidArgument if int8 weights cannot run with these options on this host."""
    if WeightFormat(options.weights) is not WeightFormat.INT8:
        return
    if any(device != "cpu" for device in devices):
        raise InvalidArgument("--weights int8 is for CPU workers: --device cpu", field="weights")
    with_panels(options.cpu_kernels)
    if compiler() is None:
        raise InvalidArgument("--weights int8 needs a C++ compiler", field="weights")


def trace_path(trace: str | None, worker: int) -> Path | None:
    """Return the file of one worker: `trace-0.json` of worker 0 for `trace.json`."""
    if trace is None:
        return None
    path = Path(trace).absolute()
    return path.with_stem(f"{path.stem}-{worker}")


def socket_path(address: str) -> Path | None:
    """Return the file of a `unix:` address; None for other addresses."""
    return Path(address.removeprefix("unix:")) if address.startswith("unix:") else None


def _unless_default(value: int, option: Option[int]) -> int | None:
    return None if value == option.default else value


def _given(flag: str, value: object | None) -> list[str]:
    return [] if value is None else [flag, str(value)]


def instance_of(listen: str) -> str:
    """Return the default name of a stack, which is unique on a host: that of its port."""
    port = listen.rpartition(":")[2]
    if listen.startswith("unix:") or port == "0":
        return f"pid-{os.getpid()}"
    return f"port-{port}"

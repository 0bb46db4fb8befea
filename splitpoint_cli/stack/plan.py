"""Turns options into the plan of a stack: what the supervisor starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from splitpoint import config
from splitpoint.checkpoint.config import model_name
from splitpoint.checkpoint.decoder import ModelBackend, support_of
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.costs.page_choice import PageChoice
from splitpoint.discovery.redis_options import read_redis_options
from splitpoint.errors import InvalidArgument
from splitpoint.extras import need, need_all
from splitpoint.host.processor import compiler, spin_environment
from splitpoint.observe.logs import LogFormat
from splitpoint.observe.tracing import collector_url
from splitpoint.options import store
from splitpoint.options.cpu_kernels import check_cpu_kernels, with_panels
from splitpoint.options.scheduler import read_served_names
from splitpoint.options.speculation import read_speculative_config
from splitpoint.shapes import Encoding, ModelShape, Numerics, WeightFormat
from splitpoint.transport.access import read_tokens
from splitpoint.transport.tls import Identity, read_identity
from splitpoint_cli.checks.gpu import FreeMemory, ask_free_memory
from splitpoint_cli.files import check_output
from splitpoint_cli.models import NamedModel, cpu_format, find_draft, model_shape
from splitpoint_cli.options import check_options
from splitpoint_cli.page_tokens import choose_pages, page_tokens_of
from splitpoint_cli.stack.api_key import ApiKey, api_key_of
from splitpoint_cli.stack.child import ServiceCommand, child_environment
from splitpoint_cli.stack.commands import (
    Model,
    gateway_command,
    scheduler_commands,
    store_command,
    worker_commands,
)
from splitpoint_cli.stack.devices import (
    choose_devices,
    cpu_memory,
    default_threads,
    gpu_memory_shares,
    worker_spin_count,
)
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.places import (
    arena_bytes,
    host_memory_bytes,
    instance_of,
    places_of,
    trace_path,
)


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
    # Address of the pool's master; None: there is none.
    tier_pool: str | None
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
    # What its clients must show, besides --tokens; None: nothing.
    api_key: ApiKey | None = None
    # Format of log lines of services and of `up`.
    log_format: LogFormat = LogFormat.TEXT
    # Format of the served model's weights; a draft model's are native.
    weights: WeightFormat = WeightFormat.NATIVE


def plan_stack(
    options: StackOptions, free_memory: Callable[[], FreeMemory] = ask_free_memory
) -> Stack:
    """Decide what is left open and spell out every command. Makes no file and no folder.

    `free_memory` asks the GPUs, if several workers share one.

    Raises InvalidArgument for options that cannot be met, MissingExtra, and the errors of
    `resolve_model`.
    """
    need_all("a stack")
    if options.http is not None:
        need("a gateway (--http)", "gateway")
    identity = _check(options)
    served = read_served_names(options.served_model_name)
    if options.tier_disk is not None:
        options = replace(options, tier_disk=str(Path(options.tier_disk).absolute()))
    folder = resolve_model(options.model)
    shape = model_shape(folder, options.dtype, options.model_backend, options.max_model_len)
    model = Model(folder, shape)
    devices = choose_devices(options.device, options.workers)
    _check_lanes(options, devices)
    _check_weights(options, folder, devices)
    speculation = read_speculative_config(options.speculative_config, options.draft_model)
    draft = None
    if speculation is not None and speculation.model is not None:
        draft = find_draft(speculation.model, folder, model.shape)
        speculation = replace(speculation, model=str(draft[0]))
    instance = instance_of(options.listen, options.instance)
    api_key = api_key_of(options, config.runtime_path(instance))
    places = places_of(options, len(devices), has_api_key=api_key is not None)
    host_memory = host_memory_bytes(options.host_memory, places.arena)
    new_arena_bytes = max(0, host_memory - arena_bytes(places.arena))
    shares = _memory_shares(options, model, devices, new_arena_bytes, free_memory)
    threads = options.threads or default_threads(devices, devices[0])
    spinning = _spinning(devices, threads)
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
        name=", ".join(served) or model_name(folder),
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
        tier_pool=options.tier_pool,
        store_address=places.store,
        worker_addresses=places.workers,
        listens=places.listens,
        identity=identity,
        has_tokens=options.tokens is not None,
        metrics=places.metrics,
        store=store_command(options, model, places, host_memory, pages),
        workers=worker_commands(
            options, model, speculation, places, devices, shares, threads, spinning
        ),
        schedulers=scheduler_commands(options, model, places),
        gateway=gateway_command(options, places, api_key),
        api_key=api_key,
        http=places.http,
        chat_template=None if options.chat_template is None else Path(options.chat_template),
        log_format=LogFormat(options.log_format),
        weights=WeightFormat(options.weights),
    )


def _spinning(devices: tuple[str, ...], threads: int | None) -> Mapping[str, str]:
    if threads is None or devices[0] != "cpu":
        return {}
    return spin_environment(worker_spin_count(threads, len(devices)))


def _memory_shares(
    options: StackOptions,
    model: Model,
    devices: tuple[str, ...],
    new_arena_bytes: int,
    free_memory: Callable[[], FreeMemory],
) -> tuple[int | None, ...]:
    """Return the bytes of device memory for each worker; None: the option's, or the worker's."""
    if options.device_memory is not None:
        return (None,) * len(devices)
    if devices[0] != "cpu":
        return gpu_memory_shares(devices, free_memory)
    named, form = NamedModel(model.shape, model.folder), WeightFormat(options.weights)
    weights = named.weight_sizes(form, is_gpu=False).total
    return (cpu_memory(weights, new_arena_bytes),) * len(devices)


def _tier_disk(options: StackOptions) -> tuple[Path, int] | None:
    if options.tier_disk is None:
        return None
    return Path(options.tier_disk), config.parse_size(
        options.tier_disk_size, field="tier_disk_size"
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
    _check_network(options)
    read_redis_options(
        options.redis, password_file=options.redis_password_file, ca_file=options.redis_ca
    )
    if options.otlp_endpoint is not None:
        collector_url(options.otlp_endpoint)
    read_speculative_config(options.speculative_config, options.draft_model)
    return identity


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


def _check_network(options: StackOptions) -> None:
    """Raise InvalidArgument for a transfer engine beside tokens, unless its network is trusted.

    The store of a stack is private and gets no tokens, so it cannot refuse this by itself.
    """
    has_engine = options.transfer != store.TRANSFER.default or options.tier_pool is not None
    if has_engine and options.tokens is not None and not options.trusted_network:
        raise InvalidArgument(
            f"{store.OPEN_NETWORK}, which --tokens would be for: give --trusted-network if no "
            "stranger reaches --transfer-interface, or leave it off (docs/tiers.md)",
            field="trusted_network",
        )


def _check_weights(options: StackOptions, folder: Path, devices: tuple[str, ...]) -> None:
    """Raise InvalidArgument if int8 weights, or codes, cannot run with these options here."""
    support = support_of(folder, backend=ModelBackend(options.model_backend))
    weights = WeightFormat(options.weights)
    what = cpu_format(support, weights)
    if what is None:
        return
    if any(device != "cpu" for device in devices):
        raise InvalidArgument(f"{what} is for CPU workers: --device cpu", field="weights")
    with_panels(options.cpu_kernels, what)
    if compiler() is None:
        raise InvalidArgument(f"{what} needs a C++ compiler", field="weights")

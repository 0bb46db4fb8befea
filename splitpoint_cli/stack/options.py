"""Options of `splitpoint up`: those of the services that it passes on, and its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from splitpoint import config
from splitpoint.options import gateway, scheduler, service, store, worker
from splitpoint.options.option import SIZE, Option
from splitpoint_cli.options import each_of, made_of, of

# Variable of the environment with the key of --api-key.
API_KEY_VARIABLE = "SPLITPOINT_API_KEY"
# Groups of --help.
_ARENA = "Arena"
_TIERS = "Tiers behind the arena, and other hosts (docs/tiers.md)"
_WORKERS = "Workers"
_SECURITY = "Security"
_REDIS = "Redis"
_LOGS = "Logs and traces"

MODEL: Option[str | None] = Option(
    "model",
    str,
    None,
    "Checkpoint folder, or a name on the Hugging Face hub (owner/name or owner/name@revision); "
    "absent: the bundled model.",
    unit="DIR|NAME",
)
WORKERS: Option[int | None] = Option(
    "workers",
    int,
    None,
    "Number of workers; absent: one per GPU, or one on the CPU.",
    unit="N",
    least=1,
)
DEVICE: Option[str] = Option(
    "device",
    str,
    "auto",
    "Device of the workers; cuda spreads them over the GPUs in turn; auto: cuda if there is a GPU.",
    choices=("auto", "cpu", "cuda"),
)
SCHEDULERS: Option[int] = Option(
    "schedulers",
    int,
    1,
    "Number of schedulers, which share the workers; the first listens at --listen, the others at "
    "the ports after it. Clients take all addresses and survive the loss of a scheduler "
    "(docs/operations.md).",
    unit="N",
    least=1,
    most=8,
)
HOST_MEMORY: Option[str | None] = Option(
    "host-memory",
    str,
    None,
    "Size of the arena in bytes; absent: a quarter of the available memory, at most 8 GiB and "
    "half of the free space of /dev/shm.",
    unit=SIZE,
)
PAGE_TOKENS: Option[str] = Option(
    "page-tokens",
    str,
    str(store.CHUNK_TOKENS.default),
    "Tokens of a page of the workers' caches and of a chunk of the store; auto: by what pages and "
    "rows cost attention on this host (docs/papers/bmc.md).",
    unit="N|auto",
    former_name=store.CHUNK_TOKENS.name,
)
LISTEN: Option[str] = Option(
    "listen",
    str,
    config.DEFAULT_ADDRESS,
    "Address for clients: a loopback port or unix:/path; any interface with TLS and tokens.",
    unit="ADDRESS",
)
HTTP: Option[str | None] = Option(
    "http",
    str,
    None,
    "Serve OpenAI-compatible HTTP and a page to try it at this address, by a gateway: a loopback "
    "port; any interface with TLS and tokens; absent: no gateway (docs/gateway.md).",
    unit="HOST:PORT",
)
API_KEY: Option[str | None] = Option(
    "api-key",
    str,
    None,
    "Key that clients of --http must send, as a bearer token. Other users see it in the list of "
    f"processes: {API_KEY_VARIABLE} in the environment or --api-key-file hide it. Absent: that "
    "variable, else no key.",
    unit="KEY",
    is_rare=True,
    secret_file="api-key-file",
)
API_KEY_FILE: Option[str | None] = Option(
    "api-key-file",
    str,
    None,
    "File of mode 0600 with the key that clients of --http must send, as a bearer token; absent: "
    "--api-key.",
    unit="PATH",
)
INSTANCE: Option[str | None] = Option(
    "instance",
    str,
    None,
    "Name of this stack's sockets and arena; absent: derived from the port.",
    unit="NAME",
)
TIER_DISK: Option[str | None] = Option(
    store.TIER_DISK.name, str, None, store.TIER_DISK.help, unit=store.TIER_DISK.unit
)
SERVER_KEY_FILE: Option[str | None] = replace(
    scheduler.SERVER_KEY_FILE,
    help="Secret behind the chunk keys, a file that is made if it is missing. Stacks that share a "
    "pool or fetch from each other need the same. Absent: `server.key` in the folder of the disk "
    "tier, else one that goes with the arena.",
)
GRACE: Option[float] = replace(
    service.GRACE_SECONDS,
    name="grace",
    help="Seconds that running requests may take to finish after Ctrl-C.",
)
METRICS: Option[int | None] = Option(
    "metrics",
    int,
    None,
    "Serve Prometheus metrics on 127.0.0.1: the scheduler's at this port, the store's at the "
    "next, then those of workers 0, 1, ..., of further schedulers and of the gateway; absent: "
    "nowhere (docs/monitoring.md).",
    unit="PORT",
    least=1,
    most=65535,
)
TRACE: Option[str | None] = Option(
    "trace",
    str,
    None,
    "File for a timeline of copies and compute, written at the stop as Chrome trace JSON: "
    "out.json becomes out-0.json of worker 0, and so on; absent: none.",
    unit="FILE",
    is_rare=True,
)
DRAFT_MODEL: Option[str | None] = replace(
    worker.DRAFT_MODEL,
    unit="DIR|NAME",
    help="Checkpoint folder or name on the hub of a small model with the same vocabulary, which "
    "drafts tokens; absent: none.",
)
LOG_LEVEL: Option[str | None] = Option(
    "log-level",
    str,
    None,
    "Lowest level of log lines that are shown; absent: warning.",
    choices=service.LOG_LEVEL.choices,
)


# Options of services that `up` decides: addresses, files and names of its processes, and what it
# gives a service by another option.
_DECIDED = frozenset(
    {
        *("listen", "parent_fd", "advertise", "tls_server_name", "token_file", "metrics_open"),
        *("layout", "page_size", "chunk_tokens", "page_reason", "arena", "replace_arena"),
        *("worker_id", "kvstore", "worker", "progress_lines"),
        *("scheduler", "ca", "scheduler_cert", "drain_seconds"),
    }
)
_SERVICES = (store.SECTIONS, worker.SECTIONS, scheduler.SECTIONS, gateway.SECTIONS)


def _passed(own: frozenset[str]) -> Mapping[str, tuple[str, Option[Any]]]:
    """Return panel and option of what services have besides `own` and what `up` decides."""
    return {
        option.field: (section.title, option)
        for sections in _SERVICES
        for section in sections
        for option in section.options
        if option.field not in own | _DECIDED
    }


@dataclass(frozen=True, slots=True)
class _OwnOptions:
    """Values of the options that `up` itself reads."""

    model: str | None = of(MODEL)
    served_model_name: str | None = of(scheduler.SERVED_MODEL_NAME)
    max_model_len: int | None = of(service.MAX_MODEL_LEN)
    chat_template: str | None = of(scheduler.CHAT_TEMPLATE)
    workers: int | None = of(WORKERS)
    device: str = of(DEVICE)
    dtype: str = of(store.DTYPE)
    weights: str = of(store.WEIGHTS)
    listen: str = of(LISTEN)
    schedulers: int = of(SCHEDULERS)
    http: str | None = of(HTTP)
    grace_seconds: float = of(GRACE)
    instance: str | None = of(INSTANCE)
    metrics: int | None = of(METRICS)

    host_memory: str | None = of(HOST_MEMORY, _ARENA)
    page_tokens: str = of(PAGE_TOKENS, _ARENA)
    kv_encoding: str = of(store.KV_ENCODING, _ARENA)
    keep_arena: bool = of(store.KEEP_ARENA, _ARENA)

    tier_disk: str | None = of(TIER_DISK, _TIERS)
    tier_disk_size: str = of(store.TIER_DISK_SIZE, _TIERS)
    tier_pool: str | None = of(store.TIER_POOL, _TIERS)
    transfer: str = of(store.TRANSFER, _TIERS)
    trusted_network: bool = of(store.TRUSTED_NETWORK, _TIERS)
    server_key_file: str | None = of(SERVER_KEY_FILE, _TIERS)

    device_memory: str | None = of(worker.DEVICE_MEMORY, _WORKERS)
    threads: int | None = of(worker.THREADS, _WORKERS)
    cpu_kernels: str = of(worker.CPU_KERNELS, _WORKERS)
    model_backend: str = of(worker.MODEL_BACKEND, _WORKERS)
    numerics: str = of(worker.NUMERICS, _WORKERS)
    link_rate: str | None = of(worker.LINK_RATE, _WORKERS)
    trace: str | None = of(TRACE, _WORKERS)
    speculative_config: str | None = of(worker.SPECULATIVE_CONFIG, _WORKERS)
    draft_model: str | None = of(DRAFT_MODEL, _WORKERS)

    # For scheduler and gateway only: store and workers listen in a private folder.
    tls_cert: str | None = of(service.TLS_CERT, _SECURITY)
    tls_key: str | None = of(service.TLS_KEY, _SECURITY)
    tls_ca: str | None = of(service.TLS_CA, _SECURITY)
    tokens: str | None = of(service.TOKENS, _SECURITY)
    api_key: str | None = of(API_KEY, _SECURITY)
    api_key_file: str | None = of(API_KEY_FILE, _SECURITY)

    redis: str | None = of(service.REDIS, _REDIS)
    redis_password_file: str | None = of(service.REDIS_PASSWORD_FILE, _REDIS)
    redis_ca: str | None = of(service.REDIS_CA, _REDIS)

    log_format: str = of(service.LOG_FORMAT, _LOGS)
    log_level: str | None = of(LOG_LEVEL, _LOGS)
    otlp_endpoint: str | None = of(service.OTLP_ENDPOINT, _LOGS)


PASSED = _passed(frozenset(each.name for each in fields(_OwnOptions)))


@dataclass(frozen=True, slots=True)
class StackOptions(_OwnOptions):
    """Values of the options of `splitpoint up`.

    Attributes:
        passed: of the services' other options, by their fields; `up` only passes them on.
    """

    passed: Mapping[str, Any] = each_of(
        {name: option for name, (_, option) in PASSED.items()},
        {name: f"{panel[0].upper()}{panel[1:]}" for name, (panel, _) in PASSED.items()},
    )


def stack_options(**values: Any) -> StackOptions:
    """Return the options with these values, by name, and the defaults of all others."""
    return made_of(StackOptions, values)

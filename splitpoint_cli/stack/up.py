"""`splitpoint up`: the whole stack on one host, until Ctrl-C.

The command's options and nothing else: stack.py plans, stack_runner.py runs.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Annotated

import typer

from splitpoint import config
from splitpoint.observe.logs import LogFormat, LogLevel
from splitpoint_cli.stack.plan import StackOptions, plan_stack
from splitpoint_cli.stack.preflight import check_options
from splitpoint_cli.stack.restart_policy import RestartLimits
from splitpoint_cli.stack.runner import run_stack

# Sections of --help.
_SERVING = "Serving"
_ARENA = "The arena"
_LIMITS = "Limits of workers and scheduler"
_SECURITY = "Security"
_LANES = "Copies beside compute (docs/pipeline.md)"
_REDIS = "Redis"
_WATCHING = "Logs and traces"


class Device(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(enum.StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class ResidencyChoice(enum.StrEnum):
    AUTO = "auto"
    RESIDENT = "resident"
    STREAMED = "streamed"


class ObjectiveChoice(enum.StrEnum):
    LATENCY = "latency"
    THROUGHPUT = "throughput"


class Activations(enum.StrEnum):
    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class KvEncoding(enum.StrEnum):
    NATIVE = "native"
    INT8 = "int8"
    INT4 = "int4"


class Eviction(enum.StrEnum):
    LRU = "lru"
    FIFO = "fifo"
    COUNTER = "counter"


class Admission(enum.StrEnum):
    ALWAYS = "always"
    SECOND_USE = "second-use"


class HugePages(enum.StrEnum):
    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


def up(
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint folder, or a name on the Hugging Face hub (owner/name[@revision]); "
            "absent: the bundled model.",
            metavar="DIR|NAME",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Workers to start; absent: one per GPU, or one on the CPU.", min=1),
    ] = None,
    device: Annotated[
        Device, typer.Option(help="cuda spreads workers over the GPUs in turn.")
    ] = Device.AUTO,
    dtype: Annotated[
        Dtype, typer.Option(help="Element type of weights and cache; auto: the checkpoint's.")
    ] = Dtype.AUTO,
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="Budget of each worker for weights and caches; absent: the worker decides.",
            metavar="SIZE",
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Size of the store's arena; absent: a quarter of the available memory, "
            "at most 8 GiB and half of what /dev/shm has free.",
            metavar="SIZE",
            rich_help_panel=_ARENA,
        ),
    ] = None,
    chunk_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens per chunk of the store.",
            min=1,
            max=4096,
            rich_help_panel=_ARENA,
        ),
    ] = 64,
    listen: Annotated[
        str,
        typer.Option(
            help="Where clients connect: loopback or unix:/path; any interface with TLS and tokens."
        ),
    ] = config.DEFAULT_ADDRESS,
    residency: Annotated[
        ResidencyChoice,
        typer.Option(
            help="For requests that do not say; auto: resident when it fits.",
            rich_help_panel=_SERVING,
        ),
    ] = ResidencyChoice.AUTO,
    objective: Annotated[
        ObjectiveChoice,
        typer.Option(
            help="Of plans: latency, least time for each request; throughput, least use of "
            "whichever of link and device is busier.",
            rich_help_panel=_SERVING,
        ),
    ] = ObjectiveChoice.LATENCY,
    activations: Annotated[
        Activations,
        typer.Option(
            help="Whether the store keeps layer inputs; auto: when they can pay.",
            rich_help_panel=_ARENA,
        ),
    ] = Activations.AUTO,
    kv_encoding: Annotated[
        KvEncoding | None,
        typer.Option(
            help="How the store keeps keys, values and layer inputs; int8 and int4 are smaller "
            "and lossy (docs/compression.md); absent: native.",
            rich_help_panel=_ARENA,
        ),
    ] = None,
    keep_arena: Annotated[
        bool,
        typer.Option(
            "--keep-arena",
            help="Leave the shared-memory file on exit, for the next `up` of this instance.",
            rich_help_panel=_ARENA,
        ),
    ] = False,
    no_restart: Annotated[
        bool,
        typer.Option(
            "--no-restart",
            help="Stop everything when a service dies for the first time.",
            rich_help_panel=_SERVING,
        ),
    ] = False,
    eviction: Annotated[
        Eviction | None,
        typer.Option(
            help="Who goes when the arena is full; absent: lru.",
            rich_help_panel=_ARENA,
        ),
    ] = None,
    evict_above: Annotated[
        float | None,
        typer.Option(
            help="Evict in the background above this fraction of slots in use; absent: never.",
            min=0,
            max=1,
            rich_help_panel=_ARENA,
        ),
    ] = None,
    evict_to: Annotated[
        float | None,
        typer.Option(
            help="And down to this one; absent: 0.05 less.",
            min=0,
            max=1,
            rich_help_panel=_ARENA,
        ),
    ] = None,
    admission: Annotated[
        Admission | None,
        typer.Option(
            help="second-use: store only what was asked for before; absent: always.",
            rich_help_panel=_ARENA,
        ),
    ] = None,
    lease_seconds: Annotated[
        float | None,
        typer.Option(
            help="After so long without a word a worker loses what it holds in the store.",
            min=0.1,
            rich_help_panel=_ARENA,
        ),
    ] = None,
    scrub_seconds: Annotated[
        float | None,
        typer.Option(
            help="Seconds within which every sealed chunk is read back and compared, again and "
            "again; 0: never; absent: 600.",
            min=0,
            rich_help_panel=_ARENA,
        ),
    ] = None,
    scrub_rate: Annotated[
        str | None,
        typer.Option(
            help="Most bytes per second that this reads, even if it takes longer; absent: 500MB.",
            metavar="RATE",
            rich_help_panel=_ARENA,
        ),
    ] = None,
    verify_rate: Annotated[
        float | None,
        typer.Option(
            help="Share of chunk reads, after a worker's first of each chunk, in which the worker "
            "compares the checksum; absent: 0.01.",
            min=0,
            max=1,
            rich_help_panel=_ARENA,
        ),
    ] = None,
    huge_pages: Annotated[
        HugePages | None,
        typer.Option(
            help="auto: where the file system has them.",
            rich_help_panel=_ARENA,
        ),
    ] = None,
    numa_node: Annotated[
        str | None,
        typer.Option(
            help="Node of the arena's memory; auto: that of the GPUs.",
            metavar="auto|none|N",
            rich_help_panel=_ARENA,
        ),
    ] = None,
    pin_limit: Annotated[
        str | None,
        typer.Option(
            help="Page-lock at most this much of the arena for the GPU; 0: nothing; absent: all.",
            metavar="SIZE",
            rich_help_panel=_ARENA,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads per worker; absent: cores / CPU workers.",
            min=1,
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-batched-tokens",
            "--prefill-chunk",
            help="Most prompt tokens in one engine step.",
            min=1,
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            help="Most requests in one engine step.",
            min=1,
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    serial: Annotated[
        bool,
        typer.Option(
            "--serial",
            help="The serial twin: workers copy or compute, one after the other.",
            rich_help_panel=_LANES,
        ),
    ] = False,
    link_rate: Annotated[
        str | None,
        typer.Option(
            help="Emulate a link of this rate in CPU workers: 184MB is 184 MB per second.",
            metavar="RATE",
            rich_help_panel=_LANES,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="At the stop write what ran when, for `splitpoint trace`; out.json becomes "
            "out-0.json of worker 0, and so on.",
            metavar="FILE",
            rich_help_panel=_LANES,
        ),
    ] = None,
    grace: Annotated[
        float,
        typer.Option(
            help="Seconds that running requests may go on after Ctrl-C.",
            min=0,
            rich_help_panel=_SERVING,
        ),
    ] = 30.0,
    queue_capacity: Annotated[
        int | None,
        typer.Option(
            help="Most requests that may wait.",
            min=1,
            rich_help_panel=_LIMITS,
        ),
    ] = None,
    instance: Annotated[
        str | None,
        typer.Option(
            help="Name of this stack's sockets and arena; absent: from the port.",
            rich_help_panel=_SERVING,
        ),
    ] = None,
    tls_cert: Annotated[
        str | None,
        typer.Option(
            help="Certificate chain (PEM) of the scheduler; serve TLS.",
            metavar="PATH",
            rich_help_panel=_SECURITY,
        ),
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(
            help="Its private key, mode 0600.",
            metavar="PATH",
            rich_help_panel=_SECURITY,
        ),
    ] = None,
    tls_ca: Annotated[
        str | None,
        typer.Option(
            help="Demand a certificate of this authority from clients.",
            metavar="PATH",
            rich_help_panel=_SECURITY,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Who may call (see `splitpoint token`), mode 0600.",
            metavar="FILE",
            rich_help_panel=_SECURITY,
        ),
    ] = None,
    tenant_requests: Annotated[
        int | None,
        typer.Option(
            help="Most requests of one tenant that may run or wait.",
            min=1,
            rich_help_panel=_SECURITY,
        ),
    ] = None,
    reflection: Annotated[
        bool,
        typer.Option(
            "--reflection",
            help="Serve gRPC reflection (for grpcurl).",
            rich_help_panel=_SERVING,
        ),
    ] = False,
    redis: Annotated[
        str | None,
        typer.Option(
            help="Registry and catalog for more services on this host (docs/redis.md).",
            metavar="URL",
            rich_help_panel=_REDIS,
        ),
    ] = None,
    redis_password_file: Annotated[
        str | None,
        typer.Option(
            help="Its password, mode 0600; better than one in the URL.",
            metavar="PATH",
            rich_help_panel=_REDIS,
        ),
    ] = None,
    redis_ca: Annotated[
        str | None,
        typer.Option(
            help="Who signs its certificate (PEM).", metavar="PATH", rich_help_panel=_REDIS
        ),
    ] = None,
    metrics: Annotated[
        int | None,
        typer.Option(
            help="Serve Prometheus metrics on 127.0.0.1: the scheduler's at this port, the store's "
            "at the next, then those of workers 0, 1, ... (docs/metrics.md).",
            metavar="PORT",
            min=1,
            max=65535,
            rich_help_panel=_SERVING,
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every log line, not only warnings.")
    ] = False,
    log_format: Annotated[
        LogFormat | None,
        typer.Option(
            help="Of everything on stderr: text, or one JSON object a line; absent: text.",
            rich_help_panel=_WATCHING,
        ),
    ] = None,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            help="Show every log line from this level on; absent: warnings.",
            rich_help_panel=_WATCHING,
        ),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Send OpenTelemetry spans of all services there (docs/tracing.md).",
            metavar="HOST:PORT|URL|env",
            rich_help_panel=_WATCHING,
        ),
    ] = None,
) -> None:
    """Start store, workers and scheduler on this host; Ctrl-C stops them.

    Running requests may finish first, for --grace seconds; a second Ctrl-C ends
    everything at once.
    Nothing is left behind: no process, no socket, no shared memory. A service
    that dies is started again after a pause; when it dies while starting for
    the first time, or 5 times within 2 minutes, everything stops, with its reason
    in the last line and its exit code: 2 wrong input, 3 a port is taken, 4 not ready
    in time, 5 memory or another resource is short, 1 anything else.
    While other workers are left, a worker is given up alone and tried again later.
    """
    options = StackOptions(
        model=model,
        workers=workers,
        device=device.value,
        dtype=dtype.value,
        device_memory=device_memory,
        host_memory=host_memory,
        chunk_tokens=chunk_tokens,
        listen=listen,
        residency=residency.value,
        objective=objective.value,
        activations=activations.value,
        kv_encoding=kv_encoding and kv_encoding.value,
        keep_arena=keep_arena,
        threads=threads,
        max_batched_tokens=max_batched_tokens,
        max_batch=max_batch,
        queue_capacity=queue_capacity,
        grace_seconds=grace,
        reflection=reflection,
        instance=instance,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_ca=tls_ca,
        tokens=tokens,
        tenant_requests=tenant_requests,
        eviction=eviction and eviction.value,
        evict_above=evict_above,
        evict_to=evict_to,
        admission=admission and admission.value,
        lease_seconds=lease_seconds,
        scrub_seconds=scrub_seconds,
        scrub_rate=scrub_rate,
        verify_rate=verify_rate,
        huge_pages=huge_pages and huge_pages.value,
        numa_node=numa_node,
        pin_limit=pin_limit,
        serial=serial,
        link_rate=link_rate,
        trace=trace,
        redis=redis,
        redis_password_file=redis_password_file,
        redis_ca=redis_ca,
        metrics=metrics,
        log_format=log_format,
        log_level=log_level,
        otlp_endpoint=otlp_endpoint,
    )
    limits = None if no_restart else RestartLimits()
    # A level that was asked for is there to be seen.
    is_verbose = verbose or log_level is not None
    stack = plan_stack(options)
    check_options(stack)
    running = run_stack(stack, verbose=is_verbose, limits=limits)
    raise typer.Exit(asyncio.run(running))

"""Options of the gateway."""

from __future__ import annotations

from splitpoint.config import DEFAULT_ADDRESS
from splitpoint.options.option import SIZE, Option, Section
from splitpoint.options.service import (
    GRACE_SECONDS,
    LISTEN,
    LOGS,
    METRICS_SECTION,
    OTLP_ENDPOINT,
    PARENT_FD,
    TLS_KEY,
    TLS_SERVER_NAME,
    TOKENS,
)

SCHEDULER: Option[str] = Option(
    "scheduler",
    str,
    DEFAULT_ADDRESS,
    "Address of the scheduler; several, with commas, of schedulers that serve the same workers.",
    unit="ADDRESS,...",
)
TLS_CERT: Option[str | None] = Option(
    "tls-cert",
    str,
    None,
    "Certificate chain (PEM) for HTTPS, also shown to the scheduler; absent: HTTP.",
    unit="PATH",
)
CA: Option[str | None] = Option(
    "ca",
    str,
    None,
    "Authority (PEM) that signs the scheduler's certificate; absent: no TLS to the scheduler.",
    unit="PATH",
)
SCHEDULER_CERT: Option[str | None] = Option(
    "scheduler-cert",
    str,
    None,
    "The scheduler's certificate (PEM) itself, instead of --ca: no other one is trusted, at any "
    "address.",
    unit="PATH",
)
MAX_BODY: Option[str] = Option(
    "max-body",
    str,
    "4MiB",
    "Largest body of a request; at least 1KiB.",
    unit=SIZE,
    is_rare=True,
)
MAX_REQUESTS: Option[int] = Option(
    "max-requests",
    int,
    512,
    "Largest number of requests at a time; further ones are answered 429.",
    unit="N",
    least=1,
    is_rare=True,
)
RESPONSE_MEMORY: Option[str] = Option(
    "response-memory",
    str,
    "64MiB",
    "Memory for conversations of /v1/responses with which clients go on by previous_response_id; "
    "0: none is kept.",
    unit=SIZE,
    is_rare=True,
)
BATCH_FOLDER: Option[str | None] = Option(
    "batch-folder",
    str,
    None,
    "Private folder for /v1/files and /v1/batches, made if it is absent, for one gateway; absent: "
    "these endpoints answer 404.",
    unit="DIR",
    is_rare=True,
)
BATCH_DISK: Option[str] = Option(
    "batch-disk",
    str,
    "1GiB",
    "Disk space for the files and batches of --batch-folder; uploads beyond it are refused.",
    unit=SIZE,
    is_rare=True,
)
BATCH_REQUESTS: Option[int] = Option(
    "batch-requests",
    int,
    16,
    "Largest number of generations of all batches that are open at a time.",
    unit="N",
    least=1,
    most=1024,
    is_rare=True,
)
DRAIN_SECONDS: Option[float] = Option(
    "drain-seconds",
    float,
    0.0,
    "Seconds after a stop in which requests are still accepted while /health answers 503, so that "
    "load balancers leave before connections are refused.",
    unit="SECONDS",
    least=0,
)

SECTIONS = (
    Section("process", (LISTEN, PARENT_FD)),
    Section("scheduler", (SCHEDULER, CA, SCHEDULER_CERT, TLS_SERVER_NAME)),
    Section("requests", (MAX_BODY, MAX_REQUESTS, RESPONSE_MEMORY, DRAIN_SECONDS, GRACE_SECONDS)),
    Section("batches (docs/gateway.md)", (BATCH_FOLDER, BATCH_DISK, BATCH_REQUESTS)),
    LOGS,
    Section("traces (docs/monitoring.md)", (OTLP_ENDPOINT,)),
    Section("security (docs/security.md)", (TLS_CERT, TLS_KEY, TOKENS)),
    METRICS_SECTION,
)

"""Options that every service has."""

from __future__ import annotations

from splitpoint.observe.logs import LogFormat, LogLevel
from splitpoint.options.option import Option, Section

LISTEN: Option[str] = Option(
    "listen",
    str,
    "",
    "Address to listen at: host:port (port 0: any free one) or unix:/path.",
    unit="ADDRESS",
    is_required=True,
)
PARENT_FD: Option[int | None] = Option(
    "parent-fd", int, None, "Stop when this inherited pipe is closed.", unit="FD"
)
REFLECTION = Option("reflection", bool, False, "Serve gRPC reflection (for grpcurl).", is_rare=True)

LOG_FORMAT: Option[str] = Option(
    "log-format",
    str,
    LogFormat.TEXT.value,
    "Format of everything on stderr: text, or one JSON object a line.",
    choices=tuple(LogFormat),
    is_rare=True,
)
LOG_LEVEL: Option[str] = Option(
    "log-level",
    str,
    LogLevel.INFO.value,
    "Lowest level of log lines that are written.",
    choices=tuple(LogLevel),
)
OTLP_ENDPOINT: Option[str | None] = Option(
    "otlp-endpoint",
    str,
    None,
    "Send OpenTelemetry spans to this collector by OTLP/gRPC; https:// for TLS; env: "
    "to the address in OTEL_EXPORTER_OTLP_ENDPOINT; absent: no spans (docs/monitoring.md).",
    unit="HOST:PORT|URL|env",
    is_rare=True,
)

MAX_MODEL_LEN: Option[int | None] = Option(
    "max-model-len",
    int,
    None,
    "Most tokens of a prompt and its answer together, for scheduler and workers alike; at most the "
    "model's context; absent: the model's context.",
    unit="N",
    least=2,
)

GRACE_SECONDS: Option[float] = Option(
    "grace-seconds",
    float,
    30.0,
    "Seconds that running requests may take to finish after a stop.",
    unit="SECONDS",
    least=0,
)

TLS_CERT: Option[str | None] = Option(
    "tls-cert",
    str,
    None,
    "Certificate chain (PEM) of this service; turns TLS on; absent: no TLS.",
    unit="PATH",
)
TLS_KEY: Option[str | None] = Option(
    "tls-key", str, None, "Private key of the certificate, a file of mode 0600.", unit="PATH"
)
TLS_CA: Option[str | None] = Option(
    "tls-ca",
    str,
    None,
    "Authority (PEM) that verifies peers: clients must show a certificate of it.",
    unit="PATH",
    is_rare=True,
)
TLS_SERVER_NAME: Option[str] = Option(
    "tls-server-name",
    str,
    "",
    "Name in the certificates of other services; absent: the host by which they are reached.",
    unit="NAME",
)
TOKENS: Option[str | None] = Option(
    "tokens",
    str,
    None,
    "Tokens and roles of permitted callers (TOML, see `splitpoint token`), a file of mode 0600; "
    "absent: callers need no token.",
    unit="FILE",
)
TOKEN_FILE: Option[str | None] = Option(
    "token-file",
    str,
    None,
    "Token that this service shows to other services, a file of mode 0600.",
    unit="PATH",
)

METRICS: Option[str | None] = Option(
    "metrics",
    str,
    None,
    "Serve Prometheus metrics at this address (port 0: any free one); absent: nowhere.",
    unit="HOST:PORT",
)
METRICS_OPEN = Option(
    "metrics-open",
    bool,
    False,
    "Serve --metrics without TLS beyond loopback, too: for a network that only the monitoring "
    "can reach.",
)

REDIS: Option[str | None] = Option(
    "redis",
    str,
    None,
    "Redis for registry and catalog: redis://, rediss:// (TLS) or unix:///path, with USER@ where "
    "there are users; absent: none (docs/tiers.md).",
    unit="URL",
    secret_file="redis-password-file",
)
REDIS_PASSWORD_FILE: Option[str | None] = Option(
    "redis-password-file",
    str,
    None,
    "Password of Redis, a file of mode 0600; safer than a password in the URL.",
    unit="PATH",
    is_rare=True,
)
REDIS_CA: Option[str | None] = Option(
    "redis-ca",
    str,
    None,
    "Authority (PEM) that signs the certificate of Redis.",
    unit="PATH",
    is_rare=True,
)
ADVERTISE: Option[str | None] = Option(
    "advertise",
    str,
    None,
    "Address at which other hosts reach this service, written to Redis; absent: where it listens.",
    unit="ADDRESS",
)

LOGS = Section("logs (docs/operations.md)", (LOG_FORMAT, LOG_LEVEL))
SECURITY = Section(
    "security (docs/security.md)",
    (TLS_CERT, TLS_KEY, TLS_CA, TLS_SERVER_NAME, TOKENS, TOKEN_FILE),
)
METRICS_SECTION = Section("metrics (docs/monitoring.md)", (METRICS, METRICS_OPEN))
REDIS_SECTION = Section("Redis (docs/tiers.md)", (REDIS, REDIS_PASSWORD_FILE, REDIS_CA))

COMMON = (
    Section("process", (LISTEN, PARENT_FD, REFLECTION)),
    LOGS,
    Section("traces (docs/monitoring.md)", (OTLP_ENDPOINT,)),
    SECURITY,
    METRICS_SECTION,
    REDIS_SECTION,
)

"""All bounds of the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.config import parse_size
from splitpoint.options.gateway import (
    BATCH_REQUESTS,
    DRAIN_SECONDS,
    MAX_BODY,
    MAX_REQUESTS,
    RESPONSE_MEMORY,
)
from splitpoint.options.service import GRACE_SECONDS


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts, bytes and seconds. Tests use small values; docs/gateway.md has the defaults."""

    # Bytes of one body, and of all that are being read at a time.
    body_bytes: int = parse_size(MAX_BODY.default)
    all_bodies_bytes: int = 256 << 20
    # Seconds until a body must have arrived.
    body_seconds: float = 60.0
    # Bytes of one request's line and headers, and seconds until they must have arrived.
    header_bytes: int = 32 << 10
    header_seconds: float = 15.0
    # Requests that are answered at a time, waiting ones included.
    requests: int = MAX_REQUESTS.default
    # Bytes of all kept conversations of /v1/responses, and seconds until one is forgotten.
    response_bytes: int = parse_size(RESPONSE_MEMORY.default)
    response_seconds: float = 3600.0
    # Seconds until an upload must have arrived; each part of it within `body_seconds`.
    upload_seconds: float = 3600.0
    # Batches that are answered at a time, and generations of all of them that are open.
    batches: int = 4
    batch_requests: int = BATCH_REQUESTS.default
    # A connection is closed if its client does not read for this long, or sends no request.
    stall_seconds: float = 30.0
    idle_seconds: float = 75.0
    # For this long, bytes that follow an answer sent before the end of the body are discarded.
    linger_seconds: float = 10.0
    # New requests are still answered for this long after a stop.
    drain_seconds: float = DRAIN_SECONDS.default
    # Running requests may go on for this long after that.
    grace_seconds: float = GRACE_SECONDS.default
    # Longest wait for the scheduler's answer to anything but a generation.
    call_seconds: float = 30.0
    # Hint to clients that were turned away for lack of room.
    retry_seconds: float = 1.0

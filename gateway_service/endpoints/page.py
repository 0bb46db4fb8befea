"""The page at /, its files, and GET /splitpoint/status: what its live view shows.

The page runs no inline script and loads nothing from elsewhere; its policy says so to the browser.
Counters count since the start of their process: the page divides the differences of two readings
by those of `uptime_seconds`.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway_service.endpoints.endpoint import Gateway
from gateway_service.http.exchange import Exchange
from gateway_service.openai.errors import HttpError
from gateway_service.openapi import Status
from splitpoint.client.caller_spans import Metadata
from splitpoint.client.scheduler_attempts import ADMIN
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

# Most waiting requests that are named; the others are counted.
_MOST_WAITING = 5


def status_reading(
    scheduler: pb.GetSchedulerStatusResponse,
    queue: pb.GetQueueResponse,
    workers: pb.ListWorkersResponse,
) -> Status:
    """Return the live view: the scheduler's counters, its queue, and each worker with its link.

    Names neither requests nor tenants: the page has no use for them.
    """
    return {
        "scheduler": _scheduler(scheduler),
        "queue": {
            "waiting_count": len(queue.requests),
            "capacity": queue.capacity,
            "requests": [
                {
                    "waited_seconds": request.waited_duration.ToTimedelta().total_seconds(),
                    "reason": request.reason,
                }
                for request in queue.requests[:_MOST_WAITING]
            ],
        },
        "workers": [_worker(worker) for worker in workers.workers],
    }


def _scheduler(status: pb.GetSchedulerStatusResponse) -> dict[str, Any]:
    return {
        "uptime_seconds": status.uptime_seconds,
        "running_count": status.running_count,
        "waiting_count": status.waiting_count,
        "completed_count": status.completed_count,
        "failed_count": status.failed_count,
        "rejected_count": status.rejected_count,
        "prompt_token_count": status.prompt_token_count,
        "cached_token_count": status.cached_token_count,
        "generated_token_count": status.generated_token_count,
        "ttft_count": status.ttft_count,
        "ttft_seconds_sum": status.ttft_seconds_sum,
    }


def _worker(worker: pb.WorkerStatus) -> dict[str, Any]:
    state = "draining" if worker.draining else "ready" if worker.ready else "not ready"
    return {
        "id": worker.worker_id,
        "address": worker.address,
        "state": state,
        "message": worker.message,
        "device": worker.device,
        "running_count": worker.running_count,
        "cache_capacity_bytes": worker.cache_capacity_bytes,
        "cache_charged_bytes": worker.cache_charged_bytes,
        "link": _link(worker),
        "telemetry": _telemetry(worker.telemetry) if worker.HasField("telemetry") else None,
    }


def _link(worker: pb.WorkerStatus) -> dict[str, Any] | None:
    """Return the rate that the link can have, and where that is known from; None if unknown."""
    if worker.emulated_link_bytes_per_second:
        return {"kind": "emulated", "bytes_per_second": worker.emulated_link_bytes_per_second}
    if worker.telemetry.link_ceiling_bytes_per_second:
        ceiling = worker.telemetry.link_ceiling_bytes_per_second
        return {"kind": "at most", "bytes_per_second": ceiling}
    if worker.profile.link_bytes_per_second:
        return {"kind": "measured", "bytes_per_second": worker.profile.link_bytes_per_second}
    return None


def _telemetry(telemetry: types_pb2.Telemetry) -> dict[str, Any]:
    has_split = telemetry.HasField("split_tokens")
    return {
        "uptime_seconds": telemetry.uptime_seconds,
        "generated_token_count": telemetry.generated_token_count,
        "prefilled_token_count": telemetry.prefilled_token_count,
        "link_in_bytes": telemetry.link_in_bytes,
        "link_in_busy_seconds": telemetry.link_in_busy_seconds,
        "compute_busy_seconds": telemetry.compute_busy_seconds,
        "loaded_token_count": telemetry.loaded_token_count,
        "rebuilt_token_count": telemetry.rebuilt_token_count,
        "recomputed_token_count": telemetry.recomputed_token_count,
        "split_tokens": telemetry.split_tokens if has_split else None,
        "cache_used_bytes": telemetry.cache_used_bytes,
    }


_FOLDER = Path(__file__).resolve().parent / "page_files"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
INDEX = "index.html"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SAFETY = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file. `headers` are those of every answer with it; `compressed` is gzip's form."""

    content: bytes
    compressed: bytes
    tag: str
    headers: Mapping[str, str]

    def is_known(self, if_none_match: str) -> bool:
        """Return True if the browser's If-None-Match names this version."""
        tags = (tag.strip().removeprefix("W/") for tag in if_none_match.split(","))
        return any(tag in (self.tag, "*") for tag in tags)


def read_files() -> dict[str, PageFile]:
    """Return the files by name."""
    return {path.name: _read(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {
        "content-type": _TYPES[path.suffix],
        # Asked for again each time, and answered by 304: a new release shows at once.
        "cache-control": "no-cache",
        # Weak: the compressed form has it, too.
        "etag": f"W/{tag}",
        "vary": "accept-encoding",
        **_SAFETY,
    }
    return PageFile(content, gzip.compress(content, mtime=0), tag, headers)


class Page:
    """Answers with the file that the path names; / is the page itself. Asks for no key."""

    def __init__(self) -> None:
        self._files = read_files()

    async def __call__(self, gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
        file = self._files.get(exchange.scope["path_params"].get("name", INDEX))
        if file is None:
            raise HttpError(404, "the page has no such file", reason="UNKNOWN_URL")
        status, headers = 200, dict(file.headers)
        kind = headers.pop("content-type").encode()
        if any(file.is_known(tags) for tags in exchange.headers(b"if-none-match")):
            status, body = 304, b""
        else:
            body = _encoded(file, exchange, headers)
        await exchange.respond_bytes(body, kind, status=status, headers=headers)


def _encoded(file: PageFile, exchange: Exchange, headers: dict[str, str]) -> bytes:
    """Return the body in a form that the client takes, and name it in the headers."""
    takes = ",".join(exchange.headers(b"accept-encoding"))
    if not any(each.partition(";")[0].strip() == "gzip" for each in takes.split(",")):
        return file.content
    headers["content-encoding"] = "gzip"
    return file.compressed


async def status(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    """Answer with the scheduler's counters, its queue and its workers.

    Raises PermissionDenied for a client whose key does not have the role for them.
    """
    call = gateway.upstream.call
    scheduler, queue, workers = await asyncio.gather(
        call(ADMIN, "GetSchedulerStatus", pb.GetSchedulerStatusRequest(), metadata),
        call(ADMIN, "GetQueue", pb.GetQueueRequest(), metadata),
        call(ADMIN, "ListWorkers", pb.ListWorkersRequest(), metadata),
    )
    await exchange.respond(
        status_reading(scheduler, queue, workers), headers={"cache-control": "no-store"}
    )

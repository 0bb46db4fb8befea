"""What the page shows of a running stack, as plain JSON values made from the scheduler's messages.

Counters count since the start of their process: the page divides the differences of two readings
by those of `uptime_seconds`. Knows no HTTP and no channel.
"""

from __future__ import annotations

from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

# Most waiting requests that are named; the others are counted.
_MOST_WAITING = 5


def status_reading(
    scheduler: pb.GetSchedulerStatusResponse,
    queue: pb.GetQueueResponse,
    workers: pb.ListWorkersResponse,
) -> dict[str, object]:
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


def _scheduler(status: pb.GetSchedulerStatusResponse) -> dict[str, object]:
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


def _worker(worker: pb.WorkerStatus) -> dict[str, object]:
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


def _link(worker: pb.WorkerStatus) -> dict[str, object] | None:
    """Return the rate that the link can have, and where that is known from; None if unknown."""
    if worker.emulated_link_bytes_per_second:
        return {"kind": "emulated", "bytes_per_second": worker.emulated_link_bytes_per_second}
    if worker.telemetry.link_ceiling_bytes_per_second:
        ceiling = worker.telemetry.link_ceiling_bytes_per_second
        return {"kind": "at most", "bytes_per_second": ceiling}
    if worker.profile.link_bytes_per_second:
        return {"kind": "measured", "bytes_per_second": worker.profile.link_bytes_per_second}
    return None


def _telemetry(telemetry: types_pb2.Telemetry) -> dict[str, object]:
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

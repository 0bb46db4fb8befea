"""Facts about requests for log lines and spans: counts, seconds and names.

Text, token ids and tenants are left out: readers of logs need not be trusted with them.
"""

from __future__ import annotations

from scheduler_service.api.request import Request
from splitpoint.errors import SplitpointError
from splitpoint.observe.logs import LogFacts
from splitpoint.planning.plan import Plan
from splitpoint.v1 import scheduler_pb2, types_pb2


def of_completed(request: Request, message: scheduler_pb2.GenerateComplete) -> LogFacts:
    """Return the facts of a request that completed."""
    plan, usage = message.plan, message.usage
    return {
        "outcome": _name(types_pb2.FinishReason.Name(message.finish_reason), "FINISH_REASON_"),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "queue_seconds": round(message.queue_seconds, 6),
        "restore_seconds": round(message.restore_seconds, 6),
        "ttft_seconds": round(message.ttft_seconds, 6),
        "total_seconds": round(message.total_seconds, 6),
        "worker": message.worker_id,
        "method": _name(types_pb2.RestoreMethod.Name(plan.method), "RESTORE_METHOD_"),
        "residency": _name(types_pb2.Residency.Name(plan.residency), "RESIDENCY_"),
        "split_tokens": plan.split_tokens,
        "losses": request.losses,
        **_of_drafts(usage.speculation),
        **_of_selection(usage.selection),
    }


def _of_drafts(usage: types_pb2.SpeculationUsage) -> LogFacts:
    """Return what drafted, and how well; nothing for plain decoding."""
    if not usage.draft_count:
        return {}
    return {
        "draft_method": _name(types_pb2.DraftMethod.Name(usage.method), "DRAFT_METHOD_"),
        "draft_tokens": usage.draft_token_count,
        "accepted_tokens": usage.accepted_token_count,
    }


def _of_selection(usage: types_pb2.SelectionUsage) -> LogFacts:
    """Return what was read by selection; nothing if everything was."""
    if not usage.step_count:
        return {}
    return {
        "is_approximate": usage.is_approximate,
        "selected_steps": usage.step_count,
        "visible_tokens": usage.visible_token_count,
        "read_tokens": usage.read_token_count,
    }


def of_failed(request: Request, error: SplitpointError, worker_id: str | None) -> LogFacts:
    """Return the facts of a request that failed. `worker_id`: where it ran; None: nowhere."""
    times = request.times
    ttft = None if times.first_token is None else round(times.first_token - times.arrived, 6)
    ended = times.arrived if request.ended_at is None else request.ended_at
    return {
        "outcome": error.reason,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": len(request.output),
        "ttft_seconds": ttft,
        "total_seconds": round(ended - times.arrived, 6),
        "worker": worker_id,
        "losses": request.losses,
    }


def of_plan(plan: Plan) -> LogFacts:
    """Return the facts with which an attempt begins."""
    return {
        "method": plan.method.value,
        "residency": plan.residency.value,
        "split_tokens": plan.split_tokens,
        "cached_tokens": plan.cached_tokens,
        "new_tokens": plan.new_tokens,
        "footprint_bytes": plan.footprint_bytes,
        "predicted_ttft_seconds": plan.predicted_ttft_seconds,
    }


def _name(constant: str, prefix: str) -> str:
    return constant.removeprefix(prefix).lower()

"""The final answers of the scheduler, rejections, and what the log says of requests.

Log lines and spans have counts, seconds and names. Text, token ids and tenants are left out:
readers of logs need not be trusted with them.
"""

from __future__ import annotations

from scheduler_service.api.request import Request
from scheduler_service.limits import Limits
from scheduler_service.placement.plan_report import actual_plan, with_drafts, with_selection
from scheduler_service.requests.admission import Rejected
from scheduler_service.requests.attempt import Attempt
from splitpoint.errors import ResourceExhausted, SplitpointError
from splitpoint.observe.logs import LogFacts
from splitpoint.planning.plan import RECOMPUTED, Plan
from splitpoint.planning.words import in_words
from splitpoint.transport.convert import plan_to_proto
from splitpoint.v1 import scheduler_pb2, types_pb2


def completion(
    attempt: Attempt,
    *,
    reason: types_pb2.FinishReason,
    step_seconds: float | None,
    now: float,
) -> scheduler_pb2.GenerateComplete:
    """Return the last message of a request, with all text that was held back.

    `step_seconds`: the worker's mean over the steps of a streamed request.
    """
    if attempt.plan is None:
        raise RuntimeError(f"{attempt.request.request_id} ended before it was sent to a worker")
    request, report = attempt.request, attempt.report
    plan = with_drafts(
        actual_plan(attempt.plan, report),
        attempt.speculation,
        request.drafts.usage,
        can_draft=attempt.can_draft,
    )
    plan = with_selection(
        plan, request.selection, request.selected.sum, drafts_give_way=attempt.drafts_give_way
    )
    message = completion_of_tokens(request, reason=reason, now=now)
    message.plan.CopyFrom(plan_to_proto(in_words(plan)))
    least = request.least_cached_tokens
    cached = plan.cached_tokens if least is None else least
    # The last token is always computed. Of a request that was resumed, delivered ones count, too.
    message.usage.cached_tokens = min(cached, len(request.prompt) - 1)
    message.worker_id = attempt.worker_id
    message.restore_seconds = report.restore_seconds if report is not None else 0.0
    if step_seconds is not None:
        message.step_seconds = step_seconds
    return message


def completion_of_tokens(
    request: Request, *, reason: types_pb2.FinishReason, now: float
) -> scheduler_pb2.GenerateComplete:
    """Return the last message of a request whose tokens no worker had to compute."""
    times, output = request.times, request.output
    stopped = reason == types_pb2.FINISH_REASON_STOP
    text = output.finish(stopped=stopped)
    return scheduler_pb2.GenerateComplete(
        finish_reason=reason,
        matched_stop=output.matched_stop if stopped else "",
        usage=scheduler_pb2.Usage(
            prompt_tokens=len(request.prompt),
            completion_tokens=len(output),
            speculation=request.drafts.usage,
            selection=request.selected.usage,
        ),
        seed=request.sampling.seed,
        request_id=request.client_request_id,
        queue_seconds=(times.dispatched or now) - times.arrived,
        ttft_seconds=(times.first_token or now) - times.arrived,
        total_seconds=now - times.arrived,
        text=text,
    )


def rejection(verdict: Rejected, request: Request, limits: Limits) -> ResourceExhausted:
    """Return the error: a full queue may be retried, what can never fit has its numbers."""
    numbers = verdict.numbers
    if numbers is None:
        return ResourceExhausted(
            verdict.reason,
            reason="QUEUE_FULL",
            retry_after_seconds=limits.retry_seconds,
            queue_capacity=limits.queue_capacity,
        )
    why = ""
    if request.forced == RECOMPUTED:
        why = "; restoring from tokens needs resident residency, so it cannot be streamed"
    return ResourceExhausted(
        f"{verdict.reason}{why}",
        reason="NEVER_FITS",
        needed_bytes=numbers.needed_bytes,
        capacity_bytes=numbers.capacity_bytes,
        needed_tokens=numbers.needed_tokens,
        capacity_tokens=numbers.capacity_tokens,
    )


# -- facts for log lines and spans --------------------------------------------------


def facts_of_completed(request: Request, message: scheduler_pb2.GenerateComplete) -> LogFacts:
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


def facts_of_failed(request: Request, error: SplitpointError, worker_id: str | None) -> LogFacts:
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


def facts_of_plan(plan: Plan) -> LogFacts:
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

"""The final answers of the scheduler: the `complete` message, and rejections."""

from __future__ import annotations

from scheduler_service.api.request import Request
from scheduler_service.limits import Limits
from scheduler_service.placement.plan_report import actual_plan, with_drafts, with_selection
from scheduler_service.policy.admission import Rejected
from scheduler_service.requests.attempts import Attempt
from splitpoint.errors import ResourceExhausted
from splitpoint.planning.plan import RestoreMethod
from splitpoint.planning.words import in_words
from splitpoint.transport.convert import plan_to_proto
from splitpoint.v1 import scheduler_pb2, types_pb2


def completion(
    attempt: Attempt,
    *,
    reason: types_pb2.FinishReason,
    matched_stop: str,
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
    message = completion_of_tokens(request, reason=reason, matched_stop=matched_stop, now=now)
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
    request: Request, *, reason: types_pb2.FinishReason, matched_stop: str, now: float
) -> scheduler_pb2.GenerateComplete:
    """Return the last message of a request whose tokens no worker had to compute."""
    times, output = request.times, request.output
    stopped = reason == types_pb2.FINISH_REASON_STOP
    text = output.finish(stopped=stopped)
    return scheduler_pb2.GenerateComplete(
        finish_reason=reason,
        matched_stop=(matched_stop or output.matched_stop) if stopped else "",
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
    if request.restore_method is RestoreMethod.TOKENS:
        why = "; restoring from tokens needs resident residency, so it cannot be streamed"
    return ResourceExhausted(
        f"{verdict.reason}{why}",
        reason="NEVER_FITS",
        needed_bytes=numbers.needed_bytes,
        capacity_bytes=numbers.capacity_bytes,
        needed_tokens=numbers.needed_tokens,
        capacity_tokens=numbers.capacity_tokens,
    )

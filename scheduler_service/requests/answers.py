"""The words of the scheduler's final answers: the `complete` message, and rejections.

Pure: reads a request's books, changes nothing.
"""

from __future__ import annotations

from scheduler_service.api.request import Request
from scheduler_service.placement.admission import Rejected
from scheduler_service.placement.planning import as_it_happened
from splitpoint.errors import ResourceExhausted
from splitpoint.planning.planner import Plan, RestoreMethod
from splitpoint.transport.convert import plan_to_proto
from splitpoint.v1 import scheduler_pb2, types_pb2, worker_pb2


def completion(
    request: Request,
    *,
    worker_id: str,
    plan: Plan,
    report: worker_pb2.RestoreReport | None,
    reason: types_pb2.FinishReason,
    matched_stop: str,
    text: str,
    step_seconds: float | None,
    now: float,
) -> scheduler_pb2.GenerateComplete:
    """What the client learns at the end. `text` is what was held back until now,
    `step_seconds` the worker's mean of a streamed request's steps."""
    times = request.times
    happened = as_it_happened(plan, report)
    prompt_tokens = len(request.input.prompt)
    return scheduler_pb2.GenerateComplete(
        finish_reason=reason,
        matched_stop=matched_stop,
        usage=scheduler_pb2.Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=len(request.transcript),
            cached_tokens=min(happened.cached_tokens, prompt_tokens),
        ),
        seed=request.input.seed,
        plan=plan_to_proto(happened),
        worker_id=worker_id,
        request_id=request.input.request_id,
        queue_seconds=(times.dispatched or now) - times.arrived,
        restore_seconds=report.restore_seconds if report is not None else 0.0,
        ttft_seconds=(times.first_token or now) - times.arrived,
        total_seconds=now - times.arrived,
        text=text,
        step_seconds=step_seconds,
    )


def rejection(
    verdict: Rejected,
    *,
    queue_capacity: int,
    retry_seconds: float,
    restore_method: RestoreMethod | None = None,
) -> ResourceExhausted:
    """A full queue is worth another try; what can never fit comes with its numbers.

    `restore_method`: what the request asked for, which may be why it could not be streamed.
    """
    numbers = verdict.numbers
    if numbers is None:
        return ResourceExhausted(
            verdict.reason,
            reason="QUEUE_FULL",
            retry_after_seconds=retry_seconds,
            queue_capacity=queue_capacity,
        )
    why = ""
    if restore_method is RestoreMethod.TOKENS:
        why = "; restoring from tokens needs resident residency, so it cannot be streamed"
    return ResourceExhausted(
        f"{verdict.reason}{why}",
        reason="NEVER_FITS",
        needed_bytes=numbers.needed_bytes,
        capacity_bytes=numbers.capacity_bytes,
        needed_tokens=numbers.needed_tokens,
        capacity_tokens=numbers.capacity_tokens,
    )

"""What a scheduler says about a finished answer beside OpenAI's fields, as plain JSON values.

The field `splitpoint` of answers whose request asked for it (`include_plan`): the plan with its
reason, the worker, the measured seconds, and what drafts came to. Knows no HTTP.
"""

from __future__ import annotations

from splitpoint.transport import convert
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2


def plan_report(complete: pb.GenerateComplete) -> dict[str, object]:
    """Return the value of the field `splitpoint`; seconds are those of the scheduler's clock.

    `plan` is None if the answer had ended before this scheduler ran anything of it.
    """
    speculation = complete.usage.speculation
    return {
        "request_id": complete.request_id,
        "worker": complete.worker_id,
        # As text: numbers of JavaScript have 53 bits.
        "seed": str(complete.seed),
        "prompt_tokens": complete.usage.prompt_tokens,
        "cached_tokens": complete.usage.cached_tokens,
        "completion_tokens": complete.usage.completion_tokens,
        "queue_seconds": complete.queue_seconds,
        "restore_seconds": complete.restore_seconds,
        "ttft_seconds": complete.ttft_seconds,
        "total_seconds": complete.total_seconds,
        "step_seconds": complete.step_seconds if complete.HasField("step_seconds") else None,
        "drafted_tokens": speculation.draft_token_count,
        "accepted_tokens": speculation.accepted_token_count,
        "plan": _plan(complete.plan) if complete.HasField("plan") else None,
    }


def _plan(message: types_pb2.Plan) -> dict[str, object]:
    plan = convert.plan_from_proto(message)
    return {
        "residency": plan.residency.value,
        "method": plan.method.value,
        "schedule": plan.schedule.value,
        "reason": plan.reason,
        "reason_details": list(plan.reason_details),
        "cached_tokens": plan.cached_tokens,
        "new_tokens": plan.new_tokens,
        "split_tokens": plan.split_tokens,
        "device_tokens": plan.device_tokens,
        "fetched_tokens": plan.fetched_tokens,
        "fetch_source": plan.fetch_source,
        "fetch_transfer": plan.fetch_transfer,
        "recomputed_tokens": plan.recomputed_tokens,
        "resident_tokens": plan.resident_tokens,
        "footprint_bytes": plan.footprint_bytes,
        "predicted_restore_seconds": plan.predicted_restore_seconds,
        "predicted_load_seconds": plan.predicted_load_seconds,
        "predicted_recompute_seconds": plan.predicted_recompute_seconds,
        "predicted_ttft_seconds": plan.predicted_ttft_seconds,
        "predicted_step_seconds": plan.predicted_step_seconds,
    }

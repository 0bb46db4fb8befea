"""ExplainPlan: the plan that a request would get from each ready worker. Runs nothing."""

from __future__ import annotations

from scheduler_service.api.validation import DEFAULT_MAX_TOKENS, optional_residency
from scheduler_service.cluster.registry import Registry
from scheduler_service.options import SchedulerOptions
from scheduler_service.placement.footprint import NeverFits
from scheduler_service.placement.planning import PlanOptions, explain
from scheduler_service.prefixes.lookup import FetchSource
from splitpoint.errors import InvalidArgument, Unavailable
from splitpoint.planning.words import in_words
from splitpoint.transport.convert import objective_from_proto, plan_to_proto, tier_from_proto
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2


def explain_plans(
    request: pb.ExplainPlanRequest, registry: Registry, options: SchedulerOptions
) -> pb.ExplainPlanResponse:
    """Raises InvalidArgument for bad counts, Unavailable if no worker is ready."""
    residency = optional_residency(request.residency)
    _check_counts(request, options.model.shape.context_length)
    objective = options.objective
    if request.objective:
        objective = objective_from_proto(request.objective)
    response = pb.ExplainPlanResponse()
    for worker in registry.ready():
        if worker.ready is None:
            continue
        answer = explain(
            worker.ready.facts,
            cached_tokens=request.cached_tokens,
            new_tokens=request.new_tokens,
            max_tokens=request.max_tokens or DEFAULT_MAX_TOKENS,
            residency=residency,
            options=PlanOptions(objective=objective),
            sources=_sources(request),
        )
        entry = response.plans.add(worker_id=worker.worker_id)
        if isinstance(answer, NeverFits):
            entry.rejection = answer.reason
        else:
            entry.plan.CopyFrom(plan_to_proto(in_words(answer)))
    if not response.plans:
        raise Unavailable(
            "no worker is ready",
            reason="NO_WORKER",
            retry_after_seconds=options.limits.retry_seconds,
        )
    return response


def _check_counts(request: pb.ExplainPlanRequest, context_length: int) -> None:
    for field, least in (("cached_tokens", 0), ("new_tokens", 1), ("max_tokens", 0)):
        if getattr(request, field) < least:
            raise InvalidArgument(f"{field} must be at least {least}", field=field)
    given = request.cached_tokens + request.new_tokens
    # The default max_tokens need not fit.
    if given + request.max_tokens > context_length:
        raise InvalidArgument(
            f"the tokens exceed the context of {context_length:,}",
            field="new_tokens",
            reason="CONTEXT_EXCEEDED",
        )
    if not 0 <= request.remote_cached_tokens <= given:
        raise InvalidArgument(
            "remote_cached_tokens must be at least 0 and at most cached + new",
            field="remote_cached_tokens",
        )
    if request.tier == types_pb2.TIER_ARENA or (request.tier and request.remote_store_address):
        raise InvalidArgument(
            "name a tier behind the arena or another store, not both", field="tier"
        )


def _sources(request: pb.ExplainPlanRequest) -> list[FetchSource]:
    if not request.remote_cached_tokens:
        return []
    if request.tier:
        return [FetchSource("", request.remote_cached_tokens, tier_from_proto(request.tier))]
    address = request.remote_store_address or "another store"
    return [FetchSource(address, request.remote_cached_tokens)]

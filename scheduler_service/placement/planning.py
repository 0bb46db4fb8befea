"""From a granted place to the worker's plan, and from what happened back to the plan.

Pure, on top of `splitpoint.planning.planner`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from scheduler_service.placement.admission import Admitted
from scheduler_service.placement.fetch_plan import Fetch, FetchSource, plan_with_fetch
from scheduler_service.placement.footprint import (
    Demand,
    Fits,
    NeverFits,
    WorkerFacts,
    footprint_of,
    resident_share,
)
from splitpoint.errors import InvalidArgument
from splitpoint.planning.planner import (
    Objective,
    Plan,
    PlanInput,
    Residency,
    RestoreMethod,
    plan_request,
)
from splitpoint.transport.convert import method_from_proto
from splitpoint.v1 import worker_pb2
from splitpoint.words import counted

# Of what was predicted, what a restore may take without a word about it.
_AS_PREDICTED = (0.75, 1.25)
# Less than this is told by no ratio: other work on the processor moves restores by as much.
_WORTH_TELLING_SECONDS = 0.01
# The share of a restore in which the busier of link and device is what limits it.
_LIMITS = 0.5


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a request, or the scheduler for all of them, asks of a plan."""

    # Forced by the client; None: as the planner says.
    split_tokens: int | None = None
    restore_method: RestoreMethod | None = None
    objective: Objective = Objective.LATENCY


NO_WISHES = Wishes()


def plan_attempt(
    worker: WorkerFacts,
    admitted: Admitted,
    *,
    token_count: int,
    cached_tokens: int,
    wishes: Wishes = NO_WISHES,
    sources: Sequence[FetchSource] = (),
) -> Fetch | Plan:
    """The plan of one placement, perhaps with a fetch before it.

    Args:
        token_count: tokens known now: the prompt, and those already delivered.
        cached_tokens: of these in the worker's store, as far as is known.
        sources: other stores that hold the sequence's beginning, as far as is known.

    Raises InvalidArgument for a forced split or method that cannot be.
    """
    place = _Place(admitted.residency, admitted.size_bytes, admitted.reason, admitted.spare_bytes)
    return _plan(worker, place, token_count, cached_tokens, wishes, sources)


def explain(
    worker: WorkerFacts,
    *,
    cached_tokens: int,
    new_tokens: int,
    max_tokens: int,
    residency: Residency | None,
    wishes: Wishes = NO_WISHES,
    sources: Sequence[FetchSource] = (),
) -> Plan | NeverFits:
    """The plan that a request with these counts would get from an empty worker."""
    demand = Demand(cached_tokens + new_tokens + max_tokens, residency)
    verdict = footprint_of(demand, worker)
    if not isinstance(verdict, Fits):
        return verdict
    spare = resident_share(verdict, worker.cache_capacity_bytes, worker.page_bytes)
    place = _Place(verdict.residency, verdict.size_bytes + spare, verdict.reason, spare)
    planned = _plan(worker, place, cached_tokens + new_tokens, cached_tokens, wishes, sources)
    return planned.plan if isinstance(planned, Fetch) else planned


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the cache will live, what that is charged, and why there."""

    residency: Residency
    size_bytes: int
    reason: str
    spare_bytes: int = 0


def _plan(
    worker: WorkerFacts,
    place: _Place,
    token_count: int,
    cached_tokens: int,
    wishes: Wishes,
    sources: Sequence[FetchSource],
) -> Fetch | Plan:
    def plan(cached: int) -> Plan:
        return plan_request(
            worker.shape,
            worker.profile,
            PlanInput(
                cached_tokens=cached,
                new_tokens=token_count - cached,
                has_activations=worker.has_activations,
                schedule=worker.schedule,
                residency=place.residency,
                footprint_bytes=place.size_bytes,
                spare_bytes=place.spare_bytes,
                keeps_activations=True,
                forced_split_tokens=wishes.split_tokens,
                forced_method=wishes.restore_method,
                residency_reason=_with_loss(place, cached, worker),
                objective=wishes.objective,
                chunk_tokens=worker.chunk_tokens,
                staging_tokens=worker.staging_tokens,
                prefill_tokens=worker.max_batched_tokens,
                encoding=worker.encoding,
            ),
        )

    # The last token is always computed: its logits are needed.
    own = plan(min(cached_tokens, token_count - 1))
    if not sources or not worker.kvstore_address or not worker.slot_bytes:
        return own
    return plan_with_fetch(
        own,
        plan,
        worker.profile,
        sources,
        chunk_tokens=worker.chunk_tokens,
        chunk_bytes=worker.slot_bytes,
    )


def _with_loss(place: _Place, cached_tokens: int, worker: WorkerFacts) -> str:
    """The place's reason, which says so when what comes from the store is not exact.

    A streamed request reads there what it has stored itself, too.
    """
    is_read = cached_tokens or place.residency is Residency.STREAMED
    if not worker.encoding.is_lossy or not is_read:
        return place.reason
    return (
        f"{place.reason}; the store keeps {worker.encoding.value}, so cached tokens are approximate"
    )


def check_split(split_tokens: int | None, workers: Collection[WorkerFacts]) -> None:
    """Refuse a forced split before it waits in the queue. Raises InvalidArgument."""
    if split_tokens and workers and not any(worker.has_activations for worker in workers):
        raise InvalidArgument(
            "the store holds no activations, so nothing can be rebuilt from them: only split 0 "
            "is possible (start with --activations always)",
            field="split_tokens",
            reason="NO_ACTIVATIONS",
        )


def as_it_happened(plan: Plan, report: worker_pb2.RestoreReport | None) -> Plan:
    """The plan with what the worker found and did in place of what was expected."""
    if report is None or report.method == 0:
        return plan
    method = method_from_proto(report.method)
    plan = _as_timed(_as_met(_as_predicted(_as_fetched(plan, report), report), report), report)
    found = (report.cached_tokens, report.split_tokens, method)
    if found == (plan.cached_tokens, plan.split_tokens, plan.method):
        return plan
    total = plan.cached_tokens + plan.new_tokens
    return replace(
        plan,
        cached_tokens=report.cached_tokens,
        new_tokens=max(1, total - report.cached_tokens),
        split_tokens=report.split_tokens,
        method=method,
        reason=(
            f"{plan.reason}; the worker found {counted(report.cached_tokens, 'token')} cached "
            f"instead of {plan.cached_tokens:,} and used method {method.value} with split "
            f"{report.split_tokens:,}"
        ),
    )


def _as_met(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """With the tokens that were recomputed until the chunks from the back were there."""
    if report.recomputed_tokens == plan.recomputed_tokens:
        return plan
    reason = plan.reason
    if report.recomputed_tokens:
        reason = f"{reason}; they met at {report.recomputed_tokens:,}"
        if plan.recomputed_tokens:
            reason = f"{reason} where {plan.recomputed_tokens:,} was expected"
    return replace(plan, recomputed_tokens=report.recomputed_tokens, reason=reason)


def _as_timed(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """With what kept the restore from taking what the worker predicted, in the reason."""
    seconds, predicted = report.restore_seconds, report.predicted_restore_seconds
    if not seconds or not predicted:
        return plan
    ratio = seconds / predicted
    is_near = abs(seconds - predicted) < _WORTH_TELLING_SECONDS
    if is_near or _AS_PREDICTED[0] <= ratio <= _AS_PREDICTED[1]:
        return plan
    device, link = report.compute_busy_seconds, report.link_busy_seconds
    busy = f"the link was busy {_ms(link)}, the device {_ms(device)}"
    if device > link:
        busy = f"the device was busy {_ms(device)}, the link {_ms(link)}"
    if max(device, link) < _LIMITS * seconds:
        # Copies and products were not what took so long.
        busy = f"{busy}, neither of them most of the time"
    times = f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"
    return replace(
        plan,
        reason=f"{plan.reason}; restored in {_ms(seconds)}, {times} x the prediction: {busy}",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _as_predicted(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """With what the worker predicted of what it found, by the costs it knew then."""
    predicted = report.predicted_restore_seconds
    if not predicted:
        return plan
    later = predicted - plan.predicted_restore_seconds
    return replace(
        plan,
        predicted_restore_seconds=predicted,
        predicted_ttft_seconds=plan.predicted_ttft_seconds + later,
    )


def _as_fetched(plan: Plan, report: worker_pb2.RestoreReport) -> Plan:
    """With the tokens that were fetched, and how long that took, in the reason."""
    if not plan.fetched_tokens and not report.fetched_tokens:
        return plan
    fetched = f"{counted(report.fetched_tokens, 'token')} in {report.fetch_seconds:.2g} s"
    return replace(
        plan,
        fetched_tokens=report.fetched_tokens,
        reason=f"{plan.reason}; fetched {fetched if report.fetched_tokens else 'nothing'}",
    )

"""The plan of one attempt: what the planner says for a granted place, with or without a fetch.

Pure, on top of `splitpoint.planning.planner`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler_service.placement.fetch_plan import ChunkSizes, PlannedAttempt, best_fetch
from scheduler_service.placement.footprint import Grant, NeverFits, footprint_of, grant_of
from scheduler_service.prefixes.lookup import FetchSource
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.planning.plan import (
    ForcedRestore,
    Objective,
    Plan,
    PlanInput,
    Reason,
    ReasonKind,
    Residency,
)
from splitpoint.planning.planner import plan_request
from splitpoint.planning.split_costs import tiles_of


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the client forces (None: nothing), and what plans minimize."""

    forced: ForcedRestore | None = None
    objective: Objective = Objective.LATENCY


DEFAULT_OPTIONS = PlanOptions()


def plan_attempt(
    worker: WorkerFacts,
    grant: Grant,
    *,
    token_count: int,
    cached_tokens: int,
    options: PlanOptions = DEFAULT_OPTIONS,
    sources: Sequence[FetchSource] = (),
) -> PlannedAttempt:
    """Return the plan of one attempt, perhaps with a fetch before it.

    Tokens that the device holds (`grant.device_tokens`) take no restore.

    Args:
        token_count: tokens known now: the prompt, and those already delivered.
        cached_tokens: how many of them the arena of the worker's store holds, as far as is known.
        sources: tiers of that store, and other stores, that hold the sequence's beginning, as far
            as is known.

    Raises InvalidArgument for a forced split or method that is not possible.
    """

    # The last token is always computed: its logits are needed.
    most = token_count - 1
    on_device = min(grant.device_tokens, most // worker.chunk_tokens * worker.chunk_tokens)

    def plan(cached: int) -> Plan:
        # Without their X on the device, tokens beyond those of the store could not be stored.
        device_tokens = min(on_device, cached) if worker.has_activations else on_device
        cached = max(cached, device_tokens)
        whole = _plan(worker, grant, options, cached, token_count - cached)
        if not device_tokens:
            return whole
        missing = cached - device_tokens
        part = _plan(worker, grant, options, missing, token_count - cached)
        recompute_seconds = worker.profile.prefill_seconds(
            worker.shape.fill_flops(missing, device_tokens),
            tiles_of(missing, worker.max_batched_tokens),
        )
        return _with_device_tokens(whole, part, device_tokens, recompute_seconds)

    arena_tokens = min(cached_tokens, most)
    own = plan(arena_tokens)
    if not sources or not worker.kvstore_address or not worker.slot_bytes:
        return PlannedAttempt(own)
    return best_fetch(
        own,
        plan,
        worker.profile,
        sources,
        ChunkSizes(
            worker.chunk_tokens,
            worker.slot_bytes,
            worker.max_batched_tokens,
            worker.shape if _can_meet(worker, options) else None,
        ),
        arena_tokens=arena_tokens,
    )


def _can_meet(worker: WorkerFacts, options: PlanOptions) -> bool:
    """Return True if the worker may compute the front of what a tier brings.

    It finds that front on its device when both have met. A client that forces how a prefix is
    restored forces that it is not computed; and what is computed is lost to throughput.
    """
    return worker.shares_pages and options == DEFAULT_OPTIONS


def explain(
    worker: WorkerFacts,
    *,
    cached_tokens: int,
    new_tokens: int,
    max_tokens: int,
    residency: Residency | None,
    options: PlanOptions = DEFAULT_OPTIONS,
    sources: Sequence[FetchSource] = (),
) -> Plan | NeverFits:
    """Return the plan that a request with these counts would get from an idle worker."""
    token_count = cached_tokens + new_tokens
    fits = footprint_of(token_count + max_tokens, residency, worker)
    if isinstance(fits, NeverFits):
        return fits
    grant = grant_of(fits, worker.cache_capacity_bytes, worker.page_bytes)
    return plan_attempt(
        worker,
        grant,
        token_count=token_count,
        cached_tokens=cached_tokens,
        options=options,
        sources=sources,
    ).plan


def _plan(
    worker: WorkerFacts, grant: Grant, options: PlanOptions, cached_tokens: int, new_tokens: int
) -> Plan:
    plan = plan_request(
        worker.shape,
        worker.profile,
        PlanInput(
            cached_tokens=cached_tokens,
            new_tokens=new_tokens,
            has_activations=worker.has_activations,
            schedule=worker.schedule,
            residency=grant.residency,
            footprint_bytes=grant.size_bytes,
            spare_bytes=grant.spare_bytes,
            keeps_activations=True,
            forced=options.forced,
            objective=options.objective,
            chunk_tokens=worker.chunk_tokens,
            staging_tokens=worker.staging_tokens,
            prefill_tokens=worker.max_batched_tokens,
            encoding=worker.encoding,
        ),
    )
    return plan.because(*grant.reasons, *_exactness(plan, worker))


def _exactness(plan: Plan, worker: WorkerFacts) -> Iterator[Reason]:
    """Yield what the answer's bits depend on."""
    if worker.encoding.is_lossy:
        # A streamed request also reads back what it stored itself.
        if plan.cached_tokens or plan.residency is Residency.STREAMED:
            yield Reason(ReasonKind.LOSSY_CACHE, (worker.encoding.value,))
    elif plan.split_tokens or plan.recomputed_tokens:
        yield Reason(ReasonKind.NUMERICS, (worker.numerics.value,))
    if worker.weight_format.is_lossy:
        yield Reason(ReasonKind.LOSSY_WEIGHTS, (worker.weight_format.value,))


def _with_device_tokens(
    whole: Plan, part: Plan, device_tokens: int, recompute_seconds: float
) -> Plan:
    """Return the plan of a prefix of which the device holds the leading tokens.

    `part` is the plan of the rest of the prefix, which takes `recompute_seconds` to compute. The
    worker rebuilds the share of the rest that `whole` rebuilds of all.
    """
    computed = whole.predicted_ttft_seconds - whole.predicted_restore_seconds
    return whole.because(
        Reason(ReasonKind.ON_DEVICE, (device_tokens,)),
        device_tokens=device_tokens,
        predicted_restore_seconds=part.predicted_restore_seconds,
        predicted_load_seconds=part.predicted_load_seconds,
        predicted_ttft_seconds=computed + part.predicted_restore_seconds,
        predicted_recompute_seconds=recompute_seconds,
    )

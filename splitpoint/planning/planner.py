"""Plans of a request and of a streamed batch: how the cached prefix is restored, and the reason.

Pure arithmetic over shape and profile: no gRPC, no clock, no tensors. In the order in which
a plan is made: `restore_choice` compares the ways, with `split_costs` (formulas of the schedules),
`split_search` (the best split) and `token_recompute` (from token ids). Why the best one was
chosen is said in values; `words` makes sentences of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import (
    ForcedRestore,
    Objective,
    Plan,
    PlanInput,
    Reason,
    ReasonKind,
    Residency,
    RestoreMethod,
    SplitLine,
)
from splitpoint.planning.restore_choice import Candidate, Chooser, Comparison
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import Encoding, ModelShape


def plan_request(shape: ModelShape, profile: Profile, request: PlanInput) -> Plan:
    """Return the plan of one request.

    Unless the client forces a method or a split, the predicted score under the request's
    objective is never worse than that of loading everything.
    """
    chooser = Chooser.of(shape, profile, request)
    comparison = chooser.choose()
    best, cached = comparison.best, request.cached_tokens
    load_seconds = chooser.costs.seconds(0, cached, chooser.options)
    return Plan(
        residency=request.residency,
        method=best.method,
        split_tokens=best.now,
        cached_tokens=cached,
        new_tokens=request.new_tokens,
        footprint_bytes=request.footprint_bytes,
        predicted_restore_seconds=best.seconds,
        predicted_load_seconds=load_seconds,
        predicted_ttft_seconds=best.seconds + chooser.prefill_seconds,
        split_slope=best.line.slope,
        split_intercept=best.line.intercept,
        split_cap=best.line.cap,
        schedule=best.schedule,
        recomputed_tokens=best.recomputed,
        resident_tokens=best.resident,
        tile_tokens=best.tile if chooser.length else 0,
        predicted_step_seconds=best.step_seconds,
        objective=request.objective,
        predicted_recompute_seconds=chooser.recompute_seconds,
        reasons=tuple(_reasons(chooser, comparison, load_seconds)),
    )


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The split of each sequence in a batch of streamed ones.

    Attributes:
        line: the split as a function of the length of one sequence.
        reasons: why.
        step_seconds: predicted seconds of one decode step of the whole batch.
    """

    line: SplitLine
    reasons: tuple[Reason, ...]
    step_seconds: float


def plan_batch(
    shape: ModelShape,
    profile: Profile,
    lengths: Sequence[int],
    *,
    has_activations: bool,
    schedule: Schedule,
    chunk_tokens: int,
    staging_tokens: int,
    encoding: Encoding = Encoding.NATIVE,
    resident_tokens: int = 0,
    step_compute_seconds: float | None = None,
) -> BatchPlan:
    """Return one split line for streamed sequences of these lengths, in tokens.

    Sequences that decode together share the link and the step, so they are planned as one
    sequence of all their tokens. If each sequence had its own plan, each plan would
    count the compute of the whole step, and would rebuild too few tokens.

    Args:
        lengths: at least one.
        resident_tokens: tokens, of all sequences together, whose K and V stay on the device.
        step_compute_seconds: seconds of a step without cache traffic. None: use the profile's.
    """
    total, count = sum(lengths), len(lengths)
    plan = plan_request(
        # The combined sequence may be as long as the maximum contexts of all sequences together.
        replace(shape, context_length=count * shape.context_length),
        profile,
        PlanInput(
            cached_tokens=total,
            new_tokens=count,
            has_activations=has_activations,
            schedule=schedule,
            residency=Residency.STREAMED,
            chunk_tokens=chunk_tokens,
            staging_tokens=staging_tokens,
            encoding=encoding,
            spare_bytes=resident_tokens * shape.kv_bytes_per_token,
            step_compute_seconds=step_compute_seconds,
        ),
    )
    # The sum over all n of slope * s_i + intercept / n is the line of the sum.
    cap = shape.context_length if plan.split_cap else 0
    line = SplitLine(plan.split_slope, plan.split_intercept / count, cap)
    return BatchPlan(line, plan.reasons, plan.predicted_step_seconds)


# -- why -------------------------------------------------------------------------


def _reasons(chooser: Chooser, comparison: Comparison, load_seconds: float) -> Iterator[Reason]:
    """Yield why `comparison.best` was chosen. `load_seconds`: of loading everything."""
    request = chooser.request
    if request.forced is not None:
        yield from _asked(chooser, comparison, load_seconds, request.forced)
    elif chooser.length:
        if comparison.best.method is RestoreMethod.TOKENS:
            yield from _why_tokens(chooser, comparison, load_seconds)
        elif comparison.best.split:
            yield from _why_split(chooser, comparison, load_seconds)
        else:
            yield from _why_load(chooser, comparison)
        if request.objective is Objective.THROUGHPUT:
            scores = (comparison.best.score, comparison.load.score)
            yield Reason(ReasonKind.THROUGHPUT, scores)
    if chooser.profile.host_weight_bytes:
        # Whatever is cached: they are often most of a step.
        taken = (chooser.costs.weights, chooser.profile.host_weight_bytes)
        yield Reason(ReasonKind.HOST_WEIGHTS, taken)


def _asked(
    chooser: Chooser, comparison: Comparison, load_seconds: float, forced: ForcedRestore
) -> Iterator[Reason]:
    request, best, wanted = chooser.request, comparison.best, forced.split_tokens
    if not chooser.length:
        if wanted:
            yield Reason(ReasonKind.ASKED_SPLIT, (wanted, 0))
        return
    if wanted is None:
        yield Reason(ReasonKind.ASKED_TOKENS)
        yield Reason(ReasonKind.RECOMPUTED, (best.recomputed, request.cached_tokens))
    else:
        yield Reason(ReasonKind.ASKED_SPLIT, (wanted, best.split))
    if request.is_streamed:
        yield _step(comparison)
    else:
        yield _predicted(best, load_seconds)


def _predicted(best: Candidate, load_seconds: float) -> Reason:
    is_loading = not best.split and not best.recomputed
    return Reason(
        ReasonKind.PREDICTED, (best.seconds, best.seconds if is_loading else load_seconds)
    )


def _step(comparison: Comparison) -> Reason:
    seconds = (comparison.best.step_seconds, comparison.load.step_seconds)
    return Reason(ReasonKind.STEP, seconds)


def _why_tokens(chooser: Chooser, comparison: Comparison, load_seconds: float) -> Iterator[Reason]:
    best, split = comparison.best, comparison.split
    yield Reason(ReasonKind.RECOMPUTED, (best.recomputed, chooser.request.cached_tokens))
    yield _predicted(best, load_seconds)
    if not chooser.shape.activations_can_pay:
        yield Reason(ReasonKind.CANNOT_PAY, (chooser.shape.rho,))
    elif split is None:
        yield Reason(ReasonKind.NO_ACTIVATIONS)
    else:
        yield Reason(ReasonKind.SPLIT_INSTEAD, (split.split, split.score, best.score))


def _why_split(chooser: Chooser, comparison: Comparison, load_seconds: float) -> Iterator[Reason]:
    request, best = chooser.request, comparison.best
    yield Reason(ReasonKind.SPLIT, (best.split, chooser.length, best.schedule.value))
    if request.cached_tokens and chooser.length != request.cached_tokens:
        yield Reason(ReasonKind.AT_FIRST, (best.now, request.cached_tokens))
    yield from _stays(chooser, best)
    if request.is_streamed:
        yield _step(comparison)
    else:
        yield _predicted(best, load_seconds)
    if best.schedule is Schedule.SERIAL and not request.is_streamed:
        yield from _not_considered(request)
    else:
        yield _limit(chooser, best)


def _why_load(chooser: Chooser, comparison: Comparison) -> Iterator[Reason]:
    best, tokens = comparison.best, comparison.tokens
    loaded = chooser.length - best.resident
    yield Reason(ReasonKind.LOADED, (loaded, best.resident))
    yield from _stays(chooser, best)
    if not loaded:
        return
    yield _why_no_split(chooser, comparison)
    if tokens is None:
        yield from _not_considered(chooser.request)
    else:
        yield from _why_no_tokens(chooser, tokens, comparison.load)


def _why_no_split(chooser: Chooser, comparison: Comparison) -> Reason:
    shape, costs, request = chooser.shape, chooser.costs, chooser.request
    load, split = comparison.load, comparison.split
    on_link = request.schedule is not Schedule.ROW
    if on_link and not shape.activations_can_pay:
        return Reason(ReasonKind.CANNOT_PAY, (shape.rho,))
    if split is None:
        return Reason(ReasonKind.NO_ACTIVATIONS)
    if split.split:
        return Reason(ReasonKind.SPLIT_INSTEAD, (split.split, split.score, load.score))
    send = costs.activation if on_link else 0.0
    if request.schedule is Schedule.SERIAL and send + costs.rebuild >= costs.load:
        return Reason(ReasonKind.REBUILD_COSTS, (send + costs.rebuild, costs.load))
    if chooser.compute_seconds >= load.link_seconds:
        return Reason(ReasonKind.DEVICE_BUSY, (chooser.compute_seconds, load.link_seconds))
    if costs.rebuild > 8 * costs.load:
        return Reason(ReasonKind.REBUILD_COSTS, (costs.rebuild, costs.load))
    chunks = -(-chooser.length // request.chunk_tokens) if request.chunk_tokens > 1 else 0
    return Reason(ReasonKind.OVERHEADS, (chooser.length, chunks))


def _why_no_tokens(chooser: Chooser, tokens: Candidate, load: Candidate) -> Iterator[Reason]:
    request = chooser.request
    first = min(request.chunk_tokens, request.cached_tokens)
    if tokens.recomputed:
        seconds = (tokens.recomputed, tokens.score, load.score)
        yield Reason(ReasonKind.TOKENS_INSTEAD, seconds)
    elif first < request.cached_tokens:  # else the headline says what that would take
        compute = chooser.token_recompute.block_seconds(0, first)
        yield Reason(ReasonKind.FIRST_CHUNK, (first, compute, load.link_seconds))


def _not_considered(request: PlanInput) -> Iterator[Reason]:
    """Yield why a resident restore was not compared with recomputing, if it was not."""
    if not request.is_streamed and request.schedule is not Schedule.PIPELINED:
        yield Reason(ReasonKind.TOKENS_NOT_CONSIDERED, (request.schedule.value,))


def _limit(chooser: Chooser, best: Candidate) -> Reason:
    link, device = best.link_seconds, best.compute_seconds
    if chooser.request.is_streamed:
        device += chooser.compute_seconds
        # All weights that come from the host; the candidate counts W_K and W_V only, and only
        # where something is rebuilt.
        ready = 0 if best.schedule is Schedule.ROW else best.resident
        counted_already = chooser.costs.kv_weights if best.split > ready else 0.0
        link += chooser.costs.weights - counted_already
    return Reason(ReasonKind.LIMIT, (link, device))


def _stays(chooser: Chooser, best: Candidate) -> Iterator[Reason]:
    """Yield what of a streamed prefix is on the device all the time."""
    tokens, shape = best.resident, chooser.shape
    if tokens and best.schedule is Schedule.ROW:
        size = tokens * shape.activation_bytes_per_token
        yield Reason(ReasonKind.INPUTS_STAY, (tokens, size))
    elif tokens:
        yield Reason(ReasonKind.KEYS_STAY, (tokens, tokens * shape.kv_bytes_per_token))

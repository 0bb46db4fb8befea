"""The plan of one attempt: what the planner says for a granted place, with or without a fetch.

Sources of a fetch are the tiers of the worker's own store and the arenas of other hosts' stores.
The missing chunks are copied first; then the longer prefix is restored from the arena, in the way
that the planner chooses for it. That pays if copying F tokens and restoring them takes less time
than computing them in the prefill:

    round trip + chunks * chunk bytes / rate + restore(K + F) - restore(K)
        < prefill(T | K) - prefill(T - F | K + F)

by a few percent of the time to the first token. A later token costs more to compute than an
earlier one and as much to copy, so mostly all of a source pays or nothing. Parts pay where the
prefill comes in few long pieces, or where the restore of a longer prefix is limited by another
rate; some are compared.

Only full chunks are fetched: keys of partial last chunks are known to their own store alone. Pure
arithmetic, on top of `splitpoint.planning.planner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from scheduler_service.placement.footprint import Grant, NeverFits, footprint_of, grant_of
from scheduler_service.prefixes.lookup import FetchSource
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.costs.fetching import TierEnds, rate_of
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
)
from splitpoint.planning.planner import plan_request
from splitpoint.planning.split_costs import tiles_of
from splitpoint.shapes import ModelShape

# Share of the seconds of loading that computing beside it must save.
WORTH_IT = 0.05
# Share of the time to the first token that any fetch must save: less is within the predictions'
# errors, and what is computed takes neither a disk nor a network.
LEAST_SAVED = 0.03
# Parts of what the best source holds, besides all of it.
_PARTS = 4


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
) -> tuple[Plan, FetchSource | None]:
    """Return the plan of one attempt, and what is fetched before it; None: nothing.

    Tokens that the device holds (`grant.device_tokens`) take no restore, unless the client forces
    a split: a worker then restores them, too.

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
    if options.forced is not None and options.forced.split_tokens is not None:
        on_device = 0

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
        return own, None
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
    plan, _ = plan_attempt(
        worker,
        grant,
        token_count=token_count,
        cached_tokens=cached_tokens,
        options=options,
        sources=sources,
    )
    return plan


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


# -- fetching first ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """Tokens and payload bytes of one chunk over all planes, and most tokens of a prefill's piece.

    `piece_tokens`: 0 for no bound. `shape`: None: nothing is computed while chunks are loaded.
    """

    tokens: int
    bytes: int
    piece_tokens: int = 0
    shape: ModelShape | None = None


@dataclass(frozen=True, slots=True)
class _Option:
    """A fetch of all that a source holds, or a part of it, compared with the plan without it."""

    plan: Plan
    # What of its source is fetched: full chunks.
    fetched: FetchSource
    source: FetchSource
    # Time to the first token that it saves; negative: it costs.
    saved_seconds: float
    reason: Reason


def best_fetch(
    plan: Plan,
    replan: Callable[[int], Plan],
    profile: Profile,
    sources: Iterable[FetchSource],
    sizes: ChunkSizes,
    *,
    arena_tokens: int,
) -> tuple[Plan, FetchSource | None]:
    """Return the plan with the best fetch and what is fetched, or the plan without one and None.

    The plan's reasons say why.

    Args:
        plan: for what the worker's device and the arena of its own store hold.
        replan: returns the plan for another number of cached tokens.
        profile: the worker's; `remote_bytes_per_second` has the rates.
        sources: tiers of the own store, and other stores of the same layout.
        arena_tokens: what the arena alone holds. A fetch brings all that follows: a chunk has its
            place behind its parent, also where the device holds both.
    """
    own = arena_tokens // sizes.tokens
    by_size = sorted(sources, key=lambda each: (-each.cached_tokens, each.address))
    options = [
        option
        for source in by_size
        if (option := _option(plan, replan, profile, source, sizes, own))
    ]
    if not options:
        return plan, None
    whole = max(options, key=_saved)
    parts = (
        _option(plan, replan, profile, part, sizes, own)
        for part in _parts(plan, whole.source, sizes)
    )
    best = max((whole, *(part for part in parts if part)), key=_saved)
    meetings = (_meeting(plan, replan, profile, source, sizes) for source in by_size)
    meeting = max((each for each in meetings if each), key=_saved, default=best)
    if meeting.saved_seconds > best.saved_seconds + WORTH_IT * best.plan.predicted_fetch_seconds:
        best = meeting
    if best.saved_seconds > LEAST_SAVED * plan.predicted_ttft_seconds:
        return best.plan, best.fetched
    return plan.because(Reason(ReasonKind.NO_FETCH, whole.reason.values)), None


def _saved(option: _Option) -> float:
    return option.saved_seconds


def _parts(plan: Plan, whole: FetchSource, sizes: ChunkSizes) -> Iterator[FetchSource]:
    """Yield beginnings of what a source holds beyond arena and device."""
    own, size = plan.cached_tokens // sizes.tokens, sizes.tokens
    total = plan.cached_tokens + plan.new_tokens
    most = min(whole.cached_tokens, total) // size
    chunks = {own + (most - own) * part // _PARTS for part in range(1, _PARTS)}
    if sizes.piece_tokens:
        # Enough that the rest is a whole number of pieces: the last piece is as long as others.
        pieces = -(-(total - most * size) // sizes.piece_tokens)
        chunks.add(-(-(total - pieces * sizes.piece_tokens) // size))
    for count in sorted(chunks, reverse=True):
        if own < count < most:
            yield replace(whole, cached_tokens=count * size)


def _option(
    plan: Plan,
    replan: Callable[[int], Plan],
    profile: Profile,
    source: FetchSource,
    sizes: ChunkSizes,
    own_chunks: int,
) -> _Option | None:
    """Return a fetch of all that a source holds; None if it holds no full chunk more.

    `own_chunks`: those of the arena.
    """
    total = plan.cached_tokens + plan.new_tokens
    chunks = min(source.cached_tokens, total) // sizes.tokens
    # The last token is always computed: its logits are needed.
    cached = min(chunks * sizes.tokens, total - 1)
    fetched = cached - own_chunks * sizes.tokens
    if fetched <= 0 or cached <= plan.cached_tokens:
        return None
    rate = rate_of(profile, source.place)
    seconds = rate.seconds((chunks - own_chunks) * sizes.bytes)
    longer = replan(cached)
    ttft = longer.predicted_ttft_seconds + seconds
    saved = plan.predicted_ttft_seconds - ttft
    takes = seconds + longer.predicted_restore_seconds - plan.predicted_restore_seconds
    is_all = own_chunks == plan.cached_tokens // sizes.tokens
    place = source.address or source.tier.value
    transfer = rate.transfer.value if source.address else ""
    values = (
        fetched,
        place,
        transfer,
        rate.bytes_per_second,
        rate.basis.value,
        max(takes, 0.0),
        takes + saved,
        0 if is_all else cached - plan.cached_tokens,
    )
    reason = Reason(ReasonKind.FETCH, values)
    with_fetch = longer.because(
        reason,
        predicted_ttft_seconds=ttft,
        fetched_tokens=fetched,
        predicted_fetch_seconds=seconds,
        fetch_source=place,
        fetch_transfer=transfer,
    )
    part = replace(source, cached_tokens=chunks * sizes.tokens)
    return _Option(with_fetch, part, source, saved, reason)


def _meeting(
    plan: Plan,
    replan: Callable[[int], Plan],
    profile: Profile,
    source: FetchSource,
    sizes: ChunkSizes,
) -> _Option | None:
    """Return a load of the back of what a tier holds, while the front is computed."""
    if source.address or sizes.shape is None or plan.residency is Residency.STREAMED:
        return None
    total = plan.cached_tokens + plan.new_tokens
    chunks = min(source.cached_tokens, total) // sizes.tokens
    cached = min(chunks * sizes.tokens, total - 1)
    if cached <= plan.cached_tokens:
        return None
    rate = rate_of(profile, source.place)
    point = TierEnds(
        sizes.shape,
        profile,
        plan.cached_tokens // sizes.tokens,
        chunks,
        sizes.tokens,
        sizes.bytes,
        rate.bytes_per_second,
        sizes.piece_tokens,
    ).meeting_point()
    if point is None:
        return None
    longer = replan(cached)
    loaded = cached - point.tokens
    # What was computed is on the device: the rest of the prefix is restored.
    restore = longer.predicted_load_seconds * loaded / cached
    prefill = longer.predicted_ttft_seconds - longer.predicted_restore_seconds
    own_restore = plan.predicted_restore_seconds
    ttft = own_restore + point.seconds + restore + prefill
    saved = plan.predicted_ttft_seconds - ttft
    takes = point.seconds + restore
    values = (
        loaded,
        point.tokens - plan.cached_tokens,
        source.tier.value,
        rate.bytes_per_second,
        rate.basis.value,
        takes,
        takes + saved,
    )
    reason = Reason(ReasonKind.MEETING, values)
    with_fetch = replace(
        longer,
        # What was compared for the longer prefix is not what is done.
        reasons=(*plan.reasons, reason),
        method=RestoreMethod.TOKENS,
        split_tokens=0,
        split_slope=0.0,
        split_intercept=0.0,
        split_cap=0,
        recomputed_tokens=point.tokens,
        predicted_restore_seconds=own_restore + restore,
        predicted_ttft_seconds=ttft,
        fetched_tokens=loaded,
        predicted_fetch_seconds=point.seconds,
        fetch_source=source.tier.value,
    )
    part = replace(source, cached_tokens=chunks * sizes.tokens, meeting_tokens=point.tokens)
    return _Option(with_fetch, part, source, saved, reason)

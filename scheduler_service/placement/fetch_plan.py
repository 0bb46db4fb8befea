"""Decides whether to fetch a prefix into the worker's own arena, from where, and how much of it.

Sources are the tiers of the worker's own store and the arenas of other hosts' stores. The missing
chunks are copied first; then the longer prefix is restored from the arena, in the way that the
planner chooses for it. That pays if copying F tokens and restoring them takes less time than
computing them in the prefill:

    round trip + chunks * chunk bytes / rate + restore(K + F) - restore(K)
        < prefill(T | K) - prefill(T - F | K + F)

by a few percent of the time to the first token. A later token costs more to compute than an
earlier one and as much to copy, so mostly all of a source pays or nothing. Parts pay where the
prefill comes in few long pieces, or where the restore of a longer prefix is limited by another
rate; some are compared.

Only full chunks are fetched: keys of partial last chunks are known to their own store alone. Pure
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from scheduler_service.prefixes.lookup import FetchSource
from splitpoint.costs.fetching import TierEnds, rate_of
from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import Plan, Reason, ReasonKind, Residency, RestoreMethod
from splitpoint.shapes import ModelShape

# Share of the seconds of loading that computing beside it must save.
WORTH_IT = 0.05
# Share of the time to the first token that any fetch must save: less is within the predictions'
# errors, and what is computed takes neither a disk nor a network.
LEAST_SAVED = 0.03
# Parts of what the best source holds, besides all of it.
_PARTS = 4


@dataclass(frozen=True, slots=True)
class PlannedAttempt:
    """The plan, and the source to fetch from before it. None: fetch nothing.

    `meeting_tokens`: where what the source brings is expected to meet what is computed meanwhile.
    0: it is fetched before anything is computed.
    """

    plan: Plan
    source: FetchSource | None = None
    meeting_tokens: int = 0


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

    attempt: PlannedAttempt
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
) -> PlannedAttempt:
    """Return the best fetch, or the plan without one; its reasons say why.

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
        return PlannedAttempt(plan)
    whole = max(options, key=_saved)
    parts = (
        _option(plan, replan, profile, part, sizes, own)
        for part in _parts(plan, whole.source, sizes)
    )
    best = max((whole, *(part for part in parts if part)), key=_saved)
    meetings = (_meeting(plan, replan, profile, source, sizes) for source in by_size)
    meeting = max((each for each in meetings if each), key=_saved, default=best)
    if (
        meeting.saved_seconds
        > best.saved_seconds + WORTH_IT * best.attempt.plan.predicted_fetch_seconds
    ):
        best = meeting
    if best.saved_seconds > LEAST_SAVED * plan.predicted_ttft_seconds:
        return best.attempt
    return PlannedAttempt(plan.because(Reason(ReasonKind.NO_FETCH, whole.reason.values)))


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
    return _Option(PlannedAttempt(with_fetch, part), source, saved, reason)


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
    part = replace(source, cached_tokens=chunks * sizes.tokens)
    attempt = PlannedAttempt(with_fetch, part, point.tokens)
    return _Option(attempt, source, saved, reason)

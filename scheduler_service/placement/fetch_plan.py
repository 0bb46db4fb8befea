"""Decides whether to fetch a prefix from another host's store. Pure arithmetic.

The worker first copies the missing chunks into its own store, then restores the longer
prefix from there. That pays if copying F tokens and restoring them takes less time than
computing them in the prefill:

    round trip + chunks * chunk bytes / rate + restore(K + F) - restore(K)
        < prefill(T | K) - prefill(T - F | K + F)

Only full chunks are fetched: keys of partial last chunks are known to their own store alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from scheduler_service.prefixes.lookup import FetchSource
from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import Plan
from splitpoint.words import counted

# Until a worker has measured the rate: 10 Gbit/s Ethernet, without its overhead.
ASSUMED_BYTES_PER_SECOND = 1e9
# Asking for the prefix there, opening the stream, sealing here.
ROUND_TRIP_SECONDS = 5e-3


def remote_rate(profile: Profile, address: str) -> float:
    """Return the bytes per second from another host's store; assumed until it was measured."""
    return profile.remote_bytes_per_second.get(address, ASSUMED_BYTES_PER_SECOND)


def copy_seconds(size: int, rate: float) -> float:
    """Return the seconds of copying so many bytes from another host's store."""
    return ROUND_TRIP_SECONDS + size / rate


@dataclass(frozen=True, slots=True)
class PlannedAttempt:
    """The plan, and the store to fetch from before it. None: fetch nothing."""

    plan: Plan
    source: FetchSource | None = None


@dataclass(frozen=True, slots=True)
class _Option:
    """A fetch from one source, compared with the plan without it."""

    attempt: PlannedAttempt
    # Time to the first token that it saves; negative: it costs.
    saved_seconds: float
    words: str


def best_fetch(
    plan: Plan,
    replan: Callable[[int], Plan],
    profile: Profile,
    sources: Iterable[FetchSource],
    *,
    chunk_tokens: int,
    chunk_bytes: int,
) -> PlannedAttempt:
    """Return the best fetch, or the plan without one; its reason says why.

    Args:
        plan: for what the worker's own store holds.
        replan: returns the plan for another number of cached tokens.
        profile: the worker's; `remote_bytes_per_second` has the rates.
        sources: other stores of the same layout.
        chunk_bytes: payload of one chunk over all planes.
    """
    by_size = sorted(sources, key=lambda source: (-source.cached_tokens, source.address))
    options = [
        option
        for source in by_size
        if (option := _option(plan, replan, profile, source, chunk_tokens, chunk_bytes))
    ]
    if not options:
        return PlannedAttempt(plan)
    best = max(options, key=lambda option: option.saved_seconds)
    if best.saved_seconds > 0:
        return best.attempt
    return PlannedAttempt(replace(plan, reason=f"{plan.reason}; not fetched: {best.words}"))


def _option(
    plan: Plan,
    replan: Callable[[int], Plan],
    profile: Profile,
    source: FetchSource,
    chunk_tokens: int,
    chunk_bytes: int,
) -> _Option | None:
    """Return a fetch from this source; None if it holds no full chunk more."""
    own_chunks = plan.cached_tokens // chunk_tokens
    total = plan.cached_tokens + plan.new_tokens
    chunks = min(source.cached_tokens, total) // chunk_tokens
    # The last token is always computed: its logits are needed.
    cached = min(chunks * chunk_tokens, total - 1)
    fetched = cached - own_chunks * chunk_tokens
    if fetched <= 0 or cached <= plan.cached_tokens:
        return None
    rate = remote_rate(profile, source.address)
    is_measured = source.address in profile.remote_bytes_per_second
    seconds = copy_seconds((chunks - own_chunks) * chunk_bytes, rate)
    longer = replan(cached)
    ttft = longer.predicted_ttft_seconds + seconds
    saved = plan.predicted_ttft_seconds - ttft
    takes = seconds + longer.predicted_restore_seconds - plan.predicted_restore_seconds
    words = (
        f"fetching {counted(fetched, 'token')} from {source.address} at {rate / 1e9:.3g} GB/s"
        f"{'' if is_measured else ' (assumed)'}: {_seconds(max(takes, 0.0))}, "
        f"recomputing them: {_seconds(takes + saved)}"
    )
    with_fetch = replace(
        longer,
        reason=f"{longer.reason}; {words}",
        predicted_ttft_seconds=ttft,
        fetched_tokens=fetched,
        predicted_fetch_seconds=seconds,
    )
    attempt = PlannedAttempt(with_fetch, FetchSource(source.address, chunks * chunk_tokens))
    return _Option(attempt, saved, words)


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"

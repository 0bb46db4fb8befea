"""Whether a prefix should come from another host's store: pure arithmetic.

The worker first copies the missing chunks into its own store, then restores the
longer prefix from there. That pays when copying them, and restoring more, takes
less time than computing the same tokens in the prefill:

    round trip + chunks * chunk bytes / rate + restore(K + F) - restore(K)
        < prefill(T | K) - prefill(T - F | K + F)

Only full chunks travel: the keys of partial tails are known to their own store alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from splitpoint.costs.profile import Profile
from splitpoint.planning.planner import Plan
from splitpoint.words import counted

# Until a worker has measured the way: 10 Gbit/s Ethernet, without its overhead.
ASSUMED_BYTES_PER_SECOND = 1e9
# Asking for the prefix there, opening the stream, sealing here.
ROUND_TRIP_SECONDS = 5e-3


@dataclass(frozen=True, slots=True)
class FetchSource:
    """Another store, and the leading tokens of the sequence that it is believed to hold."""

    address: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """What to get, from where, and the plan that counts with it."""

    source: FetchSource
    plan: Plan


def plan_with_fetch(
    plan: Plan,
    replan: Callable[[int], Plan],
    profile: Profile,
    sources: Iterable[FetchSource],
    *,
    chunk_tokens: int,
    chunk_bytes: int,
) -> Fetch | Plan:
    """The best fetch, or the plan without one; the reason of either says why.

    Args:
        plan: for what the worker's own store holds.
        replan: the plan for another number of cached tokens.
        profile: the worker's; its `remote_bytes_per_second` are the rates.
        sources: other stores of the same layout.
        chunk_bytes: payload of one chunk over all planes.
    """
    own_chunks = plan.cached_tokens // chunk_tokens
    total = plan.cached_tokens + plan.new_tokens
    best: Fetch | None = None
    least_refused = ""
    least_loss = 0.0
    for source in sorted(sources, key=lambda source: (-source.cached_tokens, source.address)):
        chunks = min(source.cached_tokens, total) // chunk_tokens
        # The last token is always computed: its logits are needed.
        cached = min(chunks * chunk_tokens, total - 1)
        fetched = cached - own_chunks * chunk_tokens
        if fetched <= 0 or cached <= plan.cached_tokens:
            continue
        measured = profile.remote_bytes_per_second.get(source.address)
        rate = measured or ASSUMED_BYTES_PER_SECOND
        seconds = ROUND_TRIP_SECONDS + (chunks - own_chunks) * chunk_bytes / rate
        longer = replan(cached)
        ttft = longer.predicted_ttft_seconds + seconds
        takes = seconds + longer.predicted_restore_seconds - plan.predicted_restore_seconds
        saves = takes + plan.predicted_ttft_seconds - ttft
        words = (
            f"fetching {counted(fetched, 'token')} from {source.address} at {rate / 1e9:.3g} GB/s"
            f"{'' if measured else ' (assumed)'}: {_seconds(max(takes, 0.0))}, "
            f"recomputing them: {_seconds(saves)}"
        )
        if ttft < plan.predicted_ttft_seconds:
            if best is None or ttft < best.plan.predicted_ttft_seconds:
                source = FetchSource(source.address, chunks * chunk_tokens)
                with_fetch = replace(
                    longer,
                    reason=f"{longer.reason}; {words}",
                    predicted_ttft_seconds=ttft,
                    fetched_tokens=fetched,
                    predicted_fetch_seconds=seconds,
                )
                best = Fetch(source, with_fetch)
        elif not least_refused or ttft - plan.predicted_ttft_seconds < least_loss:
            least_refused, least_loss = words, ttft - plan.predicted_ttft_seconds
    if best is not None:
        return best
    if least_refused:
        return replace(plan, reason=f"{plan.reason}; not fetched: {least_refused}")
    return plan


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"

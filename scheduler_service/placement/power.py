"""Advises a power cap for a device that mostly waits for its link. Pure; nothing here sets one.

The paper ("KV cache offloading bottlenecks", 7.3) caps servers of requests with high kappa ratios
at 200 to 300 W, of the 700 W of its cards, without a loss of throughput: the link is the limit.
With kappa = r * kappa_crit, computing takes 1/r of the time that the link takes. A device at the
share p of its power computes at the share p of its rate or faster, so its work still fits beside
the link's while p >= 1/r. Advice is that p, within the paper's range.
"""

from __future__ import annotations

from dataclasses import dataclass

_LEAST_SHARE, _MOST_SHARE = 200 / 700, 300 / 700
# How much of each sum is kept at the next request: some 50 requests count.
_KEPT = 0.98
# Requests before which there is no advice.
_ENOUGH = 20


class RecentKappa:
    """Cached over new tokens of the requests that were placed on one worker lately."""

    def __init__(self) -> None:
        self.request_count = 0
        self._cached = 0.0
        self._new = 0.0

    def placed(self, cached_tokens: int, new_tokens: int) -> None:
        self._cached = _KEPT * self._cached + cached_tokens
        self._new = _KEPT * self._new + new_tokens
        self.request_count += 1

    @property
    def ratio(self) -> float:
        """All their cached tokens over all their new ones; 0 without any."""
        return self._cached / self._new if self._new else 0.0


@dataclass(frozen=True, slots=True)
class PowerAdvice:
    """A cap in watts, and why."""

    watts: float
    reason: str


def advise_power(
    recent: RecentKappa, kappa_crit: float, default_limit_watts: float
) -> PowerAdvice | None:
    """Return the cap that its requests leave room for; None: none, or not enough is known.

    Args:
        kappa_crit: of the worker, above which the link is the limit.
        default_limit_watts: of the card, unless it is lowered; 0: no card, or not told.
    """
    ratio = recent.ratio
    if not default_limit_watts or recent.request_count < _ENOUGH:
        return None
    if ratio * _MOST_SHARE < kappa_crit:
        return None
    share = max(_LEAST_SHARE, kappa_crit / ratio)
    watts = round(share * default_limit_watts)
    return PowerAdvice(
        watts,
        f"the link is the limit: kappa_ratio {ratio:.3g} of recent requests is "
        f"{ratio / kappa_crit:.2g} x kappa_crit, so the device may compute more slowly",
    )

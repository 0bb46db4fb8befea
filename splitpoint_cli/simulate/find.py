"""How many devices keep an objective: the least number, by bisection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from scheduler_service.policy.settings import PolicySettings
from splitpoint_cli.simulate.outcome import Outcome
from splitpoint_cli.simulate.run import Fleet, Load, simulate


@dataclass(frozen=True, slots=True)
class Found:
    """The answer.

    Attributes:
        device_count: the least number that suffices; None if none up to the bound does.
        reason: the answer in words.
        shares: part of good requests, by the number of devices that was tried.
    """

    device_count: int | None
    reason: str
    shares: dict[int, float]


def least_count(
    good_share: Callable[[int], float], wanted: float, most: int
) -> tuple[int | None, dict[int, float]]:
    """Return the least number for which `good_share` is at least `wanted`, and what was tried.

    More devices are taken to be no worse. If `most` suffices, doubles from 1 until a number does,
    then halves the interval.
    """
    tried: dict[int, float] = {}

    def suffices(count: int) -> bool:
        if count not in tried:
            tried[count] = good_share(count)
        return tried[count] >= wanted

    if not suffices(most):
        return None, tried
    low, high = 0, 1
    while not suffices(high):
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high, tried


def find_devices(
    fleet: Fleet,
    load: Load,
    settings: PolicySettings,
    goals: Mapping[str, float],
    *,
    wanted: float,
    most: int,
    processes: int,
    on_try: Callable[[int, float], None],
) -> tuple[Found, Outcome]:
    """Return how many devices of the fleet's first kind are needed, and the outcome with them.

    If no number suffices, the outcome with the most devices.
    """
    kind = fleet.devices[0][0]
    outcomes: dict[int, Outcome] = {}

    def good_share(count: int) -> float:
        outcome = simulate(
            replace(fleet, devices=[(kind, count)]), load, settings, processes=processes
        )
        outcomes[count] = outcome
        share = outcome.good_share(goals)
        on_try(count, share)
        return share

    # With a device for each request, more are of no use.
    request_count = len(load.read().arrivals)
    top = min(most, request_count)
    count, shares = least_count(good_share, wanted, top)
    best = top if count is None else count
    if count is not None:
        reason = f"{count:,} {kind.name} keep the goals for {shares[count]:.1%} of the requests"
        if count - 1 in shares:
            reason += f", {count - 1:,} for {shares[count - 1]:.1%}"
    elif top == request_count:
        reason = (
            "no number suffices: one device for each request keeps the goals for "
            f"{shares[top]:.1%} of them, {wanted:.0%} are wanted"
        )
    else:
        reason = (
            f"no number up to {top:,} suffices: that keeps the goals for {shares[top]:.1%} of the "
            f"requests, {wanted:.0%} are wanted"
        )
    return Found(count, reason, dict(sorted(shares.items()))), outcomes[best]

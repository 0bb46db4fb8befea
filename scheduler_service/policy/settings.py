"""What the policy is told: its name, and its bounds."""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.options.scheduler import POLICY_AGING_SECONDS, POLICY_LEAD_REQUESTS, Policy


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """How waiting requests are chosen.

    Attributes:
        policy: fifo, fair or utilisation.
        aging_seconds: waiting for so long counts as much as the best use of the memory: gamma is
            1 / aging_seconds, or less where requests usually wait longer. One that has waited so
            long, and twice as long as usual, gets memory reserved. 0: waiting counts nothing, so
            that a request can starve.
        lead_requests: how far a tenant may get ahead of its share, in mean requests: in favour of
            better sets, and of prefixes that are cached.
        ahead_steps: prefill work that is bound to a worker beforehand, in full steps of it.
        restoring_share: part of a worker's memory into which requests beyond its kappa_crit may be
            restored at a time. One such request is always let through.
        window: requests that are compared for one set.
    """

    policy: Policy = Policy.FIFO
    aging_seconds: float = POLICY_AGING_SECONDS.default
    lead_requests: float = POLICY_LEAD_REQUESTS.default
    ahead_steps: float = 2.0
    restoring_share: float = 0.5
    window: int = 64

"""The tiers that a store's options ask for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from kvstore_service.pool.chunk_pool import ChunkPool
from kvstore_service.tiers.manager import TierManager
from kvstore_service.tiers.tier import ChunkTier
from splitpoint.config import parse_rate

# Values of --tier-admission.
ON_EVICTION = "eviction"


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The options about tiers, checked before anything is created.

    Attributes:
        on_eviction: chunks go down when they are evicted. False: when they are used again.
        rate_limit: bytes per second that are loaded from tiers. None: no limit.
    """

    on_eviction: bool
    rate_limit: float | None


def tier_settings(arguments: argparse.Namespace) -> TierSettings:
    """Check the options. Raises InvalidArgument."""
    rate = arguments.tier_rate
    return TierSettings(
        on_eviction=arguments.tier_admission == ON_EVICTION,
        rate_limit=None if rate is None else parse_rate(rate, field="tier-rate"),
    )


def tiers_of(settings: TierSettings, pool: ChunkPool) -> TierManager:
    """Return the tiers, which are not started yet."""
    tiers: list[ChunkTier] = []
    return TierManager(
        pool, tiers, on_eviction=settings.on_eviction, rate_limit=settings.rate_limit
    )

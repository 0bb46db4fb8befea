"""The tiers that a store's options ask for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from kvstore_service.pool.chunk_pool import ChunkPool
from kvstore_service.tiers.manager import TierManager
from kvstore_service.tiers.tier import ChunkTier
from splitpoint.config import parse_rate, parse_size
from splitpoint.errors import InvalidArgument

# Values of --tier-admission.
ON_EVICTION = "eviction"


@dataclass(frozen=True, slots=True)
class TierSettings:
    """The options about tiers, checked before anything is created.

    Attributes:
        on_eviction: chunks go down when they are evicted. False: when they are used again.
        rate_limit: bytes per second that are loaded from tiers. None: no limit.
        disk: folder of the disk tier. None: there is none.
        disk_bytes: bound of its files.
    """

    on_eviction: bool
    rate_limit: float | None
    disk: Path | None
    disk_bytes: int


def tier_settings(arguments: argparse.Namespace) -> TierSettings:
    """Check the options. Raises InvalidArgument."""
    rate, disk = arguments.tier_rate, arguments.tier_disk
    disk_bytes = parse_size(arguments.tier_disk_size, field="tier-disk-size")
    if (disk is None) != (disk_bytes == 0):
        raise InvalidArgument(
            "--tier-disk DIR and --tier-disk-size SIZE belong together",
            field="tier-disk" if disk is None else "tier-disk-size",
        )
    return TierSettings(
        on_eviction=arguments.tier_admission == ON_EVICTION,
        rate_limit=None if rate is None else parse_rate(rate, field="tier-rate"),
        disk=disk,
        disk_bytes=disk_bytes,
    )


def tiers_of(settings: TierSettings, pool: ChunkPool) -> TierManager:
    """Return the tiers, which are not started yet."""
    tiers: list[ChunkTier] = []
    if settings.disk is not None:
        # Imported here: a store without the tier starts without it.
        from kvstore_service.tiers.disk.tier import DiskTier

        tiers.append(DiskTier(pool.arena, settings.disk, settings.disk_bytes))
    return TierManager(
        pool, tiers, on_eviction=settings.on_eviction, rate_limit=settings.rate_limit
    )

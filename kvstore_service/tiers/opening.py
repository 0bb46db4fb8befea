"""The tiers that a store's options ask for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from kvstore_service.mooncake.settings import MooncakeSettings, settings_of
from kvstore_service.pool.chunk_pool import ChunkPool
from kvstore_service.tiers.manager import TierManager
from kvstore_service.tiers.tier import ChunkTier, ChunkTransfer
from splitpoint.config import parse_rate, parse_size
from splitpoint.errors import InvalidArgument
from splitpoint.transport.tls import PLAIN, Identity

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
        mooncake: None if neither transfers nor the pool use it.
    """

    on_eviction: bool
    rate_limit: float | None
    disk: Path | None
    disk_bytes: int
    mooncake: MooncakeSettings | None


def tier_settings(arguments: argparse.Namespace) -> TierSettings:
    """Check the options. Raises InvalidArgument, MissingExtra."""
    rate, disk = arguments.tier_rate, arguments.tier_disk
    disk_bytes = parse_size(arguments.tier_disk_size, field="tier-disk-size")
    if (disk is None) != (disk_bytes == 0):
        raise InvalidArgument(
            "--tier-disk DIR and --tier-disk-size SIZE belong together",
            field="tier-disk" if disk is None else "tier-disk-size",
        )
    mooncake = settings_of(arguments)
    if disk is None and (mooncake is None or mooncake.pool is None):
        for name, is_given in (
            ("tier-rate", rate is not None),
            ("tier-admission", arguments.tier_admission != ON_EVICTION),
        ):
            if is_given:
                raise InvalidArgument(f"--{name} needs --tier-disk or --tier-mooncake", field=name)
    return TierSettings(
        on_eviction=arguments.tier_admission == ON_EVICTION,
        rate_limit=None if rate is None else parse_rate(rate, field="tier-rate"),
        disk=disk,
        disk_bytes=disk_bytes,
        mooncake=mooncake,
    )


def tiers_of(
    settings: TierSettings, pool: ChunkPool, identity: Identity = PLAIN
) -> tuple[TierManager, ChunkTransfer | None]:
    """Return the tiers, and the transfer engine if there is one. They are not started yet.

    `identity`: what the transfers show to other stores.
    """
    tiers: list[ChunkTier] = []
    if settings.disk is not None:
        # Imported here: a store without the tier starts without it.
        from kvstore_service.tiers.disk.tier import DiskTier

        tiers.append(DiskTier(pool.arena, settings.disk, settings.disk_bytes, holds=pool.grants))
    transfer: ChunkTransfer | None = None
    if settings.mooncake is not None:
        from kvstore_service.mooncake.opening import mooncake_parts

        pool_tier, transfer = mooncake_parts(settings.mooncake, pool.arena, identity)
        tiers += [pool_tier] if pool_tier is not None else []
    manager = TierManager(
        pool, tiers, on_eviction=settings.on_eviction, rate_limit=settings.rate_limit
    )
    return manager, transfer

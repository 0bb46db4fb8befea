"""The tiers and the transfer engine that a store's options ask for.

The only module outside kvstore_service.mooncake that names that package.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from kvstore_service.mooncake.settings import MooncakeSettings, how_to_install, settings_of
from kvstore_service.pool.chunk_pool import ChunkPool
from kvstore_service.tiers.manager import TierManager
from kvstore_service.tiers.tier import ChunkTier, ChunkTransfer
from splitpoint.arena.mapping import Arena
from splitpoint.config import parse_rate, parse_size
from splitpoint.errors import InvalidArgument
from splitpoint.options.store import TIER_DISK, TIER_POOL
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
        engine: None if neither transfers nor a pool use it.
    """

    on_eviction: bool
    rate_limit: float | None
    disk: Path | None
    disk_bytes: int
    engine: MooncakeSettings | None


def tier_settings(arguments: argparse.Namespace) -> TierSettings:
    """Check the options. Raises InvalidArgument, MissingExtra."""
    rate, disk = arguments.tier_rate, arguments.tier_disk
    disk_bytes = parse_size(arguments.tier_disk_size, field="tier-disk-size")
    if (disk is None) != (disk_bytes == 0):
        raise InvalidArgument(
            "--tier-disk DIR and --tier-disk-size SIZE belong together",
            field="tier-disk" if disk is None else "tier-disk-size",
        )
    engine = settings_of(arguments)
    if disk is None and (engine is None or engine.pool is None):
        for name, is_given in (
            ("tier-rate", rate is not None),
            ("tier-admission", arguments.tier_admission != ON_EVICTION),
        ):
            if is_given:
                raise InvalidArgument(
                    f"--{name} needs {TIER_DISK.flag} or {TIER_POOL.flag}", field=name
                )
    return TierSettings(
        on_eviction=arguments.tier_admission == ON_EVICTION,
        rate_limit=None if rate is None else parse_rate(rate, field="tier-rate"),
        disk=disk,
        disk_bytes=disk_bytes,
        engine=engine,
    )


def missing_engine() -> str:
    """Return what the transfer engine lacks on this host, and how to get it; empty if nothing."""
    return how_to_install()


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
    if settings.engine is not None:
        pool_tier, transfer = _engine_parts(settings.engine, pool.arena, identity)
        tiers += [pool_tier] if pool_tier is not None else []
    manager = TierManager(
        pool, tiers, on_eviction=settings.on_eviction, rate_limit=settings.rate_limit
    )
    return manager, transfer


def _engine_parts(
    settings: MooncakeSettings, arena: Arena, identity: Identity
) -> tuple[ChunkTier | None, ChunkTransfer | None]:
    """Return the pool as a tier, and the transfer engine; each only if the settings ask for it."""
    # Imported here: a store without them starts without them.
    from kvstore_service.mooncake.process import Duty, MooncakeProcess
    from kvstore_service.mooncake.tier import MooncakeTier
    from kvstore_service.mooncake.transfers import MooncakeTransfer

    server = MooncakeProcess(arena, settings, Duty.SERVE)
    tier = transfer = None
    if settings.pool is not None:
        tier = MooncakeTier(server, settings.pool.master, arena.layout.chunk_bytes)
    if settings.has_transfer:
        reader = MooncakeProcess(arena, settings, Duty.READ)
        transfer = MooncakeTransfer(server, reader, arena.layout, identity)
    return tier, transfer

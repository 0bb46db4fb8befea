"""What a store's settings of Mooncake make: one process, and what uses it."""

from __future__ import annotations

from kvstore_service.mooncake.process import MooncakeProcess
from kvstore_service.mooncake.settings import MooncakeSettings
from kvstore_service.mooncake.tier import MooncakeTier
from kvstore_service.mooncake.transfers import MooncakeTransfer
from splitpoint.arena.mapping import Arena
from splitpoint.transport.tls import Identity


def mooncake_parts(
    settings: MooncakeSettings, arena: Arena, identity: Identity
) -> tuple[MooncakeTier | None, MooncakeTransfer | None]:
    """Return the pool as a tier, and the transfer engine; each only if the settings ask for it."""
    process = MooncakeProcess(arena, settings)
    tier = transfer = None
    if settings.pool is not None:
        tier = MooncakeTier(process, settings.pool.master, arena.layout.chunk_bytes)
    if settings.has_transfer:
        transfer = MooncakeTransfer(process, arena.layout, identity)
    return tier, transfer

"""What a store's settings of Mooncake make: its processes, and what uses them."""

from __future__ import annotations

from kvstore_service.mooncake.process import Duty, MooncakeProcess
from kvstore_service.mooncake.settings import MooncakeSettings
from kvstore_service.mooncake.tier import MooncakeTier
from kvstore_service.mooncake.transfers import MooncakeTransfer
from splitpoint.arena.mapping import Arena
from splitpoint.transport.tls import Identity


def mooncake_parts(
    settings: MooncakeSettings, arena: Arena, identity: Identity
) -> tuple[MooncakeTier | None, MooncakeTransfer | None]:
    """Return the pool as a tier, and the transfer engine; each only if the settings ask for it."""
    server = MooncakeProcess(arena, settings, Duty.SERVE)
    tier = transfer = None
    if settings.pool is not None:
        tier = MooncakeTier(server, settings.pool.master, arena.layout.chunk_bytes)
    if settings.has_transfer:
        reader = MooncakeProcess(arena, settings, Duty.READ)
        transfer = MooncakeTransfer(server, reader, arena.layout, identity)
    return tier, transfer

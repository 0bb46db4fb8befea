"""Seconds of bringing chunks into a worker's own arena: from a tier, or from another store. Pure.

A worker measures a rate for each source and transfer; until then one is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.costs.profile import Profile
from splitpoint.tiers import ChunkSource, Transfer

# 10 Gbit/s Ethernet without its overhead; a slow NVMe disk.
ASSUMED_BYTES_PER_SECOND = 1e9
# Asking the source for the prefix, opening the stream, sealing and looking up here. Measured by
# `benchmarks.planner_tiers` on two CPU cores: 7 to 12 ms.
ROUND_TRIP_SECONDS = 10e-3


@dataclass(frozen=True, slots=True)
class SourceRate:
    """How fast chunks come from a source, and how from another store."""

    bytes_per_second: float
    is_measured: bool
    transfer: Transfer = Transfer.GRPC

    def seconds(self, size: int) -> float:
        """Return the seconds of copying so many bytes."""
        return ROUND_TRIP_SECONDS + size / self.bytes_per_second


def rate_of(profile: Profile, source: ChunkSource) -> SourceRate:
    """Return the rate at which a worker with this profile gets chunks from `source`.

    That of Mooncake's Transfer Engine if the worker has used it for this source: it uses it again.
    """
    for transfer in (Transfer.MOONCAKE, Transfer.GRPC):
        measured = profile.remote_bytes_per_second.get(source.rate_key(transfer))
        if measured is not None:
            # One that is exactly the assumed rate was measured long ago, and has aged back.
            is_measured = measured != ASSUMED_BYTES_PER_SECOND
            return SourceRate(measured, is_measured, transfer)
    return SourceRate(ASSUMED_BYTES_PER_SECOND, is_measured=False)


def measured_rate(size: int, seconds: float, transfer_seconds: float) -> float:
    """Return the rate to plan with after a copy of `size` bytes.

    Args:
        seconds: of the whole copy, of which `SourceRate.seconds` adds a part again.
        transfer_seconds: of moving bytes alone, a part of them.
    """
    # A short copy may have taken less than the round trip that is assumed.
    return size / max(transfer_seconds, seconds - min(ROUND_TRIP_SECONDS, seconds / 2))

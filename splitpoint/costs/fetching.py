"""Seconds of bringing chunks into a worker's own arena: from a tier, or from another store. Pure.

A worker measures a rate for each source and transfer; until then one is assumed. A slow rate that
is not measured again ages: it is doubled from time to time, until it is the assumed one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from splitpoint.costs.profile import Profile
from splitpoint.tiers import ChunkSource, Transfer

# 10 Gbit/s Ethernet without its overhead; a slow NVMe disk.
ASSUMED_BYTES_PER_SECOND = 1e9
# Asking the source for the prefix, opening the stream, sealing and looking up here. Measured by
# `benchmarks.planner_tiers` on two CPU cores: 7 to 12 ms.
ROUND_TRIP_SECONDS = 10e-3


class Basis(StrEnum):
    """What a rate is based on."""

    MEASURED = "measured"
    AGED = "aged"  # measured a while ago, and doubled since
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True)
class SourceRate:
    """How fast chunks come from a source, and how from another store."""

    bytes_per_second: float
    basis: Basis
    transfer: Transfer = Transfer.GRPC

    def __str__(self) -> str:
        note = "" if self.basis is Basis.MEASURED else f" ({self.basis.value})"
        return f"{self.bytes_per_second / 1e9:.3g} GB/s{note}"

    def seconds(self, size: int) -> float:
        """Return the seconds of copying so many bytes."""
        return ROUND_TRIP_SECONDS + size / self.bytes_per_second


def rate_of(profile: Profile, source: ChunkSource) -> SourceRate:
    """Return the rate at which a worker with this profile gets chunks from `source`.

    That of Mooncake's Transfer Engine if the worker has used it for this source: it uses it again.
    """
    for transfer in (Transfer.MOONCAKE, Transfer.GRPC):
        key = source.rate_key(transfer)
        if key in profile.remote_bytes_per_second:
            return SourceRate(profile.remote_bytes_per_second[key], _basis(profile, key), transfer)
    return SourceRate(ASSUMED_BYTES_PER_SECOND, Basis.ASSUMED)


def known_rates(profile: Profile) -> list[tuple[str, SourceRate]]:
    """Return the sources that chunks came from, in words, each with its rate."""
    return [
        (
            ChunkSource.words_of(key),
            SourceRate(rate, _basis(profile, key), ChunkSource.transfer_of(key)),
        )
        for key, rate in sorted(profile.remote_bytes_per_second.items())
    ]


def _basis(profile: Profile, key: str) -> Basis:
    # One that is exactly the assumed rate was measured long ago, and has aged back.
    if profile.remote_bytes_per_second[key] == ASSUMED_BYTES_PER_SECOND:
        return Basis.ASSUMED
    return Basis.AGED if key in profile.aged_sources else Basis.MEASURED


def measured_rate(size: int, seconds: float, transfer_seconds: float) -> float:
    """Return the rate to plan with after a copy of `size` bytes.

    Args:
        seconds: of the whole copy, of which `SourceRate.seconds` adds a part again.
        transfer_seconds: of moving bytes alone, a part of them.
    """
    # A short copy may have taken less than the round trip that is assumed.
    return size / max(transfer_seconds, seconds - min(ROUND_TRIP_SECONDS, seconds / 2))

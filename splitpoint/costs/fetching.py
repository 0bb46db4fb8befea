"""Seconds of bringing chunks into a worker's own arena: from a tier, or from another store. Pure.

A worker measures a rate for each source and transfer; until then one is assumed. A slow rate that
is not measured again ages: it is doubled from time to time, until it is the assumed one.

While a tier brings the back of a prefix, with all its planes and the last chunks first, the worker
computes the front. Both are restored from the arena once they have met:

    t(m) = max(prefill(own, m), chunks of [m, s) * chunk bytes / rate) + what the meeting costs

Knows no requests and no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from splitpoint.costs.profile import Profile
from splitpoint.shapes import ModelShape, chunks_of
from splitpoint.tiers import ChunkSource, Transfer

# 10 Gbit/s Ethernet without its overhead; a slow NVMe disk.
ASSUMED_BYTES_PER_SECOND = 1e9
# Asking the source for the prefix, opening the stream, sealing and looking up here. Measured: 7
# to 12 ms on two CPU cores.
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
    transfer: Transfer = Transfer.STREAM

    def __str__(self) -> str:
        note = "" if self.basis is Basis.MEASURED else f" ({self.basis.value})"
        return f"{self.bytes_per_second / 1e9:.3g} GB/s{note}"

    def seconds(self, size: int) -> float:
        """Return the seconds of copying this many bytes."""
        return ROUND_TRIP_SECONDS + size / self.bytes_per_second


def rate_of(profile: Profile, source: ChunkSource) -> SourceRate:
    """Return the rate at which a worker with this profile gets chunks from `source`.

    That of direct reads if the worker has used them for this source: it uses them again.
    """
    for transfer in (Transfer.DIRECT, Transfer.STREAM):
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


# Write-back stores the end of the front, the loaded chunks are sealed and looked up. Measured: 5 to
# 30 ms on two CPU cores.
MEETING_SECONDS = 20e-3


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """[own, tokens) is computed and the rest loaded, in `seconds`, the restore excluded."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TierEnds:
    """Costs of bringing chunks [own_chunks, chunk_count) of a sequence into the arena.

    Attributes:
        bytes_per_second: of the tier.
        block_tokens: most tokens of one step; 0: no bound.
    """

    shape: ModelShape
    profile: Profile
    own_chunks: int
    chunk_count: int
    chunk_tokens: int
    chunk_bytes: int
    bytes_per_second: float
    block_tokens: int = 0

    def compute_seconds(self, chunks: int) -> float:
        """Return the seconds to prefill the first `chunks` of the missing chunks."""
        if not chunks:
            return 0.0
        tokens, first = chunks * self.chunk_tokens, self.own_chunks * self.chunk_tokens
        flops = self.shape.prefill_flops(tokens, first)
        pieces = chunks_of(tokens, self.block_tokens) if self.block_tokens else 1
        return self.profile.prefill_seconds(flops, pieces)

    def load_seconds(self, chunks: int) -> float:
        """Return the seconds to load this many chunks."""
        return chunks * self.chunk_bytes / self.bytes_per_second

    def meeting_point(self) -> MeetingPoint | None:
        """Return where both meet first; None if one side does all the work."""
        missing = self.chunk_count - self.own_chunks
        # The least number of computed chunks that takes as long as loading the rest.
        low, high = 0, missing
        while low < high:
            middle = (low + high) // 2
            if self.compute_seconds(middle) < self.load_seconds(missing - middle):
                low = middle + 1
            else:
                high = middle
        sides = [count for count in (low - 1, low) if 0 < count < missing]
        if not sides:
            return None
        best = min(sides, key=lambda count: self._seconds(count, missing))
        seconds = ROUND_TRIP_SECONDS + MEETING_SECONDS + self._seconds(best, missing)
        return MeetingPoint((self.own_chunks + best) * self.chunk_tokens, seconds)

    def _seconds(self, computed: int, missing: int) -> float:
        return max(self.compute_seconds(computed), self.load_seconds(missing - computed))

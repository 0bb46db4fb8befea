"""What a fetch is asked for, and what it brought."""

from __future__ import annotations

import time
from dataclasses import dataclass

from splitpoint.tiers import ChunkSource, Transfer

LONGEST_SECONDS = 30.0
# A fetch may take this beside three times what was predicted: pauses are no slow source.
SPARE_SECONDS = 2.0
# Bytes per call of a stream: enough for a link's full speed, few enough that not all is lost if
# the peer dies.
BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class FetchSource:
    """What holds more of a prefix.

    Attributes:
        predicted_seconds: 0 if unknown.
        meeting_tokens: of a tier: where its chunks, loaded from the last one on, are expected to
            meet what is computed meanwhile. 0: they are loaded before anything is computed.
    """

    place: ChunkSource
    cached_tokens: int
    predicted_seconds: float = 0.0
    meeting_tokens: int = 0

    @property
    def time_limit(self) -> float:
        if not self.predicted_seconds > 0:
            return LONGEST_SECONDS
        return min(LONGEST_SECONDS, 3 * self.predicted_seconds + SPARE_SECONDS)


@dataclass(slots=True)
class FetchResult:
    """What a fetch has brought so far.

    Attributes:
        rate: measured bytes per second; 0: too little came to measure one.
        transfer: by which its source's rate is measured: the last one that was tried.
        came_by: how its tokens came from another store, "direct", "stream" or "direct, stream".
            Empty: none came, or they came from a tier.
        recomputed_tokens: computed meanwhile, up to where the fetched tokens begin.
        began, wanted_bytes: when it had its turn, and what was to come at most; 0: not yet.
        late_rate: it took too long: the bytes per second of its source are not more. 0: it did not.
    """

    tokens: int = 0
    seconds: float = 0.0
    bytes: int = 0
    rate: float = 0.0
    transfer: Transfer = Transfer.STREAM
    came_by: str = ""
    recomputed_tokens: int = 0
    began: float = 0.0
    wanted_bytes: int = 0
    late_rate: float = 0.0

    def came(self, tokens: int, transfer: Transfer) -> None:
        """Note that this many tokens have come from another store, the last of them by this."""
        if tokens > self.tokens and not self.came_by.endswith(transfer.value):
            self.came_by = f"{self.came_by}, {transfer.value}" if self.came_by else transfer.value
        self.tokens = tokens

    def is_late(self) -> None:
        """Note that it is given up now: at best the next batch was about to end."""
        most = min(self.wanted_bytes, self.bytes + BATCH_BYTES)
        if most:
            self.late_rate = most / (time.monotonic() - self.began)


@dataclass(slots=True)
class FetchTotals:
    """Totals of all fetches, failed and cancelled ones included."""

    tokens: int = 0
    seconds: float = 0.0

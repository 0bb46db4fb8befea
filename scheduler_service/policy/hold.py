"""Why the policy holds a request back on a worker that has room for it."""

from __future__ import annotations

from enum import StrEnum


class Hold(StrEnum):
    """What it waits for."""

    # Others start first: earlier ones, or ones that fill the device better.
    TURN = "turn"
    # Its tenant is ahead of its share.
    SHARE = "share"
    # The worker has enough unprefilled tokens.
    PREFILL = "prefill"
    # Enough bytes of link-bound requests are being restored there.
    RESTORES = "restores"
    # It would be streamed there, and ones that would be resident wait, too.
    RESIDENTS = "residents"
    # The worker's memory is kept free for a request that has waited long.
    RESERVATION = "reservation"

"""How long a call of Mooncake may take before its process counts as hung."""

from __future__ import annotations

# A slower link is not worth using.
_SLOWEST_BYTES_PER_SECOND = 10e6
_ROUND_TRIP_SECONDS = 5.0
_POOL_SECONDS = 15.0
# Mooncake itself gives up after 60 s, but may then still write into slots.
_LONGEST_SECONDS = 30.0
# A call of the pool takes some seconds to fail while its master or a host of it is away.
POOL_CANCEL_SECONDS = 30.0
QUESTION_SECONDS = 5.0


def pool_seconds_for(size_bytes: int) -> float:
    """Return the time limit of a call of the pool that moves so many bytes."""
    return min(_LONGEST_SECONDS, _POOL_SECONDS + size_bytes / _SLOWEST_BYTES_PER_SECOND)


def seconds_for(size_bytes: int) -> float:
    """Return the time limit of a call that moves so many bytes."""
    return min(_LONGEST_SECONDS, _ROUND_TRIP_SECONDS + size_bytes / _SLOWEST_BYTES_PER_SECOND)

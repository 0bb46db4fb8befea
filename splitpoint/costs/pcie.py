"""Bytes per second of a PCIe link, from its generation and its lanes.

Per lane and direction, with T transfers (bits on the wire) per second:

    generation 1, 2      T * 8/10      8b/10b line code
    generation 3, 4, 5   T * 128/130   128b/130b line code
    generation 6         T * 242/256   FLIT mode: of 256 bytes 14 are CRC and error correction

times lanes, over 8 bits. Headers, acknowledgements and flow control are not subtracted, so
copies reach 80 to 90 % of it.
"""

from __future__ import annotations

# Transfers per second and lane, and the share of them that is payload.
_LANES = {
    1: (2.5e9, 8 / 10),
    2: (5e9, 8 / 10),
    3: (8e9, 128 / 130),
    4: (16e9, 128 / 130),
    5: (32e9, 128 / 130),
    6: (64e9, 242 / 256),
}
LATEST_GENERATION = max(_LANES)
MOST_LANES = 16


def link_ceiling(generation: int, lanes: int) -> float:
    """Return the bytes per second in each direction.

    Raises ValueError for an unknown generation, or no lanes.
    """
    if generation not in _LANES:
        raise ValueError(f"PCIe generation {generation} is not known: 1 to {LATEST_GENERATION} are")
    if lanes < 1:
        raise ValueError(f"a link has at least one lane, not {lanes}")
    transfers, share = _LANES[generation]
    return transfers * share * lanes / 8

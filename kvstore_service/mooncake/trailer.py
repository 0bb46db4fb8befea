"""The trailer of a chunk in the pool: 64 bytes after its payload that say what it is. Pure.

magic (8 bytes) | key (32) | checksum of the payload (8) | payload bytes (8) | zero (4) | CRC-32 (4)
"""

from __future__ import annotations

import struct
import zlib

_MAGIC = b"SPLTPL01"
_BODY = struct.Struct("<8s32sQQI")
TRAILER_BYTES = _BODY.size + 4
# In place of a checksum: an object in the pool is not the chunk that was stored.
DAMAGED = -1


def encode(key: bytes, checksum: int, payload_bytes: int) -> bytes:
    body = _BODY.pack(_MAGIC, key, checksum, payload_bytes, 0)
    return body + zlib.crc32(body).to_bytes(4, "little")


def decode(trailer: bytes, key: bytes, payload_bytes: int) -> int | None:
    """Return the payload's checksum; None unless the trailer is whole and names this chunk."""
    if len(trailer) != TRAILER_BYTES:
        return None
    body, crc = trailer[: _BODY.size], int.from_bytes(trailer[_BODY.size :], "little")
    magic, found, checksum, size, zero = _BODY.unpack(body)
    whole = zlib.crc32(body) == crc
    if not whole or (magic, found, size, zero) != (_MAGIC, key, payload_bytes, 0):
        return None
    return int(checksum)

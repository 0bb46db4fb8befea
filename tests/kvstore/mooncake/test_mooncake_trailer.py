"""A trailer names its chunk and checksum; any other bytes are no trailer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore_service.mooncake.trailer import TRAILER_BYTES, decode, encode

KEY = bytes(range(32))


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**64 - 1), st.integers(1, 2**40))
def test_a_trailer_has_its_checksum(key: bytes, checksum: int, size: int) -> None:
    trailer = encode(key, checksum, size)
    assert len(trailer) == TRAILER_BYTES == 64
    assert decode(trailer, key, size) == checksum
    assert decode(trailer, bytes(32) if any(key) else KEY, size) is None
    assert decode(trailer, key, size + 1) is None


def test_any_flipped_bit_makes_it_none() -> None:
    trailer = encode(KEY, 0x0123456789ABCDEF, 4096)
    for bit in range(8 * TRAILER_BYTES):
        damaged = bytearray(trailer)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode(bytes(damaged), KEY, 4096) is None


@given(st.binary(max_size=80))
def test_other_bytes_are_no_trailer(data: bytes) -> None:
    assert decode(data, KEY, 4096) is None

"""Pure parts: the pieces of a transfer, which copy exactly the slots' bytes, and pool trailers."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_helpers import LAYOUT
from long_runs import scaled

from kvstore_service.mooncake import trailer
from kvstore_service.mooncake.pieces import pieces_of, registered_ranges, slot_parts, slot_runs
from kvstore_service.mooncake.trailer import TRAILER_BYTES
from splitpoint.arena.format import Geometry

SOURCE, TARGET = Geometry(LAYOUT, 40), Geometry(LAYOUT, 24)
PLANES = len(SOURCE.planes)
# No byte is zero.
FILE = random.Random(1).randbytes(SOURCE.size_bytes).replace(b"\0", b"\1")

slot_pairs = st.integers(1, 20).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, 39), min_size=count, max_size=count),
        st.lists(st.integers(0, 23), min_size=count, max_size=count, unique=True),
    )
)


@pytest.mark.scaled
@given(slot_pairs, st.integers(1, 4096))
@settings(max_examples=scaled(40, chaos=100))
def test_pieces_copy_each_slots_bytes_and_no_others(
    slots: tuple[list[int], list[int]], most: int
) -> None:
    sources, targets = slots
    file = FILE
    copy = bytearray(TARGET.size_bytes)
    for piece in pieces_of(SOURCE, sources, TARGET, targets, most):
        assert 0 < piece.size <= most
        copy[piece.target : piece.target + piece.size] = file[
            piece.source : piece.source + piece.size
        ]
    for here, slot in zip(targets, sources, strict=True):
        for (to, size), (at, _) in zip(
            slot_parts(TARGET, here), slot_parts(SOURCE, slot), strict=True
        ):
            assert copy[to : to + size] == file[at : at + size]
            copy[to : to + size] = bytes(size)
    assert not any(copy)


def test_adjacent_slots_are_one_piece_in_each_plane() -> None:
    runs = list(slot_runs([3, 4, 5, 9, 10, 2], [7, 8, 9, 10, 11, 12]))
    assert runs == [(3, 7, 3), (9, 10, 2), (2, 12, 1)]
    pieces = list(pieces_of(SOURCE, [3, 4, 5], TARGET, [7, 8, 9]))
    assert len(pieces) == PLANES
    assert sum(piece.size for piece in pieces) == 3 * LAYOUT.chunk_bytes


def test_slots_that_are_adjacent_only_here_are_not_joined() -> None:
    assert list(slot_runs([5, 4], [1, 2])) == [(5, 1, 1), (4, 2, 1)]
    assert list(slot_runs([], [])) == []


@given(st.integers(1, 1 << 16))
def test_registered_ranges_cover_the_payload_without_cutting_a_plane(most: int) -> None:
    ranges = registered_ranges(SOURCE, most)
    for plane in SOURCE.planes:
        end = plane.offset + plane.slot_bytes * SOURCE.slot_count
        assert any(at <= plane.offset and end <= at + size for at, size in ranges)
    assert ranges[0][0] == SOURCE.payload_offset  # tokens and records are not registered
    assert all(at + size <= SOURCE.size_bytes for at, size in ranges)
    assert all(first[0] + first[1] <= second[0] for first, second in pairwise(ranges))


# -- trailers: they name a chunk and its checksum; any other bytes are no trailer ----------------

KEY = bytes(range(32))


@given(st.binary(min_size=32, max_size=32), st.integers(0, 2**64 - 1), st.integers(1, 2**40))
def test_a_trailer_has_its_checksum(key: bytes, checksum: int, size: int) -> None:
    block = trailer.encode(key, checksum, size)
    assert len(block) == TRAILER_BYTES == 64
    assert trailer.decode(block, key, size) == checksum
    assert trailer.decode(block, bytes(32) if any(key) else KEY, size) is None
    assert trailer.decode(block, key, size + 1) is None


def test_any_flipped_bit_makes_it_none() -> None:
    block = trailer.encode(KEY, 0x0123456789ABCDEF, 4096)
    for bit in range(8 * TRAILER_BYTES):
        damaged = bytearray(block)
        damaged[bit // 8] ^= 1 << bit % 8
        assert trailer.decode(bytes(damaged), KEY, 4096) is None


@given(st.binary(max_size=80))
def test_other_bytes_are_no_trailer(data: bytes) -> None:
    assert trailer.decode(data, KEY, 4096) is None

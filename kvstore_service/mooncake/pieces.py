"""Where a chunk's bytes lie in arena files: the pieces that copy slots, and what is registered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from splitpoint.arena.format import Geometry

# Larger pieces cost the engine less each; a few of them still fill its connections.
PIECE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """`size` bytes: offsets in the source's arena file and in the own one."""

    source: int
    target: int
    size: int


def slot_runs(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (first source slot, first target slot, count) of slots that are adjacent in both."""
    start = 0
    for end in range(1, len(sources) + 1):
        is_adjacent = (
            end < len(sources)
            and sources[end] == sources[end - 1] + 1
            and targets[end] == targets[end - 1] + 1
        )
        if not is_adjacent:
            yield sources[start], targets[start], end - start
            start = end


def pieces_of(
    source: Geometry,
    sources: Sequence[int],
    target: Geometry,
    targets: Sequence[int],
    most_bytes: int = PIECE_BYTES,
) -> Iterator[Piece]:
    """Yield the pieces that copy slots of one arena into slots of another of the same layout."""
    runs = list(slot_runs(sources, targets))
    for there, here in zip(source.planes, target.planes, strict=True):
        for from_slot, to_slot, count in runs:
            begin = there.offset + from_slot * there.slot_bytes
            shift = here.offset + to_slot * here.slot_bytes - begin
            end = begin + count * there.slot_bytes
            for offset in range(begin, end, most_bytes):
                yield Piece(offset, offset + shift, min(most_bytes, end - offset))


def slot_parts(geometry: Geometry, slot: int) -> list[tuple[int, int]]:
    """Return (offset in the arena file, size) of a slot's part of each plane, in file order."""
    return [(plane.offset + slot * plane.slot_bytes, plane.slot_bytes) for plane in geometry.planes]


def registered_ranges(geometry: Geometry, most_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, size) of ranges that cover the payload; no plane is cut.

    A range has several planes up to `most_bytes`, or one larger plane.
    """
    ranges: list[tuple[int, int]] = []
    for plane in geometry.planes:
        end = plane.offset + plane.slot_bytes * geometry.slot_count
        if ranges and end - ranges[-1][0] <= most_bytes:
            ranges[-1] = ranges[-1][0], end - ranges[-1][0]
        else:
            ranges.append((plane.offset, end - plane.offset))
    return ranges

"""Reads the folder of a disk tier without changing it, also while a store uses it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from kvstore_service.tiers.disk.folder import (
    FoundSegment,
    find_segments,
    open_segment,
)
from kvstore_service.tiers.disk.format import (
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    TRAILER_BYTES,
    RecordHeader,
    SegmentHeader,
    check_footer,
    record_bytes,
    record_offset,
)
from splitpoint.arena.format import ArenaFormatError, Truncated
from splitpoint.arena.records import PayloadMismatch
from splitpoint.shapes import ArenaLayout

_REMOVED = bytes(RECORD_HEADER_BYTES)
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class RecordDamage:
    """A violated invariant of docs/arena-format.md."""

    path: Path
    index: int | None  # of the record; None: the segment cannot be read at all
    error: ArenaFormatError


@dataclass(slots=True)
class LayoutContents:
    """The chunks of one layout.

    Attributes:
        removed_count: records that were marked as removed.
        keys: chunks that occur in several records count once.
    """

    layout: ArenaLayout
    segment_count: int = 0
    disk_bytes: int = 0
    removed_count: int = 0
    keys: set[bytes] = field(default_factory=set)
    salt_tags: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class FolderContents:
    """What a folder holds; layouts by their hashes in hexadecimal."""

    disk_bytes: int = 0
    layouts: dict[str, LayoutContents] = field(default_factory=dict)
    damages: list[RecordDamage] = field(default_factory=list)


def read_folder(
    path: Path, *, with_payload: bool = False, done: Callable[[int], None] = lambda size: None
) -> FolderContents:
    """Read all segments. `done` is called with the bytes of each.

    A running store may remove segments meanwhile; they are left out. Raises OSError.
    """
    contents = FolderContents()
    for found in sorted(find_segments(path), key=lambda each: (each.layout_name, each.number)):
        try:
            _read_segment(found, contents, with_payload=with_payload)
        except FileNotFoundError:
            continue
        finally:
            done(found.disk_bytes)
        contents.disk_bytes += found.disk_bytes
    return contents


def _read_segment(found: FoundSegment, contents: FolderContents, *, with_payload: bool) -> None:
    fd = open_segment(found.path, os.O_RDONLY)
    try:
        try:
            header = SegmentHeader.decode(os.pread(fd, SEGMENT_HEADER_BYTES, 0))
        except ArenaFormatError as error:
            contents.damages.append(RecordDamage(found.path, None, error))
            return
        layout = header.layout
        name = layout.layout_hash.hex()
        part = contents.layouts.setdefault(name, LayoutContents(layout))
        part.segment_count += 1
        part.disk_bytes += found.disk_bytes
        count, is_finished = _record_count(fd, layout, header.number)
        damages: list[RecordDamage] = []
        for index in range(count):
            damage = _read_record(fd, header, index, part, with_payload=with_payload)
            if damage is not None:
                damages.append(RecordDamage(found.path, index, damage))
        contents.damages += damages if is_finished else _before_the_tail(damages, count)
    finally:
        os.close(fd)


def _record_count(fd: int, layout: ArenaLayout, number: int) -> tuple[int, bool]:
    """Return the number of records, and whether the segment is finished."""
    size = os.fstat(fd).st_size
    try:
        trailer = os.pread(fd, TRAILER_BYTES, max(0, size - TRAILER_BYTES))
        return check_footer(layout, number, size, trailer)[0], True
    except ArenaFormatError:
        return max(0, size - SEGMENT_HEADER_BYTES) // record_bytes(layout), False


def _before_the_tail(damages: list[RecordDamage], count: int) -> list[RecordDamage]:
    """Leave out the damaged records at the end: a store is writing there, or was killed."""
    whole = count
    while damages and damages[-1].index == whole - 1:
        damages = damages[:-1]
        whole -= 1
    return damages


def _read_record(
    fd: int, segment: SegmentHeader, index: int, part: LayoutContents, *, with_payload: bool
) -> ArenaFormatError | None:
    """Add a record to the contents, or return what is wrong with it."""
    offset = record_offset(segment.layout, index)
    block = os.pread(fd, RECORD_HEADER_BYTES, offset)
    if block == _REMOVED:
        part.removed_count += 1
        return None
    try:
        header = RecordHeader.decode(block)
        header.check_place(segment.layout, segment.number, index)
        if with_payload:
            _check_payload(fd, offset + RECORD_HEADER_BYTES, header)
    except ArenaFormatError as error:
        return error
    part.keys.add(header.key)
    part.salt_tags.add(header.salt_tag)
    return None


def _check_payload(fd: int, offset: int, header: RecordHeader) -> None:
    """Raise PayloadMismatch, or Truncated if the file ends inside the payload."""
    digest, left = xxhash.xxh3_64(), header.payload_bytes
    while left:
        piece = os.pread(fd, min(left, _PIECE_BYTES), offset)
        if not piece:
            raise Truncated("the payload is cut off")
        digest.update(piece)
        offset, left = offset + len(piece), left - len(piece)
    if digest.intdigest() != header.checksum:
        raise PayloadMismatch("the payload differs from its checksum")

"""Reads and writes one segment of the disk tier. Every call blocks.

A segment is written from its front to its back; headers of damaged records are zeroed.
"""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore_service.pool.prefix_index import Entry
from kvstore_service.tiers.disk.calls import Files, Part
from kvstore_service.tiers.disk.folder import open_segment
from kvstore_service.tiers.disk.format import (
    MOST_RECORDS,
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    TRAILER_BYTES,
    MisplacedRecord,
    NotOfThisChunk,
    RecordHeader,
    SegmentHeader,
    check_footer,
    encode_footer,
    keys_of_footer,
    record_bytes,
    record_offset,
)
from splitpoint.arena.files import is_at
from splitpoint.arena.format import ArenaFormatError, LayoutHashMismatch, Truncated
from splitpoint.shapes import ArenaLayout

_NO_HEADER = bytes(RECORD_HEADER_BYTES)


class Miss(enum.Enum):
    """Why a record could not be read."""

    GONE = enum.auto()  # its header is zeros or cut off
    DAMAGED = enum.auto()


@dataclass(frozen=True, slots=True)
class Wanted:
    """A record, the chunk that it should hold, and the parts that its payload goes to."""

    index: int
    key: bytes
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """A segment that an earlier store left.

    Attributes:
        keys: of each record; None for one that is damaged.
        headers: of each record if the segment can be continued, else empty.
        is_finished: it has its footer.
    """

    path: Path
    number: int
    size_bytes: int
    keys: list[bytes | None]
    headers: list[bytes]
    is_finished: bool

    @property
    def damaged_count(self) -> int:
        return self.keys.count(None)


def read_records(
    files: Files, path: Path, layout: ArenaLayout, number: int, wanted: Sequence[Wanted]
) -> list[int | Miss]:
    """Read payloads into their parts. Return the recorded checksum of each, or why there is none.

    Raises OSError if the file cannot be opened.
    """
    fd = open_segment(path, os.O_RDONLY)
    try:
        spans = [(record_offset(layout, each.index), record_bytes(layout)) for each in wanted]
        for offset, size in spans:
            # The kernel reads ahead 128 KiB at a time otherwise: a quarter of the rate.
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)
        found = [
            _read(files, fd, layout, number, each, offset)
            for each, (offset, _) in zip(wanted, spans, strict=True)
        ]
        for offset, size in spans:
            os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)
        return found
    finally:
        os.close(fd)


def _read(
    files: Files, fd: int, layout: ArenaLayout, number: int, wanted: Wanted, offset: int
) -> int | Miss:
    block = bytearray(RECORD_HEADER_BYTES)
    try:
        size = files.read(fd, [block, *wanted.parts], offset)
    except OSError as error:
        if error.errno == errno.EIO:  # of this sector; other records may be whole
            return Miss.DAMAGED
        raise
    if size < RECORD_HEADER_BYTES or block == _NO_HEADER:
        return Miss.GONE
    try:
        header = RecordHeader.decode(bytes(block))
        header.check_place(layout, number, wanted.index)
        if header.key != wanted.key:
            raise NotOfThisChunk("the record holds another chunk")
        if size < RECORD_HEADER_BYTES + layout.chunk_bytes:
            raise Truncated("the payload is cut off")
    except ArenaFormatError:
        return Miss.DAMAGED
    return header.checksum


def zero_header(files: Files, path: Path, layout: ArenaLayout, index: int) -> None:
    """Mark a record as removed. Raises OSError."""
    fd = open_segment(path, os.O_WRONLY)
    try:
        files.write(fd, [_NO_HEADER], record_offset(layout, index))
    finally:
        os.close(fd)


def load_segment(files: Files, path: Path, layout: ArenaLayout, number: int) -> LoadedSegment:
    """Find the records of a segment: by its footer, or one by one.

    Raises OSError, or ArenaFormatError if the segment is none of this layout and number.
    """
    fd = open_segment(path, os.O_RDONLY)
    try:
        header = SegmentHeader.decode(_pread(files, fd, SEGMENT_HEADER_BYTES, 0))
        if header.layout.layout_hash != layout.layout_hash:
            raise LayoutHashMismatch("the segment was written for another layout")
        if header.number != number:
            raise MisplacedRecord(f"the file of segment {number} is that of {header.number}")
        size = os.fstat(fd).st_size
        try:
            keys = _keys_by_footer(files, fd, layout, number, size)
            return LoadedSegment(path, number, size, keys, [], is_finished=True)
        except ArenaFormatError:
            headers = _scan(files, fd, layout, number, size)
    finally:
        os.close(fd)
    keys = [None if header == _NO_HEADER else _key_of(header) for header in headers]
    return LoadedSegment(path, number, size, keys, headers, is_finished=False)


def _keys_by_footer(
    files: Files, fd: int, layout: ArenaLayout, number: int, size: int
) -> list[bytes | None]:
    """Return the keys of a finished segment. Raises ArenaFormatError if it has no whole footer."""
    trailer_at = size - TRAILER_BYTES
    if trailer_at < SEGMENT_HEADER_BYTES:
        raise Truncated("a segment without a footer")
    trailer = _pread(files, fd, TRAILER_BYTES, trailer_at)
    count, headers_crc = check_footer(layout, number, size, trailer)
    headers = _pread(files, fd, count * RECORD_HEADER_BYTES, record_offset(layout, count))
    return [key if any(key) else None for key in keys_of_footer(headers, headers_crc)]


def _scan(files: Files, fd: int, layout: ArenaLayout, number: int, size: int) -> list[bytes]:
    """Return the headers of an unfinished segment up to the last whole record.

    Zeros stand for one that is damaged.
    """
    count = (size - SEGMENT_HEADER_BYTES) // record_bytes(layout)
    headers = []
    for index in range(min(count, MOST_RECORDS)):
        header = _pread(files, fd, RECORD_HEADER_BYTES, record_offset(layout, index))
        try:
            RecordHeader.decode(header).check_place(layout, number, index)
        except ArenaFormatError:
            header = _NO_HEADER
        headers.append(header)
    while headers and headers[-1] == _NO_HEADER:
        headers.pop()
    return headers


def _key_of(header: bytes) -> bytes:
    return RecordHeader.decode(header).key


def _pread(files: Files, fd: int, size: int, offset: int) -> bytes:
    block = bytearray(size)
    return bytes(block[: files.read(fd, [block], offset)])


# Written bytes between two syncs: the most that waits in memory for the disk.
_SYNC_BYTES = 16 << 20


class SegmentWriter:
    """Appends records to one segment.

    Attributes:
        record_count: records in the file.
        is_broken: the file's end could not be restored after an error; nothing may be appended.
    """

    def __init__(
        self, files: Files, fd: int, layout: ArenaLayout, number: int, headers: list[bytes]
    ) -> None:
        self.is_broken = False
        self._files = files
        self._fd = fd
        self._layout = layout
        self._number = number
        self._headers = headers
        self._unsynced_from = record_offset(layout, len(headers))

    @classmethod
    def create(cls, files: Files, path: Path, layout: ArenaLayout, number: int) -> SegmentWriter:
        """Create the file. Raises OSError, and leaves no file then.

        FileExistsError: the name is taken.
        """
        fd = open_segment(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            files.write(fd, [SegmentHeader(layout, number).encode()], 0)
        except BaseException:
            os.close(fd)
            with suppress(OSError):
                path.unlink()
            raise
        return cls(files, fd, layout, number, [])

    @classmethod
    def reopen(cls, files: Files, loaded: LoadedSegment, layout: ArenaLayout) -> SegmentWriter:
        """Continue behind the last whole record. Raises OSError."""
        fd = open_segment(loaded.path, os.O_RDWR)
        try:
            os.ftruncate(fd, record_offset(layout, len(loaded.headers)))
        except BaseException:
            os.close(fd)
            raise
        return cls(files, fd, layout, loaded.number, list(loaded.headers))

    @property
    def record_count(self) -> int:
        return len(self._headers)

    def is_at(self, path: Path) -> bool:
        """Return True if the file is still at its path."""
        return is_at(self._fd, path)

    def append(self, entry: Entry, parts: Sequence[Part]) -> None:
        """Write one record. Raises OSError; the file ends with the record before it then."""
        index = len(self._headers)
        header = RecordHeader(
            key=entry.key,
            parent_key=entry.parent_key,
            layout_hash=self._layout.layout_hash,
            salt_tag=entry.salt_tag,
            fingerprint=entry.fingerprint,
            checksum=entry.checksum,
            token_count=entry.token_count,
            chunk_index=entry.chunk_index,
            payload_bytes=self._layout.chunk_bytes,
            segment_number=self._number,
            record_index=index,
        ).encode()
        start, end = record_offset(self._layout, index), record_offset(self._layout, index + 1)
        padding = bytes(end - start - RECORD_HEADER_BYTES - self._layout.chunk_bytes)
        try:
            self._files.write(self._fd, [header, *parts, padding], start)
        except OSError:
            self._cut(start)
            raise
        self._headers.append(header)

    def sync_if_due(self) -> None:
        """Bring records to the disk, if many are not there yet. Raises OSError."""
        end = record_offset(self._layout, len(self._headers))
        if end - self._unsynced_from >= _SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        """Bring everything to the disk, and free the memory of its cache. Raises OSError."""
        self._files.sync(self._fd)
        start = self._unsynced_from
        self._unsynced_from = record_offset(self._layout, len(self._headers))
        os.posix_fadvise(self._fd, start, self._unsynced_from - start, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """Write the footer, bring the file to the disk, close it. Raises OSError."""
        end = record_offset(self._layout, len(self._headers))
        try:
            try:
                self._files.write(self._fd, [encode_footer(self._number, self._headers)], end)
            except OSError:
                self._cut(end)
                raise
            self.sync()
        finally:
            self.close()

    def close(self) -> None:
        """Close the file; a later store continues it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _cut(self, end: int) -> None:
        try:
            os.ftruncate(self._fd, end)
        except OSError:
            self.is_broken = True

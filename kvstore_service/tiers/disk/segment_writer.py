"""Writes one segment of the disk tier, from its front to its back. Every call blocks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvstore_service.pool.prefix_index import Entry
from kvstore_service.tiers.disk.files import Files, Part
from kvstore_service.tiers.disk.folder import open_segment
from kvstore_service.tiers.disk.format import (
    RECORD_HEADER_BYTES,
    RecordHeader,
    SegmentHeader,
    encode_footer,
    record_offset,
)
from kvstore_service.tiers.disk.segment_reader import LoadedSegment
from splitpoint.arena.files import is_at
from splitpoint.shapes import ArenaLayout

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

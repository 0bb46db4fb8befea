"""The chunks of one layout in a folder: an index in memory over segments on the disk.

Its calls block, and may come from several threads: `append` from one at a time. The lock protects
the index, and is never held during I/O.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore_service.pool.prefix_index import Entry
from kvstore_service.tiers.disk.calls import Files, Part
from kvstore_service.tiers.disk.folder import (
    FoundSegment,
    TierFolder,
    find_segments,
    remove_segment,
    segment_path,
)
from kvstore_service.tiers.disk.format import FOLDER_BYTES, Division, record_offset, segment_size
from kvstore_service.tiers.disk.index import Segment, SegmentIndex
from kvstore_service.tiers.disk.segments import (
    LoadedSegment,
    Miss,
    SegmentWriter,
    Wanted,
    load_segment,
    read_records,
    zero_header,
)
from splitpoint.arena.format import ArenaFormatError
from splitpoint.config import counted
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import ArenaLayout, align

_log = logging.getLogger(__name__)

# The disk has no room for this process, whatever the bound is.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A segment in bad sectors, or none any more.
_UNREADABLE = (errno.EIO, errno.ENOENT)
# Seconds for which a disk that was full is used no further than it could be.
_SQUEEZE_SECONDS = 60.0


@dataclass(slots=True)
class LogCounts:
    """Counts since the start, over all logs of a tier, one after another."""

    written_chunk_count: int = 0
    read_chunk_count: int = 0
    missed_chunk_count: int = 0
    damaged_chunk_count: int = 0
    evicted_chunk_count: int = 0


@dataclass(frozen=True, slots=True)
class Appended:
    """How many chunks `append` wrote, and the error that ended it, if one did."""

    count: int
    error: OSError | None = None


@dataclass(slots=True)
class _Squeeze:
    """What a disk that was full has room for.

    Attributes:
        bound: most bytes.
        division: of that bound.
        until: by the log's clock; then the bound of the tier counts again.
    """

    bound: int
    division: Division
    until: float


class SegmentLog:
    """All segments of one layout, and those of other layouts as far as they use up the bound.

    Raises InvalidArgument if the bound is too small.

    Attributes:
        counts: changed under the lock.
    """

    def __init__(
        self,
        folder: TierFolder,
        layout: ArenaLayout,
        size_bytes: int,
        *,
        counts: LogCounts,
        files: Files,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.counts = counts
        self._layout = layout
        self._size_bytes = size_bytes
        self._division = Division.of(layout, size_bytes)
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._index = SegmentIndex()
        self._changed: list[bytes] = []
        # Segments that cannot be read with this layout, the oldest last.
        self._foreign: list[FoundSegment] = []
        self._active: tuple[SegmentWriter, Segment] | None = None
        self._next_number = 1
        # Less than the bound while the disk is full of other files; and until when.
        self._squeezed = _Squeeze(size_bytes, self._division, 0.0)

    # -- opening and closing --------------------------------------------------------------

    def open(self) -> None:
        """Read all segments, and remove what is beyond the bound. Raises OSError."""
        own: list[LoadedSegment] = []
        name = self._layout.layout_hash.hex()
        self._layout_folder = self.folder.layout_folder(self._layout)
        for found in sorted(find_segments(self.folder.path), key=lambda each: each.number):
            loaded = None
            if found.layout_name == name:
                self._next_number = max(self._next_number, found.number + 1)
                loaded = self._load(found)
            if loaded is None:
                self._foreign.append(found)
            else:
                own.append(loaded)
        self._foreign.sort(key=lambda each: -each.changed_at)
        for loaded in own:
            self._adopt(loaded, is_last=loaded is own[-1])
        self._make_room(0)

    def _load(self, found: FoundSegment) -> LoadedSegment | None:
        """Return what is in a segment. None if that is lost.

        Raises OSError if it may be readable at another time.
        """
        try:
            return load_segment(self._files, found.path, self._layout, found.number)
        except ArenaFormatError as error:
            _log.warning("%s is not used: %s", found.path, error.message)
        except OSError as error:
            if error.errno not in _UNREADABLE:
                raise
            _log.warning("%s is not used: %s", found.path, error.strerror)
        return None

    def _adopt(self, loaded: LoadedSegment, *, is_last: bool) -> None:
        segment = Segment(loaded.number, loaded.path, align(loaded.size_bytes), loaded.keys)
        with self._lock:
            self._index.add_segment(segment)
            self._changed += [key for key in loaded.keys if key is not None]
            self.counts.damaged_chunk_count += loaded.damaged_count
        has_room = len(loaded.headers) < self._division.record_count
        if is_last and has_room and not loaded.is_finished:
            writer = SegmentWriter.reopen(self._files, loaded, self._layout)
            self._active = (writer, segment)

    def close(self) -> None:
        """Bring what is written to the disk. The next store continues the last segment."""
        if self._active is not None:
            with suppress(OSError):
                self._active[0].sync()
            self._leave()

    # -- asking ---------------------------------------------------------------------------

    def __contains__(self, key: bytes) -> bool:
        with self._lock:
            return key in self._index

    def touch(self, key: bytes) -> bool:
        """Return True if the chunk is held, and count that as a use."""
        with self._lock:
            place = self._index.find(key)
            if place is not None:
                self._index.use(place[0])
            return place is not None

    def keys(self) -> list[bytes]:
        with self._lock:
            return list(self._index.keys())

    def has(self, keys: Iterable[bytes]) -> list[bool]:
        """Return for each key whether it is held."""
        with self._lock:
            return [key in self._index for key in keys]

    @property
    def chunk_count(self) -> int:
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        """Bytes of all segments on the disk, in whole pages, those of other layouts included."""
        with self._lock:
            return self._index.disk_bytes + sum(each.disk_bytes for each in self._foreign)

    def take_changed(self) -> list[bytes]:
        """Return the keys of chunks that came or went since the last call."""
        with self._lock:
            changed, self._changed = self._changed, []
            return changed

    # -- reading --------------------------------------------------------------------------

    def locate(self, key: bytes) -> tuple[Segment, int] | None:
        """Return the chunk's segment and record, and count the use."""
        with self._lock:
            place = self._index.find(key)
            if place is None:
                self.counts.missed_chunk_count += 1
            else:
                self._index.use(place[0])
            return place

    def read(self, segment: Segment, wanted: Sequence[Wanted]) -> list[int | None]:
        """Read records of one segment. Return the recorded checksums; None for a lost chunk.

        Raises OSError if the segment cannot be opened, though it is there, and FolderLost.
        """
        with self._lock:
            segment.reader_count += 1
        try:
            found = read_records(self._files, segment.path, self._layout, segment.number, wanted)
        except FileNotFoundError:
            self.folder.check_there()
            self._lose(segment)
            found = [Miss.GONE] * len(wanted)
        finally:
            with self._lock:
                segment.reader_count -= 1
        damaged = [
            each.key for each, what in zip(wanted, found, strict=True) if what is Miss.DAMAGED
        ]
        gone = [each.key for each, what in zip(wanted, found, strict=True) if what is Miss.GONE]
        self.drop(damaged)
        with self._lock:
            self.counts.missed_chunk_count += len(gone)
            self.counts.read_chunk_count += len(wanted) - len(gone) - len(damaged)
            for key in gone:
                self._forget(key)
        return [what if isinstance(what, int) else None for what in found]

    def drop(self, keys: Iterable[bytes]) -> None:
        """Forget damaged chunks, also for later starts. Raises nothing."""
        places = []
        with self._lock:
            for key in keys:
                place = self._forget(key)
                if place is not None:
                    self.counts.damaged_chunk_count += 1
                    places.append(place)
        records: dict[Path, list[int]] = {}
        for segment, index in places:
            records.setdefault(segment.path, []).append(index)
        for path, indices in records.items():
            count = counted(len(indices), "damaged record")
            _log.warning("%s: dropped %s, the first is number %d", path, count, min(indices))
        for segment, index in places:
            with suppress(OSError):
                zero_header(self._files, segment.path, self._layout, index)

    def _forget(self, key: bytes) -> tuple[Segment, int] | None:
        place = self._index.find(key)
        if place is not None:
            self._index.forget(key)
            self._changed.append(key)
        return place

    def _lose(self, segment: Segment) -> None:
        """Forget a segment whose file is gone."""
        with self._lock:
            if self._index.segments.get(segment.number) is segment:
                _log.warning("%s was removed or replaced from outside", segment.path)
                self._changed += self._index.remove_segment(segment)

    # -- writing --------------------------------------------------------------------------

    def append(self, chunks: Sequence[tuple[Entry, Sequence[Part]]]) -> Appended:
        """Write chunks that the index does not hold, each with the parts of its payload.

        A full disk is used no further than it can be: older segments make room, once a call.
        Raises FolderLost.
        """
        count, has_squeezed = 0, False
        while count < len(chunks):
            self.folder.check_there()
            try:
                writer, segment = self._ready()
                self._append(writer, segment, *chunks[count])
                count += 1
            except OSError as error:
                self._abandon_broken()
                if error.errno not in _FULL or has_squeezed or not self._squeeze():
                    return Appended(count, error)
                has_squeezed = True
        return Appended(count)

    def _ready(self) -> tuple[SegmentWriter, Segment]:
        """Return a segment with room for a record. Raises OSError."""
        if self._active is not None and not self._active[0].is_at(self._active[1].path):
            self._lose(self._active[1])
            self._leave()
        if self._active is not None:
            writer, segment = self._active
            if writer.record_count < self._dividing.record_count:
                writer.sync_if_due()
            else:
                self._active = None
                with self._lock:
                    size = segment_size(self._layout, len(segment.keys))
                    self._index.resize(segment, size)
                writer.finish()
        if self._active is None:
            self._make_room(self._dividing.segment_bytes)
            self._active = self._new_segment()
        return self._active

    def _new_segment(self) -> tuple[SegmentWriter, Segment]:
        """Create a segment under the next number that is free. Raises OSError."""
        while True:
            number = self._next_number
            self._next_number += 1
            path = segment_path(self._layout_folder, number)
            try:
                writer = SegmentWriter.create(self._files, path, self._layout, number)
            except FileExistsError:  # something that is not a segment has this name
                continue
            segment = Segment(number, path, align(record_offset(self._layout, 0)))
            with self._lock:
                self._index.add_segment(segment)
            return writer, segment

    def _append(
        self, writer: SegmentWriter, segment: Segment, entry: Entry, parts: Sequence[Part]
    ) -> None:
        """Write one record. Raises OSError."""
        writer.append(entry, parts)
        with self._lock:
            self._index.append(segment, entry.key)
            self._index.resize(segment, align(record_offset(self._layout, len(segment.keys))))
            self._changed.append(entry.key)
            self.counts.written_chunk_count += 1

    def _leave(self) -> None:
        if self._active is not None:
            self._active[0].close()
            self._active = None

    def _abandon_broken(self) -> None:
        """Leave a segment whose end an error left in an unknown state."""
        if self._active is not None and self._active[0].is_broken:
            self._leave()

    # -- the bound ------------------------------------------------------------------------

    def _make_room(self, size_bytes: int) -> None:
        """Remove segments until this many more bytes are within the bound. Raises OSError."""
        bound = self._squeezed.bound if self._is_squeezed else self._size_bytes
        while self._reserved_bytes + size_bytes > bound:
            if not self._remove_oldest():
                return

    @property
    def _is_squeezed(self) -> bool:
        return self._clock() < self._squeezed.until

    @property
    def _dividing(self) -> Division:
        """The division of what the disk has room for now."""
        return self._squeezed.division if self._is_squeezed else self._division

    @property
    def _reserved_bytes(self) -> int:
        """Bytes used, with all that the active segment may grow to."""
        growth = 0
        if self._active is not None:
            growth = max(0, self._dividing.segment_bytes - self._active[1].size_bytes)
        return self.used_bytes + growth + FOLDER_BYTES

    def _squeeze(self) -> bool:
        """Remove one segment from a full disk, and use no more of it for a while.

        A segment that has all of the disk goes, too: else its chunks would stay for good, and no
        other would ever be written. Those that follow are so small that several fit.
        """
        used = self.used_bytes + FOLDER_BYTES
        division = self._division
        with suppress(InvalidArgument):  # it holds less than LEAST_SEGMENTS chunks
            division = Division.of(self._layout, min(used, self._size_bytes))
        is_alone = not self._foreign and self._victim() is None
        if is_alone and division.segment_bytes >= self._dividing.segment_bytes:
            return False  # nothing smaller would fit either
        with suppress(OSError):
            if is_alone:
                self._leave()
            if self._remove_oldest():
                until = self._clock() + _SQUEEZE_SECONDS
                self._squeezed = _Squeeze(used, division, until)
                if not is_alone:
                    self._squeezed.bound = self._reserved_bytes
                return True
        return False

    def _victim(self) -> Segment | None:
        """Return the segment that goes next, if there is one besides the active one."""
        with self._lock:
            return self._index.victim(None if self._active is None else self._active[1])

    def _remove_oldest(self) -> bool:
        """Remove the oldest foreign segment, or the least recently used one. Raises OSError."""
        if self._foreign:
            remove_segment(self._foreign[-1].path)
            with self._lock:
                self._foreign.pop()
            return True
        victim = self._victim()
        if victim is None:
            return False
        remove_segment(victim.path)
        with self._lock:
            keys = self._index.remove_segment(victim)
            self._changed += keys
            self.counts.evicted_chunk_count += len(keys)
        return True

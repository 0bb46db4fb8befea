"""The index of the disk tier: which segment holds a chunk, and which segment goes next. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(slots=True, eq=False)
class Segment:
    """One segment of this layout.

    Attributes:
        size_bytes: on the disk, in whole pages; of the active segment what it may grow to.
        keys: of each record; None where the record is damaged, dropped or stored anew elsewhere.
        last_use: number of the last use of one of its chunks.
        reader_count: reads in progress.
    """

    number: int
    path: Path
    size_bytes: int
    keys: list[bytes | None] = field(default_factory=list)
    last_use: int = 0
    reader_count: int = 0


class SegmentIndex:
    """All chunks of one layout by key, and their segments by number.

    Attributes:
        disk_bytes: of all segments.
    """

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.disk_bytes = 0
        self._places: dict[bytes, tuple[Segment, int]] = {}
        self._use_count = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def keys(self) -> Iterator[bytes]:
        return iter(self._places)

    def find(self, key: bytes) -> tuple[Segment, int] | None:
        """Return the chunk's segment, and its record there."""
        return self._places.get(key)

    def add_segment(self, segment: Segment) -> None:
        """Add a segment with its keys; a chunk that is held already moves to this segment."""
        keys, segment.keys = segment.keys, []
        self.segments[segment.number] = segment
        self.disk_bytes += segment.size_bytes
        for key in keys:
            self.append(segment, key)

    def resize(self, segment: Segment, size_bytes: int) -> None:
        """Note a segment's size. One that was removed meanwhile does not count."""
        if self.segments.get(segment.number) is segment:
            self.disk_bytes += size_bytes - segment.size_bytes
        segment.size_bytes = size_bytes

    def append(self, segment: Segment, key: bytes | None) -> None:
        """Note the segment's next record."""
        if key is not None:
            self.forget(key)
            self._places[key] = (segment, len(segment.keys))
            self.use(segment)
        segment.keys.append(key)

    def use(self, segment: Segment) -> None:
        self._use_count += 1
        segment.last_use = self._use_count

    def forget(self, key: bytes) -> None:
        """Remove a chunk, if it is there."""
        place = self._places.pop(key, None)
        if place is not None:
            segment, index = place
            segment.keys[index] = None

    def remove_segment(self, segment: Segment) -> list[bytes]:
        """Remove a segment. Return the keys of the chunks that go with it."""
        del self.segments[segment.number]
        self.disk_bytes -= segment.size_bytes
        keys = [key for key in segment.keys if key is not None]
        for key in keys:
            del self._places[key]
        return keys

    def victim(self, active: Segment | None) -> Segment | None:
        """Return the least recently used segment, one that is not being read if there is one."""
        others = (each for each in self.segments.values() if each is not active)
        return min(others, key=lambda each: (each.reader_count > 0, each.last_use), default=None)

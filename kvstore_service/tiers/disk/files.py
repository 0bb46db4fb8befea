"""The system calls that read and write payloads; tests replace them to let them fail."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

# Bytes of a slot in one plane, or a header.
Part = memoryview | bytes | bytearray

# Most parts of one call (IOV_MAX).
_MOST_PARTS = 1024


class Files:
    """Reads and writes at an offset from and into many parts. Raises OSError."""

    def read(self, fd: int, parts: Sequence[Part], offset: int) -> int:
        """Fill the parts one after another. Return the bytes read: fewer at the file's end."""
        done = 0
        for views in _calls(parts):
            while views:
                count = os.preadv(fd, views, offset + done)
                if count == 0:
                    return done
                done += count
                views = _after(views, count)
        return done

    def write(self, fd: int, parts: Sequence[Part], offset: int) -> None:
        """Write all parts one after another."""
        for views in _calls(parts):
            while views:
                count = os.pwritev(fd, views, offset)
                offset += count
                views = _after(views, count)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)


def _calls(parts: Sequence[Part]) -> Iterator[list[memoryview]]:
    """Yield the parts that one call takes."""
    for start in range(0, len(parts), _MOST_PARTS):
        yield [memoryview(part) for part in parts[start : start + _MOST_PARTS]]


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what follows the first `count` bytes."""
    for place, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[place + 1 :]]
        count -= len(view)
    return []

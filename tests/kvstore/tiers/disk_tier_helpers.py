"""A disk tier beside a small arena, chunks to keep in it, and a disk that fails when told to."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvstore_helpers import LAYOUT, read_payload, write_payload

from kvstore_service.pool.prefix_index import ChunkIdentity, Entry
from kvstore_service.tiers.disk.calls import Files, Part
from kvstore_service.tiers.disk.format import FOLDER_BYTES, segment_size
from kvstore_service.tiers.disk.tier import DiskTier
from splitpoint.arena.owner import open_or_create_arena
from splitpoint.shapes import ArenaLayout

SALT = b"a salt"


def bound_of(segments: int, records: int, layout: ArenaLayout = LAYOUT) -> int:
    """Return a bound that holds this number of segments of these records."""
    return FOLDER_BYTES + segments * segment_size(layout, records)


class FailingFiles(Files):
    """Raises an error in place of a read or write.

    Attributes:
        write_error, read_error, sync_error: errno; None: no error.
        room: returns the bytes left on the disk. None: no bound.
        answers: while it is clear, no read or write returns.
    """

    def __init__(self) -> None:
        self.write_error: int | None = None
        self.read_error: int | None = None
        self.sync_error: int | None = None
        self.room: Callable[[], int] | None = None
        self.answers = threading.Event()
        self.answers.set()

    def read(self, fd: int, parts: Sequence[Part], offset: int) -> int:
        self.answers.wait()
        if self.read_error is not None:
            raise OSError(self.read_error, os.strerror(self.read_error))
        return super().read(fd, parts, offset)

    def write(self, fd: int, parts: Sequence[Part], offset: int) -> None:
        self.answers.wait()
        if self.write_error is not None:
            # Half of it is there, as after a real error.
            super().write(fd, parts[: len(parts) // 2], offset)
            raise OSError(self.write_error, os.strerror(self.write_error))
        size = sum(len(part) for part in parts)
        if self.room is not None and size > self.room():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, parts, offset)

    def sync(self, fd: int) -> None:
        if self.sync_error is not None:
            raise OSError(self.sync_error, os.strerror(self.sync_error))
        super().sync(fd)


class Holds:
    """Counts the holds of slots."""

    def __init__(self) -> None:
        self.slots: Counter[int] = Counter()

    def begin_copy(self, slots: Iterable[int]) -> None:
        self.slots.update(slots)

    def end_copy(self, slots: Iterable[int]) -> None:
        self.slots.subtract(slots)


class TierBench:
    """An arena whose slots are written by hand, and disk tiers one after another.

    The payload of chunk `number` is a function of the number. Its key is that of the first chunk
    of a sequence.
    """

    def __init__(
        self, folder: Path, size_bytes: int, *, layout: ArenaLayout = LAYOUT, slot_count: int = 8
    ) -> None:
        self.folder = folder / "tier"
        self.size_bytes = size_bytes
        self.layout = layout
        folder.mkdir(exist_ok=True)
        opened = open_or_create_arena(folder / "store" / "arena", layout, slot_count)
        self.owner, self.arena = opened.owner, opened.arena
        self.files = FailingFiles()
        self.holds = Holds()
        self.now = 1000.0
        self.tier: DiskTier | None = None

    async def start(self, *, pause_seconds: float = 0.01, stall_seconds: float = 60.0) -> DiskTier:
        self.tier = DiskTier(
            self.arena,
            self.folder,
            self.size_bytes,
            holds=self.holds,
            files=self.files,
            clock=lambda: self.now,
            pause_seconds=pause_seconds,
            stall_seconds=stall_seconds,
        )
        await self.tier.start()
        return self.tier

    def key(self, number: int) -> bytes:
        return self._identity(number).key

    def keys(self, *numbers: int) -> list[bytes]:
        return [self.key(number) for number in numbers]

    def _identity(self, number: int) -> ChunkIdentity:
        tokens = [number] * self.layout.chunk_tokens
        return ChunkIdentity.of(self.layout.layout_hash, SALT, b"", tokens)

    def entry(self, number: int, slot: int) -> Entry:
        """Write the chunk into a slot of the arena."""
        checksum = write_payload(self.arena, slot, number, self.layout.chunk_tokens)
        identity = self._identity(number)
        return Entry(
            slot=slot,
            generation=1,
            key=identity.key,
            parent_key=b"",
            salt_tag=identity.salt_tag,
            packed=identity.packed,
            fingerprint=identity.fingerprint,
            checksum=checksum,
            chunk_index=0,
        )

    async def write(self, *numbers: int) -> int:
        """Store chunks, as many at a time as the arena has slots."""
        assert self.tier is not None
        stored, size = 0, self.arena.slot_count
        for start in range(0, len(numbers), size):
            batch = numbers[start : start + size]
            entries = [self.entry(number, slot) for slot, number in enumerate(batch)]
            stored += await self.tier.write(entries)
        return stored

    async def check_read(self, *numbers: int) -> list[bool]:
        """Read chunks into zeroed slots. Return which were found.

        Each payload that was found agrees with its checksum, or is reported as damaged.
        """
        assert self.tier is not None
        found = []
        for number in numbers:
            self.arena.zero(0)
            [checksum] = await self.tier.read([self.key(number)], [0])
            if checksum is not None and self.arena.checksum(0) != checksum:
                await self.tier.drop([self.key(number)])
                checksum = None
            if checksum is not None:
                expected = write_payload(self.arena, 1, number, self.layout.chunk_tokens)
                assert checksum == expected
                assert read_payload(self.arena, 0) == read_payload(self.arena, 1)
            found.append(checksum is not None)
        return found

    def disk_bytes(self) -> int:
        """Return what `du` counts."""
        paths = [self.folder, *self.folder.rglob("*")]
        return sum(path.lstat().st_blocks * 512 for path in paths)

    def segments(self) -> list[Path]:
        return sorted(self.folder.glob("*/*.segment"))

    async def close(self) -> None:
        if self.tier is not None:
            await self.tier.close()
            self.tier = None

    def remove(self) -> None:
        self.arena.close()
        self.owner.remove()

"""The disk tier: a folder of segments that keeps chunks beyond the arena and beyond a restart.

It does its I/O in threads, and is away while its folder is, or does not answer: it then looks for
the folder again, with growing pauses. Writes pause alike after an error, while reads go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from kvstore_service.pool.prefix_index import Entry
from kvstore_service.tiers.disk.calls import (
    STALL_SECONDS,
    DaemonThreads,
    DiskCalls,
    Files,
    NoAnswer,
    Part,
    SlotHolds,
    to_the_end,
)
from kvstore_service.tiers.disk.folder import FolderLost, TierFolder
from kvstore_service.tiers.disk.index import Segment
from kvstore_service.tiers.disk.segment_log import LogCounts, SegmentLog
from kvstore_service.tiers.disk.segments import Wanted
from kvstore_service.tiers.tier import TierStats
from splitpoint.arena.mapping import Arena
from splitpoint.errors import FailedPrecondition, SplitpointError, Unavailable
from splitpoint.tiers import Tier

# Bounds of a pause, in seconds.
LEAST_PAUSE_SECONDS = 1.0
_MOST_PAUSE_SECONDS = 60.0


class Pause:
    """A pause that doubles with each error in a row.

    Attributes:
        seconds: length of the current or last pause.
    """

    def __init__(self, clock: Callable[[], float], first_seconds: float) -> None:
        self.first_seconds = first_seconds
        self.seconds = 0.0
        self._clock = clock
        self._until = 0.0

    @property
    def is_on(self) -> bool:
        return self._clock() < self._until

    def begin(self) -> None:
        self.seconds = min(max(self.first_seconds, 2 * self.seconds), _MOST_PAUSE_SECONDS)
        self._until = self._clock() + self.seconds

    def end(self) -> None:
        self.seconds = self._until = 0.0


_logger = logging.getLogger(__name__)

# Bytes that one thread reads for one call before another may continue it.
_READ_BYTES = 8 << 20

# The index of a large folder takes seconds to read.
_OPEN_SECONDS = 300.0
# How long a stop waits for the disk.
_CLOSE_SECONDS = 5.0

Result = TypeVar("Result")


class DiskTier:
    """A `ChunkTier` on a folder.

    Args:
        arena: whose chunks it keeps; folders hold chunks of several layouts side by side.
        size_bytes: bound of all files in the folder.
        holds: keeps slots that a call on a disk without an answer may still read or write.
        files: reads and writes.
        pause_seconds: after the first error.
        stall_seconds: after which a call without an answer makes the tier away.
    """

    def __init__(
        self,
        arena: Arena,
        folder: Path,
        size_bytes: int,
        *,
        holds: SlotHolds,
        files: Files | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause_seconds: float = LEAST_PAUSE_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self.on_change: Callable[[Sequence[bytes]], None] | None = None
        self._layout = arena.layout
        self._planes = [arena.plane(plane.layer, plane.tensor) for plane in arena.geometry.planes]
        self._path = folder
        self._size_bytes = size_bytes
        self._files = files or Files()
        self._clock = clock
        self._stats = TierStats(location=str(folder), is_up=False, capacity_bytes=size_bytes)
        self._log: SegmentLog | None = None
        self._device: int | None = None
        self._counts = LogCounts()
        self._writing = asyncio.Lock()
        self._pause = Pause(clock, pause_seconds)
        self._retry: asyncio.Task[None] | None = None
        self._calls = DiskCalls(holds, arena.layout.chunk_bytes, stall_seconds)

    @property
    def tier(self) -> Tier:
        return Tier.DISK

    @property
    def stats(self) -> TierStats:
        return self._stats

    # -- opening and closing --------------------------------------------------------------

    async def start(self) -> None:
        """Open the folder and read its index; see `ChunkTier.start`."""
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                log = await self._calls.writer.submit(self._open)
        except BaseException as error:
            self._calls.writer.close()
            if isinstance(error, TimeoutError) and error.errno is None:
                raise FailedPrecondition(f"the disk of {self._path} does not answer") from None
            if isinstance(error, OSError):
                raise FailedPrecondition(
                    f"the disk tier's folder {self._path} cannot be used: {error.strerror}"
                ) from error
            raise
        self._come_up(log)

    def _open(self) -> SegmentLog:
        folder = TierFolder.lock(self._path)
        try:
            if self._device is not None and folder.device != self._device:
                raise FolderLost(f"{self._path} is on another file system than before")
            log = SegmentLog(
                folder,
                self._layout,
                self._size_bytes,
                counts=self._counts,
                files=self._files,
                clock=self._clock,
            )
            log.open()
        except BaseException:
            folder.close()
            raise
        return log

    def _come_up(self, log: SegmentLog) -> None:
        self._log = log
        self._device = log.folder.device
        self._stats.is_up, self._stats.message = True, ""
        self._note()

    async def close(self) -> None:
        """Bring what is written to the disk, and release the folder."""
        if self._retry is not None:
            self._retry.cancel()
            with suppress(asyncio.CancelledError):
                await self._retry
        try:
            async with asyncio.timeout(_CLOSE_SECONDS), self._writing:
                log, self._log = self._log, None
                if log is not None:
                    await self._calls.writer.submit(lambda: _close(log))
        except TimeoutError:
            _logger.error("the disk of %s does not answer: it is left as it is", self._path)
        self._log = None
        self._stats.is_up, self._stats.message = False, "closed"
        self._calls.close()

    # -- asking ---------------------------------------------------------------------------

    async def has(self, keys: Sequence[bytes]) -> list[bool]:
        return self._opened().has(keys)

    def holds(self, key: bytes) -> bool | None:
        return self._log is not None and key in self._log

    def keys(self) -> Iterable[bytes]:
        return [] if self._log is None else self._log.keys()

    def _opened(self) -> SegmentLog:
        if self._log is None:
            raise Unavailable(f"the disk tier is away: {self._stats.message}")
        return self._log

    # -- reading --------------------------------------------------------------------------

    async def read(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[int | None]:
        """Read records in threads, several at a time; see `ChunkTier.read`."""
        log = self._opened()
        found: list[int | None] = [None] * len(keys)
        jobs: list[tuple[Segment, list[int], list[Wanted]]] = []  # places in `keys`
        most = max(1, _READ_BYTES // self._layout.chunk_bytes)
        for place, (key, slot) in enumerate(zip(keys, slots, strict=True)):
            located = log.locate(key)
            if located is None:
                continue
            segment, index = located
            if not jobs or jobs[-1][0] is not segment or len(jobs[-1][1]) == most:
                jobs.append((segment, [], []))
            jobs[-1][1].append(place)
            jobs[-1][2].append(Wanted(index, key, self._parts(slot)))

        async def run(segment: Segment, places: list[int], wanted: list[Wanted]) -> None:
            used = [slots[place] for place in places]
            checksums = await self._watched(
                log, self._calls.readers, lambda: log.read(segment, wanted), used
            )
            for place, checksum in zip(places, checksums, strict=True):
                found[place] = checksum

        await to_the_end(self._wait_for(log, [run(*job) for job in jobs]))
        return found

    async def _wait_for(self, log: SegmentLog, runs: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Wait for all runs. Raises Unavailable if the folder cannot be read."""
        outcomes = await asyncio.gather(*runs, return_exceptions=True)
        self._note()
        for error in outcomes:
            if isinstance(error, FolderLost | OSError):
                self._go_away(log, error)
                raise Unavailable(f"the disk tier is away: {self._stats.message}") from error
            if error is not None:
                raise error

    # -- writing --------------------------------------------------------------------------

    async def write(self, entries: Sequence[Entry]) -> int:
        """Append records to the log; see `ChunkTier.write`."""
        return await to_the_end(self._write(entries))

    async def _write(self, entries: Sequence[Entry]) -> int:
        async with self._writing:
            log = self._opened()
            new = [
                (entry, self._parts(entry.slot)) for entry in entries if not log.touch(entry.key)
            ]
            held = len(entries) - len(new)
            if not new or self._pause.is_on:
                return held
            try:
                used = [entry.slot for entry, _ in new]
                appended = await self._watched(
                    log, self._calls.writer, lambda: log.append(new), used
                )
            except FolderLost as error:
                self._go_away(log, error)
                raise Unavailable(f"the disk tier is away: {self._stats.message}") from error
            if appended.error is None:
                self._pause.end()
                self._stats.message = ""
            else:
                self._pause.begin()
                self._stats.message = (
                    f"writes pause for {self._pause.seconds:g} s: {appended.error.strerror}"
                )
                _logger.warning("%s: %s", self._path, self._stats.message)
            self._note()
            return held + appended.count

    async def drop(self, keys: Sequence[bytes]) -> None:
        log = self._log
        if log is not None:
            call = self._watched(log, self._calls.readers, lambda: log.drop(keys), ())
            with suppress(Unavailable):
                await to_the_end(call)
            self._note()

    def _parts(self, slot: int) -> list[Part]:
        return [plane[slot].data for plane in self._planes]

    # -- away and back --------------------------------------------------------------------

    def _go_away(self, log: SegmentLog, error: OSError | SplitpointError) -> None:
        """Stop using the folder, and look for it again later."""
        if self._log is not log:
            return
        message = _words_of(error)
        _logger.error("the disk tier %s is away: %s", self._path, message)
        self._note()
        lost = log.keys()
        self._log = None
        self._stats.is_up, self._stats.message = False, message
        self._stats.used_bytes = self._stats.chunk_count = 0
        self._tell(lost)
        self._retry = asyncio.create_task(self._come_back(log))

    async def _come_back(self, log: SegmentLog) -> None:
        """Close the log, and open the folder again as soon as that is possible."""
        pause = Pause(self._clock, self._pause.first_seconds)
        await self._calls.wait_for_stuck()
        await self._calls.writer.submit(lambda: _close(log))
        while True:
            pause.begin()
            await asyncio.sleep(pause.seconds)
            try:
                self._come_up(await self._calls.writer.submit(self._open))
            except (OSError, SplitpointError) as error:
                self._stats.message = _words_of(error)
            else:
                # As loud as the message before it, or its reader takes the tier for lost.
                _logger.warning("the disk tier %s is back", self._path)
                return

    # -- bookkeeping ----------------------------------------------------------------------

    def _note(self) -> None:
        """Bring the statistics up to date, and tell which chunks came or went."""
        log = self._log
        if log is None:
            return
        self._stats.used_bytes = log.used_bytes
        self._stats.chunk_count = log.chunk_count
        for each in fields(self._counts):
            setattr(self._stats, each.name, getattr(self._counts, each.name))
        self._stats.written_bytes = self._stats.written_chunk_count * self._layout.chunk_bytes
        self._stats.read_bytes = self._stats.read_chunk_count * self._layout.chunk_bytes
        self._tell(log.take_changed())

    def _tell(self, keys: Sequence[bytes]) -> None:
        if keys and self.on_change is not None:
            self.on_change(keys)

    async def _watched(
        self,
        log: SegmentLog,
        threads: DaemonThreads,
        call: Callable[[], Result],
        slots: Sequence[int],
    ) -> Result:
        """Run a call in a thread. Raises Unavailable, and goes away, if the disk does not answer.

        The slots are held then until the call ends.
        """
        try:
            return await self._calls.run(threads, call, slots)
        except NoAnswer:
            self._go_away(log, Unavailable(f"the disk of {self._path} does not answer"))
            raise Unavailable(f"the disk tier is away: {self._stats.message}") from None


def _words_of(error: OSError | SplitpointError) -> str:
    if isinstance(error, SplitpointError):
        return error.message
    return error.strerror or str(error)


def _close(log: SegmentLog) -> None:
    log.close()
    log.folder.close()

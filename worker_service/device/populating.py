"""Populates memory ahead of its first use: pages of the device cache, and the arena's mapping.

The first use of fresh memory waits until the kernel has found and cleared it: 0.1 ms for a huge
page of 2 MiB, and 7 to 17 ms in a virtual machine whose host has taken the memory back. A thread
does that for a part ahead of what is used, so that no restore waits for it, and the budget of a
worker does not become resident at once. This module knows neither caches nor arenas.
"""

from __future__ import annotations

import errno
import logging
import threading
import weakref
from collections.abc import Callable, Sequence

import torch

from splitpoint.config import format_size
from splitpoint.host.huge_pages import HUGE_PAGE_BYTES, populate
from splitpoint.host.memory import memory_facts

log = logging.getLogger(__name__)

# Populated ahead of what is used: as much again as is used, within these bounds.
LEAST_AHEAD_BYTES = 64 << 20
MOST_AHEAD_BYTES = 512 << 20
# Share of the memory that is still available of which no more is populated ahead.
AVAILABLE_SHARE = 0.125
# Pause before more is populated, so that the restore that used what there was is not disturbed.
PAUSE_SECONDS = 0.2


class PagedMemory:
    """Planes on the host with the same number of pages each, and how far they are populated.

    Pages should be used in ascending order. One thread uses them, another one populates them.

    Attributes:
        page_count, page_bytes: pages of each plane, and the bytes of one in all planes.
        ready_count: [0, ready_count) are populated.
        first_use_count: pages that were used before they were populated.
        on_due: called by the thread that uses pages when more should be populated.
    """

    def __init__(self, planes: Sequence[torch.Tensor], *, is_written: bool) -> None:
        """`planes`: `[page_count, ...]` each, contiguous. `is_written`: False if they are only
        read, so that the kernel need not give them memory of their own.
        """
        self.page_count = len(planes[0])
        self.page_bytes = sum(plane.nbytes for plane in planes) // max(1, self.page_count)
        self.ready_count = self.first_use_count = 0
        self.on_due: Callable[[], None] | None = None
        self._planes = planes
        self._is_written = is_written
        self._used_count = 0

    def use(self, page: int) -> None:
        """Note that a page is used from now on."""
        if page < self._used_count:
            return
        self._used_count = page + 1
        if page >= self.ready_count:
            self.first_use_count += 1
        if self.on_due is not None and self.ready_count < self._wanted_count(1):
            self.on_due()

    @property
    def wanted_count(self) -> int:
        """Pages that should be populated: those in use, and some ahead of them."""
        if self.ready_count >= self._wanted_count(1):
            return self.ready_count
        most = int(AVAILABLE_SHARE * memory_facts().usable_bytes) // self.page_bytes
        # Populating what is in use takes nothing.
        start = max(self.ready_count, self._used_count)
        return min(self._wanted_count(2), start + most)

    def _wanted_count(self, halves: int) -> int:
        """Return the pages in use, and this many halves of those ahead."""
        used = self._used_count * self.page_bytes
        ahead = min(max(used, LEAST_AHEAD_BYTES), MOST_AHEAD_BYTES)
        return min(self.page_count, self._used_count - (-ahead * halves // 2 // self.page_bytes))

    def populate(self, page_count: int, is_stopping: Callable[[], bool]) -> None:
        """Populate up to this number of pages, at most a huge page at once. Raises OSError."""
        largest = max(plane.nbytes // self.page_count for plane in self._planes)
        step = max(1, HUGE_PAGE_BYTES // largest)
        while self.ready_count < page_count:
            first = self.ready_count
            last = min(page_count, first + step)
            for plane in self._planes:
                size = plane.nbytes // self.page_count
                for start in range(first * size, last * size, HUGE_PAGE_BYTES):
                    if is_stopping():
                        return
                    length = min(HUGE_PAGE_BYTES, last * size - start)
                    populate(plane.data_ptr() + start, length, writes=self._is_written)
            self.ready_count = last


class Populator:
    """A thread that keeps memory populated ahead of its use. `close` ends it."""

    def __init__(self) -> None:
        self._memories: list[weakref.ref[PagedMemory]] = []
        self._due = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, memory: PagedMemory) -> None:
        """Populate this memory, too, as long as its owner keeps it."""
        memory.on_due = self._due.set
        self._memories = [*self._memories, weakref.ref(memory)]
        self._due.set()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="populate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and wait for the huge page under way."""
        self._stopping.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        is_first = True
        while True:
            self._due.wait()
            if self._stopping.wait(0 if is_first else PAUSE_SECONDS):
                return
            is_first = False
            self._due.clear()
            for each in self._memories:
                memory = each()
                if memory is None:
                    self._memories = [other for other in self._memories if other is not each]
                elif memory.on_due is not None:
                    self._extend(memory)

    def _extend(self, memory: PagedMemory) -> None:
        try:
            while not self._stopping.is_set() and memory.ready_count < (
                wanted := memory.wanted_count
            ):
                memory.populate(wanted, self._stopping.is_set)
        except OSError as error:
            memory.on_due = None
            reason = error.strerror
            if error.errno == errno.EINVAL:
                reason = "this kernel cannot (Linux 5.14 can)"
            log.warning(
                "memory is not populated ahead of its use beyond %s, so first uses take longer: %s",
                format_size(memory.ready_count * memory.page_bytes),
                reason,
            )

"""Memory that is populated ahead of its use: page faults that no copy waits for, and its bounds."""

from __future__ import annotations

import logging
import mmap
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from waiting import wait_until

from splitpoint.host import huge_pages
from worker_service.device.copies import large_zeros
from worker_service.device.populating import LEAST_AHEAD_BYTES, PagedMemory, Populator

MIB = 1 << 20
PAGE_BYTES = MIB
WAIT_SECONDS = 30.0


def planes(page_count: int) -> list[torch.Tensor]:
    """Return two planes of fresh memory, with half of each page in either."""
    return [large_zeros(page_count * PAGE_BYTES // 2).view(page_count, -1) for _ in range(2)]


@contextmanager
def populating(memory: PagedMemory) -> Iterator[Populator]:
    populator = Populator()
    populator.watch(memory)
    populator.start()
    try:
        yield populator
    finally:
        populator.close()


def faults_of(call: Callable[[], object]) -> int:
    """Return the page faults of this thread during the call."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def mmap_of(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_pages_ahead_of_their_use_cost_no_page_faults() -> None:
    fresh, ahead = planes(160), planes(160)
    memory = PagedMemory(ahead, is_written=True)
    with populating(memory):
        wait_until(lambda: memory.ready_count >= LEAST_AHEAD_BYTES // PAGE_BYTES)

    def write(given: list[torch.Tensor]) -> None:
        for plane in given:
            plane[: LEAST_AHEAD_BYTES // PAGE_BYTES].fill_(1)

    # A huge page is a fault of its own.
    least = LEAST_AHEAD_BYTES // huge_pages.HUGE_PAGE_BYTES
    assert faults_of(lambda: write(fresh)) >= least
    assert faults_of(lambda: write(ahead)) < least // 4


def test_it_grows_ahead_of_use_and_no_further() -> None:
    before = resident_bytes()
    memory = PagedMemory(planes(1024), is_written=True)
    with populating(memory):
        wait_until(lambda: memory.ready_count == 64)
        assert resident_bytes() - before < 96 * MIB
        for page in range(20):
            memory.use(page)  # the other half is still ahead
        assert memory.wanted_count == 64
        for page in range(20, 33):
            memory.use(page)
        wait_until(lambda: memory.ready_count == 33 + 64)
        assert resident_bytes() - before < 128 * MIB
        assert memory.first_use_count == 0
        for page in range(33, 100):
            memory.use(page)
        # As much again as is used.
        wait_until(lambda: memory.ready_count == 200)
        for page in (3, 0, 99):
            memory.use(page)
        assert memory.wanted_count == 200, "pages that are used again take nothing"


def test_pages_that_are_used_before_they_are_populated_are_counted() -> None:
    memory = PagedMemory(planes(96), is_written=True)
    for page in (0, 1, 0, 2):
        memory.use(page)
    assert memory.first_use_count == 3
    with populating(memory):
        wait_until(lambda: memory.ready_count >= 64)
    memory.use(3)
    assert memory.first_use_count == 3
    memory.use(95)
    assert memory.first_use_count == 4


def test_contents_stay_and_a_mapped_file_is_only_read(tmp_path: Path) -> None:
    """As the arena is: by a part of a page for each slot, in a file that others write."""
    slot, count = 3 * mmap.PAGESIZE // 2, 4096
    path = tmp_path / "arena"
    path.write_bytes(b"\7" * slot * count)
    plane = torch.frombuffer(mmap_of(path), dtype=torch.uint8).view(count, slot)
    memory = PagedMemory([plane], is_written=False)
    with populating(memory):
        wait_until(lambda: memory.ready_count == count)
    # By numpy, which reads in this thread alone.
    unmapped = np.frombuffer(mmap_of(path), dtype=np.uint8)
    assert faults_of(plane.numpy().max) < faults_of(unmapped.max) // 2
    assert bool((plane == 7).all())


def test_a_file_that_was_cut_short_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A mapped arena can lose its end: reading there would kill the process."""
    path = tmp_path / "arena"
    path.write_bytes(bytes(MIB))
    plane = torch.frombuffer(mmap_of(path), dtype=torch.uint8).view(2, -1)
    os.truncate(path, MIB // 2)
    # From its second page on.
    memory = PagedMemory([plane[1:]], is_written=False)
    other = PagedMemory(planes(8), is_written=True)
    with caplog.at_level(logging.WARNING), populating(memory) as populator:
        populator.watch(other)
        wait_until(lambda: other.ready_count == 8)
    assert memory.ready_count == 0
    assert "not populated ahead of its use beyond 0 B" in caplog.text


def test_a_kernel_that_cannot_populate_is_named_and_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huge_pages, "MADV_POPULATE_WRITE", 12345)  # EINVAL, as such a kernel says
    memory = PagedMemory(planes(8), is_written=True)
    with caplog.at_level(logging.WARNING), populating(memory):
        wait_until(lambda: memory.on_due is None)
        memory.use(0)
    assert caplog.text.count("this kernel cannot (Linux 5.14 can)") == 1
    assert (memory.ready_count, memory.first_use_count) == (0, 1)


def test_a_stop_waits_for_no_more_than_a_huge_page() -> None:
    memory = PagedMemory(planes(96), is_written=True)
    memory.populate(96, lambda: True)
    assert memory.ready_count == 0
    seen: list[int] = []

    def is_stopping() -> bool:
        seen.append(memory.ready_count)
        return len(seen) > 4

    memory.populate(96, is_stopping)
    # Two planes of half a page each: four pages are a huge page in either.
    assert (memory.ready_count, seen) == (8, [0, 0, 4, 4, 8])

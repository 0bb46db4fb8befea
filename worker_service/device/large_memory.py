"""Memory of the host in huge pages, for what every decode step reads: weights and the cache.

A read that needs no new translation for every 4 KiB is faster, most of all in a virtual machine,
where each takes two walks: products with 9 MB of weights took 0.6 to 1.0 of the time on an
EPYC. Only the kernel knows whether it has huge pages to give; without any it gives small ones.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from splitpoint.host.huge_pages import HUGE_PAGE_BYTES


def large_zeros(size_bytes: int) -> torch.Tensor:
    """Return zeros, uint8 `[size_bytes]`, that take memory when they are first touched.

    From the size of a huge page on they begin at one's border.
    """
    if size_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(size_bytes, dtype=torch.uint8)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=private)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    # Whole huge pages only: the rest would become one, too. A kernel without them refuses.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, first, size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size_bytes, offset=first)

"""Device memory for the cache: pages in the arena's own layout.

A page corresponds to a slot of the arena: `chunk_tokens` tokens, with K and V of one
layer as `[n_kv, chunk_tokens, d]`, and the same page number in every layer. Restore and
write-back are therefore plain copies. This module knows no requests.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from splitpoint.errors import ResourceExhausted
from splitpoint.host.huge_pages import HUGE_PAGE_BYTES
from splitpoint.shapes import ArenaLayout, DataType
from worker_service.device.claims import Claims
from worker_service.device.copies import large_zeros
from worker_service.device.memory import MemoryPlan
from worker_service.device.populating import PagedMemory

TORCH_TYPES = {
    DataType.FLOAT32: torch.float32,
    DataType.BFLOAT16: torch.bfloat16,
    DataType.FLOAT16: torch.float16,
}


class PageAllocator:
    """Counts the references to pages, and keeps some pages after their last reference.

    A page is free, in use (one reference or more), or cached: without a reference, but
    `keep` marked it, and it can be shared again until its memory is wanted. The lowest
    free page is allocated first, so that live pages stay close together: attention reads a
    nearly contiguous range of pages without gathering them. Without a free page, the cached
    page that lost its last reference first is evicted and allocated.

    Attributes:
        on_evict: called with each page that is evicted; its bytes are still unchanged.
        on_use: called with each page that is allocated and was free.
    """

    def __init__(self, page_count: int) -> None:
        self.page_count = page_count
        self.on_evict: Callable[[int], None] | None = None
        self.on_use: Callable[[int], None] | None = None
        self._free = list(range(page_count))
        # References of the pages in use.
        self._references: dict[int, int] = {}
        # Pages without a reference, least recently used first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return len(self._references)

    @property
    def cached_count(self) -> int:
        return len(self._cached)

    @property
    def available_count(self) -> int:
        """Pages that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def kept_pages(self) -> frozenset[int]:
        """Pages that `keep` marked: cached ones, and those that will be."""
        return frozenset(self._kept)

    def references(self, page: int) -> int:
        """Return how many references a page has; 0 if it is free or cached."""
        return self._references.get(page, 0)

    def allocate(self) -> int:
        """Return a page with one reference. Raises ResourceExhausted if all are in use."""
        if self._free:
            page = heapq.heappop(self._free)
            if self.on_use is not None:
                self.on_use(page)
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            self._kept.remove(page)
            if self.on_evict is not None:
                self.on_evict(page)
        else:
            raise ResourceExhausted(f"all {self.page_count} pages are in use", reason="NO_PAGE")
        self._references[page] = 1
        return page

    def share(self, page: int) -> None:
        """Add a reference to a page in use or cached. Raises ValueError if it is free."""
        if page in self._references:
            self._references[page] += 1
        elif page in self._cached:
            del self._cached[page]
            self._references[page] = 1
        else:
            raise ValueError(f"page {page} is free")

    def free(self, page: int) -> None:
        """Take a reference away. Raises ValueError if the page is not in use."""
        count = self._references.get(page)
        if count is None:
            raise ValueError(f"page {page} is not in use")
        if count > 1:
            self._references[page] = count - 1
            return
        del self._references[page]
        if page in self._kept:
            self._cached[page] = None
        else:
            heapq.heappush(self._free, page)

    def keep(self, page: int) -> None:
        """Cache a page after its last reference. Raises ValueError if it is not in use."""
        if page not in self._references:
            raise ValueError(f"page {page} is not in use")
        self._kept.add(page)

    def drop(self, page: int) -> None:
        """Undo `keep`: a cached page becomes free. Raises ValueError if it is not kept."""
        if page not in self._kept:
            raise ValueError(f"page {page} is not kept")
        self._kept.remove(page)
        if page in self._cached:
            del self._cached[page]
            heapq.heappush(self._free, page)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless each page is in exactly one state and counts agree."""
        pages = [*self._free, *self._references, *self._cached]
        if sorted(pages) != list(range(self.page_count)):
            raise RuntimeError(f"pages are lost or twice in a state: {sorted(pages)}")
        if any(count < 1 for count in self._references.values()):
            raise RuntimeError(f"a page in use has no reference: {self._references}")
        if not self._cached.keys() <= self._kept <= self._cached.keys() | self._references.keys():
            raise RuntimeError("a page is cached without being kept, or kept while free")


class DeviceCache:
    """K and V pages of all layers, X pages of chunks not sealed yet, and claims.

    Memory is filled with zeros: a masked row may have old values but never a NaN, since
    0 * NaN would be NaN.

    Attributes:
        keys, values: per layer `[device_page_count, n_kv, chunk_tokens, d]`.
        inputs: per layer `[input_page_count, chunk_tokens, h]`; empty without activations.
        page_memory, input_memory: what of the pages' memory is populated (`populating.py`); None
            if all is.
        padding_page, padding_input_page: one page more of each, which is never allocated, for
            the padding rows of CUDA graphs; None if the plan has no graphs.
    """

    def __init__(self, layout: ArenaLayout, plan: MemoryPlan, device: torch.device) -> None:
        self.layout = layout
        self.plan = plan
        self.device = device
        dtype = TORCH_TYPES[layout.data_type]
        kv_page = (layout.kv_head_count, layout.chunk_tokens, layout.head_dim)
        x_page = (layout.chunk_tokens, layout.hidden_size)

        def planes(count: int, page: tuple[int, ...]) -> list[torch.Tensor]:
            return [_zeros((count, *page), dtype, device) for _ in range(layout.layer_count)]

        padding = 1 if plan.graph_bytes else 0
        self.padding_page = plan.device_page_count if padding else None
        self.padding_input_page = plan.input_page_count if padding else None
        self.keys = planes(plan.device_page_count + padding, kv_page)
        self.values = planes(plan.device_page_count + padding, kv_page)
        pages = plan.input_page_count + padding
        self.inputs = planes(pages, x_page) if plan.input_page_count else []
        self.pages = PageAllocator(plan.device_page_count)
        self.input_pages = PageAllocator(plan.input_page_count)
        self.claims = Claims(self.pages, plan.room_page_count)
        self.page_memory = _paged([*self.keys, *self.values], self.pages)
        self.input_memory = _paged(self.inputs, self.input_pages)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use, without those of the room."""
        return (self.pages.used_count - self.claims.room_used) * self.plan.page_bytes

    @property
    def first_use_bytes(self) -> int:
        """Bytes of pages of K and V that were allocated before their memory was populated."""
        memory = self.page_memory
        return 0 if memory is None else memory.first_use_count * memory.page_bytes

    def inputs_in_pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pages' memory as two planes for X, `[page_count, chunk_tokens, h]`.

        The planes take the place of K and of V, so h must be n_kv * d.
        """
        page = (-1, self.layout.chunk_tokens, self.layout.hidden_size)
        return self.keys[layer].view(page), self.values[layer].view(page)

    def keep_inputs(self, input_page: int, page: int, half: int) -> None:
        """Copy X of all layers from an input page into half 0 (K) or 1 (V) of a cache page."""
        for layer, inputs in enumerate(self.inputs):
            self.inputs_in_pages(layer)[half][page].copy_(inputs[input_page])

    def write_inputs(
        self, layer: int, pages: torch.Tensor, rows: torch.Tensor, inputs: torch.Tensor
    ) -> None:
        """Store X `[N, h]` at `pages[i], rows[i]`."""
        self.inputs[layer][pages, rows] = inputs


def _paged(planes: Sequence[torch.Tensor], pages: PageAllocator) -> PagedMemory | None:
    """Return what is populated of planes with these pages; None if nothing is left to populate."""
    if not planes or planes[0].device.type != "cpu" or planes[0].nbytes < HUGE_PAGE_BYTES:
        return None
    memory = PagedMemory(planes, is_written=True)
    pages.on_use = memory.use
    return memory


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU as fresh pages of the kernel, which take memory when touched.

    `torch.zeros` writes every byte: a worker with a large budget would need its whole
    cache, and seconds, before its first request.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return large_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

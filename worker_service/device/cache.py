"""Device memory for the cache: pages in the arena's own layout.

A page corresponds to a slot of the arena: `chunk_tokens` tokens, with K and V of one
layer as `[n_kv, chunk_tokens, d]`, and the same page number in every layer. Restore and
write-back are therefore plain copies. This module knows no requests.
"""

from __future__ import annotations

import heapq
import math

import numpy as np
import torch

from splitpoint.errors import ResourceExhausted
from splitpoint.shapes import ArenaLayout, DataType
from worker_service.device.memory import MemoryPlan

TORCH_TYPES = {
    DataType.FLOAT32: torch.float32,
    DataType.BFLOAT16: torch.bfloat16,
    DataType.FLOAT16: torch.float16,
}


class PageAllocator:
    """Allocates the lowest free page, so that live pages stay close together.

    Attention reads a nearly contiguous range of pages without gathering them.
    """

    def __init__(self, page_count: int) -> None:
        self.page_count = page_count
        self._free = list(range(page_count))
        self._used: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return len(self._used)

    def allocate(self) -> int:
        """Return a free page. Raises ResourceExhausted if there is none."""
        if not self._free:
            raise ResourceExhausted(f"all {self.page_count} pages are in use", reason="NO_PAGE")
        page = heapq.heappop(self._free)
        self._used.add(page)
        return page

    def free(self, page: int) -> None:
        """Free a page. Raises ValueError if it is not in use."""
        if page not in self._used:
            raise ValueError(f"page {page} is not in use")
        self._used.remove(page)
        heapq.heappush(self._free, page)


class DeviceCache:
    """K and V pages of all layers, X pages of chunks not sealed yet, and claims.

    A claim reserves pages for a request once, at admission; the pages themselves are
    allocated one by one as the sequence grows, and can then never be missing. Memory is
    filled with zeros: a masked row may have old values but never a NaN, since 0 * NaN
    would be NaN.

    Attributes:
        keys, values: per layer `[page_count, n_kv, chunk_tokens, d]`.
        inputs: per layer `[input_page_count, chunk_tokens, h]`; empty without activations.
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

        self.keys = planes(plan.page_count, kv_page)
        self.values = planes(plan.page_count, kv_page)
        self.inputs = planes(plan.input_page_count, x_page) if plan.input_page_count else []
        self.pages = PageAllocator(plan.page_count)
        self.input_pages = PageAllocator(plan.input_page_count)
        self._claimed = 0

    @property
    def claimed_count(self) -> int:
        return self._claimed

    @property
    def used_bytes(self) -> int:
        return self.pages.used_count * self.plan.page_bytes

    def try_claim(self, page_count: int) -> bool:
        """Claim pages; return False if too few are unclaimed."""
        if self._claimed + page_count > self.plan.page_count:
            return False
        self._claimed += page_count
        return True

    def unclaim(self, page_count: int) -> None:
        if page_count > self._claimed:
            raise ValueError(f"{page_count} pages unclaimed, {self._claimed} claimed")
        self._claimed -= page_count

    def write(
        self,
        layer: int,
        pages: torch.Tensor,
        rows: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Store K and V `[N, n_kv, d]` at `pages[i], rows[i]` (int64 `[N]` each)."""
        self.keys[layer][pages, :, rows] = keys
        self.values[layer][pages, :, rows] = values

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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU as fresh pages of the kernel, which take memory when touched.

    `torch.zeros` writes every byte: a worker with a large budget would need its whole
    cache, and seconds, before its first request.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size_bytes, dtype=np.uint8)).view(dtype).view(shape)

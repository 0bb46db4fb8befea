"""Device memory for the cache: pages in the arena's own layout.

A page is what a slot is in the arena: room for `chunk_tokens` tokens, K and V
of one layer as `[n_kv, chunk_tokens, d]`, the same page number in every layer.
Restore and write-back are then plain copies. It knows nothing of requests.
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
    """Hands out page numbers, lowest first, so that live pages stay close together.

    Attention reads a nearly contiguous range of pages without gathering them.
    """

    def __init__(self, page_count: int) -> None:
        self.page_count = page_count
        self._free = list(range(page_count))
        self._taken: set[int] = set()

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return len(self._taken)

    def allocate(self) -> int:
        """One page. Raises ResourceExhausted when none is free."""
        if not self._free:
            raise ResourceExhausted(f"all {self.page_count} pages are in use", reason="NO_PAGE")
        page = heapq.heappop(self._free)
        self._taken.add(page)
        return page

    def free(self, page: int) -> None:
        """Take a page back. Raises ValueError for a page that is not out."""
        if page not in self._taken:
            raise ValueError(f"page {page} is not in use")
        self._taken.remove(page)
        heapq.heappush(self._free, page)


class DeviceCache:
    """K and V pages of all layers, X pages of chunks not sealed yet, and claims.

    A claim is a request's right to pages: pages are taken one by one as the
    sequence grows, claims are made once, so that an admitted request can never
    find the memory gone. Zero-filled: a masked row may hold old values but
    never a NaN, and 0 * NaN would be NaN.

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
        """Claim pages if that many are unclaimed."""
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
        """Pages seen as room for X, `[page_count, chunk_tokens, h]`: in the place of K, of V.

        The same memory; only where h is n_kv * d.
        """
        page = (-1, self.layout.chunk_tokens, self.layout.hidden_size)
        return self.keys[layer].view(page), self.values[layer].view(page)

    def keep_inputs(self, input_page: int, page: int, half: int) -> None:
        """X of all layers from an input page into half 0 or 1 of a cache page."""
        for layer, inputs in enumerate(self.inputs):
            self.inputs_in_pages(layer)[half][page].copy_(inputs[input_page])

    def write_inputs(
        self, layer: int, pages: torch.Tensor, rows: torch.Tensor, inputs: torch.Tensor
    ) -> None:
        """Store X `[N, h]` at `pages[i], rows[i]`."""
        self.inputs[layer][pages, rows] = inputs


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU as fresh pages of the kernel, which take memory when first touched.

    `torch.zeros` writes every byte: a worker with a large budget would take its
    whole cache, and seconds, before its first request.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(size_bytes, dtype=np.uint8)).view(dtype).view(shape)

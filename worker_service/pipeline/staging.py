"""Device memory for chunks in transit: X before a rebuild, K and V before attention.

There is one for each device. Streamed steps use K, V and X of it. Restores, which run beside
steps, have X of their own, which one of them holds at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from splitpoint.shapes import ArenaLayout
from worker_service.store.quantization import ChunkCodec


@dataclass(frozen=True, slots=True)
class InputSlots:
    """X memory that is cut into slots of one tile each.

    Attributes:
        inputs: `[pages, chunk_tokens, h]`; None without activations.
        slot_pages: pages of X that one slot holds.
        count: slots.
    """

    inputs: torch.Tensor | None
    slot_pages: int
    count: int

    @classmethod
    def cut(cls, inputs: torch.Tensor | None, page_count: int, tile_pages: int) -> InputSlots:
        """Cut `page_count` pages into slots of one tile.

        A tile of more than half of the memory is shrunk so that two slots fit, unless it
        is as large as the whole memory.
        """
        pages = max(1, tile_pages)
        if pages < page_count:
            pages = min(pages, max(1, page_count // 2))
        pages = min(pages, page_count)
        return cls(inputs, pages, page_count // pages)

    def __getitem__(self, slot: int) -> torch.Tensor:
        """Return X of a slot, `[slot_pages, chunk_tokens, h]`."""
        if self.inputs is None:
            raise RuntimeError("a split above zero was planned for an arena without activations")
        return self.inputs[slot * self.slot_pages : (slot + 1) * self.slot_pages]


class Staging:
    """Staging memory for `page_count` native chunks of one layer, and X of as many for restores.

    Attributes:
        keys, values: `[page_count, n_kv, chunk_tokens, d]`.
        inputs: `[page_count, chunk_tokens, h]`; None without activations.
        restore_inputs: as `inputs`, for restores.
    """

    def __init__(self, layout: ArenaLayout, page_count: int, device: torch.device) -> None:
        self.page_count = page_count
        self.device = device
        self._chunk_tokens = layout.chunk_tokens
        codec = ChunkCodec(layout)

        def inputs() -> torch.Tensor | None:
            return codec.native_zeros("X", page_count, device) if layout.has_activations else None

        self.keys = codec.native_zeros("K", page_count, device)
        self.values = codec.native_zeros("V", page_count, device)
        self.inputs = inputs()
        self.restore_inputs = inputs()

    def step_slots(self, tile_pages: int) -> InputSlots:
        """Cut the X memory of steps into slots of exactly one tile."""
        return InputSlots(self.inputs, tile_pages, self.page_count // tile_pages)

    def restore_slots(self, tile_tokens: int) -> InputSlots:
        """Cut the X memory of restores, as far as it has room for such tiles."""
        return InputSlots.cut(
            self.restore_inputs, self.page_count, tile_tokens // self._chunk_tokens
        )

    @property
    def size_bytes(self) -> int:
        """Allocated bytes; `memory.staging_bytes` predicts them."""
        inputs = 0 if self.inputs is None else 2 * self.inputs.nbytes
        return self.keys.nbytes + self.values.nbytes + inputs

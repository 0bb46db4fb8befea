"""Device memory where chunks land on their way: X before it is rebuilt from, K,V before they
are attended.

One for each device, shared by restores, which run between steps, and by the streamed
attention of a step: never by both at once. How it is cut into slots is their business.
"""

from __future__ import annotations

import torch

from splitpoint.shapes import ArenaLayout
from worker_service.store.codec import ChunkCodec


class Staging:
    """Room for `page_count` native chunks of one layer.

    Attributes:
        keys, values: `[page_count, n_kv, chunk_tokens, d]`.
        inputs: `[page_count, chunk_tokens, h]`; None without activations.
    """

    def __init__(self, layout: ArenaLayout, page_count: int, device: torch.device) -> None:
        self.page_count = page_count
        self.device = device
        codec = ChunkCodec(layout)
        self.keys = codec.native_zeros("K", page_count, device)
        self.values = codec.native_zeros("V", page_count, device)
        self.inputs = (
            codec.native_zeros("X", page_count, device) if layout.has_activations else None
        )

    @property
    def size_bytes(self) -> int:
        """What it occupies; `memory.staging_bytes` says so before it is allocated."""
        tensors = (self.keys, self.values, *([] if self.inputs is None else [self.inputs]))
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

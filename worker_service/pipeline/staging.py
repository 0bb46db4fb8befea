"""Device memory for chunks in transit: X before a rebuild, K and V before attention.

There is one for each device. Restores use it between steps, and the streamed attention
during a step, so never both at once; each divides it into slots of its own.
"""

from __future__ import annotations

import torch

from splitpoint.shapes import ArenaLayout
from worker_service.store.codec import ChunkCodec


class Staging:
    """Staging memory for `page_count` native chunks of one layer.

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
        """Allocated bytes; `memory.staging_bytes` predicts them."""
        inputs = 0 if self.inputs is None else self.inputs.nbytes
        return self.keys.nbytes + self.values.nbytes + inputs

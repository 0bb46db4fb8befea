"""The arena's planes as torch tensors over the mapped bytes; copies nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from splitpoint.arena import Arena
from splitpoint.errors import ChunkLost
from worker_service.device_cache import TORCH_TYPES


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A sealed chunk as a reader names it."""

    slot: int
    generation: int
    token_count: int
    key: bytes


class ArenaTensors:
    """Views of one attached arena.

    Attributes:
        keys, values: per layer `[slots, n_kv, chunk_tokens, d]`.
        inputs: per layer `[slots, chunk_tokens, h]`; empty without activations.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.layout = layout = arena.layout
        dtype = TORCH_TYPES[layout.data_type]
        kv_slot = (layout.kv_head_count, layout.chunk_tokens, layout.head_dim)

        def views(tensor: str, slot: tuple[int, ...]) -> list[torch.Tensor]:
            return [
                torch.from_numpy(arena.plane(layer, tensor)).view(dtype).view(-1, *slot)
                for layer in range(layout.layer_count)
            ]

        self.keys = views("K", kv_slot)
        self.values = views("V", kv_slot)
        x_slot = (layout.chunk_tokens, layout.hidden_size)
        self.inputs = views("X", x_slot) if layout.has_activations else []

    def check_current(self, chunks: Sequence[StoredChunk]) -> None:
        """Raise ChunkLost unless every chunk is still sealed under its generation.

        Readers call it before AND after copying: bytes copied from a slot that
        changed in between must never be used.
        """
        slots = [chunk.slot for chunk in chunks]
        if not self.arena.is_current(slots, [chunk.generation for chunk in chunks]):
            raise ChunkLost("a cached chunk was reused while it was being read")

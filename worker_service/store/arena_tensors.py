"""The arena's planes as torch tensors over the mapped bytes; copies nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from splitpoint.arena.mapping import Arena
from splitpoint.arena.records import SlotState
from splitpoint.errors import ChunkLost
from splitpoint.v1 import types_pb2
from worker_service.device.populating import PagedMemory
from worker_service.store.quantization import ChunkCodec


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """The handle of a sealed chunk. `checksum`: XXH3-64 of the payload, from the store.

    `is_sealed`: False for a slot that was granted to the session and whose rows change: it has
    neither a key nor a checksum (`granted`).
    """

    slot: int
    generation: int
    token_count: int
    key: bytes
    checksum: int
    is_sealed: bool = True

    @classmethod
    def granted(cls, slot: int, generation: int, token_count: int) -> StoredChunk:
        """Return the handle of a slot that is never sealed."""
        return cls(slot, generation, token_count, b"", 0, is_sealed=False)

    @classmethod
    def from_proto(cls, handle: types_pb2.SlotHandle, key: bytes) -> StoredChunk:
        return cls(handle.slot, handle.generation, handle.token_count, key, handle.checksum)


class SuspectChunks(ChunkLost):
    """`chunks` are no longer sealed under their generations."""

    def __init__(self, message: str, chunks: Sequence[StoredChunk]) -> None:
        super().__init__(message, reason="CHUNK_LOST")
        self.chunks = tuple(chunks)


class DamagedChunks(SuspectChunks):
    """The payloads of `chunks` differ from their checksums."""


class ArenaTensors:
    """Views of one attached arena.

    Attributes:
        codec: the encoding of the planes. Encoded planes are raw bytes here.
        keys, values: per layer `[slots, n_kv, chunk_tokens, d]`; encoded: row bytes for d.
        inputs: per layer `[slots, chunk_tokens, h]`; encoded: row bytes for h. Empty without
            activations.
        memory: what of the mapping is populated (`populating.py`).
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.layout = layout = arena.layout
        self.codec = codec = ChunkCodec(layout)

        def views(tensor: str) -> list[torch.Tensor]:
            slot = codec.stored_shape(tensor)
            return [
                torch.from_numpy(arena.plane(layer, tensor)).view(codec.stored_type).view(-1, *slot)
                for layer in range(layout.layer_count)
            ]

        self.keys = views("K")
        self.values = views("V")
        self.inputs = views("X") if layout.has_activations else []
        self.memory = PagedMemory([*self.keys, *self.values, *self.inputs], is_written=False)

    def note_use(self, slots: Iterable[int]) -> None:
        """Note that these slots are read or written from now on."""
        self.memory.use(max(slots, default=-1))

    def plane(self, layer: int, tensor: str) -> torch.Tensor:
        """Return all slots of "K", "V" or "X" in one layer."""
        return {"K": self.keys, "V": self.values, "X": self.inputs}[tensor][layer]

    def zero_rows(self, slot: int, first_row: int) -> None:
        """Zero the rows of a slot from `first_row` on, in all planes."""
        if first_row < self.layout.chunk_tokens:
            for plane in (*self.keys, *self.values, *self.inputs):
                plane[slot, ..., first_row:, :] = 0

    def check_current(self, chunks: Sequence[StoredChunk]) -> None:
        """Raise SuspectChunks unless every chunk is still sealed under its generation.

        Or still granted, if it is never sealed. Readers call it after the last byte was copied.
        Generations only grow, so a sealed chunk that is current then did not change during the
        copy.
        """
        if self._are_current(chunks):
            return
        changed = [chunk for chunk in chunks if not self._are_current([chunk])]
        raise SuspectChunks("cached chunks changed while they were being read", changed)

    def _are_current(self, chunks: Sequence[StoredChunk]) -> bool:
        return all(
            self.arena.is_current(
                [chunk.slot for chunk in chunks if chunk.is_sealed == is_sealed],
                [chunk.generation for chunk in chunks if chunk.is_sealed == is_sealed],
                state=SlotState.SEALED if is_sealed else SlotState.WRITING,
            )
            for is_sealed in {chunk.is_sealed for chunk in chunks} or {True}
        )


def as_rows(plane: torch.Tensor) -> npt.NDArray[np.void]:
    """Return host memory `[..., d]` as an array of rows, each one opaque element."""
    data = plane.view(torch.uint8).numpy()
    return data.view(np.dtype((np.void, data.shape[-1]))).reshape(-1)

"""Converts between stored chunks and the tensors that the device computes with.

One codec per layout knows the stored shapes, the bytes that cross the link, and both directions
of the encoding. Native chunks are stored as they are. The codec knows no slots and no lanes.
"""

from __future__ import annotations

import torch

from splitpoint.shapes import ArenaLayout, Encoding
from worker_service.device.cache import TORCH_TYPES
from worker_service.store.quantization import decode, encode


class ChunkCodec:
    """The encoding of one arena's K, V and X.

    A stored tensor of n chunks is `[n, n_kv, chunk_tokens, r]` for "K" and "V" and
    `[n, chunk_tokens, r]` for "X": natively in elements of `data_type`, encoded in
    uint8. A native tensor of n chunks is the same with d or h for r.

    Attributes:
        stored_type: element type of stored tensors.
    """

    def __init__(self, layout: ArenaLayout) -> None:
        self._layout = layout
        self._encoding = layout.encoding
        self._native_type = TORCH_TYPES[layout.data_type]
        self.stored_type = self._native_type if self.is_native else torch.uint8

    @property
    def is_native(self) -> bool:
        """True if stored tensors are native tensors and can be copied as they are."""
        return self._encoding is Encoding.NATIVE

    def stored_shape(self, tensor: str) -> tuple[int, ...]:
        """Return the shape of one chunk of "K", "V" or "X", in elements of `stored_type`."""
        layout = self._layout
        if tensor == "X":
            return layout.chunk_tokens, layout.x_row_bytes // self.stored_type.itemsize
        row = layout.kv_row_bytes // self.stored_type.itemsize
        return layout.kv_head_count, layout.chunk_tokens, row

    def link_bytes(self, tensor: str, chunk_count: int) -> int:
        """Return the bytes on the link for `chunk_count` chunks of a tensor in one layer."""
        layout = self._layout
        return chunk_count * (layout.x_slot_bytes if tensor == "X" else layout.kv_slot_bytes)

    def room(self, tensor: str, chunk_count: int, device: torch.device) -> torch.Tensor:
        """Return uninitialized memory for stored chunks that come over the link."""
        shape = (chunk_count, *self.stored_shape(tensor))
        return torch.empty(shape, dtype=self.stored_type, device=device)

    def native_zeros(self, tensor: str, chunk_count: int, device: torch.device) -> torch.Tensor:
        """Return zeroed pages, `[n, n_kv, chunk_tokens, d]` or `[n, chunk_tokens, h]`."""
        layout = self._layout
        rows = (layout.kv_head_count, layout.chunk_tokens, layout.head_dim)
        page = (layout.chunk_tokens, layout.hidden_size) if tensor == "X" else rows
        return torch.zeros((chunk_count, *page), dtype=self._native_type, device=device)

    def decode(self, stored: torch.Tensor, native: torch.Tensor) -> None:
        """Fill `native` from stored chunks on the same device."""
        if self.is_native:
            native.copy_(stored)
        else:
            decode(stored, self._encoding, native)

    def encode(self, native: torch.Tensor) -> torch.Tensor:
        """Return the stored form of native chunks, on the same device.

        Raises Unencodable for a value that the encoding cannot represent.
        """
        return native if self.is_native else encode(native, self._encoding)

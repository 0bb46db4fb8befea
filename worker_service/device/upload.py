"""Small tables of a step, sent to the device in one copy from pinned memory.

A copy of its own for each table costs a call, and from pageable memory the host waits for
the device. On a CPU tables are tensors over their own memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

BLOCK_BYTES = 256 << 10
_ALIGNMENT = 16


class Upload:
    """Collects tables for one device; `send` copies what was collected, in the current stream.

    torch keeps pinned memory until the copies from it are done.
    """

    def __init__(
        self, device: torch.device, *, block_bytes: int = BLOCK_BYTES, pin_memory: bool = True
    ) -> None:
        self.device = device
        self._block_bytes = block_bytes
        self._pin_memory = pin_memory
        self._blocks: list[_Block] = []

    def table(self, values: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> torch.Tensor:
        """Return a tensor of these values on the device, which holds them after `send`."""
        array: npt.NDArray[Any] = np.ascontiguousarray(values, dtype=dtype)
        if self.device.type == "cpu":
            return torch.from_numpy(array)
        return self.place(array)

    def place(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return room on the device for a contiguous array, which `send` fills."""
        size = -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if not self._blocks or self._blocks[-1].left < size:
            self._blocks.append(
                _Block(max(size, self._block_bytes), self.device, pin_memory=self._pin_memory)
            )
        return self._blocks[-1].add(array, size)

    def send(self) -> None:
        """Copy all tables since the last call; the host does not wait."""
        for block in self._blocks:
            block.send()
        self._blocks = []


class _Block:
    """Pinned memory, and as much on the device."""

    def __init__(self, size_bytes: int, device: torch.device, *, pin_memory: bool) -> None:
        self._host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pin_memory)
        self._bytes = self._host.numpy()
        self._device = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self._used = 0

    @property
    def left(self) -> int:
        return len(self._bytes) - self._used

    def add(self, array: npt.NDArray[Any], size_bytes: int) -> torch.Tensor:
        first, last = self._used, self._used + array.nbytes
        self._bytes[first:last] = array.reshape(-1).view(np.uint8)
        self._used += size_bytes
        dtype = torch.from_numpy(array[:0] if array.ndim else array.reshape(1)).dtype
        return self._device[first:last].view(dtype).view(array.shape)

    def send(self) -> None:
        self._device[: self._used].copy_(self._host[: self._used], non_blocking=True)

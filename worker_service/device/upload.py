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
ALIGNMENT = 16


class Upload:
    """Collects tables for one device; `send` copies what was collected, in the current stream.

    torch keeps pinned memory until the copies from it are done.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        block_bytes: int = BLOCK_BYTES,
        pin_memory: bool = True,
        into: torch.Tensor | None = None,
    ) -> None:
        """`into`: bytes of the device that receive the tables, one after the other, and must
        hold all of them; None: memory of their own.
        """
        self.device = device
        self._into = into
        self._block_bytes = block_bytes
        self._pin_memory = pin_memory
        self._blocks: list[_Block] = []

    def table(self, values: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> torch.Tensor:
        """Return a tensor of these values on the device, which holds them after `send`."""
        array: npt.NDArray[Any] = np.ascontiguousarray(values, dtype=dtype)
        if self.device.type == "cpu" and self._into is None:
            return torch.from_numpy(array)
        return self.place(array)

    def place(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Return room on the device for a contiguous array, which `send` fills.

        Raises ValueError if the memory that was given for the tables is full.
        """
        size = -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if not self._blocks or self._blocks[-1].left < size:
            self._blocks.append(self._block_for(size))
        return self._blocks[-1].add(array, size)

    def _block_for(self, size: int) -> _Block:
        if self._into is None:
            size = max(size, self._block_bytes)
            into = torch.empty(size, dtype=torch.uint8, device=self.device)
        elif self._blocks or len(self._into) < size:
            raise ValueError(f"a step's tables need more than their {len(self._into)} bytes")
        else:
            into = self._into
        return _Block(into, pin_memory=self._pin_memory)

    def send(self) -> None:
        """Copy all tables since the last call; the host does not wait."""
        for block in self._blocks:
            block.send()
        self._blocks = []


class _Block:
    """Pinned memory, and as much on the device."""

    def __init__(self, into: torch.Tensor, *, pin_memory: bool) -> None:
        self._host = torch.empty(len(into), dtype=torch.uint8, pin_memory=pin_memory)
        self._bytes = self._host.numpy()
        self._device = into
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

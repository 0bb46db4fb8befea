"""The read bandwidth of a device's memory, as the fastest of several reads.

The limit that a decode step is measured against: no step can be shorter than reading its bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from worker_service.device.copies import large_zeros

# Far larger than any cache.
BUFFER_BYTES = 512 << 20


class MemoryReads:
    """A buffer on the device and the fastest that it was read, with torch's threads.

    Call `measure` several times during a run, so that the bandwidth is that of the same minutes
    as what is compared with it.

    Attributes:
        bytes_per_second: of the fastest read so far; 0 before the first.
    """

    def __init__(self, device: torch.device, buffer_bytes: int = BUFFER_BYTES) -> None:
        # Memory as weights and the cache have it.
        on_cpu = device.type == "cpu"
        empty = (
            large_zeros(buffer_bytes)
            if on_cpu
            else torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
        )
        buffer = empty.view(torch.float32).fill_(1)
        self._device = device
        self._bytes = buffer.numel() * buffer.element_size()
        # Different processors read fastest in different reductions.
        self._reads: tuple[Callable[[], object], ...] = (
            lambda: torch.linalg.vector_norm(buffer),
            lambda: torch.dot(buffer, buffer),
            lambda: buffer.max(),
            lambda: buffer.sum(),
        )
        self.bytes_per_second = 0.0

    def measure(self, repeats: int = 3) -> float:
        """Read the buffer `repeats` times in each way; return `bytes_per_second`."""
        for read in self._reads:
            for _ in range(repeats):
                started = time.perf_counter()
                read()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                rate = self._bytes / (time.perf_counter() - started)
                self.bytes_per_second = max(self.bytes_per_second, rate)
        return self.bytes_per_second

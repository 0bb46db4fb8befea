"""Copies from memory that the driver did not lock, through a pair of buffers that it did.

If the arena cannot be registered, the driver copies through its own buffers, with one thread
of the host. Here all of torch's threads fill a buffer while the one before is on the link.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

log = logging.getLogger(__name__)

BUFFER_BYTES = 16 << 20
BUFFERS = 2


@dataclass(slots=True)
class _Buffer:
    """Pinned memory, and the event after the last copy from it; None before the first."""

    memory: torch.Tensor
    read: Any = None


class Bounce:
    """Pinned buffers for copies to one device, made at the first copy. For one thread.

    `cuda` is torch.cuda, or in tests a double of its streams and events.
    """

    def __init__(
        self,
        device: torch.device,
        cuda: Any = torch.cuda,
        *,
        buffer_bytes: int = BUFFER_BYTES,
        pin_memory: bool = True,
    ) -> None:
        self._device = device
        self._cuda = cuda
        self._buffer_bytes = buffer_bytes
        self._pin_memory = pin_memory
        self._buffers: list[_Buffer] | None = None
        self._next = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous host memory to the device, in the current stream.

        Returns when the last bytes are in a buffer; the host waits for earlier copies only.
        """
        if self._buffers is None:
            self._buffers = self._made()
        if not self._buffers:
            target.copy_(source, non_blocking=True)
            return
        into, bytes_in = (each.view(-1).view(torch.uint8) for each in (target, source))
        stream = self._cuda.current_stream(self._device)
        for first in range(0, len(bytes_in), self._buffer_bytes):
            part = bytes_in[first : first + self._buffer_bytes]
            buffer = self._buffers[self._next]
            self._next = (self._next + 1) % len(self._buffers)
            if buffer.read is None:
                buffer.read = self._cuda.Event()
            else:
                buffer.read.synchronize()
            filled = buffer.memory[: len(part)].copy_(part)
            self._send(into[first : first + len(part)], filled)
            buffer.read.record(stream)

    def _send(self, target: torch.Tensor, buffer: torch.Tensor) -> None:
        target.copy_(buffer, non_blocking=True)

    def _made(self) -> list[_Buffer]:
        try:
            return [
                _Buffer(
                    torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=self._pin_memory)
                )
                for _ in range(BUFFERS)
            ]
        except RuntimeError as error:
            # The same bytes arrive, at the rate of pageable memory.
            log.warning("no pinned buffers for memory that is not pinned: %s", error)
            return []

"""A CUDA stream that decodes chunks while the copy stream fetches the next ones.

The copy engine would otherwise be idle while the device decodes. This module knows neither
chunks nor encodings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from worker_service.hardware.streams import StreamUse, stream_for


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a buffer: `arrived` after it was filled, `decoded` after it was read."""

    arrived: Any
    decoded: Any


class DecodeStream:
    """Decodes the parts of a buffer in turn. For the thread that gives work to the copy stream.

    `cuda` is torch.cuda, or in tests a double of its streams and events.
    """

    def __init__(self, device: torch.device, part_count: int, cuda: Any = torch.cuda) -> None:
        self.part_count = part_count
        self._device = device
        self._cuda = cuda
        self._stream = stream_for(StreamUse.DECODE, device, cuda)
        # Recorded again and again: a wait keeps the record that it saw.
        self._parts = [_Part(cuda.Event(), cuda.Event()) for _ in range(part_count)]
        self._last: Any = None

    def run(self, part: int, fetch: Callable[[], None], decode: Callable[[], None]) -> None:
        """Fetch into a part in the current stream once it is free; decode it in this one."""
        copies, events = self._cuda.current_stream(self._device), self._parts[part]
        copies.wait_event(events.decoded)
        fetch()
        events.arrived.record(copies)
        self._stream.wait_event(events.arrived)
        with self._cuda.stream(self._stream):
            decode()
        events.decoded.record(self._stream)
        self._last = events.decoded

    def join(self) -> None:
        """Let the current stream wait for everything that was decoded."""
        if self._last is not None:
            self._cuda.current_stream(self._device).wait_event(self._last)

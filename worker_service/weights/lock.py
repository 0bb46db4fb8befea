"""Page-locks weights on the host for the GPU driver, in the background, unit by unit.

Copies from memory that is not locked yet are right, only slower, so nothing waits for
this. Not confirmed on a GPU yet. This module knows no slots and no lanes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch

from splitpoint.config import format_size
from splitpoint.shapes import align
from worker_service.device.pinning import LockedRanges, PinningFailed, Registrar, refusal

log = logging.getLogger(__name__)


class WeightLock:
    """Locks whole mappings, each once; `close` it before any of them is unmapped."""

    def __init__(self, registrar: Registrar, memory: Sequence[torch.Tensor]) -> None:
        """`memory`: uint8, each from the beginning of its mapping (`host_memory`)."""
        self._locked = LockedRanges(registrar)
        self._memory = memory  # must not be unmapped while it is locked
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._lock_all, name="weight lock", daemon=True)
        self._thread.start()

    @property
    def locked_bytes(self) -> int:
        """Bytes that are locked at this moment."""
        return self._locked.size_bytes

    def wait(self) -> None:
        """Wait until all memory is locked, or locking failed."""
        self._thread.join()

    def close(self) -> None:
        """Stop, and unlock. No copy may be under way."""
        self._stop.set()
        self._thread.join()
        self._locked.release()

    def _lock_all(self) -> None:
        wanted = sum(memory.numel() for memory in self._memory)
        for memory in self._memory:
            if self._stop.is_set():
                return
            # A mapping has whole pages; the memory may use the last one in part.
            size = align(memory.numel())
            try:
                self._locked.lock(memory.data_ptr(), size)
            except PinningFailed as error:
                log.warning("weights: %s", refusal(error, size, wanted))
                return
        log.info("%s of weights on the host are page-locked", format_size(self.locked_bytes))

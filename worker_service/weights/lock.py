"""Page-locks weights on the host for the GPU driver, in the background, unit by unit.

Copies from what is not locked yet are right, only slower: nobody waits for this. No
GPU has confirmed it. Knows no slots and no lanes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch

from splitpoint.config import format_size
from splitpoint.shapes import align
from worker_service.device.pinning import PinningFailed, Registrar, refusal

log = logging.getLogger(__name__)


class WeightLock:
    """Locks whole mappings, each once; `close` before any of them goes.

    Attributes:
        locked_bytes: at this moment.
    """

    def __init__(self, registrar: Registrar, memory: Sequence[torch.Tensor]) -> None:
        """`memory`: uint8, each from the beginning of its mapping (`host_memory`)."""
        self.locked_bytes = 0
        self._registrar = registrar
        self._memory = memory  # keeps it while it is locked
        self._stop = threading.Event()
        self._held: list[int] = []
        self._thread = threading.Thread(target=self._lock_all, name="weight lock", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until everything is locked, or cannot be."""
        self._thread.join()

    def close(self) -> None:
        """Stop, and unlock. No copy may be under way."""
        self._stop.set()
        self._thread.join()
        while self._held:
            try:
                self._registrar.unregister(self._held.pop())
            except PinningFailed as error:
                # The driver forgets it with the process; nothing else can be done.
                log.error("unlocking weights failed: %s", error)
        self.locked_bytes = 0

    def _lock_all(self) -> None:
        wanted = sum(memory.numel() for memory in self._memory)
        for memory in self._memory:
            if self._stop.is_set():
                return
            # A mapping is whole pages, of which the memory may use the last in part.
            size = align(memory.numel())
            try:
                self._registrar.register(memory.data_ptr(), size)
            except PinningFailed as error:
                log.warning("weights: %s", refusal(error, size, wanted))
                return
            self._held.append(memory.data_ptr())
            self.locked_bytes += size
        log.info("%s of weights on the host are page-locked", format_size(self.locked_bytes))

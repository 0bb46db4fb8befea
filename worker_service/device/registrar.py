"""Page-locks address ranges for the GPU driver, and checks that copies profit from it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from splitpoint.config import format_size
from worker_service.hardware.streams import StreamUse, stream_for

log = logging.getLogger(__name__)

# cudaHostRegisterPortable: locked for every context of the process.
_PORTABLE = 1
# Size of the probe copies that show whether copies are asynchronous: far longer on the
# link than a call takes, and little device memory.
PROBE_BYTES = 8 << 20
PROBES = 3


class PinningFailed(Exception):
    """The driver did not lock a piece; the message says why, in its words."""


def _launch(device: torch.device) -> None:
    """Start a kernel on a device. Raises RuntimeError for the thread's last error."""
    torch.ones(1, device=device)


class Registrar(Protocol):
    """Locks and unlocks address ranges; every call may take seconds."""

    def register(self, address: int, size_bytes: int) -> None:
        """Lock a range. Raises PinningFailed, and then nothing of the range is locked."""

    def unregister(self, address: int) -> None:
        """Unlock the range that begins here. Raises PinningFailed."""

    def fault_of(self, address: int, size_bytes: int) -> str | None:
        """Return why copies from a locked range are not asynchronous; None if they are."""


class CudaRegistrar:
    """The CUDA driver, for one device.

    `cuda` is torch.cuda, and `launch` starts a kernel on the device; tests have doubles of both.
    """

    def __init__(
        self,
        device: torch.device,
        cuda: Any = torch.cuda,
        launch: Callable[[torch.device], object] = _launch,
    ) -> None:
        self._device = device
        self._cuda = cuda
        self._launch = launch

    def register(self, address: int, size_bytes: int) -> None:
        self._call("cudaHostRegister", address, size_bytes, _PORTABLE)

    def unregister(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def fault_of(self, address: int, size_bytes: int) -> str | None:
        size = min(PROBE_BYTES, size_bytes)
        # torch asks the driver, so this also works for memory that torch did not allocate.
        if not all(
            _memory(start, size).is_pinned() for start in (address, address + size_bytes - size)
        ):
            return "torch does not take it for pinned memory"
        if size < PROBE_BYTES:
            return None  # too short for a copy to outlast its call
        try:
            with self._cuda.device(self._device):
                return copy_fault(probe_copies(_memory(address, size), self._device, self._cuda))
        except torch.OutOfMemoryError:
            return "there was no device memory left to check its copies with"

    def _call(self, name: str, *arguments: int) -> None:
        with self._cuda.device(self._device):
            code = getattr(self._cuda.cudart(), name)(*arguments)
            if int(code) != 0:
                self._forget_error()
                raise PinningFailed(f"CUDA error {code}")

    def _forget_error(self) -> None:
        """Take the error of a refused call from this thread.

        CUDA keeps it, and the next launch in the thread would raise it as its own. torch has no
        other call that asks for the error, which clears it.
        """
        with contextlib.suppress(RuntimeError):
            self._launch(self._device)


def probe_copies(
    source: torch.Tensor, device: torch.device, cuda: Any = torch.cuda
) -> list[tuple[float, float]]:
    """Time a few copies; return (seconds until the call returned, until it was done)."""
    stream = stream_for(StreamUse.PROBE, device, cuda)
    probes = []
    with cuda.stream(stream):
        target = torch.empty_like(source, device=device)
        for _ in range(PROBES):
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            issued = time.perf_counter()
            stream.synchronize()
            probes.append((issued - started, time.perf_counter() - started))
    return probes


def _memory(address: int, size_bytes: int) -> torch.Tensor:
    """Return mapped memory of this process as a tensor."""
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def copy_fault(probes: Sequence[tuple[float, float]]) -> str | None:
    """Return why copies are not asynchronous, by (issued, done) seconds of a few of them.

    One call that returned early proves that they are: others may have waited for the
    interpreter, or been the first. None if they are asynchronous.
    """
    if any(issued < done / 2 for issued, done in probes):
        return None
    issued, done = min(probes)
    return (
        f"copies from it are not asynchronous: a call takes {1e6 * issued:.0f} µs, "
        f"the copy {1e6 * done:.0f} µs"
    )


class LockedRanges:
    """The address ranges that were locked and not released yet.

    Attributes:
        size_bytes: locked at this moment.
    """

    def __init__(self, registrar: Registrar) -> None:
        self.size_bytes = 0
        self._registrar = registrar
        self._held: list[tuple[int, int]] = []  # (address, bytes), in order

    def __bool__(self) -> bool:
        return bool(self._held)

    def lock(self, address: int, size_bytes: int) -> None:
        """Lock a range. Raises PinningFailed."""
        self._registrar.register(address, size_bytes)
        self._held.append((address, size_bytes))
        self.size_bytes += size_bytes

    def release(self) -> None:
        """Unlock all ranges. No copy may be under way."""
        while self._held:
            address, size_bytes = self._held.pop()
            self.size_bytes -= size_bytes
            try:
                self._registrar.unregister(address)
            except PinningFailed as error:
                # The driver unlocks it when the process ends; nothing else can be done.
                log.error("unlocking %s failed: %s", format_size(size_bytes), error)


def refusal(error: Exception, piece_bytes: int, size_bytes: int) -> str:
    """Return why nothing is locked, and how to raise the limit that is the usual cause."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        limit = "RLIMIT_MEMLOCK is unlimited"
    else:
        limit = f"RLIMIT_MEMLOCK is {format_size(soft)}"
        if soft < size_bytes:
            limit += (
                "; raise it with `ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, "
                "or --ulimit memlock=-1 for a container"
            )
    return (
        f"not pinned: locking {format_size(piece_bytes)} of {format_size(size_bytes)} failed "
        f"({error}); {limit}"
    )

"""Page-locks a mapped arena for the GPU driver, in the background and in pieces.

Readiness does not wait: copies from memory that is not locked yet go through the driver's own
buffers and are right, only slower. The registrar locks address ranges and checks that copies
profit from it; `Pinning` decides pieces, order and rollback. All its methods but the work itself
run on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import resource
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from splitpoint.arena.mapping import Arena
from splitpoint.config import format_size
from splitpoint.options.worker import PROGRESS_SECONDS
from splitpoint.progress import Counter, Progress, Ticker
from splitpoint.shapes import Plane
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


# The driver locks a piece in a tenth of a second or so. Meanwhile other calls of the process to
# the driver wait, and a stop that was asked for.
PIECE_BYTES = 1 << 30
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [offset, offset + size_bytes) of the payload mapping."""

    offset: int
    size_bytes: int


def pieces_of(
    planes: Sequence[Plane],
    slot_count: int,
    payload_offset: int,
    limit_bytes: int | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> list[Piece]:
    """Join whole planes into pieces of at most `piece_bytes`, in file order.

    A larger plane is cut into pieces of `piece_slots`: no copy may cross from one registration
    into another. Planes beyond `limit_bytes` stay unlocked.
    """
    pieces: list[Piece] = []
    total = 0
    for plane in planes:
        offset, size = plane.offset - payload_offset, plane.slot_bytes * slot_count
        total += size
        if limit_bytes is not None and total > limit_bytes:
            break
        last = pieces[-1] if pieces else None
        if size > piece_bytes:
            step = piece_slots(plane.slot_bytes, piece_bytes) * plane.slot_bytes
            pieces += [
                Piece(offset + first, min(step, size - first)) for first in range(0, size, step)
            ]
        elif last is not None and offset + size - last.offset <= piece_bytes:
            pieces[-1] = Piece(last.offset, offset + size - last.offset)
        else:
            pieces.append(Piece(offset, size))
    return pieces


def piece_slots(slot_bytes: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Return how many slots of a plane a piece holds: it begins and ends with a memory page."""
    step = math.lcm(slot_bytes, _PAGE_BYTES) // slot_bytes
    return max(step, piece_bytes // slot_bytes // step * step)


class Pinning:
    """The locked pages of the arena that a worker maps now; one arena at a time.

    Attributes:
        description: the state, for people.
        between_steps: runs a function while no copy is under way, and returns after it.
            Set while an engine runs; None if no copies can be under way.
    """

    def __init__(
        self,
        registrar: Registrar,
        *,
        limit_bytes: int | None = None,
        piece_bytes: int = PIECE_BYTES,
        progress_seconds: float = PROGRESS_SECONDS.default,
    ) -> None:
        self.description = "not pinned"
        self._registrar = registrar
        self._limit_bytes = limit_bytes
        self._piece_bytes = piece_bytes
        self._progress_seconds = progress_seconds
        # One thread: registrations and their undoing never overtake each other.
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="pinning")
        self._stop = threading.Event()
        self._locked = LockedRanges(registrar)
        # Keeps the mapping while any of it is locked: unregister comes before unmap.
        self._payload: object | None = None
        self._task: asyncio.Future[None] | None = None
        self.between_steps: Callable[[Callable[[], None]], None] | None = None

    @property
    def pinned_bytes(self) -> int:
        """Bytes that are locked at this moment."""
        return self._locked.size_bytes

    def attach(self, arena: Arena) -> None:
        """Release the locked arena, if any, and lock this one's payload, in the background."""
        self._stop.set()
        self._stop = stop = threading.Event()
        payload = arena.payload
        pieces = pieces_of(
            arena.geometry.planes,
            arena.slot_count,
            arena.geometry.payload_offset,
            self._limit_bytes,
            self._piece_bytes,
        )

        def work() -> None:
            if self._locked and self.between_steps is not None:
                # Requests that still read the old arena go on, from unlocked pages.
                try:
                    self.between_steps(self._release)
                except TimeoutError as error:
                    self.description = f"not pinned, the arena before still is: {error}"
                    raise
            else:
                self._release()
            self._payload = payload
            self._lock_all(payload.ctypes.data, pieces, payload.nbytes, stop)

        self._submit(work)

    async def idle(self) -> None:
        """Return when all requested work is done."""
        if self._task is not None:
            await self._task

    async def close(self) -> None:
        """Unlock everything. No copy may be under way."""
        self._stop.set()
        self._submit(self._release)
        await self.idle()
        self._lane.shutdown()

    def _submit(self, work: Callable[[], None]) -> None:
        self._task = asyncio.get_running_loop().run_in_executor(self._lane, self._guard, work)

    @staticmethod
    def _guard(work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            # A worker without locked pages is slower, not wrong.
            log.exception("pinning failed")

    # -- on the lane ---------------------------------------------------------------

    def _lock_all(
        self, base: int, pieces: Sequence[Piece], size_bytes: int, stop: threading.Event
    ) -> None:
        self.description = f"pinning {format_size(size_bytes)}"
        fault: str | None = None
        wanted = sum(piece.size_bytes for piece in pieces)
        counter = Counter("pinning", wanted, [Ticker(_tell, self._progress_seconds)])
        for piece in pieces:
            if stop.is_set():
                return  # the next arena, or the end, releases
            try:
                self._locked.lock(base + piece.offset, piece.size_bytes)
            except PinningFailed as error:
                self._release()
                self.description = refusal(error, piece.size_bytes, size_bytes)
                log.warning("%s", self.description)
                return
            counter.add(piece.size_bytes)
            fault = fault or self._registrar.fault_of(base + piece.offset, piece.size_bytes)
        if self._limit_bytes is None:
            self.description = f"pinned {format_size(self.pinned_bytes)}"
        else:
            self.description = (
                f"pinned {format_size(self.pinned_bytes)} of {format_size(size_bytes)} "
                f"(--pin-limit {format_size(self._limit_bytes)})"
            )
        if fault is None:
            log.info("%s", self.description)
        else:
            # Restores are right, but overlap less than planned.
            self.description += f", but {fault}"
            log.warning("%s", self.description)

    def _release(self) -> None:
        self._locked.release()
        self._payload = None
        self.description = "not pinned"


def _tell(progress: Progress) -> None:
    if not progress.is_complete:  # the end has a log line of its own
        done, total = format_size(progress.done_bytes), format_size(progress.total_bytes)
        log.info("pinning: %s of %s", done, total)

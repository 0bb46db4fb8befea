"""Page-locks a mapped arena for the GPU driver, in the background and in pieces.

Readiness does not wait: copies from what is not locked yet go through the
driver's own buffers and are right, only slower. What a registrar does is the
driver's business; this module decides on pieces, order and rollback, and says
when locked memory does not do what it was locked for. All methods of `Pinning`
but the work itself run on the event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
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
from splitpoint.progress import Counter, Progress, Ticker
from splitpoint.shapes import Plane

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 30
# cudaHostRegisterPortable: locked for every context of the process.
_PORTABLE = 1
# What is copied to see whether copies are asynchronous: far longer on the link than
# a call takes, little enough to be no burden on a device's memory.
PROBE_BYTES = 8 << 20
PROBES = 3
# Between two lines of the log that tell how far it is.
PROGRESS_SECONDS = 2.0


class PinningFailed(Exception):
    """The driver did not lock a piece; the message says why, in its words."""


class Registrar(Protocol):
    """Locks and unlocks address ranges; every call may take seconds."""

    def register(self, address: int, size_bytes: int) -> None:
        """Raises PinningFailed, and then nothing of the range is locked."""

    def unregister(self, address: int) -> None:
        """Undo `register` of the range that begins here. Raises PinningFailed."""

    def fault_of(self, address: int, size_bytes: int) -> str | None:
        """What keeps copies from a registered range from being asynchronous; None: nothing."""


class CudaRegistrar:
    """The CUDA driver, for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size_bytes: int) -> None:
        with torch.cuda.device(self._device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._check(runtime.cudaHostRegister(address, size_bytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._check(runtime.cudaHostUnregister(address))

    def fault_of(self, address: int, size_bytes: int) -> str | None:
        size = min(PROBE_BYTES, size_bytes)
        # torch asks the driver, so this holds for memory it did not allocate itself.
        if not all(
            _memory(start, size).is_pinned() for start in (address, address + size_bytes - size)
        ):
            return "torch does not take it for pinned memory"
        if size < PROBE_BYTES:
            return None  # too little for a copy to outlast its call
        try:
            return copy_fault(self._probe(_memory(address, size)))
        except torch.OutOfMemoryError:
            return "there was no device memory left to check its copies with"

    def _probe(self, source: torch.Tensor) -> list[tuple[float, float]]:
        """(seconds until the call returned, until the copy was done), a few times."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        probes = []
        with torch.cuda.stream(stream):
            target = torch.empty_like(source, device=self._device)
            for _ in range(PROBES):
                started = time.perf_counter()
                target.copy_(source, non_blocking=True)
                issued = time.perf_counter()
                stream.synchronize()
                probes.append((issued - started, time.perf_counter() - started))
        return probes

    @staticmethod
    def _check(code: object) -> None:
        if int(code) != 0:  # type: ignore[call-overload]
            raise PinningFailed(f"CUDA error {code}")


def _memory(address: int, size_bytes: int) -> torch.Tensor:
    """Bytes of this process as a tensor; whoever calls knows that they are mapped."""
    memory = (ctypes.c_uint8 * size_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8)


def copy_fault(probes: Sequence[tuple[float, float]]) -> str | None:
    """Whether copies come back before they are done, by (issued, done) seconds of a few.

    One that does is proof; others may have waited for the interpreter, or been the first.
    """
    if any(issued < done / 2 for issued, done in probes):
        return None
    issued, done = min(probes)
    return (
        f"copies from it are not asynchronous: a call takes {1e6 * issued:.0f} µs, "
        f"the copy {1e6 * done:.0f} µs"
    )


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
    """Whole planes joined into pieces of at most `piece_bytes`, in file order.

    A plane larger than that is a piece of its own: one copy must not cross from
    one registration into another. `limit_bytes`: planes beyond it stay unlocked.
    """
    pieces: list[Piece] = []
    total = 0
    for plane in planes:
        offset, size = plane.offset - payload_offset, plane.slot_bytes * slot_count
        total += size
        if limit_bytes is not None and total > limit_bytes:
            break
        last = pieces[-1] if pieces else None
        if last is not None and offset + size - last.offset <= piece_bytes:
            pieces[-1] = Piece(last.offset, offset + size - last.offset)
        else:
            pieces.append(Piece(offset, size))
    return pieces


class Pinning:
    """The locked pages of the arena that a worker maps now; one arena at a time.

    Attributes:
        pinned_bytes: locked at this moment.
        description: the state, for people.
        between_steps: runs a function while no copy is under way, and returns after it;
            None: there is none anyway. Set while an engine runs.
    """

    def __init__(
        self,
        registrar: Registrar,
        *,
        limit_bytes: int | None = None,
        piece_bytes: int = PIECE_BYTES,
        progress_seconds: float = PROGRESS_SECONDS,
    ) -> None:
        self.pinned_bytes = 0
        self.description = "not pinned"
        self._registrar = registrar
        self._limit_bytes = limit_bytes
        self._piece_bytes = piece_bytes
        self._progress_seconds = progress_seconds
        # One thread: registrations and their undoing never overtake each other.
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="pinning")
        self._stop = threading.Event()
        self._held: list[tuple[int, int]] = []  # (address, bytes), in order
        # Keeps the mapping while any of it is locked: unregister comes before unmap.
        self._payload: object | None = None
        self._task: asyncio.Future[None] | None = None
        self.between_steps: Callable[[Callable[[], None]], None] | None = None

    def attach(self, arena: Arena) -> None:
        """Lock the arena's payload from now on; what was locked before is let go first."""
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
            if self._held and self.between_steps is not None:
                # Requests that still read the arena before go on, from unlocked pages.
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
        """Return when everything asked for is done."""
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
            # A worker without locked pages is slower, not wrong: it goes on, and says so.
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
                return  # another arena follows, or the end: both release
            try:
                self._registrar.register(base + piece.offset, piece.size_bytes)
            except PinningFailed as error:
                self._release()
                self.description = refusal(error, piece.size_bytes, size_bytes)
                log.warning("%s", self.description)
                return
            self._held.append((base + piece.offset, piece.size_bytes))
            self.pinned_bytes += piece.size_bytes
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
            # Restores are right all the same, but overlap less than planned.
            self.description += f", but {fault}"
            log.warning("%s", self.description)

    def _release(self) -> None:
        while self._held:
            address, size_bytes = self._held.pop()
            self.pinned_bytes -= size_bytes
            try:
                self._registrar.unregister(address)
            except PinningFailed as error:
                # The driver forgets it with the process; nothing else can be done.
                log.error("unlocking %s failed: %s", format_size(size_bytes), error)
        self._payload = None
        self.description = "not pinned"


def _tell(progress: Progress) -> None:
    if not progress.is_complete:  # the end is told in other words
        done, total = format_size(progress.done_bytes), format_size(progress.total_bytes)
        log.info("pinning: %s of %s", done, total)


def refusal(error: Exception, piece_bytes: int, size_bytes: int) -> str:
    """Why nothing is locked, and what to do about the limit that most often is in the way."""
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

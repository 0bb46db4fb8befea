"""Scattered slots onto a GPU: one copy for each run, or one kernel for all of them.

A copy of less than 64 KiB reaches a tenth of a PCIe link, since each costs a call; a
kernel that reads registered host memory by index costs one launch. Which is faster
for how many runs is measured once, at start. Knows nothing of chunks or schedules.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from splitpoint.costs.profile import Line, fit_line

log = logging.getLogger(__name__)

WORD = torch.int64
# Words of one block: 16 KiB, 128 bytes for each thread of four warps. Some 32 blocks
# under way hold what a PCIe 5 link has in flight several times over.
BLOCK_WORDS = 2048
PROGRAMS = 32
# Calibration: pieces of a copy, and bytes of a launch that fetches the smallest of them.
PIECE_BYTES = (8 << 10, 64 << 10, 256 << 10)
PIECES = 64
REPEATS = 5

# A plane, and where its slots go: `[slots, ...]` on the host, `[pages, ...]` on the device.
Planes = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GatherCosts:
    """What both ways cost: `copy` for one copy, `kernel` for one launch, by bytes."""

    copy: Line
    kernel: Line

    def prefers_kernel(self, run_count: int, size_bytes: int) -> bool:
        """Whether one launch is faster than `run_count` copies of `size_bytes` together."""
        copies = run_count * self.copy.overhead + size_bytes / self.copy.rate
        return self.kernel.overhead + size_bytes / self.kernel.rate < copies


class Gatherer:
    """Fetches slots of pinned planes by a kernel, where that is the faster way.

    Attributes:
        costs: of both ways, on this device.
        kernel: what `launch` starts.
    """

    def __init__(self, device: torch.device, kernel: Any, costs: GatherCosts) -> None:
        self.costs = costs
        self.kernel = kernel
        self._device = device

    def is_faster(self, planes: Sequence[Planes], run_count: int, slot_count: int) -> bool:
        """Whether these slots should, and may, be fetched by the kernel.

        What is not registered must never be read by a kernel; registration may end
        between two steps, so the driver is asked each time.
        """
        sources = [source for source, _ in planes]
        slot_bytes = [source[0].numel() * source.element_size() for source in sources]
        return (
            self.costs.prefers_kernel(run_count * len(planes), slot_count * sum(slot_bytes))
            and all(size % WORD.itemsize == 0 for size in slot_bytes)
            and all(source.is_pinned() for source in sources)
        )

    def gather(self, planes: Sequence[Planes], slots: Sequence[int], pages: Sequence[int]) -> None:
        """`target[pages[i]] = source[slots[i]]` of each plane, in the current stream."""
        # Through pinned memory: a copy from elsewhere would make the host wait.
        index = torch.tensor([list(slots), list(pages)], dtype=torch.int64).pin_memory()
        on_device = index.to(self._device, non_blocking=True)
        for source, target in planes:
            launch(self.kernel, target, source, on_device[0], on_device[1])


def launch(
    kernel: Any,
    target: torch.Tensor,
    source: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    """Start the kernel over one plane; `slots` and `pages`: int64 `[n]` on the device."""
    words_in, words_out = _words(source), _words(target)
    slot_words = words_in.shape[1]
    blocks = -(-slot_words // BLOCK_WORDS)
    count = len(slots) * blocks
    programs = min(PROGRAMS, count)
    kernel[(programs,)](
        words_out,
        words_in,
        slots,
        pages,
        slot_words,
        blocks,
        count,
        block=BLOCK_WORDS,
        programs=programs,
    )


def load_kernel() -> Any:
    """The kernel; ModuleNotFoundError where Triton is not installed."""
    from worker_service.pipeline.gather_kernel import gather_slots

    return gather_slots


def gatherer_of(device: torch.device) -> Gatherer | None:
    """A calibrated gatherer; None on a CPU, and where the kernel cannot be built.

    Takes a second or two on a GPU: the kernel is compiled.
    """
    if device.type != "cuda":
        return None
    try:
        kernel = load_kernel()
        return Gatherer(device, kernel, calibrate(device, kernel))
    except Exception as error:
        # Copies are right without it; why it is missing must be known all the same.
        log.warning("scattered slots are copied one by one: %s: %s", type(error).__name__, error)
        return None


@torch.inference_mode()
def calibrate(device: torch.device, kernel: Any) -> GatherCosts:
    """Time both ways on a stream of their own, over pinned memory."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    largest = PIECES * PIECE_BYTES[-1]
    source = torch.zeros(largest, dtype=torch.uint8, pin_memory=True)
    target = torch.zeros(largest, dtype=torch.uint8, device=device)
    # Backwards, so that no two pieces make one run.
    order = torch.arange(PIECES - 1, -1, -1, device=device)
    # Both were filled on the current stream.
    stream.wait_stream(torch.cuda.current_stream(device))

    def views(piece: int) -> Planes:
        size = PIECES * piece
        return source[:size].view(PIECES, piece), target[:size].view(PIECES, piece)

    def copies(piece: int) -> Callable[[], None]:
        host, gpu = views(piece)

        def run() -> None:
            for index in range(PIECES):
                gpu[PIECES - 1 - index].copy_(host[index], non_blocking=True)

        return run

    def launches(piece: int) -> Callable[[], None]:
        host, gpu = views(piece)
        return lambda: launch(kernel, gpu, host, order, order)

    copied = [_median_seconds(copies(piece), stream) / PIECES for piece in PIECE_BYTES]
    launched = [_median_seconds(launches(piece), stream) for piece in PIECE_BYTES]
    return GatherCosts(
        copy=fit_line(PIECE_BYTES, copied),
        kernel=fit_line([PIECES * piece for piece in PIECE_BYTES], launched),
    )


def _median_seconds(run: Callable[[], None], stream: Any) -> float:
    samples = []
    with torch.cuda.stream(stream):
        run()
        for _ in range(REPEATS):
            stream.synchronize()
            started = time.perf_counter()
            run()
            stream.synchronize()
            samples.append(time.perf_counter() - started)
    return statistics.median(samples)


def _words(plane: torch.Tensor) -> torch.Tensor:
    """`[slots, words]` over the same memory."""
    return plane.flatten(1).view(WORD)

"""Copies scattered slots to a GPU: one copy for each run, or one kernel for all of them.

A copy below 64 KiB reaches a tenth of a PCIe link, because each copy costs a call; a
kernel that reads registered host memory by index costs one launch. Which is faster for
how many runs is measured once, at start. This module knows no chunks and no schedules.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from splitpoint.costs.profile import Line, fit_line
from worker_service.device.copies import are_pinned, sent
from worker_service.device.pinning import piece_slots
from worker_service.hardware.streams import StreamUse, stream_for

log = logging.getLogger(__name__)

WORD = torch.int64
# Words of one block: 16 KiB, 128 bytes for each thread of four warps. 32 blocks under
# way hold several times what a PCIe 5 link has in flight.
BLOCK_WORDS = 2048
PROGRAMS = 32
# Calibration copies this many pieces of each of these sizes, and launches one kernel over them.
PIECE_BYTES = (8 << 10, 64 << 10, 256 << 10)
PIECES = 64
REPEATS = 5

# A plane and its target: `[slots, ...]` on the host, `[pages, ...]` on the device.
Planes = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GatherCosts:
    """Costs by bytes: `copy` of one copy, `kernel` of one launch."""

    copy: Line
    kernel: Line

    def prefers_kernel(self, run_count: int, size_bytes: int) -> bool:
        """Return True if one launch is faster than `run_count` copies, `size_bytes` in all."""
        copies = run_count * self.copy.overhead + size_bytes / self.copy.rate
        return self.kernel.overhead + size_bytes / self.kernel.rate < copies


class Gatherer:
    """Copies slots of pinned planes by a kernel where that is the faster way.

    Attributes:
        costs: of both ways, on this device.
        kernel: the Triton kernel that `launch` starts.
    """

    def __init__(self, device: torch.device, kernel: Any, costs: GatherCosts) -> None:
        self.costs = costs
        self.kernel = kernel
        self._device = device

    def is_faster(self, planes: Sequence[Planes], run_count: int, slots: Sequence[int]) -> bool:
        """Return True if the kernel may copy these slots, and is faster.

        A kernel must never read memory that is not registered.
        """
        sources = [source for source, _ in planes]
        slot_bytes = [source[0].nbytes for source in sources]
        return (
            self.costs.prefers_kernel(run_count * len(planes), len(slots) * sum(slot_bytes))
            and all(size % WORD.itemsize == 0 for size in slot_bytes)
            and all(
                are_pinned(source, slots, piece_slots(size))
                for source, size in zip(sources, slot_bytes, strict=True)
            )
        )

    def gather(self, planes: Sequence[Planes], slots: Sequence[int], pages: Sequence[int]) -> None:
        """Do `target[pages[i]] = source[slots[i]]` for each plane, in the current stream."""
        both = sent([*slots, *pages], self._device)
        for source, target in planes:
            launch(self.kernel, target, source, both[: len(slots)], both[len(slots) :])


def launch(
    kernel: Any,
    target: torch.Tensor,
    source: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
) -> None:
    """Start the kernel over one plane; `slots` and `pages` are int64 `[n]` on the device."""
    # `[slots, words]` over the same memory.
    words_in, words_out = (plane.flatten(1).view(WORD) for plane in (source, target))
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
    )


def load_kernel() -> Any:
    """Return the kernel. Raises ModuleNotFoundError if Triton is not installed."""
    from worker_service.pipeline.gather_kernels import gather_slots

    return gather_slots


def gatherer_of(device: torch.device) -> Gatherer | None:
    """Return a calibrated gatherer; None on a CPU, and if the kernel cannot be built.

    This compiles the kernel, which takes a second or two.
    """
    if device.type != "cuda":
        return None
    try:
        kernel = load_kernel()
        return Gatherer(device, kernel, calibrate(device, kernel))
    except Exception as error:
        # Copies give the same result; the log says why the faster way is missing.
        log.warning("scattered slots are copied one by one: %s: %s", type(error).__name__, error)
        return None


@torch.inference_mode()
def calibrate(device: torch.device, kernel: Any) -> GatherCosts:
    """Time both ways on a separate stream, over pinned memory."""
    stream = stream_for(StreamUse.CALIBRATE, device)
    source = torch.zeros(PIECES * PIECE_BYTES[-1], dtype=torch.uint8, pin_memory=True)
    target = torch.zeros_like(source, device=device)
    # In reverse, so that no two pieces make one run.
    order = torch.arange(PIECES - 1, -1, -1, device=device)
    # The tensors are filled on the current stream.
    stream.wait_stream(torch.cuda.current_stream(device))
    copied, launched = [], []
    for piece in PIECE_BYTES:
        size = PIECES * piece
        host, gpu = source[:size].view(PIECES, piece), target[:size].view(PIECES, piece)
        copied.append(_median_seconds(partial(_copy_reversed, gpu, host), stream) / PIECES)
        launched.append(_median_seconds(partial(launch, kernel, gpu, host, order, order), stream))
    return GatherCosts(
        copy=fit_line(PIECE_BYTES, copied),
        kernel=fit_line([PIECES * piece for piece in PIECE_BYTES], launched),
    )


def _copy_reversed(target: torch.Tensor, source: torch.Tensor) -> None:
    for index in range(PIECES):
        target[PIECES - 1 - index].copy_(source[index], non_blocking=True)


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

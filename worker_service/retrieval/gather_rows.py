"""Copies single rows of K and V from the arena into device pages, by index.

On a CPU by numpy in the calling thread alone: torch would start a team of threads, which takes
turns with the team that computes on the same cores. On a GPU one launch reads registered host
memory by indices that lie on the device, so that the host never waits for them. Memory that is
not registered, and a worker without Triton, gather on the host into pinned memory. The GPU part is
not confirmed on one yet.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from worker_service.device.copies import are_pinned
from worker_service.device.pinning import piece_slots

log = logging.getLogger(__name__)

# Rows that a program copies at once, and programs: as many bytes under way as in `gather`.
ROWS = 32
PROGRAMS = 64


@dataclass(frozen=True, slots=True)
class RowPlane:
    """One plane `[slots, n_kv, C, d]` of the store, and one `[pages, n_kv, C, d]` of the device."""

    source: torch.Tensor
    target: torch.Tensor


def gather_rows(
    planes: Sequence[RowPlane],
    sources: torch.Tensor,
    targets: torch.Tensor,
    slots: Sequence[int],
) -> None:
    """Copy row `sources[i]` of each plane to row `targets[i]`, in the current stream.

    Args:
        sources, targets: int64 `[M]` on the device, `(slot * n_kv + head) * C + row` of store and
            device. On a GPU a target below 0 says that nothing is copied.
        slots: of the store, that the sources lie in.
    """
    if targets.device.type == "cpu":
        origins, places = sources.numpy(), targets.numpy()
        for plane in planes:
            _as_rows(plane.target)[places] = _as_rows(plane.source).take(origins)
        return
    kernel = load_kernel()
    stream = torch.cuda.current_stream(targets.device)
    for numbers in (sources, targets):
        # They were made in the stream of compute, which must not use their memory again too early.
        numbers.record_stream(stream)
    by_host = []
    for plane in planes:
        cut = piece_slots(plane.source[0].nbytes)
        if kernel is not None and are_pinned(plane.source, slots, cut):
            launch(kernel, plane, sources, targets)
        else:
            by_host.append(plane)
    if by_host:
        _through_pinned(by_host, sources, targets)


def launch(kernel: Any, plane: RowPlane, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Start the kernel over one plane whose source is registered."""
    width = plane.target.shape[-1]
    word = _word_of(width * plane.target.element_size())
    words_in, words_out = (each.view(-1, width).view(word) for each in (plane.source, plane.target))
    row_words = words_in.shape[1]
    groups = -(-len(sources) // ROWS)
    kernel[(min(PROGRAMS, groups),)](
        words_out,
        words_in,
        sources,
        targets,
        len(sources),
        groups,
        row_words=row_words,
        rows=ROWS,
        block=1 << (row_words - 1).bit_length(),
    )


@cache
def load_kernel() -> Any:
    """Return the kernel; None if Triton is not installed."""
    try:
        from worker_service.pipeline.gather_kernels import gather_rows_by_index
    except ModuleNotFoundError as error:
        # The host gathers the same rows; the log says why the faster way is missing.
        log.warning("selected rows are gathered by the host: %s", error)
        return None
    return gather_rows_by_index


def _through_pinned(
    planes: Sequence[RowPlane], sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Gather on the host, which waits for the indices; copy the rows, and put them in place."""
    wanted = targets >= 0
    rows, places = sources[wanted].cpu().numpy(), targets[wanted]
    for plane in planes:
        # torch keeps the pinned memory until the copy is done.
        pinned = torch.empty(
            (len(rows), plane.target.shape[-1]), dtype=plane.target.dtype, pin_memory=True
        )
        _as_rows(plane.source).take(rows, out=_as_rows(pinned), mode="clip")
        sent = pinned.to(plane.target.device, non_blocking=True)
        plane.target.view(-1, plane.target.shape[-1]).index_copy_(0, places, sent)


def _as_rows(plane: torch.Tensor) -> npt.NDArray[np.void]:
    """Return host memory `[..., d]` as an array of rows, each one opaque element."""
    data = plane.view(torch.uint8).numpy()
    return data.view(np.dtype((np.void, data.shape[-1]))).reshape(-1)


def _word_of(row_bytes: int) -> torch.dtype:
    """Return the largest type that rows of this many bytes consist of."""
    words = (torch.int64, torch.int32, torch.int16)
    return next(word for word in words if row_bytes % word.itemsize == 0)

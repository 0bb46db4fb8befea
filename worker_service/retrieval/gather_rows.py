"""Copies single rows of K and V from the arena into device pages, by index, and decodes them.

Of an encoded row its own codes and parameters cross the link, and the device decodes them.

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
from importlib import import_module
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from splitpoint.shapes import Encoding
from worker_service.device.copies import are_pinned
from worker_service.device.pinning import piece_slots
from worker_service.store.arena_tensors import as_rows
from worker_service.store.quantization import decode

log = logging.getLogger(__name__)

# Rows that a program copies at once, and programs: as many bytes under way as in `gather`.
ROWS = 32
PROGRAMS = 64
# Elements from which on torch divides an operation among threads.
_TEAM_ELEMENTS = 32768


@dataclass(frozen=True, slots=True)
class RowPlane:
    """One plane of the store, and one of the device.

    Attributes:
        source: `[slots, n_kv, C, d]`; encoded: uint8 `[slots, n_kv, C, row bytes]`.
        target: `[pages, n_kv, C, d]`.
        encoding: of the source's rows.
    """

    source: torch.Tensor
    target: torch.Tensor
    encoding: Encoding = Encoding.NATIVE


def gather_rows(
    planes: Sequence[RowPlane],
    sources: torch.Tensor,
    targets: torch.Tensor,
    slots: Sequence[int],
) -> None:
    """Copy row `sources[i]` of each plane to row `targets[i]`, decoded, in the current stream.

    Args:
        sources, targets: int64 `[M]` on the device, `(slot * n_kv + head) * C + row` of store and
            device. On a GPU a target below 0 says that nothing is copied.
        slots: of the store, that the sources lie in.
    """
    if targets.device.type == "cpu":
        origins, places = sources.numpy(), targets.numpy()
        for plane in planes:
            _gather_here(plane, origins, places)
        return
    kernels = load_kernels()
    stream = torch.cuda.current_stream(targets.device)
    for numbers in (sources, targets):
        # They were made in the stream of compute, which must not use their memory again too early.
        numbers.record_stream(stream)
    by_host = []
    for plane in planes:
        cut = piece_slots(plane.source[0].nbytes)
        if kernels is not None and are_pinned(plane.source, slots, cut):
            launch(kernels, plane, sources, targets)
        else:
            by_host.append(plane)
    if by_host:
        _through_pinned(by_host, sources, targets)


def launch(
    kernels: ModuleType, plane: RowPlane, sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Start the kernel over one plane whose source is registered."""
    groups = -(-len(sources) // ROWS)
    grid = (min(PROGRAMS, groups),)
    width, encoding = plane.target.shape[-1], plane.encoding
    if encoding is Encoding.NATIVE:
        word = _word_of(width * plane.target.element_size())
        words_in, words_out = (
            each.view(-1, width).view(word) for each in (plane.source, plane.target)
        )
        row_words = words_in.shape[1]
        kernels.gather_rows_by_index[grid](
            words_out,
            words_in,
            sources,
            targets,
            len(sources),
            groups,
            row_words=row_words,
            rows=ROWS,
            block=_power_of_2(row_words),
        )
        return
    words_in = plane.source.view(-1, plane.source.shape[-1]).view(torch.int16)
    row_words = words_in.shape[1]
    kernels.decode_rows_by_index[grid](
        plane.target.view(-1, width),
        words_in,
        sources,
        targets,
        len(sources),
        groups,
        row_words=row_words,
        width=width,
        group=encoding.group_elements,
        parameter_words=encoding.parameter_bytes(width) // 2,
        has_minimum=encoding is Encoding.INT4,
        rows=ROWS,
        word_block=_power_of_2(row_words),
        block=_power_of_2(width),
    )


@cache
def load_kernels() -> ModuleType | None:
    """Return the module of the kernels; None if Triton is not installed."""
    try:
        return import_module("worker_service.pipeline.gather_kernels")
    except ModuleNotFoundError as error:
        # The host gathers the same rows; the log says why the faster way is missing.
        log.warning("selected rows are gathered by the host: %s", error)
        return None


def _gather_here(
    plane: RowPlane, origins: npt.NDArray[np.int64], places: npt.NDArray[np.int64]
) -> None:
    """Copy rows between planes of the host, in this thread alone."""
    source, target = as_rows(plane.source), as_rows(plane.target)
    if plane.encoding is Encoding.NATIVE:
        target[places] = source.take(origins)
        return
    width = plane.target.shape[-1]
    # Fewer at once than torch would start a team for.
    step = max(1, (_TEAM_ELEMENTS - 1) // width)
    for first in range(0, len(origins), step):
        stored = source.take(origins[first : first + step])
        rows = torch.from_numpy(stored.view(np.uint8).reshape(len(stored), -1))
        decoded = torch.empty((len(stored), width), dtype=plane.target.dtype)
        decode(rows, plane.encoding, decoded)
        target[places[first : first + step]] = as_rows(decoded)


def _through_pinned(
    planes: Sequence[RowPlane], sources: torch.Tensor, targets: torch.Tensor
) -> None:
    """Gather on the host, which waits for the indices; copy the rows, and put them in place."""
    wanted = targets >= 0
    rows, places = sources[wanted].cpu().numpy(), targets[wanted]
    for plane in planes:
        source, target = plane.source, plane.target.view(-1, plane.target.shape[-1])
        # torch keeps the pinned memory until the copy is done.
        pinned = torch.empty((len(rows), source.shape[-1]), dtype=source.dtype, pin_memory=True)
        as_rows(source).take(rows, out=as_rows(pinned), mode="clip")
        sent = pinned.to(target.device, non_blocking=True)
        if plane.encoding is not Encoding.NATIVE:
            stored, sent = sent, target.new_empty((len(rows), target.shape[1]))
            decode(stored, plane.encoding, sent)
        target.index_copy_(0, places, sent)


def _word_of(row_bytes: int) -> torch.dtype:
    """Return the largest type that rows of this many bytes consist of."""
    words = (torch.int64, torch.int32, torch.int16)
    return next(word for word in words if row_bytes % word.itemsize == 0)


def _power_of_2(count: int) -> int:
    """Return the smallest power of 2 that is at least `count`."""
    return 1 << (count - 1).bit_length()

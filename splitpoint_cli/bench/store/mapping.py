"""Reads an arena's payload through the mapping, and copies as much between private buffers.

Both contenders copy pieces of the same size in the same order into the same
destination, all of it touched before; only the source differs. The mapping's
side also compares the commit words before and after each run of slots, since no
reader may go without.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from splitpoint.arena.mapping import Arena
from splitpoint.errors import Internal
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.store.report import MappingResult

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Sealed slots [first, first + len(generations)) under these generations."""

    first: int
    generations: tuple[int, ...]


def runs_of(handles: Sequence[tuple[int, int]], run_slots: int) -> list[SlotRun]:
    """Return contiguous runs of exactly `run_slots` slots among (slot, generation) pairs."""
    runs: list[SlotRun] = []
    piece: list[tuple[int, int]] = []
    for slot, generation in sorted(handles):
        if piece and slot != piece[-1][0] + 1:
            piece = []
        piece.append((slot, generation))
        if len(piece) == run_slots:
            runs.append(SlotRun(piece[0][0], tuple(generation for _, generation in piece)))
            piece = []
    return runs


def measure_mapping(
    arena: Arena, runs: Sequence[SlotRun], attach_seconds: float, repeats: int, progress: Progress
) -> MappingResult:
    """Read a mapped arena of which nothing was read yet; every run is under a lease."""
    planes = [
        arena.plane(layer, tensor)
        for layer in range(arena.layout.layer_count)
        for tensor in arena.layout.tensors
    ]
    run_slots = len(runs[0].generations)
    target = [np.zeros((run_slots, plane.shape[1]), np.uint8) for plane in planes]
    payload_bytes = len(runs) * sum(piece.nbytes for piece in target)

    def read() -> float:
        began = time.perf_counter()
        for run in runs:
            slots = range(run.first, run.first + run_slots)
            before = arena.is_current(slots, run.generations)
            for plane, piece in zip(planes, target, strict=True):
                np.copyto(piece, plane[run.first : run.first + run_slots])
            if not (before and arena.is_current(slots, run.generations)):
                raise Internal("a leased chunk changed during the benchmark")
        return payload_bytes / (time.perf_counter() - began)

    first_read_rate = read()
    private = [plane.copy() for plane in planes]

    def copy() -> float:
        began = time.perf_counter()
        for run in runs:
            for plane, piece in zip(private, target, strict=True):
                np.copyto(piece, plane[run.first : run.first + run_slots])
        return payload_bytes / (time.perf_counter() - began)

    read()
    copy()
    contenders: list[tuple[Any, list[float]]] = [(read, []), (copy, [])]
    for run_once, rates in progress.rounds("mapping and memcpy", contenders, repeats):
        rates.append(run_once())
    return MappingResult(
        attach_seconds=attach_seconds,
        payload_bytes=payload_bytes,
        piece_bytes=target[0].nbytes,
        first_read_rate=first_read_rate,
        read_rates=tuple(contenders[0][1]),
        memcpy_rates=tuple(contenders[1][1]),
    )

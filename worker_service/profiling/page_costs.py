"""Measures what a page costs decode attention on this machine, beside what its rows cost.

A choice of the page size follows from it (splitpoint/costs/growth.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch

from splitpoint.costs.growth import PageCosts
from splitpoint.shapes import ModelShape, chunks_of
from worker_service.device.cache import TORCH_TYPES
from worker_service.model.attention import decode_partial
from worker_service.model.attention_plan import DecodePlan

REPEATS = 7
Result = TypeVar("Result")
# Layers with memory of their own, attended in turn: a layer finds its rows in no cache that is
# smaller than a step's rows.
_MOST_LAYERS = 4


def measure_page_costs(
    shape: ModelShape,
    *,
    batch: int,
    lengths: Sequence[int],
    page_sizes: Sequence[int],
    device: torch.device,
) -> PageCosts:
    """Return the costs of all layers of `shape`, fitted to every length in pages of every size.

    Needs two page sizes or more, and memory for four layers of `batch` sequences.
    """
    cases = [(size, length) for size in page_sizes for length in lengths]
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    steps = {case: _Step(shape, batch, *case, device) for case in cases}
    for number in range(REPEATS + 1):
        for case in cases[:: -1 if number % 2 else 1]:
            taken = steps[case].seconds()
            if number:  # the first round warms up
                seconds[case].append(taken)
    counts = [(chunks_of(length, size), size) for size, length in cases]
    step, page, row = fit_costs(
        [(1, pages, pages * size) for pages, size in counts],
        [statistics.median(seconds[case]) for case in cases],
    )
    return PageCosts(step_seconds=step, page_seconds=page, row_seconds=row)


def fit_costs(amounts: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Fit seconds as a sum of amounts times costs, by least squares of relative errors.

    No cost is negative: one that would be is zero, and the others are fitted without it.
    """
    weighted = np.array(amounts) / np.array(seconds)[:, None]
    kept = [*range(weighted.shape[1])]
    while True:
        costs = np.linalg.lstsq(weighted[:, kept], np.ones(len(weighted)), rcond=None)[0]
        if costs.min() >= 0:
            break
        del kept[int(costs.argmin())]
    found = dict(zip(kept, costs.tolist(), strict=True))
    return tuple(found.get(index, 0.0) for index in range(weighted.shape[1]))


class _Step:
    """One decode step over pages of one size: its plan, and the attention of some layers."""

    def __init__(
        self, shape: ModelShape, batch: int, page: int, length: int, device: torch.device
    ) -> None:
        count = batch * chunks_of(length, page)
        dtype = TORCH_TYPES[shape.data_type]
        size = (count, shape.kv_head_count, page, shape.head_dim)
        self._layers = shape.layer_count
        self._pools = [
            (
                torch.ones(size, dtype=dtype, device=device),
                torch.ones(size, dtype=dtype, device=device),
            )
            for _ in range(min(shape.layer_count, _MOST_LAYERS))
        ]
        self._queries = torch.ones(
            (batch, shape.query_head_count, shape.head_dim), dtype=dtype, device=device
        )
        # Sequences that grow side by side take pages in turn.
        self._tables = [range(first, count, batch) for first in range(batch)]
        self._lengths = [length] * batch
        self._page = page
        self._device = device

    def seconds(self) -> float:
        """Return the seconds of one plan, and of the attention of all of the shape's layers."""
        planned, plan = _timed(self._plan, self._device)
        attended, _ = _timed(lambda: self._attend(plan), self._device)
        return planned + attended * self._layers / len(self._pools)

    def _plan(self) -> DecodePlan:
        return DecodePlan.of_sequences(
            self._tables,
            self._lengths,
            chunk_tokens=self._page,
            windows=(None,),
            device=self._device,
        )

    @torch.inference_mode()
    def _attend(self, plan: DecodePlan) -> None:
        scale = self._queries.shape[-1] ** -0.5
        for keys, values in self._pools:
            decode_partial(self._queries, keys, values, plan, window=None, scale=scale)


def _timed(run: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    started = time.perf_counter()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, result

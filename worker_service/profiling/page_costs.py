"""Measures what a page costs decode attention on this machine, beside what its rows cost.

    python -m worker_service.profiling.page_costs --shape JSON --device cpu --threads N

prints the costs as one JSON object. `splitpoint up --page-tokens auto` runs it and chooses the
page size by them (splitpoint/costs/page_choice.py).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

import numpy as np
import torch

from splitpoint.costs.page_choice import TYPICAL_BATCH, PageCosts, typical_rows
from splitpoint.options.worker import NUMERICS
from splitpoint.shapes import DataType, ModelShape, chunks_of
from worker_service.device.cache import TORCH_TYPES
from worker_service.model.attention import decode_partial
from worker_service.model.attention_plan import DecodePlan
from worker_service.profiling.calibration import AUTO, prefers_one_order, use_kernels

REPEATS = 11
# Pages that tell what a page costs, from the smallest to a large one.
PAGE_SIZES = (8, 32, 128)
Result = TypeVar("Result")
# Layers with memory of their own, attended in turn: in a model other rows pass before a layer
# meets its own again.
_MOST_LAYERS = 2


def measure_page_costs(
    shape: ModelShape,
    *,
    batch: int,
    lengths: Sequence[int],
    page_sizes: Sequence[int],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> PageCosts:
    """Return the costs of all layers of `shape`, fitted to every length in pages of every size.

    The least seconds of each case count, which other load disturbs least. Needs two page sizes
    or more, and memory for two layers of `batch` sequences.
    """
    cases = [(size, length) for size in page_sizes for length in lengths]
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    most = max(chunks_of(length, size) * size for size, length in cases)
    planes = [
        torch.ones(batch * most * shape.kv_width, dtype=TORCH_TYPES[shape.data_type], device=device)
        for _ in range(2 * min(shape.layer_count, _MOST_LAYERS))
    ]
    steps = {case: _Step(shape, batch, *case, planes) for case in cases}
    for number in range(REPEATS + 1):
        for case in cases[:: -1 if number % 2 else 1]:
            taken = steps[case].seconds(clock)
            if number:  # the first round warms up
                seconds[case].append(taken)
    counts = [(chunks_of(length, size), size) for size, length in cases]
    step, page, row = fit_costs(
        [(1, pages, pages * size) for pages, size in counts],
        [min(seconds[case]) for case in cases],
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
        self,
        shape: ModelShape,
        batch: int,
        page: int,
        length: int,
        planes: Sequence[torch.Tensor],
    ) -> None:
        count = batch * chunks_of(length, page)
        size = (count, shape.kv_head_count, page, shape.head_dim)
        pools = [plane[: count * page * shape.kv_width].view(size) for plane in planes]
        self._layers = shape.layer_count
        self._pools = [*zip(pools[::2], pools[1::2], strict=True)]
        self._queries = planes[0].new_ones((batch, shape.query_head_count, shape.head_dim))
        # Sequences that grow side by side take pages in turn.
        self._tables = [range(first, count, batch) for first in range(batch)]
        self._lengths = [length] * batch
        self._page = page
        self._device = planes[0].device

    def seconds(self, clock: Callable[[], float]) -> float:
        """Return the seconds of one plan, and of the attention of all of the shape's layers."""
        planned, plan = _timed(self._plan, self._device, clock)
        attended, _ = _timed(lambda: self._attend(plan), self._device, clock)
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


def _timed(
    run: Callable[[], Result], device: torch.device, clock: Callable[[], float]
) -> tuple[float, Result]:
    started = clock()
    result = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started, result


def measure_typical(shape: ModelShape, device: torch.device) -> PageCosts:
    """Return the costs for the requests that a page size is chosen for."""
    rows = typical_rows(shape)
    last = rows.prompt + rows.new
    return measure_page_costs(
        shape,
        batch=TYPICAL_BATCH,
        lengths=sorted({last // 2, last}),
        page_sizes=PAGE_SIZES,
        device=device,
    )


def main() -> None:
    """Print the costs of the shape on the command line."""
    parser = argparse.ArgumentParser(prog="page_costs", description=main.__doc__)
    parser.add_argument("--shape", required=True, help="A model's dimensions, as JSON.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-kernels", default=AUTO)
    arguments = parser.parse_args()
    fields = json.loads(arguments.shape)
    shape = ModelShape(**{**fields, "data_type": DataType(fields["data_type"])})
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    if device.type == "cpu":
        # Those of the host's workers, whose attention is what counts.
        dtype = TORCH_TYPES[shape.data_type]
        is_invariant = prefers_one_order(NUMERICS.default)
        wish, head_dims = arguments.cpu_kernels, [shape.head_dim]
        use_kernels(dtype, wish, head_dims=head_dims, is_invariant=is_invariant)
    print(json.dumps(asdict(measure_typical(shape, device))))


if __name__ == "__main__":
    main()

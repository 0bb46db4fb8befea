"""Finds the counts of rows at which products with a matrix agree: once for each shape and host.

The file is like that of the kernels (calibration.py), and also belongs to a number of threads and a
layout. A new shape is added to it; a damaged file is measured anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from worker_service.kernels.choice import Layout
from worker_service.kernels.compiled import NoKernels, locked
from worker_service.kernels.row_counts import row_counts, use_row_counts
from worker_service.model.linear import Linear
from worker_service.profiling.calibration import host_facts, keep, kept, path_of
from worker_service.weights.packing import Matrix, layout_of

log = logging.getLogger(__name__)

FORMAT = 1
_COUNTS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_MOST = _COUNTS[-1]
# A decode step is padded to the least count: more than this would cost more than it is worth.
_LEAST_AT_MOST = 64
# Rows that are compared at few of them, in several calls.
_COMPARED_ROWS = 128
_CPU = torch.device("cpu")
_SEED = 17

Shape = tuple[int, int]
Found = Mapping[Shape, Sequence[int]]


def use_agreeing_rows(shapes: Collection[Shape], dtype: torch.dtype) -> None:
    """Let products with matrices `[out, in]` of these shapes depend on no other rows.

    Matrices in panels need nothing. What a host cannot keep in its file is measured at each start.
    """
    layout = layout_of(_CPU, dtype)
    if layout is Layout.PANELS:
        use_row_counts({})
        return
    facts = host_facts(FORMAT, dtype, layout=layout.value, threads=torch.get_num_threads())
    try:
        path = path_of("rows", facts)
        with locked(path.parent, "calibrating"):
            known = kept(path, facts, _counts_of) or {}
            found = {**known, **_measured(set(shapes) - set(known), dtype)}
            if len(found) > len(known):
                keep(path, facts, counts={f"{m}x{n}": list(found[m, n]) for m, n in found})
    except (NoKernels, OSError) as error:
        log.warning("counts of rows are not kept: %s", error)
        found = _measured(set(shapes), dtype)
    use_row_counts({shape: found[shape] for shape in shapes})


def _counts_of(record: dict[str, Any]) -> dict[Shape, tuple[int, ...]]:
    """Return the counts in a file's record. Raises ValueError if no measurement gives them."""
    found: dict[Shape, tuple[int, ...]] = {}
    for name, counts in record["counts"].items():
        out_features, in_features = map(int, name.split("x"))
        if not counts or not set(counts) <= set(_COUNTS) or counts != sorted(counts):
            raise ValueError(f"counts of {name} are {counts}")
        found[out_features, in_features] = tuple(counts)
    return found


@torch.inference_mode()
def _measured(shapes: Collection[Shape], dtype: torch.dtype) -> dict[Shape, tuple[int, ...]]:
    in_use = {shape: counts for shape in shapes if (counts := row_counts(*shape)) is not None}
    use_row_counts({})
    try:
        return {shape: agreeing_counts(*shape, dtype) for shape in sorted(shapes)}
    finally:
        use_row_counts(in_use)


def agreeing_counts(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the counts at which a random matrix's products agree, ascending.

    Among several such classes that with the largest count, unless its least count is too large for
    a decode step.
    """
    generator = torch.Generator().manual_seed(_SEED)
    weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    linear = Linear(Matrix(weight.to(dtype)))
    rows = torch.randn(_MOST, in_features, generator=generator).to(dtype)
    other = torch.randn(_MOST, out_features, generator=generator).to(dtype)

    def all_uses(part: slice) -> torch.Tensor:
        """Return what layers make of a product; oneDNN has a kernel for each of these."""
        given, beside = rows[part], other[part]
        products = (linear(given), linear.added_to(given, beside), linear.times(given, beside))
        return torch.cat(products, dim=1)

    results = {count: _computed(all_uses, count) for count in _COUNTS}
    remaining, classes = list(_COUNTS), []
    while remaining:
        largest = results[remaining[-1]]
        alike = [count for count in remaining if _agree(results[count], largest)]
        classes.append(alike)
        remaining = [count for count in remaining if count not in alike]
    usable = [each for each in classes if each[0] <= _LEAST_AT_MOST]
    return tuple((usable or classes)[0])


def _computed(product: Callable[[slice], torch.Tensor], count: int) -> torch.Tensor:
    """Return the results of the first rows, computed this many at once, in several calls.

    Rounding to a half-precision type hides most differences, so one row would not do.
    """
    ends = range(count, max(_COMPARED_ROWS, count) + 1, count)
    return torch.cat([product(slice(end - count, end)) for end in ends])


def _agree(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return True if all bits of the rows that both have are equal."""
    shared = min(len(mine), len(theirs))
    return torch.equal(mine[:shared], theirs[:shared])

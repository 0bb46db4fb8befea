"""What both tests of products with panels check: native weights and int8 weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from worker_service.kernels.panel_gemm import Operation, multiply

TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Whole panels; a part of a vector, with an odd count of inputs; several panels and a part.
SHAPES = ((48, 16), (7, 5), (33, 17), (150, 70))

_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
_REFERENCES: dict[Operation, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Operation.NONE: lambda product, _: product,
    Operation.RELU: lambda product, _: product.relu(),
    Operation.SILU: lambda product, _: functional.silu(product),
    Operation.GELU_TANH: lambda product, _: functional.gelu(product, approximate="tanh"),
    Operation.ADD: lambda product, other: product + other,
    Operation.MULTIPLY: lambda product, other: product * other,
}


def drawn(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return normal random numbers of this size."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_products(
    panels: torch.Tensor,
    weight: torch.Tensor,
    dtype: torch.dtype,
    operation: Operation,
    count: int,
    group: int = 0,
) -> None:
    """Compare products of `count` rows with those of `weight` [out, in] in float64.

    Each row has the same bits in parts of these rows, and with other numbers of threads.
    """
    out_features, in_features = weight.shape
    rows = drawn(count, in_features, dtype=dtype, seed=1)
    bias = drawn(out_features, dtype=dtype, seed=2)
    other = drawn(count, out_features, dtype=dtype, seed=3)
    has_other = operation in (Operation.ADD, Operation.MULTIPLY)

    def call(first: int, last: int) -> torch.Tensor:
        beside = other[first:last] if has_other else None
        return multiply(rows[first:last], panels, out_features, bias, operation, beside, group)

    every = call(0, count)
    product = rows.double() @ weight.double().T + bias.double()
    expected = _REFERENCES[operation](product, other.double())
    tolerance: dict[str, Any] = dict.fromkeys(("rtol", "atol"), _TOLERANCES[dtype])
    torch.testing.assert_close(every.double(), expected, **tolerance)
    for part in (1, 2, 3, 7, 8, 9, 16, 17, 20, 24, 25, 41):
        for first in (0, count - part) if part < count else ():
            assert torch.equal(call(first, first + part), every[first : first + part])
    for threads in (1, 5):
        torch.set_num_threads(threads)
        assert torch.equal(call(0, count), every)

"""A GPU's kernels of one order give a row the same bits in any call, in Triton's interpreter; 30 s.

The interpreter carries the kernels' own source out with numpy: it shows that tiles, units and
merges are the same in all ways, not that a GPU's products are. That is what the tests in
tests/worker/numerics/test_worker_gpu_numerics.py are for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_order_world import layer_results, products, ways
from interpreted import Interpreter, interpreter
from one_sequence import Shape
from tiny_models import write_tiny

from worker_service.kernels import tile_gemm
from worker_service.kernels.panel_gemm import Operation

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def process() -> Iterator[Interpreter]:
    with interpreter() as running:
        yield running


@pytest.mark.parametrize(
    ("shape", "length", "dtype"),
    [
        (Shape(heads=2, kv_heads=1, head_dim=16), 38, torch.float32),
        (Shape(heads=3, kv_heads=1, head_dim=20, window=21), 38, torch.float16),
        (Shape(heads=2, kv_heads=2, head_dim=16, chunk=9, cap=3.0), 31, torch.float32),
        # Units of 128 rows and of the rest of a page.
        (Shape(heads=2, kv_heads=1, head_dim=16, chunk=140, window=130), 283, torch.float16),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_attention_has_the_same_bits_in_every_way(
    process: Interpreter, shape: Shape, length: int, dtype: torch.dtype
) -> None:
    found = process.call(ways, shape, dtype, length)
    expected, whole, alone = (found.pop(name) for name in ("expected", "whole", "alone"))
    near = 3e-6 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(whole.double(), expected, rtol=near, atol=near)
    assert {name for name, each in found.items() if not torch.equal(each, whole)} == set()
    assert torch.equal(alone, whole[-1:])


@pytest.mark.parametrize(
    ("dtype", "has_bias"), [(torch.float32, True), (torch.float16, False)], ids=str
)
def test_a_product_is_its_rows_own(
    process: Interpreter, dtype: torch.dtype, *, has_bias: bool
) -> None:
    """With tiles that the rows, outputs and inputs do not fill."""
    tiles = tile_gemm.tiles_of(70, dtype)
    counts = [3, tiles.rows, tiles.rows + 5]
    generator = torch.Generator().manual_seed(1)

    def values(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(dtype)

    rows, weight, other = values(counts[-1], 90), values(70, 90), values(counts[-1], 70)
    bias = values(70) if has_bias else None
    found = process.call(products, rows, weight, bias, other, counts)
    sums = rows.double() @ weight.double().T + (0 if bias is None else bias.double())
    wanted = {
        Operation.NONE: sums,
        Operation.RELU: sums.relu(),
        Operation.SILU: torch.nn.functional.silu(sums),
        Operation.GELU_TANH: torch.nn.functional.gelu(sums, approximate="tanh"),
        Operation.ADD: sums + other.double(),
        Operation.MULTIPLY: sums * other.double(),
    }
    near = 1e-4 if dtype == torch.float32 else 2e-2
    for operation, expected in wanted.items():
        whole = found[operation, counts[-1]]
        torch.testing.assert_close(whole.double(), expected, rtol=near, atol=near)
        for count in counts:
            assert torch.equal(found[operation, count], whole[:count]), (operation, count)
        assert torch.equal(found[operation, 1], whole[-1:])


@pytest.mark.parametrize("case", ["llama", "opt"])
def test_a_layer_computes_its_products_so(process: Interpreter, case: str, tmp_path: Path) -> None:
    """Gated and plain MLPs, with biases and without."""
    folder = write_tiny(case, tmp_path)
    hidden = torch.randn(20, 64, generator=torch.Generator().manual_seed(2))
    whole, part, usual = process.call(layer_results, folder, hidden)
    for mine, few, other in zip(whole, part, usual, strict=True):
        assert torch.equal(few, mine[5:8])
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    rows, weight = torch.zeros(2, 8), torch.zeros(4, 8)
    with pytest.raises(ValueError, match="no product"):
        tile_gemm.multiply(rows, weight[:, :7])
    with pytest.raises(ValueError, match="no product"):
        tile_gemm.multiply(rows.half(), weight)
    with pytest.raises(ValueError, match="ADD needs"):
        tile_gemm.multiply(rows, weight, None, Operation.ADD)
    assert tile_gemm.multiply(rows[:0], weight).shape == (0, 4)

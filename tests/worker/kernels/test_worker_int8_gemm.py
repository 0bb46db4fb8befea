"""Products with int8 weights: those of the dequantised matrix, and the same bits whatever else
is computed. About 5 s, with two compilations."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from gemm_checks import SHAPES, TYPES, check_products, drawn

from splitpoint.checkpoint.decoder import Activation
from splitpoint.errors import FailedPrecondition
from splitpoint.host.processor import compiler
from splitpoint.shapes import WeightFormat
from worker_service.kernels.choice import Choice, Decode, Layout, Prefill, use
from worker_service.kernels.panel_gemm import (
    Operation,
    multiply,
    packed,
    packed_int8,
    packed_int8_bytes,
)
from worker_service.model.linear import Linear
from worker_service.weights.packing import Matrix, check_format, held_bytes, quantized

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

CPU = torch.device("cpu")
COUNT = 42  # rows: five blocks and a part


@pytest.fixture(autouse=True)
def panels() -> None:
    use(Choice(Decode.PRODUCTS, Prefill.PRODUCTS, Layout.PANELS))


def test_a_row_is_off_by_half_a_scale_at_most() -> None:
    weight = drawn(40, 70, dtype=torch.float32)
    weight[3] *= 1000  # its scale is no other row's
    weight[5], weight[6, 1:] = 0, 0
    codes, scales = quantized(weight)
    error = (codes * scales[:, None] - weight).abs()
    assert bool((error <= scales[:, None] * 0.5001).all())
    assert torch.equal(codes.abs().amax(dim=1) == 127, weight.any(dim=1))
    assert not codes[5].any()
    largest = weight.abs().amax(dim=1)
    torch.testing.assert_close(scales * 127, largest)


def test_blocks_of_rows_take_little_memory_and_give_the_codes_of_rows_alone() -> None:
    """A head of many rows has no second copy in fp32. In a process of its own, as a peak stays."""
    program = (
        "import resource, torch\n"
        "from worker_service.weights.packing import quantized\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "weight = torch.randn(1 << 17, 256, generator=torch.Generator().manual_seed(1))\n"
        "quantized(weight[:9]); before = peak()\n"
        "codes, scales = quantized(weight)\n"
        "print(peak() - before)\n"
        "for row in (0, 1 << 14, (1 << 14) - 1, (1 << 17) - 1):\n"
        "    alone = quantized(weight[row : row + 1])\n"
        "    assert torch.equal(alone[0][0], codes[row]) and alone[1][0] == scales[row]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    # KiB: 32 MiB of codes, and what some blocks take; the matrix has 128 MiB.
    assert int(done.stdout) < 96 << 10


def test_a_row_that_is_not_finite_stays_so() -> None:
    weight = torch.ones(3, 16)
    weight[0, 2], weight[1, 3] = float("nan"), float("inf")
    product = multiply(torch.ones(2, 16), packed_int8(*quantized(weight), torch.float32), 3)
    assert product[:, :2].isfinite().tolist() == [[False, False]] * 2
    assert product[:, 2].tolist() == [16.0] * 2


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operation", list(Operation), ids=lambda each: each.name)
def test_products_are_those_of_the_dequantised_matrix(
    dtype: torch.dtype, shape: tuple[int, int], operation: Operation
) -> None:
    """Beside float64; and rows are independent, also of whether codes are unpacked once."""
    codes, scales = quantized(drawn(*shape, dtype=torch.float32))
    panels = packed_int8(codes, scales, dtype)
    assert panels.nbytes == packed_int8_bytes(*shape, dtype)
    check_products(panels, codes.double() * scales.double()[:, None], dtype, operation, COUNT)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_linear_layer_has_no_other_difference(dtype: torch.dtype) -> None:
    """It computes what panels of the codes as floats do, scaled at the end."""
    weight, rows = drawn(20, 12, dtype=torch.float32), drawn(3, 12, dtype=dtype, seed=1)
    matrix = Matrix(weight, int8_for=dtype)
    assert matrix.layout is Layout.PANELS
    held = held_bytes(20, 12, CPU, dtype, WeightFormat.INT8)
    assert matrix.size_bytes == held == matrix.raw().numel()
    codes, scales = quantized(weight)
    layer, other = Linear(matrix), drawn(3, 20, dtype=dtype, seed=2)
    expected = rows.double() @ (codes.double() * scales.double()[:, None]).T
    for found, wanted in (
        (layer(rows), expected),
        (layer(rows, Activation.RELU), expected.relu()),
        (layer.added_to(rows, other), expected + other),
        (layer.times(rows, other), expected * other),
    ):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=3e-2)


def test_another_matrix_may_be_copied_over() -> None:
    """Codes and scales, byte for byte: what weights that stream do."""
    first, second = drawn(20, 12, dtype=torch.float32), drawn(20, 12, dtype=torch.float32, seed=1)
    slot = Matrix(first, int8_for=torch.bfloat16)
    slot.raw().copy_(Matrix(9 * second, int8_for=torch.bfloat16).raw())
    rows = drawn(2, 12, dtype=torch.bfloat16, seed=2)
    expected = Linear(Matrix(9 * second, int8_for=torch.bfloat16))(rows)
    assert torch.equal(Linear(slot)(rows), expected)


def test_panels_of_another_matrix_are_refused() -> None:
    panels = packed_int8(*quantized(torch.ones(16, 8)), torch.float32)
    with pytest.raises(ValueError, match="not those of rows"):
        multiply(torch.ones(1, 8), panels, 32)
    with pytest.raises(ValueError, match="not those of rows"):
        multiply(torch.ones(1, 8), packed(torch.ones(16, 8))[:-1], 16)


def test_other_layouts_and_devices_are_refused() -> None:
    check_format(WeightFormat.INT8, CPU, torch.float32)
    for layout in (Layout.PACKED, Layout.PLAIN):
        use(Choice(Decode.PRODUCTS, Prefill.PRODUCTS, layout))
        with pytest.raises(FailedPrecondition, match="linear=panels"):
            check_format(WeightFormat.INT8, CPU, torch.float32)
        check_format(WeightFormat.NATIVE, CPU, torch.float32)
    use(Choice(Decode.PRODUCTS, Prefill.PRODUCTS, Layout.PANELS))
    with pytest.raises(FailedPrecondition, match="CPU worker"):
        check_format(WeightFormat.INT8, torch.device("cuda"), torch.float32)

"""Products with matrices in panels: right, and the same bits whatever else is computed."""

from __future__ import annotations

import pytest
import torch
from gemm_checks import SHAPES, TYPES, check_products, drawn
from torch.nn import functional

from splitpoint.checkpoint.decoder import Activation
from splitpoint.host.processor import compiler
from worker_service.kernels.choice import Choice, Decode, Layout, Prefill, use
from worker_service.kernels.panel_gemm import Operation, multiply, packed, packed_bytes
from worker_service.model.linear import Linear
from worker_service.weights.packing import Matrix, held_bytes

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

CPU = torch.device("cpu")
COUNT = 21  # rows: two blocks and a part


@pytest.fixture(autouse=True)
def panels() -> None:
    use(Choice(Decode.PRODUCTS, Prefill.PRODUCTS, Layout.PANELS))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operation", list(Operation), ids=lambda each: each.name)
def test_products_are_right_and_rows_independent(
    dtype: torch.dtype, shape: tuple[int, int], operation: Operation
) -> None:
    weight = drawn(*shape, dtype=dtype)
    panels = packed(weight)
    assert panels.nbytes == packed_bytes(*shape, dtype)
    check_products(panels, weight, dtype, operation, COUNT)


def test_rows_are_divided_where_panels_are_few() -> None:
    """A matrix of one panel and many rows is work for all threads."""
    weight, rows = drawn(20, 40, dtype=torch.float32), drawn(400, 40, dtype=torch.float32, seed=1)
    torch.set_num_threads(3)
    whole = multiply(rows, packed(weight), 20)
    torch.testing.assert_close(whole, rows @ weight.T, rtol=1e-5, atol=1e-5)
    assert torch.equal(multiply(rows[390:], packed(weight), 20), whole[390:])


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    weight, rows = drawn(50, 30, dtype=torch.bfloat16), drawn(9, 30, dtype=torch.bfloat16, seed=1)
    expected = multiply(rows, packed(weight), 50)
    rows[4, 7] = float("nan")
    for operation in (Operation.NONE, Operation.RELU, Operation.SILU, Operation.GELU_TANH):
        spoiled = multiply(rows, packed(weight), 50, None, operation)
        assert spoiled[4].isnan().all()
        assert not spoiled[[0, 1, 2, 3, 5, 6, 7, 8]].isnan().any()
    rows[4, 7] = 0
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(multiply(rows, packed(weight), 50)[kept], expected[kept])


def test_large_values_become_infinite_not_wrong() -> None:
    big = torch.full((1, 4), 3e38)
    product = multiply(big, packed(torch.ones(2, 4)), 2)
    assert product.tolist() == [[float("inf")] * 2]
    silu = multiply(-big, packed(torch.ones(2, 4)), 2, None, Operation.SILU)
    # -inf * 0, as torch has it.
    assert silu.isnan().all()
    assert functional.silu(-product).isnan().all()
    rounded = multiply(torch.full((1, 1), 1e4).half(), packed(torch.full((1, 1), 1e4).half()), 1)
    assert rounded.item() == float("inf")


def test_rows_may_be_any_view() -> None:
    weight = drawn(16, 6, dtype=torch.float32)
    wide = drawn(5, 12, dtype=torch.float32, seed=1)
    for rows in (wide[:, :6], wide[:, 6:], wide[:, ::2], wide[::2, :6], wide[:0, :6]):
        expected = rows @ weight.T
        torch.testing.assert_close(multiply(rows, packed(weight), 16), expected)


def test_another_type_or_shape_is_refused() -> None:
    panels, rows = packed(torch.ones(16, 6)), torch.ones(2, 6)
    for wrong in (
        {"rows": rows.half()},
        {"rows": torch.ones(2, 7)},
        {"out_features": 40},
        {"bias": torch.ones(16).bfloat16()},
        {"other": torch.ones(2, 16).double()},
    ):
        with pytest.raises(ValueError, match="are not those of rows"):
            multiply(**{"rows": rows, "panels": panels, "out_features": 16, **wrong})  # type: ignore[arg-type]


def test_what_goes_with_the_product_must_have_its_shape() -> None:
    """The kernel would read beside it."""
    panels, rows = packed(torch.ones(16, 6)), torch.ones(2, 6)
    for wrong in (
        {"bias": torch.ones(1)},
        {"bias": torch.ones(32)[::2]},
        {"operation": Operation.ADD},
        {"operation": Operation.MULTIPLY, "other": torch.ones(1, 16)},
        {"operation": Operation.RELU, "other": torch.ones(2, 16)},
    ):
        with pytest.raises(ValueError, match=r"is not one of|needs other|go with|takes no"):
            multiply(rows, panels, 16, **wrong)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_linear_layer_uses_panels(dtype: torch.dtype) -> None:
    weight, rows = drawn(20, 12, dtype=dtype), drawn(3, 12, dtype=dtype, seed=1)
    matrix = Matrix(weight.clone())
    assert matrix.layout is Layout.PANELS
    assert matrix.size_bytes == held_bytes(20, 12, CPU, dtype) == matrix.raw().numel()
    layer, other = Linear(matrix), drawn(3, 20, dtype=dtype, seed=2)
    expected = functional.linear(rows.double(), weight.double())
    for found, wanted in (
        (layer(rows), expected),
        (layer(rows, Activation.SILU), functional.silu(expected)),
        (layer.added_to(rows, other), expected + other),
        (layer.times(rows, other), expected * other),
    ):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-2, atol=3e-2)


def test_another_matrix_may_be_copied_over() -> None:
    """As weights that stream do, byte for byte."""
    first, second = drawn(20, 12, dtype=torch.float32), drawn(20, 12, dtype=torch.float32, seed=1)
    slot = Matrix(first)
    slot.raw().copy_(Matrix(second).raw())
    rows = drawn(2, 12, dtype=torch.float32, seed=2)
    assert torch.equal(Linear(slot)(rows), Linear(Matrix(second))(rows))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_part_of_a_matrix_has_the_bits_of_its_outputs(dtype: torch.dtype) -> None:
    matrix, rows = Matrix(drawn(276, 12, dtype=dtype)), drawn(5, 12, dtype=dtype, seed=1)
    whole = Linear(matrix)(rows)
    for first, count in ((0, 64), (64, 128), (192, 84), (0, 276)):
        part = matrix.part(first, count)
        assert part is not None
        assert torch.equal(Linear(part)(rows), whole[:, first : first + count])
        assert (
            part.weight.untyped_storage().data_ptr() == matrix.weight.untyped_storage().data_ptr()
        )
    # Not whole panels.
    assert matrix.part(0, 20) is None
    assert matrix.part(3, 64) is None

"""Products with int4 codes: those of the dequantised matrix, and the same bits whatever else is
computed. About 5 s, with two compilations."""

from __future__ import annotations

import pytest
import torch
from gemm_checks import check_products, drawn

from splitpoint.host.processor import compiler
from worker_service.checkpoint.quantized import Codes
from worker_service.kernels.panel_gemm import Operation, multiply, packed_int4, packed_int4_bytes

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

COUNT = 42  # rows: blocks and a part
# Outputs, inputs and a group: whole panels and parts, whole groups and a shorter last one.
SHAPES = ((48, 16, 8), (33, 72, 32), (150, 256, 128), (7, 40, 40))


def random_codes(out_features: int, in_features: int, group: int) -> Codes:
    """Return codes with zeros from 0 to 16: GPTQ's are stored less by 1."""
    generator = torch.Generator().manual_seed(1)
    size = (out_features, -(-in_features // group))
    words = (out_features, in_features // 8)
    return Codes(
        torch.randint(-(2**31), 2**31, words, generator=generator).to(torch.int32),
        torch.rand(size, generator=generator) / in_features**0.5 / 5,
        torch.randint(0, 17, size, generator=generator).to(torch.int8),
        group,
    )


# A kernel of each type is compiled for seconds. What fp16 changes, int8's tests have, too.
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.chaos)],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "operation", [Operation.SILU, Operation.ADD, Operation.MULTIPLY], ids=lambda each: each.name
)
def test_products_are_those_of_the_dequantised_matrix(
    dtype: torch.dtype, shape: tuple[int, int, int], operation: Operation
) -> None:
    """Beside float64; and rows are independent, also of whether codes are unpacked once."""
    codes = random_codes(*shape)
    panels = packed_int4(codes.codes, codes.scales, codes.zeros, codes.group, dtype)
    assert panels.nbytes == packed_int4_bytes(*shape)
    weight = codes.dequantized().double()
    check_products(panels, weight, dtype, operation, COUNT, codes.group)


def test_panels_of_another_matrix_are_refused() -> None:
    codes = random_codes(16, 64, 32)
    panels = packed_int4(codes.codes, codes.scales, codes.zeros, 32, torch.float32)
    with pytest.raises(ValueError, match="not those of rows"):
        multiply(drawn(1, 64, dtype=torch.float32), panels, 16, group=16)

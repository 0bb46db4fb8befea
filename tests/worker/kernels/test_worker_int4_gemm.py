"""Products with codes of 4 bits: those of the dequantised matrix, with the same bits whatever is
computed beside. About 10 s, with four compilations."""

from __future__ import annotations

import pytest
import torch
from gemm_checks import check_products, drawn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from splitpoint.host.processor import compiler
from worker_service.checkpoint.quantized import Codes, read_mxfp4, stacked
from worker_service.kernels.panel_gemm import (
    Kind,
    Operation,
    multiply,
    packed_in_groups,
    packed_in_groups_bytes,
)

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
    panels = packed_in_groups(codes.codes, codes.scales, codes.zeros, codes.group, dtype)
    assert panels.nbytes == packed_in_groups_bytes(*shape)
    weight = codes.dequantized().double()
    check_products(panels, weight, dtype, operation, COUNT, codes.group)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.chaos)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(48, 32), (33, 96), (150, 256)], ids=str)
def test_products_with_mxfp4(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    out_features, in_features = shape
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(-(2**31), 2**31, (out_features, in_features // 8), generator=generator)
    scales = torch.randint(118, 125, (out_features, in_features // 32), generator=generator)
    codes = Codes(words.to(torch.int32), scales.to(torch.uint8), None, 32)
    panels = packed_in_groups(codes.codes, codes.scales, None, 32, dtype)
    assert panels.nbytes == packed_in_groups_bytes(*shape, 32, Kind.MXFP4)
    weight = codes.dequantized().double()
    check_products(panels, weight, dtype, Operation.SILU, COUNT, 32)


def test_mxfp4_is_what_transformers_reads() -> None:
    """Every code with every scale but the least, which is taken for 0."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 16, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T
    stored = {"x_blocks": blocks, "x_scales": scales}
    (found,) = read_mxfp4("x", stored.__getitem__)
    assert torch.equal(found.dequantized(), wanted)


def test_mxfp4_is_stacked_dequantised() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16)
    stored = {"x_blocks": blocks, "x_scales": torch.full((1, 16, 1), 127, dtype=torch.uint8)}
    (codes,) = read_mxfp4("x", stored.__getitem__)
    found = stacked([codes, codes], torch.float32)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, codes.dequantized().repeat(2, 1))


def test_panels_of_another_matrix_are_refused() -> None:
    codes = random_codes(16, 64, 32)
    panels = packed_in_groups(codes.codes, codes.scales, codes.zeros, 32, torch.float32)
    with pytest.raises(ValueError, match="not those of rows"):
        multiply(drawn(1, 64, dtype=torch.float32), panels, 16, group=16)

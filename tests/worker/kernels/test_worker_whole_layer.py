"""What kernels do with rows is what torch's operators do, and a layer in two calls is its parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gemm_checks import TYPES, drawn
from tiny_models import write_tiny

from splitpoint.checkpoint.decoder import Norm
from splitpoint.host.processor import compiler
from worker_service.kernels import row_wise
from worker_service.kernels.choice import Choice, Decode, Layout, Prefill, use
from worker_service.model.decoder import Decoder
from worker_service.model.layer import NormWeights
from worker_service.model.rope import Rotary

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

CPU = torch.device("cpu")
PANELS = Choice(Decode.PRODUCTS, Prefill.PRODUCTS, Layout.PANELS)
NEAR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [20, 64, 100])
@pytest.mark.parametrize("kind", [*Norm], ids=lambda each: each.name)
def test_norms_are_those_of_torch(kind: Norm, width: int, dtype: torch.dtype) -> None:
    wide = drawn(width, dtype=torch.float32, seed=1) + 1
    weight = wide if kind is Norm.RMS_PLUS_ONE else wide.to(dtype)
    bias = drawn(width, dtype=dtype, seed=2) if kind is Norm.LAYER else None
    norm = NormWeights(kind, weight, bias, 1e-5)
    # Every second head of some: rows with gaps between them.
    rows = 3 * drawn(5, 4, width, dtype=dtype)[:, ::2]
    wanted = norm(rows)
    use(PANELS)
    assert norm.takes(rows)
    found = norm(rows)
    torch.testing.assert_close(found, wanted, rtol=NEAR[dtype], atol=NEAR[dtype])
    assert torch.equal(norm(rows[3:4]), found[3:4])
    rows[1, 1, 7] = torch.nan
    spoiled = norm(rows)
    assert spoiled[1, 1].isnan().all()
    assert torch.equal(spoiled[2:], found[2:])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("width", [20, 64])
def test_a_rotation_rounds_as_transformers_does(width: int, dtype: torch.dtype) -> None:
    heads = drawn(5, 3, width, dtype=dtype)
    angles = drawn(5, 1, width // 2, dtype=torch.float32, seed=1)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    rotary = Rotary(torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1))
    first, second = heads.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    use(PANELS)
    found = row_wise.turned(heads, angles=rotary.angles)
    assert torch.equal(found, heads * rotary.cosine + swapped * rotary.sine)
    with pytest.raises(ValueError, match="angles"):
        row_wise.turned(heads[:4], angles=rotary.angles)
    with pytest.raises(ValueError, match="norm"):
        row_wise.turned(heads)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_are_written_where_an_index_would(dtype: torch.dtype) -> None:
    both = drawn(300, 2, 3, 20, dtype=dtype)
    rows = torch.randperm(320, generator=torch.Generator().manual_seed(3))[:300]
    planes = [torch.zeros(40, 3, 8, 20, dtype=dtype) for _ in range(4)]
    for chosen, pair in ((None, planes[:2]), (PANELS, planes[2:])):
        use(chosen)
        row_wise.write(pair[0], pair[1], rows // 8, rows % 8, both[:, 0], both[:, 1])
    for wanted, found in zip(planes[:2], planes[2:], strict=True):
        assert wanted.any()
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize("case", ["opt", "llama", "qwen3"])
def test_a_layer_in_two_calls_has_the_bits_of_its_parts(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    use(PANELS)
    model = Decoder.load(write_tiny(case, tmp_path), CPU, dtype)
    layer = model.layers[0]
    parts = replace(layer, whole=None)
    assert layer.whole is not None
    for count in (1, 9, 700):
        hidden = drawn(count, model.shape.hidden_size, dtype=dtype)
        attended = drawn(count, model.shape.query_width, dtype=dtype, seed=1)
        rotary = model.rotary(torch.arange(count) % 50)
        wanted = parts.begin(hidden, rotary)
        for found, each in zip(layer.begin(hidden, rotary), wanted, strict=True):
            assert torch.equal(found, each)
        for found, each in zip(layer.project_kv(wanted[0], rotary), wanted[2:], strict=True):
            assert torch.equal(found, each)
        assert torch.equal(layer.finish(hidden, attended), parts.finish(hidden, attended))


def test_layers_that_add_another_norm_are_computed_in_parts(tmp_path: Path) -> None:
    use(PANELS)
    model = Decoder.load(write_tiny("gemma2", tmp_path), CPU, torch.float32)
    assert all(each.whole is None for each in model.layers)


OTHER_PARTS = {
    "query": "down",
    "key_value": "down",
    "output": "up",
    "gate": "down",
    "up": "down",
    "down": "up",
    "attention_norm": "key_norm",
    "query_norm": "mlp_norm",
}


@pytest.mark.parametrize("role", OTHER_PARTS)
def test_parts_that_are_not_of_one_layer_are_refused(role: str, tmp_path: Path) -> None:
    """The kernel reads and writes as their sizes say."""
    use(PANELS)
    layer = Decoder.load(write_tiny("qwen3", tmp_path), CPU, torch.float32).layers[0]
    wrong: dict[str, Any] = {role: getattr(layer, OTHER_PARTS[role])}
    with pytest.raises(ValueError, match="one layer"):
        replace(layer, **wrong).in_two_calls(torch.float32)


def test_what_was_attended_must_be_of_the_layers_shape_and_type(tmp_path: Path) -> None:
    use(PANELS)
    model = Decoder.load(write_tiny("qwen3", tmp_path), CPU, torch.float32)
    hidden = torch.zeros(2, model.shape.hidden_size)
    attended = torch.zeros(2, model.shape.query_width)
    for wrong in (attended[:1], attended[:, 1:], attended.double()):
        with pytest.raises(ValueError, match="attended"):
            model.layers[0].finish(hidden, wrong)

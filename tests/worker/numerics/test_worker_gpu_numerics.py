"""A worker's kernels of one order on a GPU: the check at its start finds nothing. Some minutes.

Triton compiles each kernel for each type and kind of matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny

from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.shapes import BUILT_IN_SHAPES, Numerics
from splitpoint.transport.tls import PLAIN
from worker_service.__main__ import options_from, parse_arguments
from worker_service.kernels.choice import adds_in_one_order, use_one_order
from worker_service.model.decoder import Decoder
from worker_service.model.library_attention import library_of
from worker_service.numerics.self_check import dependence
from worker_service.startup.worker import load_worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def one_order() -> Iterator[None]:
    use_one_order(True)
    yield
    use_one_order(False)


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama-3-8b", torch.bfloat16), ("opt-6.7b", torch.float16)], ids=str
)
def test_no_operator_of_a_large_layer_depends_on_other_rows(name: str, dtype: torch.dtype) -> None:
    assert library_of(CUDA) is None
    shape = replace(BUILT_IN_SHAPES[name], layer_count=1)
    model = Decoder.random(DecoderConfig.of_shape(shape), 0, CUDA, dtype)
    assert dependence(model, 64) is None


# Norms on q and k, windows, caps, odd widths.
@pytest.mark.parametrize(
    ("case", "dtype"),
    [("qwen3", torch.bfloat16), ("gemma2", torch.bfloat16), ("qwen2-windows", torch.float32)],
    ids=str,
)
def test_no_operator_of_other_families_does(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = Decoder.load(write_tiny(case, tmp_path), CUDA, dtype)
    assert dependence(model, 16) is None


def test_the_products_are_those_of_the_usual_kernels(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path)
    model = Decoder.load(folder, CUDA, torch.float32)
    use_one_order(False)
    usual = Decoder.load(folder, CUDA, torch.float32)
    ids = torch.arange(3, 40, device=CUDA)
    hidden = usual.embed(ids, torch.arange(len(ids), device=CUDA))
    mine, other = (each.layers[0].add_mlp(hidden) for each in (model, usual))
    torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wish", ["invariant", "auto"])
async def test_a_worker_is_invariant_if_asked(wish: str, tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path)
    base = ("--listen", "unix:/none", "--model", str(folder), "--device", "cuda")
    small = ("--device-memory", "1GiB", "--max-batch", "4", "--numerics", wish)
    worker = await load_worker(options_from(parse_arguments([*base, *small]), PLAIN))
    await worker.runtime.stop()
    worker.monitor.stop()
    is_wanted = wish == "invariant"
    assert adds_in_one_order() is is_wanted
    assert worker.numerics.numerics is (Numerics.INVARIANT if is_wanted else Numerics.FAST)
    if not is_wanted:
        assert "one GPU has confirmed them so far" in worker.numerics.reason

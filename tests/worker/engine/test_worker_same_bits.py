"""The same bits, whatever else runs: all variants of `benchmarks.numerics`, with engine and store.

The kernels are those of invariant numerics. About half a minute.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny

from benchmarks.numerics import Host, Workload, compare_all, draw_prompts
from splitpoint.checkpoint.decoder import read_shape
from splitpoint.host.processor import compiler
from splitpoint.shapes import DataType
from splitpoint_cli.bench.engine import use_worker_kernels
from splitpoint_cli.bench.harness import Progress
from worker_service.device.cache import TORCH_TYPES
from worker_service.kernels import units
from worker_service.model.decoder import Decoder

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler"),
    pytest.mark.usefixtures("one_thread"),
]

CPU = torch.device("cpu")
INVARIANT = "decode=fused,prefill=fused,linear=panels"
WORKLOAD = Workload(
    model="",
    dtype="",
    prompts=2,
    # Longer than a tile of a streamed step.
    prompt=120,
    new=6,
    page_tokens=16,
    kernels=INVARIANT,
    fast_kernels=INVARIANT,
    cost_shape="",
    repeats=1,
    device="cpu",
    threads=1,
    seed=0,
)


def differing(folder: Path, dtype: str) -> dict[str, object]:
    """The variants that differ, with their first differences."""
    workload = replace(WORKLOAD, model=str(folder), dtype=dtype)
    data_type = DataType(dtype)
    model = load(folder, data_type)
    prompts = draw_prompts(workload, folder, model.shape.vocabulary_size)
    with closing(Host(model, workload)) as host:
        results = compare_all(host, prompts, workload.prompts, Progress())
    assert all(each.answers == workload.prompts for each in results)
    return {each.variant.name: each.differences[0] for each in results if each.differences}


def load(folder: Path, data_type: DataType) -> Decoder:
    use_worker_kernels(CPU, data_type, [read_shape(folder, data_type).head_dim], wish=INVARIANT)
    return Decoder.load(folder, CPU, TORCH_TYPES[data_type])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_model_has_one_answer(bundled_model: Path, dtype: str) -> None:
    assert differing(bundled_model, dtype) == {}


@pytest.mark.parametrize("case", ["qwen3", "gemma2"])
def test_a_prefix_of_more_parts_than_may_wait_has_the_same_answer(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed tiles then come in the order of positions, and long sequences in rounds."""
    folder = write_tiny(case, tmp_path / "tiny")
    monkeypatch.setattr(units, "ATTENTION_PARTS", 5)
    # bfloat16 would round most of a wrong order away.
    assert differing(folder, "float32") == {}


# Biases and learned positions; grouped queries, norms on q and k, windows, caps.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["opt", "qwen3", "gemma2"])
def test_other_families_have_one_answer(case: str, dtype: str, tmp_path: Path) -> None:
    assert differing(write_tiny(case, tmp_path / "tiny"), dtype) == {}

"""The same bits, whatever else runs: all variants of `benchmarks.numerics`, with engine and store.

The kernels are those of invariant numerics. `make chaos` has each model in both types.
"""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
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
# OPT's: one kernel of a type for all families. Those of other widths are tried by their own tests.
HEAD_DIM = 16
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


def first_layers(source: Path, folder: Path, count: int) -> Path:
    """Write a Llama without its last layers: the widths and the vocabulary are the whole one's."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    last = config["num_hidden_layers"]
    config["num_hidden_layers"] = count
    (folder / "config.json").write_text(json.dumps(config))
    dropped = tuple(f"model.layers.{number}." for number in range(count, last))
    weights = load_file(folder / "model.safetensors")
    kept = {name: each for name, each in weights.items() if not name.startswith(dropped)}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("layers", "dtype"),
    [
        (2, "bfloat16"),
        pytest.param(8, "bfloat16", marks=pytest.mark.chaos),
        pytest.param(8, "float32", marks=pytest.mark.chaos),
    ],
)
def test_the_bundled_model_has_one_answer(
    bundled_model: Path, layers: int, dtype: str, tmp_path: Path
) -> None:
    """Text, a head of 4096 rows, products of many panels. The layers above are like the second."""
    assert differing(first_layers(bundled_model, tmp_path / "model", layers), dtype) == {}


@pytest.mark.parametrize("case", [pytest.param("qwen3", marks=pytest.mark.chaos), "gemma2"])
def test_a_prefix_of_more_parts_than_may_wait_has_the_same_answer(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed tiles then come in the order of positions, and long sequences in rounds."""
    folder = write_tiny(case, tmp_path / "tiny", head_dim=HEAD_DIM)
    monkeypatch.setattr(units, "ATTENTION_PARTS", 5)
    # bfloat16 would round most of a wrong order away.
    assert differing(folder, "float32") == {}


# Biases and learned positions; grouped queries, norms on q and k. The type decides which kernels
# run, the family what is between them: windows and caps are above, bfloat16 in the bundled model.
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("opt", "float32"),
        ("qwen3", "float32"),
        pytest.param("opt", "bfloat16", marks=pytest.mark.chaos),
        pytest.param("qwen3", "bfloat16", marks=pytest.mark.chaos),
        pytest.param("gemma2", "bfloat16", marks=pytest.mark.chaos),
        pytest.param("gemma2", "float32", marks=pytest.mark.chaos),
    ],
)
def test_other_families_have_one_answer(case: str, dtype: str, tmp_path: Path) -> None:
    changes = {} if case == "opt" else {"head_dim": HEAD_DIM}
    assert differing(write_tiny(case, tmp_path / "tiny", **changes), dtype) == {}

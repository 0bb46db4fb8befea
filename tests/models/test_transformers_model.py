"""What a worker checks of a model by transformers' code before it serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import CONTEXT, small_model, write
from engine_runner import CPU
from live_bytes import held_bytes
from own_names import instance_name
from safetensors.torch import load_file, save_file
from transformers.models.llama import modeling_llama
from typer.testing import CliRunner

from splitpoint.checkpoint.config import TEXT_ONLY
from splitpoint.checkpoint.decoder import ModelBackend
from splitpoint.errors import InvalidArgument, ResourceExhausted
from splitpoint.host.processor import compiler
from splitpoint.planning.weight_placement import NOTHING_ON_HOST
from splitpoint.shapes import DataType, WeightFormat
from splitpoint_cli.checks.finding import Verdict
from splitpoint_cli.checks.model import find_model
from splitpoint_cli.main import app
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.plan import plan_stack
from worker_service.kernels.choice import by_flags, use
from worker_service.model.model import Model
from worker_service.startup.model_source import source_of

pytestmark = pytest.mark.usefixtures("one_thread")


def load(folder: Path, data_type: DataType = DataType.FLOAT32, **options: Any) -> Model:
    source = source_of(folder, data_type, ModelBackend.TRANSFORMERS, **options)
    model = source.load(CPU, NOTHING_ON_HOST, (), WeightFormat.NATIVE)
    planned = source.weight_sizes(CPU, WeightFormat.NATIVE).total
    # Norms that scale by 1 + weight are held in fp32.
    assert planned <= model.weight_bytes <= 1.01 * planned
    return model


def edit(folder: Path, **changes: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize("data_type", [DataType.BFLOAT16, DataType.FLOAT16])
@pytest.mark.parametrize("family", ["gpt2", "gemma", "deepseek_v3", "qwen3_moe"])
def test_half_precision_is_accepted(family: str, data_type: DataType, tmp_path: Path) -> None:
    assert load(write(small_model(family), tmp_path), data_type).shape.data_type is data_type


def test_rows_that_depend_on_others_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A convolution over tokens inside the attention module, as some families have."""
    folder = write(small_model("llama"), tmp_path)
    forward = modeling_llama.LlamaAttention.forward

    def mixed(self: Any, hidden_states: torch.Tensor, *args: Any, **more: Any) -> Any:
        before = torch.nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return forward(self, hidden_states + before, *args, **more)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", mixed)
    with pytest.raises(InvalidArgument, match="a token's rows depend on their order in a step"):
        load(folder)


def test_positions_that_are_not_those_given_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(small_model("llama"), tmp_path)
    forward = modeling_llama.LlamaRotaryEmbedding.forward

    def counted(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(self, x, torch.arange(x.shape[1], device=x.device)[None])

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", counted)
    with pytest.raises(InvalidArgument, match="depend on their order in a step"):
        load(folder)


def test_code_that_fails_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(small_model("llama"), tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", fail)
    with pytest.raises(InvalidArgument, match="model_type 'llama': its code fails: no"):
        load(folder)


def test_a_config_chooses_no_code_and_no_form_of_answers(tmp_path: Path) -> None:
    folder = write(small_model("granite"), tmp_path)
    changes = {"attn_implementation": "owner/kernels", "_attn_implementation": "splitpoint"}
    load(edit(folder, return_dict=False, experts_implementation="batched_mm", **changes))


def test_rope_that_depends_on_lengths(tmp_path: Path) -> None:
    """Refused, or served within the context in which it does not."""
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    folder = edit(write(small_model("granite"), tmp_path), rope_parameters=dynamic)
    with pytest.raises(InvalidArgument, match="dynamic RoPE"):
        source_of(folder)
    factors = [1.0] * 8
    long: dict[str, object] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": CONTEXT // 4,
    }
    edit(folder, rope_parameters=long)
    with pytest.raises(InvalidArgument, match=f"--max-model-len {CONTEXT // 4}"):
        source_of(folder)
    options = StackOptions(
        model=str(folder),
        device="cpu",
        instance=instance_name("rope"),
        max_model_len=CONTEXT // 4,
    )
    assert plan_stack(options).shape.context_length == CONTEXT // 4
    load(folder, max_model_len=CONTEXT // 4)


def test_int8_weights_are_for_our_own_decoder(tmp_path: Path) -> None:
    folder = write(small_model("granite"), tmp_path)
    with pytest.raises(InvalidArgument, match="--weights int8 takes a model that our own decoder"):
        source_of(folder).weight_sizes(CPU, WeightFormat.INT8)
    options = StackOptions(
        model=str(folder), device="cpu", instance=instance_name("int8"), weights="int8"
    )
    with pytest.raises(InvalidArgument, match="--weights int8 takes a model that our own decoder"):
        plan_stack(options)
    doctor = find_model(str(folder), "auto", weights=WeightFormat.INT8).finding
    assert doctor.verdict is Verdict.PROBLEM
    assert "--weights int8 takes a model that our own decoder" in doctor.found


def test_doctor_says_that_no_weights_can_stay_on_the_host(tmp_path: Path) -> None:
    folder = str(write(small_model("granite"), tmp_path))
    found = find_model(folder, "auto")
    assert "computed by transformers' code" in found.finding.found
    arguments = ("--model", folder, "--device-memory", "1MiB")
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu", *arguments, "--json"])
    findings = {each["name"]: each for each in json.loads(done.stdout)["findings"]}
    why = "none of which can stay on the host (docs/models.md)"
    assert findings["device memory"]["verdict"] == "problem"
    assert why in findings["device memory"]["found"]
    # As plan and size.
    lengths = ("--cached", "10", "--new", "2", "--max-tokens", "2")
    for command in (
        ("plan", "--profile", "h100", *lengths),
        ("size", "--tokens", "64", *lengths[2:]),
    ):
        done = CliRunner().invoke(app, [*command, *arguments])
        assert isinstance(done.exception, ResourceExhausted)
        assert why in done.exception.message


def test_parts_for_images_are_neither_read_nor_counted(tmp_path: Path) -> None:
    """A checkpoint without their weights is served as well."""
    folder = write(small_model("qwen3_vl"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    text = {name: each for name, each in tensors.items() if ".visual." not in name}
    assert len(text) < len(tensors)
    save_file(text, folder / "model.safetensors", metadata={"format": "pt"})
    model = load(folder)
    assert model.weight_bytes <= 1.1 * sum(each.nbytes for each in text.values())
    doctor = find_model(str(folder), "auto")
    assert TEXT_ONLY in doctor.finding.found
    assert doctor.shape is not None
    assert doctor.shape.family == "qwen3_vl"


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("layout", ["plain", "packed", "panels"])
def test_a_head_that_is_the_table_is_counted_as_it_is_held(layout: str, tmp_path: Path) -> None:
    """Once if plain; beside the table in any other layout."""
    use(by_flags(torch.float32, []).parsed(f"linear={layout}"))
    folder = write(small_model("gpt2"), tmp_path)
    model = load(folder)
    assert model.shape.tied_embeddings
    assert 0 <= held_bytes(model) - model.weight_bytes <= 512
    assert model.shape.held_weight_bytes is not None
    beside = model.weight_bytes - model.shape.held_weight_bytes
    assert (beside >= model.shape.embedding_bytes) is (layout != "plain")

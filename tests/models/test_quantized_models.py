"""Quantised checkpoints: near the model that they stand for, exact in themselves, as large as said.
Two compilations of a kernel at the first run."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import clear_prompt, small_model, write
from engine_runner import CPU, admission, make_engine, run_all
from own_names import instance_name
from quantized_models import FORMS, int8, quantized_model
from safetensors.torch import load_file, save_file
from store_runner import restored, store_runner
from transformers import LlamaForCausalLM, PreTrainedModel

from splitpoint.checkpoint.decoder import ModelBackend
from splitpoint.checkpoint.quantized import Quantization, Stored, read_quantization
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.host.processor import compiler
from splitpoint.planning.weight_placement import NOTHING_ON_HOST, WeightSizes
from splitpoint.shapes import ArenaLayout, DataType, WeightFormat
from splitpoint_cli.checks.model import check_weights, find_model
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.plan import plan_stack
from worker_service.engine.sampling import Sampling
from worker_service.kernels.choice import Choice, Decode, Layout, Prefill, use
from worker_service.model.attention import prefill_alone
from worker_service.model.experts import ExpertMatrices
from worker_service.model.model import Model
from worker_service.numerics.self_check import dependence
from worker_service.startup.model_source import source_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler"),
]

NEW_TOKENS = 8
GREEDY = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)
BACKENDS = [ModelBackend.OWN, ModelBackend.TRANSFORMERS]


@pytest.fixture(autouse=True)
def panels() -> None:
    use(Choice(Decode.FUSED, Prefill.FUSED, Layout.PANELS))


def load(
    folder: Path,
    backend: ModelBackend,
    data_type: DataType | None = DataType.FLOAT32,
    *,
    is_uniform: bool = True,
) -> Model:
    """Load, and compare the bytes with what is said beforehand.

    `is_uniform`: all but the head is in the format, as a shape has it.
    """
    source = source_of(folder, data_type, backend)
    model = source.load(CPU, NOTHING_ON_HOST, (), WeightFormat.NATIVE)
    assert model.weight_bytes == pytest.approx(
        source.weight_sizes(CPU, WeightFormat.NATIVE).total, rel=1e-3
    )
    said = WeightSizes.of(source.config.shape, is_gpu=False).total
    # Without padding, norms and scales of whole rows, of which small matrices have more.
    assert not is_uniform or said == pytest.approx(model.weight_bytes, rel=0.05)
    return model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def store(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def say(folder: Path, **changes: Any) -> None:
    """Change the quantization_config."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def logits_of(model: Model, ids: torch.Tensor) -> torch.Tensor:
    def attend(_: int, layer: Any, _inputs: Any, *heads: torch.Tensor) -> torch.Tensor:
        how = {"window": layer.window, "scale": layer.scale, "cap": layer.cap}
        return prefill_alone(*heads, **how, sinks=layer.sinks)

    with torch.inference_mode():
        return model.logits(model.run(ids, torch.arange(len(ids)), attend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_dequantised_model(
    form: str, backend: ModelBackend, tmp_path: Path
) -> None:
    exact = quantized_model("qwen2", form, tmp_path)
    ids = torch.randint(3, 500, (20,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = exact(ids[None]).logits[0]
    largest = float(wanted.abs().max())
    found = logits_of(load(tmp_path, backend), ids)
    assert float((found - wanted).abs().max()) < 1e-5 * largest
    near = logits_of(load(tmp_path, backend, DataType.BFLOAT16), ids)
    assert float((near - wanted).abs().max()) < 0.03 * largest


EXPERTS = [
    *(("gptq", "qwen3_moe"), ("awq", "mixtral"), ("packed with zeros", "qwen3_moe")),
    *(("int8", "qwen3_moe"), ("fp8 of blocks", "qwen3_moe"), ("mxfp4", "gpt_oss")),
]


@pytest.mark.parametrize(("form", "family"), EXPERTS)
def test_experts_are_those_of_the_dequantised_model(form: str, family: str, tmp_path: Path) -> None:
    """In bfloat16 a row may choose other experts."""
    exact = quantized_model(family, form, tmp_path)
    ids = torch.randint(3, 500, (20,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = exact(ids[None]).logits[0]
    is_uniform = form not in ("mxfp4", "int8")
    found = logits_of(load(tmp_path, ModelBackend.AUTO, is_uniform=is_uniform), ids)
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    model: Any = load(tmp_path, ModelBackend.AUTO, DataType.BFLOAT16, is_uniform=is_uniform)
    off = (logits_of(model, ids) - wanted).abs().amax(dim=1)
    assert float(off.median()) < 0.03 * float(wanted.abs().max())
    # Codes are not held in another form.
    held = {
        each.weight.dtype
        for module in model._divided.model.modules()
        if isinstance(module, ExpertMatrices)
        for each in module.matrices
    }
    kinds = {"int8": torch.int8, "fp8 of blocks": torch.bfloat16, "mxfp4": torch.float4_e2m1fn_x2}
    assert held == {kinds.get(form, torch.uint8)}


@pytest.mark.parametrize(
    ("form", "family"),
    [
        *(("gptq", "qwen3_moe"), ("mxfp4", "gpt_oss"), ("gptq", "llama"), ("int8", "qwen2")),
        # The text part of what reads images: its checkpoint has other names than the model.
        ("awq", "qwen2_5_vl"),
        *(
            pytest.param(*each, marks=pytest.mark.chaos)
            for each in (
                ("awq", "mixtral"),
                ("awq", "qwen3"),
                ("awq", "granite"),
                ("gptq", "gemma3"),
            )
        ),
    ],
)
def test_tokens_are_those_of_the_dequantised_model_restored_or_not(
    form: str, family: str, tmp_path: Path
) -> None:
    exact = quantized_model(family, form, tmp_path / "m")
    model = load(tmp_path / "m", ModelBackend.AUTO)
    prefix, answered = clear_prompt(exact, 70, NEW_TOKENS)
    prompt, wanted = clear_prompt(exact, 9, NEW_TOKENS, before=[*prefix, *answered])
    layout = ArenaLayout.of(model.shape, chunk_tokens=16, has_activations=True)
    cached = len(prefix) + NEW_TOKENS - 1
    with store_runner(layout, tmp_path, 200) as runner:
        asks = [admission("prefix", prefix, GREEDY), admission("other", prompt[:40], GREEDY)]
        done = runner.run(make_engine(model, has_activations=True), asks)
        assert done.tokens["prefix"] == answered
        ask = admission("prompt", prompt, GREEDY)
        for split, residency, found in restored(runner, model, ask, cached):
            assert found == wanted, (split, residency)


@pytest.mark.parametrize(
    ("form", "family", "backend"),
    [
        *(("awq", "llama", each) for each in BACKENDS),
        *(("gptq", "qwen3_moe", ModelBackend.AUTO), ("mxfp4", "gpt_oss", ModelBackend.AUTO)),
    ],
)
def test_numerics_are_invariant(
    form: str, family: str, backend: ModelBackend, tmp_path: Path
) -> None:
    quantized_model(family, form, tmp_path)
    assert dependence(load(tmp_path, backend, DataType.BFLOAT16), 16) is None


def test_the_commands_say_the_format(tmp_path: Path) -> None:
    quantized_model("llama", "gptq", tmp_path)
    found = find_model(str(tmp_path), "auto").finding.found
    assert "GPTQ int4 in groups of 32" in found
    assert check_weights(tmp_path).verdict.value == "ok"
    options = StackOptions(model=str(tmp_path), device="cpu", instance=instance_name("int4"))
    assert plan_stack(options).shape.held_weight_bytes
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"weights": "int8"}, "is GPTQ int4 in groups of 32 already"),
        ({"cpu_kernels": "linear=plain"}, "GPTQ int4 in groups of 32 needs linear=panels"),
        ({"draft_model": str(tmp_path)}, "a quantised model does not draft"),
    )
    for change, told in refused:
        with pytest.raises(InvalidArgument, match=told):
            plan_stack(replace(options, **change))


def test_doctor_finds_what_a_wrapper_says_of_its_decoder(tmp_path: Path) -> None:
    quantized_model("gemma3", "fp8 of outputs", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert check_weights(tmp_path).verdict.value == "ok"


def test_codes_need_panels(tmp_path: Path) -> None:
    quantized_model("llama", "gptq", tmp_path)
    use(Choice(Decode.PRODUCTS, Prefill.PRODUCTS, Layout.PLAIN))
    with pytest.raises(FailedPrecondition, match="linear=panels"):
        source_of(tmp_path).load(CPU, NOTHING_ON_HOST, (), WeightFormat.NATIVE)


def test_matrices_that_are_stored_plainly_are_read_as_they_are(tmp_path: Path) -> None:
    """What a configuration ignores: in one layer, and one of those that are stacked."""
    exact = quantized_model("llama", "packed", tmp_path)
    names = ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.v_proj"]
    tensors = stored(tmp_path)
    for name in names:
        for part in [each for each in tensors if each.startswith(name)]:
            del tensors[part]
        tensors[f"{name}.weight"] = exact.get_parameter(f"{name}.weight").detach()
    store(tmp_path, tensors)
    # As a wrapper's checkpoint names the decoder.
    say(tmp_path, ignore=["lm_head", *(f"language_model.{each}" for each in names)])
    prompt, wanted = clear_prompt(exact, 40, NEW_TOKENS)
    for backend in BACKENDS:
        model = load(tmp_path, backend, is_uniform=False)
        done = run_all(make_engine(model), [admission("a", prompt, GREEDY)])
        assert done.tokens["a"] == wanted


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tied_head_is_the_table_whatever_is_said(backend: ModelBackend, tmp_path: Path) -> None:
    quantized_model("llama", "packed", tmp_path, tie_word_embeddings=True)
    say(tmp_path, ignore=[])
    load(tmp_path, backend, is_uniform=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("form", "said"), [("gptq", {"lm_head": True}), ("int8", {"ignore": []})])
def test_a_head_that_is_quantised(
    form: str, said: dict[str, Any], backend: ModelBackend, tmp_path: Path
) -> None:
    exact = quantized_model("llama", form, tmp_path, with_head=True)
    say(tmp_path, **said)
    ids = torch.arange(3, 20)
    with torch.inference_mode():
        wanted = exact(ids[None]).logits[0]
    found = logits_of(load(tmp_path, backend), ids)
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


def test_fp8_moves_to_the_device_as_ordinary_parameters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moved: list[int] = []
    move: Any = PreTrainedModel.to

    def count(self: PreTrainedModel, *args: Any, **options: Any) -> Any:
        moved.append(sum(each.nbytes for each in self.parameters()))
        return move(self, *args, **options)

    quantized_model("qwen2", "fp8 of outputs", tmp_path)
    plain = write(small_model("qwen2"), tmp_path / "plain")
    monkeypatch.setattr(PreTrainedModel, "to", count)
    sizes = []
    for folder in (tmp_path, plain):
        model = load(folder, ModelBackend.TRANSFORMERS, DataType.BFLOAT16)
        sizes.append((moved[-1], model.weight_bytes))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_biases_that_are_no_biases_and_scales_of_a_cache(
    backend: ModelBackend, tmp_path: Path
) -> None:
    """GPTQ files have a bias for each matrix, of zeros; others have scales of K and V."""
    exact = quantized_model("llama", "gptq", tmp_path)
    tensors = stored(tmp_path)
    biases = {
        f"{name.removesuffix('qweight')}bias": torch.zeros(words.shape[1])
        for name, words in tensors.items()
        if name.endswith("qweight")
    }
    attention = "model.layers.0.self_attn"
    tensors |= {**biases, f"{attention}.k_scale": torch.ones(1)}
    store(tmp_path, {**tensors, f"{attention}.v_scale": torch.ones(1)})
    ids = torch.arange(3, 20)
    with torch.inference_mode():
        wanted = exact(ids[None]).logits[0]
    found = logits_of(load(tmp_path, backend), ids)
    assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    tensors[f"{attention}.q_proj.bias"][5] = 0.25
    store(tmp_path, tensors)
    with pytest.raises(InvalidArgument, match=r"q_proj\.bias"):
        load(tmp_path, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("form", "part", "told"),
    [
        ("packed with zeros", "weight_zero_point", "up_proj.weight_zero_point is torch.int8"),
        ("awq", "qweight", "up_proj.qweight is torch.int8"),
        ("int8", "weight_scale", "7 scales of"),
    ],
)
def test_parts_that_are_not_as_the_format_says(
    form: str, part: str, told: str, backend: ModelBackend, tmp_path: Path
) -> None:
    """Such as zeros in int8, of older versions, whose bytes would fit as nibbles."""
    quantized_model("llama", form, tmp_path)
    tensors = stored(tmp_path)
    name = f"model.layers.0.mlp.up_proj.{part}"
    wrong = torch.ones(7, 1) if form == "int8" else tensors[name].view(torch.int8).contiguous()
    store(tmp_path, {**tensors, name: wrong})
    with pytest.raises(InvalidArgument, match=told):
        load(tmp_path, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_in_another_order_are_refused(backend: ModelBackend, tmp_path: Path) -> None:
    quantized_model("llama", "gptq", tmp_path)
    tensors = stored(tmp_path)
    name = "model.layers.0.mlp.up_proj.g_idx"
    store(tmp_path, {**tensors, name: tensors[name].flip(0)})
    with pytest.raises(InvalidArgument, match="act-order"):
        load(tmp_path, backend)


@pytest.mark.parametrize(
    ("family", "form", "told"),
    [
        # Transposed, and of no interface.
        ("aria_text", "gptq", "experts stored as GPTQ int4"),
        ("llama4_text", "fp8 of blocks", "experts stored as FP8"),
        ("qwen3_moe", "mxfp4", "experts stored as MXFP4"),
    ],
)
def test_experts_that_are_stored_otherwise_are_refused(
    family: str, form: str, told: str, tmp_path: Path
) -> None:
    folder = write(small_model(family), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"} if form == "mxfp4" else FORMS[form][1]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match=told):
        source_of(folder)


def test_experts_that_are_not_stored_one_by_one_are_refused(tmp_path: Path) -> None:
    """Nothing would be known of their scales."""
    quantized_model("qwen3_moe", "fp8 of blocks", tmp_path)
    tensors = stored(tmp_path)
    for name in [each for each in tensors if "down_proj.weight_scale_inv" in each]:
        tensors[name.replace("weight_scale_inv", "other_scale")] = tensors.pop(name)
    store(tmp_path, tensors)
    with pytest.raises(InvalidArgument, match="down_proj is not stored as FP8"):
        load(tmp_path, ModelBackend.AUTO)


@pytest.mark.parametrize(
    ("form", "family", "part", "told"),
    [
        ("gptq", "qwen3_moe", "experts.2.up_proj.qweight", "is not 4 times"),
        ("mxfp4", "gpt_oss", "experts.down_proj_scales", "no weights .*down_proj_scales"),
    ],
)
def test_experts_of_which_parts_are_missing(
    form: str, family: str, part: str, told: str, tmp_path: Path
) -> None:
    quantized_model(family, form, tmp_path)
    tensors = stored(tmp_path)
    del tensors[next(each for each in tensors if each.endswith(part))]
    store(tmp_path, tensors)
    with pytest.raises(InvalidArgument, match=told):
        load(tmp_path, ModelBackend.AUTO)


def test_an_expert_in_another_format_than_the_others(tmp_path: Path) -> None:
    quantized_model("qwen3_moe", "gptq", tmp_path)
    tensors = stored(tmp_path)
    name = "model.layers.0.mlp.experts.1.up_proj."
    other = {
        part: tensors.pop(f"{name}{part}") for part in ("qweight", "qzeros", "scales", "g_idx")
    }
    inputs = len(other["g_idx"])
    plain, _ = int8(torch.randn(other["qweight"].shape[1], inputs))
    store(tmp_path, {**tensors, **{f"{name}{part}": each for part, each in plain.items()}})
    told = "expert 1 of model.layers.0.mlp.experts.gate_up_proj is not stored as GPTQ int4"
    with pytest.raises(InvalidArgument, match=told) as caught:
        load(tmp_path, ModelBackend.AUTO)
    assert caught.value.reason == "BAD_CHECKPOINT"


def test_matrices_that_the_model_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of layers that guess tokens are not read; any other is refused."""
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"^mtp.*"])
    quantized_model("llama", "gptq", tmp_path)
    tensors = stored(tmp_path)
    own = "model.layers.0.mlp.up_proj."
    parts = {name.removeprefix(own): each for name, each in tensors.items() if own in name}
    for beside in ("model.layers.7.mlp.up_proj", "mtp.up_proj"):
        tensors |= {f"{beside}.{part}": each.clone() for part, each in parts.items()}
    store(tmp_path, tensors)
    load(tmp_path, ModelBackend.TRANSFORMERS)
    other = "model.layers.0.mlp.other_proj"
    tensors |= {f"{other}.{part}": each.clone() for part, each in parts.items()}
    store(tmp_path, tensors)
    with pytest.raises(InvalidArgument, match=f"{other} is stored as GPTQ"):
        load(tmp_path, ModelBackend.TRANSFORMERS)


def test_blocks_that_are_no_mxfp4(tmp_path: Path) -> None:
    quantized_model("gpt_oss", "mxfp4", tmp_path)
    tensors = stored(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    store(tmp_path, {**tensors, name: tensors[name][:, :, :-1].contiguous()})
    with pytest.raises(InvalidArgument, match=r"down_proj: blocks \[4, 64, 4, 16\], scales"):
        load(tmp_path, ModelBackend.AUTO)


GPTQ: dict[str, Any] = FORMS["gptq"][1]
PACKED: dict[str, Any] = FORMS["packed"][1]


def fp8_in(strategy: str) -> dict[str, Any]:
    given = deepcopy(FORMS["fp8 of outputs"][1])
    given["config_groups"]["group_0"]["weights"]["strategy"] = strategy
    return given


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "runs on GPUs only"),
        ({"quant_method": "quark"}, "weights quantized by 'quark' are not read"),
        ({"bits": 4}, "weights quantized by None"),
        ({**GPTQ, "bits": 8}, "gptq with bits = 8"),
        ({**GPTQ, "desc_act": True}, "gptq with desc_act = True"),
        ({**GPTQ, "group_size": 12}, "gptq with group_size = 12"),
        ({**GPTQ, "dynamic": {"-:x": {}}}, "gptq with dynamic = a dict"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq with version = 'gemv'"),
        ({**PACKED, "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized int4"),
        ({**PACKED, "config_groups": {}}, "config_groups = a dict"),
        ({**PACKED, "transform_config": {"config_groups": {"R1": {}}}}, "transform_config ="),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config ="),
        (fp8_in("group"), "strategy = 'group'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 with fmt = 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "FP8 in blocks of"),
        (["gptq"], "weights quantized by None"),
    ],
)
def test_what_is_not_read_is_refused_by_name(given: object, told: str) -> None:
    with pytest.raises(InvalidArgument, match="quantization_config") as caught:
        read_quantization({"quantization_config": given})
    assert told in caught.value.message


def test_names_that_are_ignored() -> None:
    names = ("lm_head", "re:.*mlp\\.gate$", "re:model.layers.0.*")
    how = Quantization(Stored.PACKED, 128, ignored=names)
    assert not how.covers("lm_head")
    assert not how.covers("model.layers.3.mlp.gate")
    assert how.covers("model.layers.3.mlp.gate_proj")
    assert not how.covers("model.language_model.layers.0.mlp.up_proj")
    assert not how.covers("model.layers.0.mlp.up_proj")
    assert not Quantization(Stored.FP8).covers("model.layers.0.mlp.up_proj")

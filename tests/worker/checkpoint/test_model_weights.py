"""Checkpoint folders: what is accepted, and what is said about those that are not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import CASES, FAMILY_CASES, build_tiny, write_tiny

from splitpoint.checkpoint.decoder import Activation, DecoderConfig, Norm, plain_config
from splitpoint.checkpoint.rope_config import Rope
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, ModelShape
from worker_service.checkpoint.names import expected_tensors
from worker_service.checkpoint.tensors import weight_files
from worker_service.model.decoder import Decoder
from worker_service.model.linear import Linear
from worker_service.weights.packing import Matrix

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {case: write_tiny(case, root / case) for case in FAMILY_CASES}


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of an unsharded, tied checkpoint to break."""
    return Path(shutil.copytree(originals["qwen2"], tmp_path / "copy"))


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def logits(model: Decoder) -> torch.Tensor:
    return model.logits(model.embed(torch.tensor([5, 6]), torch.tensor([0, 1])))


def test_sharded_checkpoints_have_several_files(originals: dict[str, Path]) -> None:
    assert len(weight_files(originals["llama-3"])) > 1
    assert len(weight_files(originals["opt"])) == 1


@pytest.mark.parametrize("case", CASES)
def test_expected_tensors_are_those_transformers_writes(case: str) -> None:
    model = build_tiny(case)
    config = DecoderConfig.parse(model.config.to_dict())
    stored = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    if config.shape.tied_embeddings:
        del stored["lm_head.weight"]
    assert expected_tensors(config) == stored


def test_missing_tensors_are_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(InvalidArgument, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        Decoder.load(folder, CPU)


def test_unknown_tensors_are_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.extra": torch.ones(2)}))
    with pytest.raises(InvalidArgument, match=r"has not: model\.layers\.0\.extra"):
        Decoder.load(folder, CPU)


def test_wrong_shapes_are_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(InvalidArgument, match=r"model\.norm\.weight has shape \[3\].*\[64\]"):
        Decoder.load(folder, CPU)


def test_integers_are_no_weights(folder: Path) -> None:
    whole = torch.ones(64, dtype=torch.int32)
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": whole}))
    with pytest.raises(InvalidArgument, match="stored as I32"):
        Decoder.load(folder, CPU)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    with pytest.raises(InvalidArgument, match=r"pytorch_model\.bin.*convert them to safetensors"):
        Decoder.load(folder, CPU)


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidArgument, match=r"no model\.safetensors"):
        Decoder.load(folder, CPU)


def test_a_truncated_file_is_an_error(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidArgument, match="cannot be read"):
        Decoder.load(folder, CPU)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {"a": "missing.safetensors"}}', "lacks the shard"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "no file of its folder"),
        ('{"weight_map": []}', "no safetensors index"),
        ("{", "index.json cannot be read"),
    ],
)
def test_bad_indexes(folder: Path, index: str, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InvalidArgument, match=message):
        Decoder.load(folder, CPU)


def test_a_stored_tied_head_must_be_the_embeddings(folder: Path) -> None:
    plain = logits(Decoder.load(folder, CPU))

    def store_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(folder, store_head)
    assert torch.equal(logits(Decoder.load(folder, CPU)), plain)
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(InvalidArgument, match="is not the embeddings"):
        Decoder.load(folder, CPU)


@pytest.mark.parametrize("case", ["qwen2", "opt"])
def test_names_of_a_bare_model_and_old_buffers(
    case: str, originals: dict[str, Path], tmp_path: Path
) -> None:
    """Saved without the leading `model.`, and with rotary buffers as of old."""
    bare = Path(shutil.copytree(originals[case], tmp_path / "bare"))

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    rewrite(bare, strip)
    whole = logits(Decoder.load(originals[case], CPU))
    assert torch.equal(logits(Decoder.load(bare, CPU)), whole)


def test_the_model_survives_its_files(folder: Path) -> None:
    """Nothing stays mapped: weights may be replaced on disk while a worker serves."""
    model = Decoder.load(folder, CPU)
    before = logits(model)
    path = folder / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(logits(model), before)


def test_linear_layers_equal_their_definition() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias, rows, other = (
        torch.randn(size, generator=generator) for size in ((24, 40), (24,), (5, 40), (5, 24))
    )
    linear = Linear(Matrix(weight.clone()), bias)
    product = rows @ weight.T + bias
    for got, wanted in (
        (linear(rows), product),
        (linear(rows, Activation.RELU), product.relu()),
        (linear(rows, Activation.SILU), product * product.sigmoid()),
        (linear.added_to(rows, other), product + other),
        (linear.times(rows, other), product * other),
    ):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_random_weights_are_seeded() -> None:
    shape = ModelShape("tiny", "llama", 1, 16, 2, 1, 8, 24, 32, 64)
    config = DecoderConfig.of_shape(shape)

    def drawn(seed: int) -> torch.Tensor:
        return logits(Decoder.random(config, seed, CPU, torch.float32))

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


# -- config.json ------------------------------------------------------------------


def config_of(family: str, **changes: object) -> dict[str, Any]:
    shape = BUILT_IN_SHAPES[
        {
            "opt": "opt-125m",
            "llama": "llama-3-8b",
            "mistral": "mistral-7b",
            "qwen2": "qwen2-7b",
            "qwen3": "qwen3-8b",
            "gemma2": "gemma-2-2b",
            "gemma3_text": "gemma-3-1b",
        }[family]
    ]
    return {**plain_config(shape), **changes}


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("opt", {"activation_function": "gelu"}, "activation_function"),
        ("opt", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ("opt", {"do_layer_norm_before": "yes"}, "do_layer_norm_before"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type"),
        ("llama", {"hidden_act": ["silu"] * 99}, "hidden_act"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ("qwen2", {"max_window_layers": "all"}, "max_window_layers"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "odd": 1}}, "rope_parameters.odd"),
        (
            "llama",
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"sliding_window": 128}, "sliding_window"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"layer_types": ["full_attention"] * 31}, "layer_types"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 28}, "layer_types"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 28}, "layer_types"),
        ("qwen3", {"head_dim": None}, "head_dim"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3", {"model_type": "mamba"}, "model_type"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("gemma2", {"sliding_window": None}, "layer_types"),
        ("gemma3_text", {"attention_bias": True}, "attention_bias"),
        ("gemma3_text", {"rope_parameters": {"chunked": {}}}, "rope_parameters"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gemma3_text", {"model_type": "gemma3"}, "text_config"),
    ],
)
def test_settings_that_are_not_supported_are_named(
    family: str, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        DecoderConfig.parse(config_of(family, **changes))
    assert caught.value.field == field
    assert field.rpartition(".")[2] in caught.value.message
    assert len(caught.value.message) < 200


def test_key_value_heads_are_not_guessed() -> None:
    config = config_of("mistral")
    del config["num_key_value_heads"]
    with pytest.raises(InvalidArgument, match="num_key_value_heads"):
        DecoderConfig.parse(config)


def test_older_and_newer_rope_configs_mean_the_same() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    older = DecoderConfig.parse(config_of("llama", rope_theta=5e5, rope_scaling=scaling))
    newer = DecoderConfig.parse(config_of("llama", rope_parameters={**scaling, "rope_theta": 5e5}))
    assert older.rope == newer.rope
    assert older.rope is not None
    assert (older.rope.kind, older.rope.theta) == ("llama3", 5e5)


def test_windows_by_family() -> None:
    def windows(family: str, **changes: object) -> tuple[int | None, ...]:
        return DecoderConfig.parse(config_of(family, **changes)).windows

    assert windows("mistral", sliding_window=4096) == (4096,) * 32
    assert windows("mistral", sliding_window=None) == (None,) * 32
    # Qwen names a window but must also switch it on.
    assert windows("qwen2", sliding_window=4096) == (None,) * 28
    on = windows("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=26)
    assert on == (None,) * 26 + (64, 64)
    types = ["full_attention", "sliding_attention"] * 14
    mixed = windows("qwen2", sliding_window=64, use_sliding_window=True, layer_types=types)
    assert mixed == (None, 64) * 14


@pytest.mark.parametrize("name", [n for n in BUILT_IN_SHAPES if not n.startswith("gemma")])
def test_built_in_shapes_have_a_config(name: str) -> None:
    config = DecoderConfig.of_shape(BUILT_IN_SHAPES[name])
    assert config.shape == BUILT_IN_SHAPES[name]
    assert config.norm is (Norm.LAYER if config.shape.family == "opt" else Norm.RMS)
    matrices = sum(
        size[0] * size[1]
        for tensor, size in expected_tensors(config).items()
        if len(size) == 2 and "embed_positions" not in tensor
    )
    assert matrices == config.shape.parameter_count


def test_the_bundled_model_loads(bundled_model: Path) -> None:
    model = Decoder.load(bundled_model, CPU)
    assert model.dtype == torch.bfloat16
    config = json.loads((bundled_model / "config.json").read_text())
    assert len(model.layers) == config["num_hidden_layers"]


def test_gemma_3_is_read_in_the_old_and_the_new_form() -> None:
    """Read the hub's form, where much is left out, and that of today's transformers."""
    rope = {"rope_type": "linear", "factor": 8.0}
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": rope,
        "sliding_window": 1024,
    }
    old = DecoderConfig.parse(
        {"model_type": "gemma3", "text_config": text, "vision_config": {}, "torch_dtype": "float16"}
    )
    new = DecoderConfig.parse(
        {
            **{key: text[key] for key in text if key != "rope_scaling"},
            "torch_dtype": "float16",
            "layer_types": [*(["sliding_attention"] * 5), "full_attention"] * 5
            + ["sliding_attention"] * 4,
            "rope_parameters": {
                "full_attention": {**rope, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
    )
    assert old == replace(new, shape=replace(new.shape, name=old.shape.name))
    assert (
        replace(old.shape, name="Gemma-3-4B", data_type=DataType.BFLOAT16)
        == (BUILT_IN_SHAPES["gemma-3-4b"])
    )
    assert old.windows[:6] == (1024,) * 5 + (None,)
    assert old.score_scale == 256**-0.5
    assert old.score_cap is old.logit_cap is None
    assert old.rope == Rope(1e6, "linear", 8.0)
    assert old.local_rope == Rope(1e4)


def test_gemma_2_is_read_with_what_its_config_leaves_out() -> None:
    config = DecoderConfig.parse(config_of("gemma2", query_pre_attn_scalar=144))
    assert config.windows[:3] == (4096, None, 4096)
    assert (config.score_cap, config.logit_cap) == (50.0, 30.0)
    assert config.score_scale == 1 / 12
    assert config.shape.tied_embeddings


@pytest.mark.parametrize("root", ["language_model.model.", "model.language_model."])
def test_the_text_decoder_of_a_gemma_that_sees_images_is_read(root: str, tmp_path: Path) -> None:
    """In both layouts that such checkpoints have; what sees images is left out."""
    folder = write_tiny("gemma3", tmp_path / "text")
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", root, 1): tensor for name, tensor in tensors.items()}
    images = root.removesuffix("language_model.").replace("language_model.model.", "")
    tensors[f"{images}vision_tower.encoder.weight"] = torch.ones(3)
    tensors[f"{images}multi_modal_projector.weight"] = torch.ones(3)
    both = tmp_path / "both"
    both.mkdir()
    save_file(tensors, both / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    (both / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    ids = torch.arange(3, 20)
    wanted, found = (Decoder.load(each, torch.device("cpu")) for each in (folder, both))
    assert torch.equal(wanted.embed(ids, ids), found.embed(ids, ids))
    inputs = torch.randn(17, 64)
    for mine, other in zip(wanted.layers, found.layers, strict=True):
        for left, right in zip(
            mine.project(inputs, wanted.rotary(ids)),
            other.project(inputs, found.rotary(ids)),
            strict=True,
        ):
            assert torch.equal(left, right)

"""Checkpoint folders: resolving, names, fingerprints, end-of-sequence ids, and the one verdict on
a config.json. No network."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]
from own_names import instance_name
from splitpoint_command import splitpoint

from splitpoint.checkpoint.config import model_name
from splitpoint.checkpoint.resolve import (
    eos_token_ids,
    model_fingerprint,
    resolve_model,
    weight_files,
)
from splitpoint.config import arena_path, runtime_path
from splitpoint.errors import InvalidArgument, NotFound, SplitpointError, Unavailable
from splitpoint_cli.checks.finding import Verdict
from splitpoint_cli.checks.model import find_model
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.plan import plan_stack
from splitpoint_offline.options import settings_of
from worker_service.startup.model_source import source_of

INSTANCE = instance_name("verdict")


@pytest.fixture
def copy(bundled_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bundled_model, tmp_path / "copy"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_bundled_model_is_the_default(bundled_model: Path) -> None:
    assert resolve_model(None) == bundled_model
    assert resolve_model(str(bundled_model)) == bundled_model
    assert resolve_model("stdlib-llama", download=False) == bundled_model
    assert model_name(bundled_model) == "stdlib-llama"
    assert eos_token_ids(bundled_model) == (1,)
    assert [path.name for path in weight_files(bundled_model)] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("/no/such/folder", InvalidArgument),
        ("./nothing", InvalidArgument),
        ("a/b/c", InvalidArgument),
        ("", InvalidArgument),
        ("bad..name", InvalidArgument),
        # Without a slash it is meant as a folder; below one that is there, too.
        ("nosuchdir", InvalidArgument),
        ("nosuchdir@main", InvalidArgument),
        ("tests/nosuchdir", InvalidArgument),
        # The suite runs offline: an unknown name can only be "not cached".
        ("no-such-owner/nothing-of-that-name", Unavailable),
        ("no-such-owner/nothing@refs/pr/1", Unavailable),
    ],
)
def test_names_that_lead_nowhere(text: str, kind: type[SplitpointError]) -> None:
    with pytest.raises(kind) as caught:
        resolve_model(text)
    if "nosuchdir" in text:
        assert "no such folder" in str(caught.value)


def test_without_download_only_the_cache_is_asked() -> None:
    with pytest.raises(NotFound, match="downloaded before"):
        resolve_model("no-such-owner/nothing-of-that-name", download=False)


def test_a_folder_without_config_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_fingerprints(bundled_model: Path, copy: Path) -> None:
    original = model_fingerprint(bundled_model)
    assert len(original) == 32
    assert model_fingerprint(copy) == original, "the folder's name is not part of it"
    weights = copy / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    changed = model_fingerprint(copy)
    assert changed != original
    edit(copy / "config.json", rope_theta=20000.0)
    assert model_fingerprint(copy) not in (changed, original)


def test_a_truncated_or_foreign_weight_file(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidArgument, match="no safetensors file"):
        model_fingerprint(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(InvalidArgument, match="no safetensors file"):
        weight_files(copy)


def test_sharded_weights(copy: Path) -> None:
    index = copy / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "b.safetensors", "c": "a.safetensors"}}))
    with pytest.raises(InvalidArgument, match=r"lacks a\.safetensors, b\.safetensors"):
        weight_files(copy)
    for name in ("a", "b"):
        (copy / f"{name}.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert [path.name for path in weight_files(copy)] == ["a.safetensors", "b.safetensors"]
    assert len(model_fingerprint(copy)) == 32
    index.write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(InvalidArgument, match="no file of its folder"):
        weight_files(copy)


def test_names_of_cached_downloads(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--the-name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert model_name(snapshot) == "owner/the-name"


def test_eos_token_ids(copy: Path) -> None:
    edit(copy / "generation_config.json", eos_token_id=[5, 6, 5])
    assert eos_token_ids(copy) == (5, 6)
    (copy / "generation_config.json").unlink()
    assert eos_token_ids(copy) == (1,)
    edit(copy / "config.json", eos_token_id=None)
    assert eos_token_ids(copy) == ()
    edit(copy / "config.json", eos_token_id="</s>")
    with pytest.raises(InvalidArgument):
        eos_token_ids(copy)


def test_a_download_takes_what_is_served_and_no_other_formats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the library's own filter."""
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options)
        raise errors.LocalEntryNotFoundError(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(Unavailable):
        resolve_model("owner/name")
    served = [
        "config.json",
        "tokenizer.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    ]
    others = ["pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors"]
    others += ["onnx/model.onnx", "onnx/config.json", "additional_chat_templates/x.py", "README.md"]
    taken = filter_repo_objects(
        served + others,
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(taken) == served


# -- one verdict ------------------------------------------------------------------------------

# Changes of a Llama's config.json, and what the refusal says; empty: it is served.
CONFIGS: dict[str, tuple[dict[str, object], str]] = {
    "as it is": ({}, ""),
    "linear rope": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ""),
    "bfloat16": ({"dtype": "bfloat16"}, ""),
    "another family": ({"model_type": "qwen2_moe", "num_experts": 4}, ""),
    "no decoder": ({"model_type": "mamba"}, "model_type 'mamba': MambaModel takes no position ids"),
    "GPTQ": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
        "",
    ),
    "bitsandbytes": (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "weights quantized by 'bitsandbytes' are not read",
    ),
    "YaRN": ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ""),
    "another activation": ({"hidden_act": "gelu"}, ""),
    "element type": ({"dtype": "float8_e4m3fn"}, "'float8_e4m3fn'"),
    "odd heads": ({"head_dim": 7}, "makes no llama of this config.json"),
}


# Of these one command is asked: it takes seconds to import transformers.
BY_TRANSFORMERS = ("another family", "no decoder")


@pytest.mark.parametrize("name", CONFIGS)
def test_every_command_has_the_same_verdict(name: str, tmp_path: Path, bundled_model: Path) -> None:
    changes, reason = CONFIGS[name]
    config = json.loads((bundled_model / "config.json").read_text())
    for key in ("rope_scaling", "rope_parameters"):  # the older form replaces the newer one
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    model, told = str(tmp_path), ""
    try:
        shape = source_of(tmp_path).config.shape
    except InvalidArgument as error:
        told = error.message
    assert reason in told
    assert bool(reason) == bool(told)
    doctor = find_model(model, "auto").finding
    assert (doctor.verdict is Verdict.OK) == (not reason)
    assert told in doctor.found
    options = StackOptions(model=model, device="cpu", instance=INSTANCE)
    if not reason:
        assert plan_stack(options).shape == shape
        assert settings_of(model, {}).model == tmp_path
    else:
        for refuse in (lambda: plan_stack(options), lambda: settings_of(model, {})):
            with pytest.raises(InvalidArgument) as caught:
                refuse()
            assert caught.value.message == told
    asked = {
        "size": ("--profile", "h100", "--tokens", "64", "--new", "16", "--max-tokens", "16"),
        "plan": ("--profile", "h100", "--cached", "16", "--new", "16", "--max-tokens", "16"),
        "simulate": ("--devices", "h100=1", "--num-prompts", "1"),
        **({"up": ("--device", "cpu", "--instance", INSTANCE)} if reason else {}),
    }
    if name not in ("as it is", "GPTQ", "bitsandbytes", "element type"):
        asked = {"size": asked["size"]} if name in BY_TRANSFORMERS else {}
    for command, more in asked.items():
        done = splitpoint(command, "--model", model, *more)
        assert done.returncode == (2 if reason else 0), (command, done.stderr)
        assert " ".join(told.split()) in " ".join(done.stderr.split()), command
    # Refused before anything was made for it.
    assert not os.path.lexists(runtime_path(INSTANCE))
    assert not os.path.lexists(arena_path(INSTANCE).parent)

"""Which template a model folder has, as transformers reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from splitpoint.chat.messages import Chat
from splitpoint.chat.source import MOST_TEMPLATE_BYTES, read_templates
from splitpoint.chat.template import ModelTemplates
from splitpoint.checkpoint.resolve import model_fingerprint
from splitpoint.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[3]
BUNDLED = ROOT / "models" / "stdlib-llama"
EOS = {"__type": "AddedToken", "content": "</s>", "special": True}
CHAT = Chat('[{"role": "user", "content": "hi"}]')


def write(folder: Path, config: dict[str, Any] | None = None, **files: str) -> Path:
    """Write a tokenizer's folder. `files`: contents by name, with `__` for a slash."""
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "hi": 1}, unk_token="<unk>"))
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.jinja"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": "{{ messages[0].content }} of settings"}, {}),
        (
            {
                "chat_template": [
                    {"name": "default", "template": "default"},
                    {"name": "tool_use", "template": "tools {{ tools | length }}"},
                    {"name": "rag", "template": "rag"},
                ]
            },
            {},
        ),
        ({"chat_template": "of settings"}, {"chat_template": "of a file"}),
        ({}, {"chat_template": "a", "additional_chat_templates__tool_use": "b"}),
        (
            {"bos_token": "<s>", "eos_token": EOS},
            {"chat_template": "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"},
        ),
        (None, {"chat_template": "without settings\n"}),
    ],
)
@pytest.mark.parametrize("tools", ["", '[{"type": "function", "function": {"name": "f"}}]'])
def test_a_folder_has_the_template_that_transformers_finds(
    tmp_path: Path, config: dict[str, Any] | None, files: dict[str, str], tools: str
) -> None:
    folder = write(tmp_path, config, **files)
    found = read_templates(folder)
    assert found is not None
    ours = ModelTemplates(found.default, found.tool_use, found.special_tokens)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder).apply_chat_template(
        json.loads(CHAT.messages),
        tools=json.loads(tools) if tools else None,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert ours.render(Chat(CHAT.messages, tools)) == theirs


@pytest.mark.parametrize(
    "config",
    [None, {}, {"chat_template": None}, {"chat_template": [{"name": "a", "template": ""}]}],
)
def test_a_folder_without_a_default_template_has_none(tmp_path: Path, config: Any) -> None:
    assert read_templates(write(tmp_path, config)) is None


def test_templates_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    for value in (1, {"default": "x"}, [1], [{"name": "default"}], "x" * (MOST_TEMPLATE_BYTES + 1)):
        write(tmp_path, {"chat_template": value})
        with pytest.raises(InvalidArgument, match="chat_template"):
            read_templates(tmp_path)
    write(tmp_path, {})
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"\xff")
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        read_templates(tmp_path)
    path.write_bytes(b"x" * (MOST_TEMPLATE_BYTES + 1))
    with pytest.raises(InvalidArgument, match="at most 1,048,576"):
        read_templates(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InvalidArgument, match="not a regular file"):
        read_templates(tmp_path)


def test_the_bundled_template_makes_a_python_file_and_only_appends() -> None:
    """Each turn's prompt begins with the one before, so that its cache is found."""
    templates = read_templates(BUNDLED)
    assert templates is not None
    model = ModelTemplates(templates.default, templates.tool_use, templates.special_tokens)
    messages = [{"role": "system", "content": "Only functions.\nNo classes."}]
    prompt = ""
    for turn in range(5):
        messages.append({"role": "user", "content": f"Write function {turn}."})
        longer = model.render(Chat(json.dumps(messages)))
        assert longer.startswith(prompt)
        answer = f"def function_{turn}():\n    return {turn}"
        messages.append({"role": "assistant", "content": answer})
        prompt = longer + answer
    assert prompt.startswith(
        "<s># Only functions.\n# No classes.\n# Write function 0.\ndef function_0():\n    return 0"
        "\n\n# Write function 1.\n"
    )
    assert "{#" not in prompt


def test_a_template_does_not_change_a_models_fingerprint(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in BUNDLED.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").unlink()
    assert model_fingerprint(folder) == model_fingerprint(BUNDLED)

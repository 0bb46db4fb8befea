"""What the scheduler makes of a model folder's chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from scheduler_doubles import MODEL_FOLDER

from scheduler_service.options import load_served_model
from splitpoint.chat.messages import Chat
from splitpoint.chat.source import ChatTemplates, read_template_file
from splitpoint.errors import InvalidArgument

CHAT = Chat('[{"role": "user", "content": "hi"}]')


def test_a_broken_template_is_a_warning_and_one_that_was_asked_for_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model whose own template is broken serves plain prompts still."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        (folder / name).symlink_to(MODEL_FOLDER / name)
    (folder / "chat_template.jinja").write_text("{% for %}")
    model = load_served_model(folder)
    assert model.chats is None
    assert model.tool_call_format == ""
    assert "serves no chats" in caplog.text
    given = tmp_path / "given.jinja"
    with pytest.raises(InvalidArgument, match="no such file"):
        load_served_model(folder, chat_template=given)
    given.write_text("{% for %}")
    with pytest.raises(InvalidArgument, match="cannot be used: Expected an expression"):
        load_served_model(folder, chat_template=given)
    given.write_text("<tool_call>{{ bos_token }}")
    model = load_served_model(folder, chat_template=given)
    assert model.chats is not None
    try:
        assert model.chats.render(CHAT) == "<tool_call>"
    finally:
        model.chats.close()
    assert model.tool_call_format == "hermes"
    assert model.tokenizer_files["chat_template.jinja"] == given
    assert read_template_file(given, MODEL_FOLDER) == ChatTemplates(
        "<tool_call>{{ bos_token }}", None, {"bos_token": "<s>", "eos_token": "</s>"}
    )

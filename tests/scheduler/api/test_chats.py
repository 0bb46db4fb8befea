"""Chats over the wire, and the calls about tokens, through the SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from scheduler_doubles import (
    MODEL,
    MODEL_FOLDER,
    SHAPE,
    TOKENIZER,
    Stack,
    WorkerDouble,
    answer,
    stack,
)

from scheduler_service.options import ServedModel, load_served_model
from splitpoint.chat.messages import Chat
from splitpoint.chat.source import ChatTemplates, read_template_file, read_templates
from splitpoint.chat.template import ModelTemplates
from splitpoint.client import AsyncClient
from splitpoint.errors import FailedPrecondition, InvalidArgument, NotFound
from splitpoint.transport import statuses
from splitpoint.v1 import scheduler_pb2

MESSAGES = [
    {"role": "system", "content": "Be brief, naïve 😀"},
    {"role": "user", "content": "Write a function."},
]
FOUND = read_templates(MODEL_FOLDER)
assert FOUND is not None
TEMPLATES = ModelTemplates(FOUND.default, FOUND.tool_use, FOUND.special_tokens)


def prompt_of(messages: Any, **fields: Any) -> list[int]:
    text = TEMPLATES.render(Chat(json.dumps(messages), **fields))
    return TOKENIZER.encode(text, adds_special_tokens=False)


@pytest.fixture
async def running() -> AsyncIterator[Stack]:
    async with stack(model=load_served_model(MODEL_FOLDER)) as running:
        yield running


@pytest.fixture
async def client(running: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(running.address) as client:
        yield client


async def test_a_chat_is_answered_as_its_text_is(client: AsyncClient) -> None:
    ids = prompt_of(MESSAGES)
    tokens = await client.tokenize(messages=MESSAGES)
    assert list(tokens.token_ids) == ids
    assert ids[0] == 0  # the template's own <s>, once
    done = await client.chat(MESSAGES, max_tokens=4).complete()
    assert list(done.token_ids) == answer(ids, 4)
    assert done.usage.prompt_tokens == len(ids)
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools = prompt_of(MESSAGES, tools=json.dumps(tools))
    done = await client.chat(MESSAGES, tools=tools, max_tokens=4).complete()
    assert list(done.token_ids) == answer(with_tools, 4) != answer(ids, 4)
    begun = [*MESSAGES, {"role": "assistant", "content": "def f("}]
    done = await client.chat(begun, max_tokens=4, continue_final_message=True).complete()
    text = TEMPLATES.render(Chat(json.dumps(MESSAGES))) + "def f("
    assert list(done.token_ids) == answer(TOKENIZER.encode(text), 4)


async def test_the_same_chat_attaches_and_another_does_not(client: AsyncClient) -> None:
    first = await client.chat(MESSAGES, max_tokens=4, request_id="one").complete()
    again = await client.chat(MESSAGES, max_tokens=4, request_id="one").complete()
    assert again == first
    with pytest.raises(Exception, match="body"):
        await client.chat(MESSAGES[1:], max_tokens=4, request_id="one").complete()


async def test_long_and_many_chats_are_answered(running: Stack, client: AsyncClient) -> None:
    """Chats of all sizes, more at a time than there are processes to render them."""
    chats = [[{"role": "user", "content": f"{n} " * (1 + n * 40)}] for n in range(40)]
    found = await asyncio.gather(*(client.tokenize(messages=chat) for chat in chats))
    assert [list(each.token_ids) for each in found] == [prompt_of(chat) for chat in chats]


async def refused(running: Stack, chat: dict[str, Any]) -> InvalidArgument:
    request = scheduler_pb2.GenerateRequest(chat=scheduler_pb2.ChatPrompt(**chat))
    error = await running.error(request)
    assert isinstance(error, InvalidArgument)
    tokenize = scheduler_pb2.TokenizeRequest(chat=request.chat)
    with pytest.raises(grpc.RpcError) as caught:
        await running.inference.Tokenize(tokenize)
    other = statuses.error_of(caught.value)
    assert isinstance(other, InvalidArgument)
    assert other.field == error.field
    return error


async def test_a_bad_chat_names_its_field_and_repeats_no_message(
    running: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    for chat, field in (
        ({}, "chat.messages"),
        ({"messages": "[]"}, "chat.messages"),
        ({"messages": '[{"role": "user", "content": 7}]'}, "chat.messages[0].content"),
        ({"messages": json.dumps(MESSAGES), "tools": "x"}, "chat.tools"),
        (
            {"messages": json.dumps(MESSAGES), "template_arguments": '{"tools": []}'},
            "chat.template_arguments.tools",
        ),
    ):
        assert (await refused(running, chat)).field == field
    long = [{"role": "user", "content": "secret words " * 5000}]
    request = scheduler_pb2.GenerateRequest(chat={"messages": json.dumps(long)})
    told = await running.error(request)
    assert isinstance(told, InvalidArgument)
    assert (told.field, told.reason) == ("chat.messages", "CONTEXT_EXCEEDED")
    assert "secret" not in told.message + caplog.text


async def test_a_model_without_a_template_or_a_tokenizer_takes_no_chats() -> None:
    for model, reason in ((MODEL, "NO_CHAT_TEMPLATE"), (ServedModel(SHAPE, None), "NO_TOKENIZER")):
        async with stack(model=model) as running, AsyncClient(running.address) as client:
            assert not (await client.get_model()).has_chat_template
            with pytest.raises(FailedPrecondition) as caught:
                await client.chat(MESSAGES).complete()
            assert caught.value.reason == reason


async def test_the_model_tells_its_template(tmp_path: Path) -> None:
    path = tmp_path / "hermes.jinja"
    path.write_text("<tool_call>{{ messages[0].content }}{{ raise_exception('no: x') if tools }}")
    model = load_served_model(MODEL_FOLDER, chat_template=path)
    async with stack(model=model) as running, AsyncClient(running.address) as client:
        found = await client.get_model()
        assert (found.has_chat_template, found.tool_call_format) == (True, "hermes")
        with pytest.raises(InvalidArgument, match="refuses these messages: no: x") as caught:
            await client.chat(MESSAGES, tools=[{"type": "function"}]).complete()
        assert caught.value.reason == "CHAT_REFUSED"
        files = await client.get_tokenizer()
        assert files["chat_template.jinja"] == path.read_bytes()


async def test_the_tokenizers_files_come_whole(client: AsyncClient) -> None:
    files = await client.get_tokenizer()
    names = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(files) == names
    assert files == {name: (MODEL_FOLDER / name).read_bytes() for name in names}
    with pytest.raises(NotFound):
        await client.get_tokenizer("another")


async def test_a_large_tokenizer_comes_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    content = bytes(range(256)) * 12_000
    path.write_bytes(content)
    model = replace(MODEL, tokenizer_files={path.name: path})
    async with stack(model=model) as running, AsyncClient(running.address) as client:
        request = scheduler_pb2.GetTokenizerRequest()
        pieces = [piece async for piece in running.inference.GetTokenizer(request)]
        assert len(pieces) == 3
        assert max(len(piece.data) for piece in pieces) == 1 << 20
        assert await client.get_tokenizer() == {path.name: content}


async def test_tokens_become_text_again(client: AsyncClient) -> None:
    text = "def naïve():\n    return '你好 😀'\n"
    ids = TOKENIZER.encode(text)
    assert await client.detokenize(ids) == text
    assert await client.detokenize([0, *ids, 1]) == text
    assert await client.detokenize([0, *ids, 1], keeps_special_tokens=True) == f"<s>{text}</s>"
    bad = TOKENIZER.encode("é")[:1]
    assert await client.detokenize(bad) == "\ufffd"
    for ids, field in (
        ([], "token_ids"),
        ([5, SHAPE.vocabulary_size], "token_ids[1]"),
        ([-1], "token_ids[0]"),
        ([5] * (SHAPE.context_length + 1), "token_ids"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            await client.detokenize(ids)
        assert caught.value.field == field
    with pytest.raises(NotFound):
        await client.detokenize([5], model="another")


async def test_log_probabilities_have_the_bytes_of_their_tokens(client: AsyncClient) -> None:
    """Also in a stream, and for the alternatives."""
    stream = client.chat(MESSAGES, max_tokens=6, logprobs=4)
    told = [entry async for event in stream for entry in getattr(event, "logprobs", ())]
    done = await client.chat(MESSAGES, max_tokens=6, logprobs=4, seed=1).complete()
    assert list(done.logprobs) == told[:6]
    assert [entry.chosen_bytes for entry in done.logprobs] == [
        TOKENIZER.token_bytes(token) for token in done.token_ids
    ]
    assert done.logprobs[0].top_bytes == (b"<s>", b"</s>", b"!", b'"')
    assert b"".join(entry.chosen_bytes for entry in done.logprobs).decode(
        errors="replace"
    ) == TOKENIZER.decode(done.token_ids)


async def test_an_answer_may_fill_the_context() -> None:
    shape = replace(SHAPE, context_length=40)
    model = replace(MODEL, shape=shape)
    async with (
        stack(WorkerDouble(shape=shape), model=model) as running,
        AsyncClient(running.address) as client,
    ):
        done = await client.generate([5] * 10, fills_context=True, ignore_eos=True).complete()
        assert len(done.token_ids) == 30
        done = await client.generate([5] * 10, fills_context=True, max_tokens=3).complete()
        assert len(done.token_ids) == 3


async def test_texts_go_without_special_tokens_if_asked() -> None:
    """Of a tokenizer that puts one before a prompt."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing

    from splitpoint.checkpoint.text import Tokenizer

    backend = Backend.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    model = replace(load_served_model(MODEL_FOLDER), tokenizer=Tokenizer(backend))
    async with stack(model=model) as running, AsyncClient(running.address) as client:
        plain = TOKENIZER.encode("import os")
        assert list((await client.tokenize("import os")).token_ids) == [0, *plain]
        found = await client.tokenize("import os", omits_special_tokens=True)
        assert list(found.token_ids) == plain
        done = await client.generate("import os", max_tokens=2).complete()
        assert list(done.token_ids) == answer([0, *plain], 2)
        done = await client.generate(
            "import os", max_tokens=2, omits_special_tokens=True
        ).complete()
        assert list(done.token_ids) == answer(plain, 2)
        # A chat has those of its template, and only these.
        assert list((await client.tokenize(messages=MESSAGES)).token_ids) == prompt_of(MESSAGES)


async def test_a_scheduler_ends_its_processes(running: Stack) -> None:
    chats = running.scheduler.manager.options.model.chats
    assert chats is not None
    children = Path("/proc/self/task").glob("*/children")
    pids = {
        pid
        for path in children
        for pid in path.read_text().split()
        if "splitpoint.chat" in Path(f"/proc/{pid}/cmdline").read_text()
    }
    assert pids
    await running.scheduler.stop(0)
    assert not any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids)


# -- what the scheduler makes of a model folder's chat template --------------------------

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

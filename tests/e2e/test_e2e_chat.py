"""A chat with real processes: its template, its bytes, and the loss of its scheduler.

About 10 s.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_names import instance_name
from small_model import small_model
from test_e2e_cli import assert_nothing_left, scheduler_of, service_processes
from up_process import up_process, wait_until_up
from waiting import until

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.client import AsyncClient, Completion
from splitpoint.errors import InvalidArgument

MESSAGES = [{"role": "user", "content": "Return the naïve sum 😀"}]
TEMPLATE = """{% for message in messages %}
{% if message.role == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}
{% endfor %}{% endif %}# {{ message.content }}
{% endfor %}def total("""
NEW_TOKENS = 120


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """The instance of a stack with two schedulers, and their addresses."""
    template = tmp_path_factory.mktemp("chat") / "template.jinja"
    template.write_text(TEMPLATE)
    instance = instance_name("chat")
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--chat-template", str(template)),
        *("--device", "cpu", "--threads", "1", "--host-memory", "64MiB", "--schedulers", "2"),
        *("--model", str(small_model()), "--listen", "127.0.0.1:0", "--instance", instance),
    ]
    with up_process(command) as process:
        yield instance, re.findall(r"scheduler  (\S+)", wait_until_up(process))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert_nothing_left(instance)


def rendering(instance: str) -> dict[int, int]:
    """Rendering processes by their scheduler."""
    found = {}
    for pid, name in service_processes(instance).items():
        if name == "scheduler_service":
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                for child in children.read_text().split():
                    assert "splitpoint.chat" in Path(f"/proc/{child}/cmdline").read_text()
                    found[pid] = int(child)
    return found


def spelled(answer: Completion) -> bytes:
    return b"".join(each.chosen_bytes for each in answer.logprobs)


def test_a_chat_is_the_text_that_its_template_makes(stack: tuple[str, list[str]]) -> None:
    _, addresses = stack

    async def play() -> None:
        async with AsyncClient(addresses[0]) as client:
            await client.wait_ready(30)
            text = "# Return the naïve sum 😀\ndef total("
            as_text = await client.generate(text, max_tokens=24, temperature=0).complete()
            chat = await client.chat(MESSAGES, max_tokens=24, temperature=0, logprobs=3).complete()
            assert chat.token_ids == as_text.token_ids
            assert chat.text == as_text.text
            tokenizer = Tokenizer.load(small_model())
            assert tokenizer is not None
            assert chat.usage.prompt_tokens == len(tokenizer.encode(text))
            assert spelled(chat).decode() == chat.text
            for token, entry in zip(chat.token_ids, chat.logprobs, strict=True):
                assert entry.top[0][0] == token  # greedy: the likeliest
                assert entry.top_bytes[0] == entry.chosen_bytes
            assert await client.detokenize(chat.token_ids) == chat.text

    asyncio.run(play())


def test_an_endless_template_holds_up_no_other_request(stack: tuple[str, list[str]]) -> None:
    """Its process is stopped meanwhile, so that the chat is under way however busy the machine."""
    instance, addresses = stack

    async def play() -> None:
        async with AsyncClient(addresses[0]) as client:
            await client.wait_ready(30)
            child = rendering(instance)[scheduler_of(instance, addresses[0])]
            os.kill(child, signal.SIGSTOP)
            try:
                loop = client.chat([{"role": "loop", "content": "x"}]).complete()
                asked = asyncio.create_task(loop)
                await client.generate("import os", max_tokens=4).complete()
                await client.chat(MESSAGES, max_tokens=4).complete()
                assert not asked.done()
            finally:
                os.kill(child, signal.SIGCONT)
            with pytest.raises(InvalidArgument) as caught:
                await asked
            assert (caught.value.field, caught.value.reason) == ("chat.messages", "CHAT_TOO_SLOW")
            assert (await client.chat(MESSAGES, max_tokens=2).complete()).token_ids

    asyncio.run(play())


def test_a_chat_goes_on_at_another_scheduler(stack: tuple[str, list[str]]) -> None:
    """The other one renders it again; the answer's bytes and text have no seam."""
    instance, addresses = stack
    options = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 5}

    async def play() -> None:
        async with AsyncClient(addresses[1]) as other:
            await other.wait_ready(30)
            wanted = await other.chat(MESSAGES, logprobs=1, **options).complete()  # type: ignore[arg-type]
            assert spelled(wanted).decode(errors="replace") == wanted.text
        before = rendering(instance)
        assert len(before) == 2
        async with AsyncClient(addresses) as client:
            await client.wait_ready(30)
            count = 0
            stream = client.chat(MESSAGES, logprobs=1, **options)  # type: ignore[arg-type]
            async for event in stream:
                if isinstance(event, Completion):
                    answer = event
                    break
                count += len(event.token_ids)
                if count and before and client.address == addresses[0]:
                    first = scheduler_of(instance, addresses[0])
                    os.kill(first, signal.SIGKILL)
                    child = before.pop(first)
                    before.clear()
        assert not before
        assert client.address == addresses[1]
        assert answer.token_ids == wanted.token_ids
        assert answer.text == wanted.text
        assert spelled(answer) == spelled(wanted)
        # The killed scheduler's process has ended by itself.
        await until(lambda: not Path(f"/proc/{child}/cmdline").exists())

    asyncio.run(play())

"""The router of the package smg in front of a real stack, asked by the official client."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import openai
import pytest
from own_names import free_ports, instance_name
from up_process import up_process, wait_until_up

from splitpoint.client import Client
from splitpoint_cli.stack.child import child_environment

SECONDS = 60
MODEL = "stdlib-llama"
PROMPT = "import asyncio\n\n\nclass Queue:\n"


@dataclass(frozen=True)
class Routed:
    """A stack, asked directly and through the router."""

    scheduler: str
    router: openai.OpenAI

    def running(self) -> int:
        with Client(self.scheduler) as client:
            return client.scheduler_status().running_count


@contextmanager
def process(log: Path, *command: str) -> Iterator[None]:
    # No look for the model's name on a hub.
    environment = child_environment({"HF_HUB_OFFLINE": "1"})
    with log.open("wb") as output:
        started = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        yield
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    folder = tmp_path_factory.mktemp("smg")
    engine, router, metrics = range(first := free_ports(3), first + 3)
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--device", "cpu", "--threads", "1"),
        *("--workers", "1", "--dtype", "float32", "--host-memory", "64MiB"),
        *("--device-memory", "192MiB", "--listen", "127.0.0.1:0"),
        *("--instance", instance_name("smg")),
    ]
    with ExitStack() as cleanup:
        up = cleanup.enter_context(up_process(command))
        cleanup.callback(up.communicate, timeout=SECONDS)
        cleanup.callback(up.terminate)
        scheduler = re.findall(r"scheduler  (\S+)", wait_until_up(up))[0]
        cleanup.enter_context(
            process(
                folder / "gateway.log",
                *("gateway_service", "--listen", "127.0.0.1:0", "--scheduler", scheduler),
                *("--engine-listen", f"127.0.0.1:{engine}"),
            )
        )
        log = folder / "router.log"
        cleanup.enter_context(
            process(
                log,
                *("smg", "launch", "--host", "127.0.0.1", "--port", str(router)),
                *("--worker-urls", f"grpc://127.0.0.1:{engine}", "--disable-retries"),
                *("--worker-startup-check-interval", "1"),
                *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)),
            )
        )
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{router}/v1", api_key="none", max_retries=0
        )
        cleanup.callback(client.close)

        def is_routed() -> bool:
            """A router knows the model before it has its tokenizer."""
            try:
                client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
            except openai.OpenAIError:
                return False
            return MODEL in {model.id for model in client.models.list()}

        try:
            until(is_routed, "the router has no model")
        except AssertionError as error:
            raise AssertionError(log.read_text()) from error
        yield Routed(scheduler, client)


def test_a_stream_through_the_router_is_the_stacks_own_answer(routed: Routed) -> None:
    with Client(routed.scheduler) as client:
        wanted = client.generate(PROMPT, max_tokens=64).complete()
    whole = routed.router.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=64, temperature=0
    )
    assert whole.choices[0].text == wanted.text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == wanted.usage.completion_tokens
    # The router makes prompts of the same tokens, so it finds what the first call left.
    details = whole.usage.prompt_tokens_details
    assert details is not None
    assert (details.cached_tokens or 0) >= wanted.usage.prompt_tokens - 1 - 64
    pieces = list(
        routed.router.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=64,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [choice.text for piece in pieces for choice in piece.choices]
    assert "".join(texts) == wanted.text
    assert sum(map(bool, texts)) > 16, "it streams"
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 64


def test_chats_logprobs_and_several_answers(routed: Routed) -> None:
    answer = routed.router.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is asyncio?"}],
        max_tokens=8,
        temperature=0.8,
        seed=7,
        n=2,
        logprobs=True,
        top_logprobs=3,
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.finish_reason in ("length", "stop")
        assert choice.logprobs is not None
        content = choice.logprobs.content
        assert content is not None
        assert "".join(each.token for each in content).startswith(choice.message.content or "")
        assert all(each.logprob <= 0 and len(each.top_logprobs) == 3 for each in content)
    texts = [choice.message.content for choice in answer.choices]
    assert texts[0] != texts[1], "each answer has a seed of its own"


def test_a_stop_string_ends_the_answer(routed: Routed) -> None:
    stopped = routed.router.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=64, temperature=0, stop=["def "]
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert "def " not in stopped.choices[0].text


def test_an_answer_follows_a_schema(routed: Routed) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["asyncio", "json"]}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    }
    answer = routed.router.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a module."}],
        max_tokens=200,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "module", "schema": schema, "strict": True},
        },
    )
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content or ""), schema)


def test_the_schedulers_errors_reach_the_client(routed: Routed) -> None:
    with pytest.raises(openai.BadRequestError, match="exceed the context of 4,096"):
        routed.router.completions.create(model=MODEL, prompt=PROMPT, max_tokens=99_999)


def test_a_client_that_leaves_ends_its_request(routed: Routed) -> None:
    stream = routed.router.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=3000, temperature=0, stream=True
    )
    next(iter(stream))
    assert routed.running() == 1
    stream.close()
    until(lambda: routed.running() == 0, "the request goes on without its client")

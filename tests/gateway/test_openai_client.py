"""The official `openai` package against real processes: everything that it is used for."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema
import openai
import pytest
import torch
from gateway_stack import BUNDLED, HERMES_TEMPLATE, MODEL, GatewayStack, gateway_stack, logs
from long_runs import scaled
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel
from small_model import small_model
from transformers import AutoModelForCausalLM

from splitpoint.client import AsyncClient, Client
from splitpoint.planning.plan import Residency
from splitpoint.speculation import DraftMethod

FLUENT = BUNDLED.name
SOURCES = ("asyncio", "collections", "contextlib", "dataclasses", "functools", "itertools")
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
LOOK_UP: Any = {"type": "function", "function": {"name": "look_up"}}


@pytest.fixture(scope="module")
def stack() -> Iterator[GatewayStack]:
    with gateway_stack(chat_template=HERMES_TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def client(stack: GatewayStack) -> Iterator[openai.OpenAI]:
    with stack.client() as made:
        yield made


@pytest.fixture(scope="module")
def fluent() -> Iterator[openai.OpenAI]:
    """A client of the bundled model: it repeats calls, and comes to the end of what it must say."""
    with (
        gateway_stack(model=BUNDLED, chat_template=HERMES_TEMPLATE) as running,
        running.client() as made,
    ):
        yield made


def user(text: str) -> ChatCompletionMessageParam:
    return {"role": "user", "content": text}


def calls_before(count: int) -> list[Any]:
    """A conversation whose calls the model repeats."""
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "c", "type": "function", "function": function}
    return [user("import os"), *[{"role": "assistant", "tool_calls": [call]}] * count]


# -- models, completions, chats --------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


def test_completions(client: openai.OpenAI, stack: GatewayStack) -> None:
    found = client.completions.create(
        model=MODEL, prompt=["import os", "def f("], n=2, max_tokens=6, temperature=0, echo=True
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    with Client(stack.scheduler_address) as direct:
        texts = [
            f"{prompt}{direct.generate(prompt, max_tokens=6).complete().text}"
            for prompt in ("import os", "def f(")
        ]
    assert [choice.text for choice in found.choices] == [texts[0], texts[0], texts[1], texts[1]]
    assert found.usage is not None
    assert found.usage.completion_tokens == 24


def test_a_chat_is_the_templates_prompt(client: openai.OpenAI, stack: GatewayStack) -> None:
    messages = [user("import os\nimport"), user("class A:")]
    found = client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=24, temperature=0
    )
    with Client(stack.scheduler_address) as direct:
        prompt = "import os\nimport\nclass A:\n"
        answer = direct.generate(prompt, max_tokens=24, temperature=0).complete()
    choice = found.choices[0]
    assert (choice.message.content, choice.message.role) == (answer.text, "assistant")
    assert choice.finish_reason == "length"
    assert found.usage is not None
    assert found.usage.completion_tokens == 24


def test_a_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    arguments: Any = {"model": MODEL, "messages": [user("class A:")], "seed": 5, "max_tokens": 30}
    whole = client.chat.completions.create(**arguments, n=2)
    texts, reasons, usage = ["", ""], ["", ""], None
    for chunk in client.chat.completions.create(
        **arguments, n=2, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage is not None
    assert usage.completion_tokens == 60
    assert whole.choices[0].message.content != whole.choices[1].message.content


def test_a_stream_tells_the_usage_so_far(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "n": 2, "max_tokens": 8}
    chats: Any = client.chat.completions.create(
        **body, messages=[user("class A:")], stream=True, stream_options=options
    )
    texts: Any = client.completions.create(
        **body, prompt=["import os", "def f("], stream=True, stream_options=options
    )
    for stream, counts in ((chats, {0: 0, 1: 0}), (texts, {0: 0, 1: 0, 2: 0, 3: 0})):
        prompts: dict[int, int] = {}
        *chunks, last = stream
        for chunk in chunks:
            assert chunk.usage is not None
            [choice] = chunk.choices
            usage = chunk.usage
            assert usage.prompt_tokens == prompts.setdefault(choice.index, usage.prompt_tokens) > 0
            assert counts[choice.index] <= usage.completion_tokens
            assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            counts[choice.index] = usage.completion_tokens
        assert last.usage is not None
        assert sum(counts.values()) == last.usage.completion_tokens == 8 * len(counts)
        # Each prompt counts once; a chat has one, with two answers.
        once = prompts[0] if stream is chats else prompts[0] + prompts[2]
        assert once == last.usage.prompt_tokens
    one = {"include_usage": False, "continuous_usage_stats": True}
    alone: Any = client.completions.create(
        model=MODEL, prompt="a", stream=True, extra_body={"stream_options": one}
    )
    assert {chunk.usage for chunk in alone} == {None}


def test_embeddings_are_the_states_that_transformers_computes(
    client: openai.OpenAI, stack: GatewayStack
) -> None:
    reference = reference_model()
    long = "def add(a, b):\n    return a + b\n\n\n" * 60
    texts = ["import os", long, f"{long}class A:", "x"]
    with Client(stack.scheduler_address) as direct:
        ids = [list(direct.tokenize(text).token_ids) for text in texts]

    def states(given: list[Any], **fields: Any) -> torch.Tensor:
        found = client.embeddings.create(model=MODEL, input=given, **fields)
        assert [each.index for each in found.data] == list(range(len(given)))
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
        assert found.model_dump()["pooling"] == "last"
        return torch.tensor([each.embedding for each in found.data])

    with torch.inference_mode():
        hidden = [
            reference(torch.tensor([each]), output_hidden_states=True).hidden_states[-1][0, -1]
            for each in ids
        ]
    wanted = torch.stack(hidden)
    raw = states(texts, extra_body={"normalize": False})
    torch.testing.assert_close(raw, wanted, atol=1e-4, rtol=1e-4)
    # The client asks for base64 by default; prefixes are cached by now.
    unit = torch.nn.functional.normalize(wanted, dim=1)
    for found in (states(texts), states(ids, encoding_format="float")):
        torch.testing.assert_close(found, unit, atol=1e-5, rtol=1e-4)
    again = client.embeddings.create(model=MODEL, input=f"{long}class B:").usage.model_dump()
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert len(ids[1]) - 64 < cached < again["prompt_tokens"]


@functools.cache
def reference_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(small_model(), dtype=torch.float32)


@functools.cache
def reference_logprobs(ids: tuple[int, ...]) -> torch.Tensor:
    """Return transformers' log-probabilities before each token but the first, [n - 1, V]."""
    reference = reference_model()
    with torch.inference_mode():
        return torch.log_softmax(reference(torch.tensor([ids])).logits[0, :-1], dim=-1)


@pytest.mark.parametrize("residency", [Residency.RESIDENT, Residency.STREAMED])
def test_prompt_logprobs_are_those_of_transformers(
    stack: GatewayStack, residency: Residency
) -> None:
    """Prompts lie within a prefill chunk and beyond it, also where all of it is cached."""
    text = "import os\n\n\ndef add(a, b):\n    return a + b\n\n\n" * 60
    with Client(stack.scheduler_address) as direct:
        ids = list(direct.tokenize(text).token_ids)
        assert len(ids) > 700
        for count in (1, 2, 513, 700, 700):
            found = direct.generate(
                ids[:count],
                max_tokens=2,
                prompt_logprobs=3,
                logprobs=1,
                residency=residency,
            ).complete()
            assert [each.token_id for each in found.prompt_logprobs] == ids[:count]
            assert found.prompt_logprobs[0].logprob is None
            assert (found.prompt_logprobs[0].rank, found.prompt_logprobs[0].top) == (0, ())
            assert (len(found.token_ids), found.usage.cached_tokens) == (2, 0)
            if count == 1:
                continue
            # No token sees a later one.
            wanted = reference_logprobs(tuple(ids[:700]))[: count - 1]
            chosen = wanted.gather(1, torch.tensor(ids[1:count])[:, None])
            told = torch.tensor([each.logprob for each in found.prompt_logprobs[1:]])
            torch.testing.assert_close(told, chosen[:, 0], atol=1e-4, rtol=0)
            tops = [each.top for each in found.prompt_logprobs[1:]]
            values = torch.tensor([[value for _, value in top] for top in tops])
            torch.testing.assert_close(values, wanted.topk(3, dim=1).values, atol=1e-4, rtol=0)
            for each, (token, value), row in zip(
                found.prompt_logprobs[1:], (top[0] for top in tops), wanted, strict=True
            ):
                assert float(row[token]) == pytest.approx(value, abs=1e-4)
                # A rank between those of values a little larger and smaller.
                least = int((row > float(row[each.token_id]) + 1e-4).sum()) + 1
                most = int((row > float(row[each.token_id]) - 1e-4).sum()) + 1
                assert least <= each.rank <= most
        # What it computed is stored.
        again = direct.generate(ids[:700], max_tokens=1).complete()
        assert again.usage.cached_tokens > 600


def test_prompt_logprobs_with_drafts_are_the_same(stack: GatewayStack) -> None:
    prompt = "import os\nimport sys\nimport os\nimport sys\nimport"
    with Client(stack.scheduler_address) as direct:
        plain, drafted = (
            direct.generate(prompt, max_tokens=16, prompt_logprobs=1, speculate=method).complete()
            for method in (DraftMethod.OFF, DraftMethod.AUTO)
        )
    assert drafted.prompt_logprobs == plain.prompt_logprobs
    assert drafted.token_ids == plain.token_ids


def test_echo_with_logprobs(client: openai.OpenAI, stack: GatewayStack) -> None:
    prompt = "import os\nprint(os.path)\n"
    with Client(stack.scheduler_address) as direct:
        ids = list(direct.tokenize(prompt, omits_special_tokens=True).token_ids)
        answer = direct.generate(ids, max_tokens=3, temperature=0).complete()
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "echo": True, "logprobs": 2}
    alone = client.completions.create(**body, prompt=ids, max_tokens=0)
    both = client.completions.create(**body, prompt=ids, max_tokens=3)
    wanted = reference_logprobs(tuple(ids))
    chosen = wanted.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    for found, count in ((alone, 0), (both, 3)):
        choice, usage = found.choices[0], found.usage
        assert choice.logprobs is not None
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), count)
        assert choice.text == prompt + (answer.text if count else "")
        assert choice.finish_reason == "length"
        told = choice.logprobs
        assert told.tokens is not None
        assert told.text_offset is not None
        assert told.token_logprobs is not None
        assert told.top_logprobs is not None
        assert len(told.tokens) == len(ids) + count
        for token, offset in zip(told.tokens, told.text_offset, strict=True):
            assert choice.text[offset : offset + len(token)] == token
        assert told.token_logprobs[0] is None
        assert told.top_logprobs[0] is None
        assert told.token_logprobs[1 : len(ids)] == pytest.approx(chosen, abs=1e-4)
        for token, value, top in zip(
            told.tokens[1:], told.token_logprobs[1:], told.top_logprobs[1:], strict=True
        ):
            assert 2 <= len(top) <= 3
            assert top[token] == value
    streamed = client.completions.create(**body, prompt=ids, max_tokens=0, stream=True)
    parts = [chunk.choices[0] for chunk in streamed if chunk.choices]
    assert "".join(part.text for part in parts) == prompt
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    values = [value for each in logprobs for value in each.token_logprobs or []]
    assert alone.choices[0].logprobs is not None
    assert values == alone.choices[0].logprobs.token_logprobs


def test_prompt_logprobs_are_objects_by_token(client: openai.OpenAI) -> None:
    extra = {"prompt_logprobs": 2}
    texts = client.completions.create(
        model=MODEL, prompt="import os", max_tokens=2, extra_body=extra
    )
    chat = client.chat.completions.create(
        model=MODEL, messages=[user("import os")], max_tokens=2, extra_body=extra
    )
    for given, usage in (
        (texts.choices[0].model_dump()["prompt_logprobs"], texts.usage),
        (chat.model_dump()["prompt_logprobs"], chat.usage),
    ):
        assert usage is not None
        assert len(given) == usage.prompt_tokens
        assert given[0] is None
        for position in given[1:]:
            ranks = sorted(each["rank"] for each in position.values())
            assert ranks[:2] == [1, 2]
            assert len(ranks) in (2, 3)
            assert all(each["logprob"] <= 0 for each in position.values())
            assert {type(each["decoded_token"]) for each in position.values()} == {str}


def test_embeddings_that_cannot_be(client: openai.OpenAI) -> None:
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ("a", {"dimensions": 8}, "dimensions"),
        ("", {}, "input"),
        (["a"] * 257, {}, "input"),
        ([1 << 30], {}, "input"),
        ([5] * 100_000, {}, "input"),
    ]
    for given, fields, parameter in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model=MODEL, input=given, **fields)
        assert (refused.value.param or "").startswith(parameter)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="none", input="a")


def test_fields_that_change_nothing_are_told(client: openai.OpenAI) -> None:
    """What would change the text is refused; one table has both."""

    def warning(raw: Any) -> str | None:
        found: str | None = raw.headers.get("x-splitpoint-warning")
        return found

    body: dict[str, Any] = {"model": MODEL, "messages": [user("class A:")], "max_tokens": 2}
    chats, ignored = client.chat.completions.with_raw_response, "ignored: user, metadata, store, "
    plain = chats.create(**body, seed=1, store=False)
    told = chats.create(
        **body, seed=1, store=True, user="u", metadata={"a": "b"}, reasoning_effort="high"
    )
    assert warning(plain) is None
    assert warning(told) == f"{ignored}reasoning_effort"
    assert told.parse().choices == plain.parse().choices
    streamed = chats.create(**body, stream=True, extra_body={"include_reasoning": False})
    assert warning(streamed) == "ignored: include_reasoning"
    assert len([*streamed.parse()]) > 1
    response = client.responses.with_raw_response.create(
        model=MODEL, input="class A:", max_output_tokens=2, reasoning={"effort": "low"}
    )
    assert warning(response) == "ignored: reasoning"
    for field in ({"verbosity": "low"}, {"logits_processors": ["x"]}, {"never_heard_of": 1}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**body, extra_body=field)
        assert refused.value.param == next(iter(field))
        assert warning(refused.value.response) is None


def test_seeds_repeat_answers(client: openai.OpenAI) -> None:
    def answer(**options: Any) -> str:
        found = client.chat.completions.create(
            model=MODEL, messages=[user("class A:")], max_tokens=24, **options
        )
        return found.choices[0].message.content or ""

    assert answer(seed=7) == answer(seed=7)
    # The second answer of a request has the next seed.
    assert answer(seed=8) != answer(seed=7)
    assert answer() != answer()


def test_log_probabilities(client: openai.OpenAI, stack: GatewayStack) -> None:
    found = client.chat.completions.create(
        model=MODEL,
        messages=[user("# é ü 你好")],
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    choice = found.choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    text = b"".join(bytes(each.bytes or ()) for each in content)
    assert text.decode(errors="replace").startswith(choice.message.content or "")
    with Client(stack.scheduler_address) as direct:
        answer = direct.generate("# é ü 你好\n", max_tokens=12, logprobs=3).complete()
    assert [each.logprob for each in content] == pytest.approx(
        [each.chosen for each in answer.logprobs], abs=1e-5
    )
    for each in content:
        assert len(each.top_logprobs) == 3
        assert each.top_logprobs[0].logprob == pytest.approx(each.logprob)
        assert each.top_logprobs[0].token == each.token


def test_stops(client: openai.OpenAI) -> None:
    arguments: Any = {"model": MODEL, "messages": [user("class A:")], "temperature": 0}
    text = client.chat.completions.create(**arguments, max_tokens=40).choices[0].message.content
    assert text is not None
    stop = text[10:14]
    choice = client.chat.completions.create(**arguments, max_tokens=40, stop=stop).choices[0]
    assert choice.message.content == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    assert (choice.model_extra or {})["stop_reason"] == stop


def test_special_tokens_can_be_text(client: openai.OpenAI) -> None:
    """The model is pushed to its token for the begin of a text, which it never chooses itself."""
    texts = [
        client.completions.create(
            model=MODEL,
            prompt="import os",
            temperature=0,
            max_tokens=3,
            logit_bias={"0": 100},
            extra_body={"skip_special_tokens": skips},
        )
        .choices[0]
        .text
        for skips in (True, False)
    ]
    assert texts == ["", "<s>" * 3]


def test_without_a_limit_the_answer_fills_the_context(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(
        model=MODEL,
        messages=[user("x = 1\n" * 1020)],
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert found.usage is not None
    assert found.usage.total_tokens == 4096
    assert found.choices[0].finish_reason == "length"


# -- cached tokens ------------------------------------------------------------------------------


def test_a_growing_conversation_reuses_its_prefix(client: openai.OpenAI) -> None:
    """Ten turns: of the prompt before, at least 90 % is cached each time."""
    rng = random.Random("a conversation")
    messages: list[ChatCompletionMessageParam] = []
    before = 0
    for turn in range(10):
        lines = [f"import {rng.choice(SOURCES)} as name{rng.randrange(1000)}" for _ in range(6)]
        messages.append(user("\n".join(lines)))
        found = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=20, seed=turn
        )
        usage = found.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert (usage.prompt_tokens_details.cached_tokens or 0) >= 0.9 * before, f"turn {turn}"
        assert usage.prompt_tokens > before
        before = usage.prompt_tokens
        messages.append({"role": "assistant", "content": found.choices[0].message.content or ""})


@dataclass(frozen=True)
class Asked:
    """A request for both doors: gRPC's options, and those of them that `openai` does not know."""

    prompt: str
    options: dict[str, Any]
    extra: dict[str, Any]
    is_chat: bool
    is_stream: bool


@pytest.mark.scaled
def test_the_text_through_http_is_that_through_grpc(stack: GatewayStack) -> None:
    """Random requests, texts and chats, each through both doors, whole or streamed."""
    rng = random.Random("two doors")
    asked = [random_request(rng, index) for index in range(scaled(24, chaos=100))]

    async def both() -> None:
        slots = asyncio.Semaphore(8)
        async with stack.async_client() as http, AsyncClient(stack.scheduler_address) as grpc:

            async def compare(each: Asked) -> None:
                async with slots:
                    options: Any = {**each.options, **each.extra}
                    if each.is_chat:
                        generation = grpc.chat(
                            [{"role": "user", "content": each.prompt}], **options
                        )
                    else:
                        generation = grpc.generate(each.prompt, **options)
                    answer = await generation.complete()
                    text, finish = await through_http(http, each)
                assert text == answer.text, each
                assert finish == answer.finish_reason.value

            await asyncio.gather(*(compare(each) for each in asked))

    asyncio.run(both())


async def through_http(client: openai.AsyncOpenAI, asked: Asked) -> tuple[str, str | None]:
    options: Any = {"model": MODEL, **asked.options, "extra_body": asked.extra}
    if asked.is_chat:
        create: Any = client.chat.completions.create
        options["messages"] = [user(asked.prompt)]
    else:
        create, options["prompt"] = client.completions.create, asked.prompt
    if not asked.is_stream:
        choice = (await create(**options)).choices[0]
        text = choice.message.content if asked.is_chat else choice.text
        return text, choice.finish_reason
    text, finish = "", None
    async for chunk in await create(**options, stream=True):
        choice = chunk.choices[0]
        text += (choice.delta.content if asked.is_chat else choice.text) or ""
        finish = choice.finish_reason or finish
    return text, finish


def random_request(rng: random.Random, index: int) -> Asked:
    lines = "".join(f"import {rng.choice(SOURCES)}\n" for _ in range(rng.randrange(1, 12)))
    options: dict[str, Any] = {
        "max_tokens": rng.randrange(1, 40),
        "temperature": rng.choice([0.0, 0.7, 1.3]),
        "seed": rng.randrange(-(2**40), 2**40),
    }
    known: dict[str, Any] = {
        "top_p": 0.9,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.3,
        "logit_bias": {17: 5.0, 200: -100.0},
        "stop": ["\n\n", "import"],
    }
    own: dict[str, Any] = {
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
    }
    options |= {name: known[name] for name in rng.sample(sorted(known), rng.randrange(3))}
    extra = {name: own[name] for name in rng.sample(sorted(own), rng.randrange(3))}
    return Asked(f"{lines}# {index} é\n", options, extra, rng.random() < 0.5, rng.random() < 0.5)


# -- tools and structured output ------------------------------------------------------------------


def test_a_model_calls_a_tool_by_itself(fluent: openai.OpenAI) -> None:
    arguments: Any = {
        "model": FLUENT,
        "messages": calls_before(8),
        "tools": [ADD, LOOK_UP],
        "temperature": 0,
        "stop": "\n",
        "max_tokens": 80,
    }
    choice = fluent.chat.completions.create(**arguments).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    with fluent.chat.completions.stream(**arguments) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls is not None
    [other] = streamed.message.tool_calls
    assert other.function.arguments == call.function.arguments
    # The answer goes back with the result.
    message = choice.message.model_dump(exclude_none=True)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    again = fluent.chat.completions.create(
        model=FLUENT,
        messages=[user("import os"), message, result],
        tools=[ADD],
        max_tokens=4,
    )
    assert again.choices[0].finish_reason == "length"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_can_be_forced(client: openai.OpenAI, is_stream: bool) -> None:
    for seed in range(2):
        arguments: Any = {
            "model": MODEL,
            "messages": [user("x = 1")],
            "tools": [ADD, LOOK_UP],
            "tool_choice": "required",
            "seed": seed,
            "max_tokens": 400,
        }
        if is_stream:
            with client.chat.completions.stream(**arguments) as stream:
                choice: Any = stream.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**arguments).choices[0]
        calls = choice.message.tool_calls or []
        assert calls
        if choice.finish_reason == "length":
            calls = calls[:-1]
        else:
            assert choice.finish_reason == "tool_calls"
        for call in calls:
            assert call.function.name in ("add", "look_up")
            given = json.loads(call.function.arguments)
            if call.function.name == "add":
                jsonschema.validate(given, ADD["function"]["parameters"])
            else:
                assert given == {}


def test_a_function_can_be_named(fluent: openai.OpenAI) -> None:
    choice = fluent.chat.completions.create(
        model=FLUENT,
        messages=[user("x = 1")],
        tools=[LOOK_UP, ADD],
        tool_choice={"type": "function", "function": {"name": "add"}},
        max_tokens=200,
        temperature=0,
    ).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])


class Author(BaseModel):
    name: Literal["Ada", "Grace"]
    born: int
    tags: list[Literal["x", "y"]]


def test_a_json_schema(client: openai.OpenAI) -> None:
    """The package makes the schema of a class, and reads the answer by it."""
    for seed in range(3):
        found = client.chat.completions.parse(
            model=MODEL,
            messages=[user("authors = [")],
            response_format=Author,
            seed=seed,
            max_completion_tokens=800,
        )
        assert found.choices[0].finish_reason == "stop"
        assert isinstance(found.choices[0].message.parsed, Author)


def test_any_json_object(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(
        model=MODEL,
        messages=[user("{")],
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=200,
        extra_body={"repetition_penalty": 1.1},
    ).choices[0]
    assert (choice.message.content or "").lstrip().startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)


# -- responses -----------------------------------------------------------------------------------


def test_responses(client: openai.OpenAI) -> None:
    arguments: Any = {
        "model": MODEL,
        "instructions": "import sys",
        "input": [user("class A:")],
        "max_output_tokens": 20,
        "temperature": 0,
    }
    found = client.responses.create(**arguments)
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "import sys"}, user("class A:")],
        max_tokens=20,
        temperature=0,
    )
    assert found.output_text == chat.choices[0].message.content
    assert found.status == "incomplete"
    with client.responses.stream(**arguments) as stream:
        events = [*stream]
    kinds = [event.type for event in events]
    assert events[-1].type == "response.incomplete"
    final = events[-1].response
    assert final.output_text == found.output_text
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert final.usage is not None
    assert final.usage.input_tokens_details.cached_tokens > 0


def test_a_response_calls_a_function_and_goes_on(fluent: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **ADD["function"]}
    arguments: Any = {
        "model": FLUENT,
        "input": "x = 1",
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_output_tokens": 200,
        "temperature": 0,
    }
    found = fluent.responses.create(**arguments)
    [call] = found.output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), tool["parameters"])
    with fluent.responses.stream(**arguments) as stream:
        [other] = stream.until_done().get_final_response().output
    assert other.type == "function_call"
    assert other.arguments == call.arguments
    items: Any = [
        user("x = 1"),
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]
    again = fluent.responses.create(model=FLUENT, input=items, max_output_tokens=4)
    assert again.status == "incomplete"


def test_a_response_goes_on_with_an_earlier_one(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
    asked = ["import os\nimport", "class A:", "def f("]
    items: list[Any] = []
    previous: Any = None
    for number, text in enumerate(asked):
        items.append(user(text))
        whole = client.responses.create(input=items, store=False, **arguments)
        if number == 1:  # the second one comes as a stream
            *_, last = client.responses.create(
                input=text, previous_response_id=previous.id, stream=True, **arguments
            )
            found = last.response
        else:
            found = client.responses.create(
                input=text,
                previous_response_id=previous.id if previous else openai.omit,
                **arguments,
            )
        assert found.output_text == whole.output_text
        assert found.usage is not None
        assert whole.usage is not None
        assert found.usage.input_tokens == whole.usage.input_tokens
        assert found.previous_response_id == (previous.id if previous else None)
        assert (found.to_dict()["store"], whole.to_dict()["store"]) == (True, False)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(input="a", previous_response_id=whole.id, **arguments)
        items += found.output
        previous = found
    # Instructions are those of the request alone.
    told = client.responses.create(
        input="x", instructions="# Be brief.", previous_response_id=previous.id, **arguments
    )
    more = client.responses.create(input="y", previous_response_id=told.id, **arguments)
    items += [user("x"), *told.output, user("y")]
    plain = client.responses.create(input=items, **arguments)
    assert more.output_text == plain.output_text


def test_a_response_by_a_schema(fluent: openai.OpenAI) -> None:
    found = fluent.responses.parse(
        model=FLUENT, input="authors = [", text_format=Author, max_output_tokens=800
    )
    assert isinstance(found.output_parsed, Author)


# -- errors ---------------------------------------------------------------------------------------


def test_errors_have_openais_form(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="none", messages=[user("a")])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.responses.create(model=MODEL, input="a", previous_response_id="resp_1")
    assert unknown.value.param == "previous_response_id"
    assert unknown.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model=MODEL, messages=[user("x = 1\n" * 9000)])
    assert "token" in too_long.value.message
    with pytest.raises(openai.BadRequestError) as bad_schema:
        client.chat.completions.create(
            model=MODEL,
            messages=[user("a")],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "nonsense"}},
            },
        )
    assert bad_schema.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as out_of_range:
        client.chat.completions.create(model=MODEL, messages=[user("a")], temperature=-1)
    assert out_of_range.value.param == "temperature"


def test_a_message_that_the_scheduler_refuses_is_named(client: openai.OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{no"}}
    messages: Any = [user("a"), {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=messages)
    assert raised.value.param == "messages[1].tool_calls[0].function.arguments"
    with pytest.raises(openai.BadRequestError) as reserved:
        client.chat.completions.create(
            model=MODEL,
            messages=[user("a")],
            extra_body={"chat_template_kwargs": {"messages": []}},
        )
    assert reserved.value.param == "chat_template_kwargs.messages"


# -- streams -----------------------------------------------------------------------------------


def test_a_client_that_leaves_cancels(client: openai.OpenAI, stack: GatewayStack) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[user("class A:")],
        max_tokens=3000,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for count, _ in enumerate(stream):
        if count == 3:
            break
    with Client(stack.scheduler_address) as direct:
        assert sum(worker.running_count for worker in direct.list_workers()) == 1
        stream.close()
        deadline = time.monotonic() + 30
        while sum(worker.running_count for worker in direct.list_workers()):
            assert time.monotonic() < deadline, "the request goes on"
            time.sleep(0.05)


def test_64_streams_at_once(stack: GatewayStack) -> None:
    """Each gets its own answer: the one that it gets alone."""

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        text = ""
        async for chunk in await client.chat.completions.create(
            model=MODEL,
            messages=[user(f"import {SOURCES[number % len(SOURCES)]}\nx{number} = ")],
            max_tokens=12,
            temperature=0,
            stream=True,
        ):
            text += chunk.choices[0].delta.content or ""
        return text

    async def all_at_once() -> None:
        async with stack.async_client() as client:
            together = await asyncio.gather(*(ask(client, number) for number in range(64)))
            assert together[::8] == [await ask(client, number) for number in range(0, 64, 8)]

    asyncio.run(all_at_once())


def test_a_stream_that_is_cut_ends_with_an_error(stack: GatewayStack) -> None:
    """A gateway that stops does not wait for long answers; each protocol has its own last event."""
    address = stack.start_gateway("--grace-seconds", "0.5")
    child = stack.fleet.server.children[-1]
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        arguments: Any = {"model": MODEL, "stream": True, "extra_body": {"ignore_eos": True}}
        response = client.responses.create(input="class A:", max_output_tokens=3500, **arguments)
        assert next(iter(response)).type == "response.created"
        chat = client.chat.completions.create(
            messages=[user("class A:")], max_tokens=3500, **arguments
        )
        assert next(iter(chat)).choices
        child.signal(signal.SIGTERM)
        *_, last = response
        assert last.type == "error"
        assert last.code == "draining"
        with pytest.raises(openai.APIError, match="stopping"):
            for _ in chat:
                pass
    child.wait_ended()


def test_no_prompt_is_in_a_log(client: openai.OpenAI, stack: GatewayStack) -> None:
    secret = "xylophone_quartz_1234"
    client.chat.completions.create(
        model=MODEL, messages=[user(secret)], max_tokens=2, extra_body={"cache_salt": f"s{secret}"}
    )
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=MODEL, messages=[user(secret)], stop=[""])
    assert secret not in logs(stack)

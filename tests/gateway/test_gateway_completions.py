"""Completions, models and tokens by HTTP, over a scheduler with a double for a worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai.types import Completion
from running_gateway import RunningGateway, running_gateway
from scheduler_doubles import SHAPE, TOKENIZER, Stack, Steps, answer, stack

from gateway_service.openai.answers import Answer
from gateway_service.openai.completions import TokenLogprobs, read_completion
from gateway_service.settings import Limits
from splitpoint.errors import Unavailable
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

PROMPT = "def main():"
IDS = TOKENIZER.encode(PROMPT, 100)
BODY = {"model": "stdlib-llama", "prompt": PROMPT}
STREAM_USAGE = {"include_usage": True, "continuous_usage_stats": True}


@dataclass
class Front:
    """A scheduler, and a gateway before it."""

    stack: Stack
    http: RunningGateway


@pytest.fixture
async def front() -> AsyncIterator[Front]:
    async with stack() as behind, running_gateway(behind.address) as http:
        yield Front(behind, http)


def text_of(ids: list[int]) -> str:
    return TOKENIZER.decode(ids)


async def test_an_answer_is_that_of_the_scheduler(front: Front) -> None:
    request = pb.GenerateRequest(text=PROMPT)
    request.sampling.max_tokens = 12
    grpc_answer = await front.stack.generate(request)
    found = (await front.http.complete(max_tokens=12)).json
    assert found.pop("id").startswith("cmpl-")
    assert found.pop("created") > 1.7e9
    assert found == {
        "object": "text_completion",
        "model": "stdlib-llama",
        "choices": [
            {
                "index": 0,
                "text": grpc_answer.text,
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(IDS),
            "completion_tokens": 12,
            "total_tokens": len(IDS) + 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_stream_has_the_same(front: Front) -> None:
    whole = (await front.http.complete(max_tokens=12)).json
    options = {"include_usage": True}
    found = await front.http.complete(max_tokens=12, stream=True, stream_options=options)
    assert found.headers["cache-control"] == "no-store"
    *chunks, last, usage = found.events
    assert {each["id"] for each in found.events} == {found.headers["x-request-id"]}
    text = "".join(each["choices"][0]["text"] for each in [*chunks, last])
    assert text == whole["choices"][0]["text"]
    assert all(each["usage"] is None for each in [*chunks, last])
    assert {each["choices"][0]["finish_reason"] for each in chunks} == {None}
    assert last["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])


async def test_without_options_a_stream_has_no_usage(front: Front) -> None:
    events = (await front.http.complete(max_tokens=3, stream=True)).events
    assert 2 <= len(events) <= 4
    assert not any("usage" in each for each in events)


async def test_the_text_has_what_ended_it_if_asked(front: Front) -> None:
    tokens = answer(IDS, 16)
    text, ending = text_of(tokens), text_of(tokens[6:7])
    stop: dict[str, Any] = {"stop": ending, "max_tokens": 16}
    kept = {"include_stop_str_in_output": True}
    [before] = (await front.http.complete(**stop)).json["choices"]
    [whole] = (await front.http.complete(**stop, **kept)).json["choices"]
    assert (before["text"], whole["text"]) == (
        text[: text.index(ending)],
        text[: text.index(ending)] + ending,
    )
    events = (await front.http.complete(**stop, **kept, stream=True)).events
    assert "".join(each["choices"][0]["text"] for each in events) == whole["text"]
    ids = {"stop_token_ids": [tokens[6]], "max_tokens": 16}
    [before] = (await front.http.complete(**ids)).json["choices"]
    [whole] = (await front.http.complete(**ids, **kept)).json["choices"]
    assert whole["finish_reason"] == "stop"
    assert whole["text"] == before["text"] + ending


async def test_a_prompt_is_cut_at_its_front(front: Front) -> None:
    long = IDS * (SHAPE.context_length // len(IDS) + 1)
    spelled = TOKENIZER.encode(text_of(long), 1 << 20)
    assert len(spelled) > SHAPE.context_length
    for prompt, count, wanted in (
        (PROMPT, 2, IDS[-2:]),
        (IDS, 2, IDS[-2:]),
        (PROMPT, 50, IDS),
        (text_of(long), 20, spelled[-20:]),
        (long, 20, long[-20:]),
    ):
        found = await front.http.complete(prompt=prompt, truncate_prompt_tokens=count, max_tokens=4)
        assert found.status == 200, found.json
        assert list(front.stack.workers[0].admits[-1].prompt_token_ids) == wanted


async def test_bad_words_and_allowed_tokens_reach_the_worker(front: Front) -> None:
    await front.http.complete(bad_words=["main", " def"], allowed_token_ids=[5, 6], max_tokens=1)
    command = front.stack.workers[0].admits[-1]
    assert list(command.sampling.allowed_token_ids) == [5, 6]
    words = [list(each.token_ids) for each in command.bad_words]
    assert TOKENIZER.encode("main", 9, adds_special_tokens=False) in words
    texts = {text_of(each).strip() for each in words}
    assert texts == {"main", "def"}


async def test_several_prompts_and_answers(front: Front) -> None:
    body: dict[str, Any] = {"prompt": [PROMPT, IDS[:2]], "n": 2, "max_tokens": 4, "seed": 7}
    whole = (await front.http.complete(**body)).json
    texts = [each["text"] for each in whole["choices"]]
    assert [each["index"] for each in whole["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1] == text_of(answer(IDS, 4))
    assert texts[2] == texts[3] == text_of(answer(IDS[:2], 4))
    assert whole["usage"]["prompt_tokens"] == len(IDS) + 2
    assert whole["usage"]["completion_tokens"] == 16
    # Each is a request of its own, in any order; seeds count up.
    seeds = {each.request_id: each.sampling.seed for each in front.stack.workers[0].admits}
    name = whole["id"]
    assert seeds == {name: 7, f"{name}-1": 8, f"{name}-2": 7, f"{name}-3": 8}
    events = (await front.http.complete(**body, stream=True)).events
    streamed = ["", "", "", ""]
    for event in events:
        (choice,) = event["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts


async def test_echo(front: Front) -> None:
    body: dict[str, Any] = {"prompt": [PROMPT, IDS], "echo": True, "max_tokens": 3}
    whole = (await front.http.complete(**body)).json
    expected = PROMPT + text_of(answer(IDS, 3))
    assert [each["text"] for each in whole["choices"]] == [expected, expected]
    events = (await front.http.complete(**body, stream=True)).events
    assert "".join(e["choices"][0]["text"] for e in events if not e["choices"][0]["index"]) == (
        expected
    )


async def test_logprobs(front: Front) -> None:
    whole = (await front.http.complete(max_tokens=3, logprobs=2)).json
    found = whole["choices"][0]["logprobs"]
    ids = answer(IDS, 3)
    assert "".join(found["tokens"]) == text_of(ids)
    lengths = [len(token) for token in found["tokens"]]
    assert found["text_offset"] == [sum(lengths[:n]) for n in range(3)]
    assert found["token_logprobs"] == [-1.0, -1.0, -1.0]
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        others = [top[each] for each in top if each != token]
        assert (top[token], others) == (-1.0, [0.0, -1.0])  # the double's choice is none of them
    events = (await front.http.complete(max_tokens=3, logprobs=2, stream=True)).events
    parts = [each["choices"][0]["logprobs"] for each in events[:-1]]
    for name, values in found.items():
        assert [value for part in parts for value in part[name]] == values
    alone = (await front.http.complete(max_tokens=2, logprobs=0)).json
    Completion.model_validate(alone, strict=True)
    assert alone["choices"][0]["logprobs"]["top_logprobs"] == [
        {token: -1.0} for token in found["tokens"][:2]
    ]


def test_logprobs_always_have_the_chosen_token() -> None:
    top = [types_pb2.TokenLogprob(token_bytes=b"x", logprob=-0.5)]
    position = types_pb2.PositionLogprobs(
        chosen_logprob=-7, chosen_token_bytes="é".encode(), top=top
    )
    assert TokenLogprobs(1).add([position])["top_logprobs"] == [{"x": -0.5, "é": -7.0}]
    position.chosen_token_bytes, position.chosen_logprob = b"x", -0.5
    assert TokenLogprobs(1).add([position])["top_logprobs"] == [{"x": -0.5}]


async def test_stops(front: Front) -> None:
    text, third = text_of(answer(IDS, 12)), answer(IDS, 3)[2]
    stop = text[5:8]
    # The double of the worker knows no texts, and so does not say why it would have stopped.
    (choice,) = (await front.http.complete(max_tokens=12, stop=[stop, "\0never"])).json["choices"]
    assert choice["text"] == text[: text.index(stop)]
    (choice,) = (await front.http.complete(max_tokens=12, stop_token_ids=[third])).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text_of(answer(IDS, 2)), "stop")


def test_what_ended_an_answer() -> None:
    job = read_completion({"model": "m", "prompt": "x"}, request_id="i", created=3)
    complete = pb.GenerateComplete(finish_reason=types_pb2.FINISH_REASON_STOP, matched_stop="ab")
    ended = {"finish_reason": "stop", "stop_reason": "ab"}
    (choice,) = job.result([Answer(complete=complete)])["choices"]
    assert choice.items() >= ended.items()
    frame = job.writer().complete(0, complete)
    (sent,) = json.loads(frame.removeprefix(b"data: "))["choices"]
    assert sent.items() >= ended.items()
    complete.finish_reason = types_pb2.FINISH_REASON_CANCELLED
    with pytest.raises(Unavailable):
        job.result([Answer(complete=complete)])


async def test_every_field_reaches_the_worker(front: Front) -> None:
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 11,
        "min_p": 0.25,
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [9],
    }
    more = {"logit_bias": {"17": -5}, "priority": 4, "cache_salt": "s", "user": "u"}
    found = await front.http.complete(max_tokens=2, **{**sampling, **more})
    assert found.status == 200
    (admit,) = front.stack.workers[0].admits
    for name, value in sampling.items():
        assert getattr(admit.sampling, name) == value, name
    assert admit.sampling.logit_bias == {17: -5.0}
    # OpenAI samples where a client says nothing, and so does the gateway.
    await front.http.ask("POST", "/v1/completions", {"model": "stdlib-llama", "prompt": "x"})
    admit = front.stack.workers[0].admits[-1]
    assert (admit.sampling.temperature, admit.sampling.max_tokens) == (1.0, 16)


async def test_the_plan_of_an_answer(front: Front) -> None:
    whole = (await front.http.complete(max_tokens=1, include_plan=True)).json
    assert whole["splitpoint"]["plan"]["reason"]
    options = {"include_plan": True}
    events = (await front.http.complete(max_tokens=1, stream=True, stream_options=options)).events
    assert events[-1]["splitpoint"]["plan"]["reason"]
    assert "usage" not in events[-1]
    assert "splitpoint" not in (await front.http.complete(max_tokens=1)).json


async def test_models(front: Front) -> None:
    listed = (await front.http.ask("GET", "/v1/models")).json
    (model,) = listed["data"]
    assert listed["object"] == "list"
    assert (model["id"], model["object"]) == ("stdlib-llama", "model")
    assert model["max_model_len"] == SHAPE.context_length
    assert (await front.http.ask("GET", "/v1/models/stdlib-llama")).json == model
    missing = await front.http.ask("GET", "/v1/models/owner/other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_tokenize_and_detokenize(front: Front) -> None:
    asked = {"prompt": PROMPT, "return_token_strs": True}
    found = (await front.http.ask("POST", "/tokenize", asked)).json
    assert found["tokens"] == IDS
    assert (found["count"], found["max_model_len"]) == (len(IDS), SHAPE.context_length)
    assert len(found["token_strs"]) == len(IDS)
    back = await front.http.ask("POST", "/detokenize", {"tokens": IDS})
    assert back.json == {"prompt": PROMPT}
    wrong_ones: list[tuple[dict[str, Any], str]] = [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ({"prompt": "a", "tools": []}, "tools"),
        (
            {"messages": [{"role": "user", "content": "b"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ({"prompt": ""}, "prompt"),
    ]
    for body, parameter in wrong_ones:
        wrong = await front.http.ask("POST", "/tokenize", body)
        assert (wrong.status, wrong.error["param"]) == (400, parameter)
    wrong = await front.http.ask("POST", "/detokenize", {"tokens": [SHAPE.vocabulary_size]})
    assert (wrong.status, wrong.error["param"]) == (400, "tokens[0]")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [[1], [True]]}, "prompt[1][0]"),
    ({"prompt": [2**31]}, "prompt[0]"),
    ({"prompt": [SHAPE.vocabulary_size]}, "prompt[0]"),  # the scheduler knows
    ({"prompt": "\ud800"}, "prompt"),
    ({"model": 3}, "model"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"n": 128, "prompt": ["a", "b", "c"]}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"echo": True, "logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": SHAPE.context_length}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"logprobs": 21}, "logprobs"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {str(SHAPE.vocabulary_size): 1}}, f"logit_bias[{SHAPE.vocabulary_size}]"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"guided_json": "{}", "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": SHAPE.context_length}, "truncate_prompt_tokens"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [SHAPE.vocabulary_size]}, "allowed_token_ids[0]"),
    ({"allowed_token_ids": [1], "guided_regex": "a"}, "allowed_token_ids"),
    ({"bad_words": ["a", ""]}, "bad_words[1]"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"cache_salt": "s" * 129}, "cache_salt"),
    ({"priority": 11}, "priority"),
]


async def test_wrong_bodies_name_their_field(front: Front) -> None:
    asked = [front.http.complete(**body) for body, _ in WRONG]
    for (body, parameter), found in zip(WRONG, await asyncio.gather(*asked), strict=True):
        assert found.status == 400, body
        assert found.error["param"] == parameter, body
        assert found.error["type"] == "invalid_request_error"
    assert front.stack.workers[0].admits == []


async def test_errors_of_the_scheduler(front: Front) -> None:
    missing = await front.http.complete(model="other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    long = await front.http.complete(prompt=[5] * SHAPE.context_length)
    assert (long.status, long.error["code"]) == (400, "context_length_exceeded")
    assert long.error["param"] == "prompt"
    huge = await front.http.complete(prompt="word " * 1_000_000)
    assert (huge.status, huge.error["code"]) == (413, "body_too_large")
    limits = Limits(body_bytes=8 << 20)
    async with running_gateway(front.stack.address, limits=limits) as http:
        huge = await http.complete(prompt="word " * 1_000_000)
        assert (huge.status, huge.error["code"]) == (413, "message_too_large")
    # Also of a stream: nothing was sent before.
    missing = await front.http.complete(model="other", stream=True, n=2)
    assert (missing.status, missing.headers["content-type"]) == (404, "application/json")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "invalid_json"),
        (b'{"model": "m", "prompt": "x", "seed": NaN}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"model": "m", "prompt": "\xff"}', "invalid_json"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b"[1]", "invalid_argument"),
        (b"", "invalid_json"),
        (json.dumps(BODY).encode("utf-8-sig"), "invalid_json"),
        (json.dumps(BODY).encode("utf-16"), "invalid_json"),
        (json.dumps(BODY).encode("utf-32"), "invalid_json"),
    ],
)
async def test_bodies_that_are_no_object(front: Front, body: bytes, code: str) -> None:
    found = await front.http.ask("POST", "/v1/completions", body)
    assert (found.status, found.error["code"]) == (400, code)


async def test_a_stream_goes_on_after_its_scheduler_was_lost() -> None:
    """The client sees one answer."""
    async with stack() as first, stack() as second:
        first.workers[0].pace = steps = Steps()
        async with running_gateway(f"{first.address},{second.address}") as http:
            asked = asyncio.create_task(http.complete(max_tokens=12, stream=True))
            steps.allow(5)
            await first.until(lambda: first.workers[0].steps >= 5)
            await first.scheduler.stop(0)
            found = await asked
            assert http.gateway.upstream.retry_count >= 1
            text = "".join(event["choices"][0]["text"] for event in found.events)
            assert text == text_of(answer(IDS, 12))
            (admit,) = second.workers[0].admits
            # Not computed again; how many had arrived depends on the machine.
            assert admit.delivered_token_ids


@pytest.mark.parametrize(("given", "sent"), [(-10, 10), (4, -4), (None, 0)])
def test_smaller_priorities_start_first(given: int | None, sent: int) -> None:
    """As in vLLM; the scheduler starts larger ones first."""
    job = read_completion({**BODY, "priority": given}, request_id="i", created=3)
    assert [request.priority for request in job.requests] == [sent]


def test_heads_of_frames_are_json() -> None:
    """What is rendered by hand is what json.dumps would write."""
    body = {"model": 'a"\\\u2028ü', "prompt": "x", "stream": True}
    job = read_completion(body, request_id="i", created=3)
    text = 'quote " back \\ line \n \u2028 \U0001f600 \x00'
    frame = job.writer().chunk(0, pb.GenerateChunk(token_ids=[1], text=text))
    value = json.loads(frame.removeprefix(b"data: "))
    assert frame == b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
    assert (value["model"], value["choices"][0]["text"]) == (body["model"], text)


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_a_character_of_several_tokens_is_one_event(has_logprobs: bool) -> None:
    """Its text comes with its last token. Events without text are sent for log-probabilities."""
    more = {"logprobs": 0} if has_logprobs else {"stream_options": STREAM_USAGE}
    body = {**BODY, "stream": True, **more}
    writer = read_completion(body, request_id="i", created=3).writer()
    chunks = [
        pb.GenerateChunk(
            token_ids=[byte],
            text="\U0001f600" if byte == 0x80 else "",
            logprobs=[types_pb2.PositionLogprobs(chosen_token_bytes=bytes([byte]))],
        )
        for byte in "\U0001f600".encode()
    ]
    frames = [frame for chunk in chunks if (frame := writer.chunk(0, chunk))]
    events = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    texts = [each["choices"][0]["text"] for each in events]
    assert texts == (["", "", "", "\U0001f600"] if has_logprobs else ["\U0001f600"])
    if not has_logprobs:
        assert events[0]["usage"]["completion_tokens"] == 4

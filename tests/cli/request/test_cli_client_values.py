"""What clients take as arguments of `generate`: one value or several, and never the wrong type."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from fake_scheduler import Script, fake_scheduler
from typer.testing import CliRunner

from splitpoint import errors
from splitpoint.client import AsyncClient, Client
from splitpoint.client.requests import generate_request
from splitpoint.planning.plan import Residency, RestoreMethod
from splitpoint.selection import Selection
from splitpoint.speculation import DraftMethod
from splitpoint.transport import convert
from splitpoint.v1 import scheduler_pb2, types_pb2
from splitpoint_cli.main import app


@pytest.fixture
def script(socket_address: str) -> Iterator[Script]:
    with fake_scheduler(socket_address) as script:
        yield script


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_one_value_or_several(script: Script, asynchronous: bool) -> None:
    async def generate(prompt: Any, **options: Any) -> scheduler_pb2.GenerateRequest:
        if asynchronous:
            async with AsyncClient(script.address) as client:
                await client.generate(prompt, **options).complete()
        else:
            with Client(script.address) as client:
                client.generate(prompt, **options).complete()
        return script.requests[-1]

    request = await generate("abc", stop="os", stop_token_ids=7)
    assert (list(request.sampling.stop), list(request.sampling.stop_token_ids)) == (["os"], [7])
    request = await generate((i for i in range(97, 100)), stop=("a", "b"), stop_token_ids={5})
    assert list(request.token_ids.ids) == [97, 98, 99]
    assert list(request.sampling.stop) == ["a", "b"]
    assert list(request.sampling.stop_token_ids) == [5]
    request = await generate(
        np.array([97, 98], dtype=np.int32),
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        logit_bias=MappingProxyType({np.int16(4): -1}),
        stop=iter(["x"]),
    )
    assert list(request.token_ids.ids) == [97, 98]
    assert (request.sampling.max_tokens, request.sampling.temperature) == (3, 0.5)
    assert dict(request.sampling.logit_bias) == {4: -1.0}
    assert list(request.sampling.stop) == ["x"]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_wrong_type_names_its_argument_and_nothing_is_sent(
    script: Script, kind: type[Client] | type[AsyncClient]
) -> None:
    client = kind(script.address)
    for prompt, options, said in WRONG:
        with pytest.raises(TypeError) as caught:
            client.generate(prompt, **options)
        assert str(caught.value) == said
    closing = client.close()
    if closing is not None:
        await closing
    assert script.requests == []


WRONG: list[tuple[Any, Any, str]] = [
    (b"abc", {}, "prompt must be text or a sequence of token ids, not a bytes"),
    ({1: 2}, {}, "prompt must be text or a sequence of token ids, not a dict"),
    ({1, 2}, {}, "prompt must be text or a sequence of token ids, not a set"),
    (None, {}, "prompt must be text or a sequence of token ids, not a NoneType"),
    (5, {}, "prompt must be text or a sequence of token ids, not an int"),
    ([1, "2"], {}, "prompt[1] must be an int, not a str"),
    ([1, True], {}, "prompt[1] must be an int, not a bool"),
    ([1.0], {}, "prompt[0] must be an int, not a float"),
    ("a", {"stop": 5}, "stop must be a string or a list of strings, not an int"),
    ("a", {"stop": b"os"}, "stop must be a string or a list of strings, not a bytes"),
    ("a", {"stop": ["x", None]}, "stop[1] must be a str, not a NoneType"),
    ("a", {"stop": {"x": 1}}, "stop must be a string or a list of strings, not a dict"),
    ("a", {"stop_token_ids": "12"}, "stop_token_ids must be an int or a list of ints, not a str"),
    (
        "a",
        {"stop_token_ids": b"12"},
        "stop_token_ids must be an int or a list of ints, not a bytes",
    ),
    ("a", {"stop_token_ids": [True]}, "stop_token_ids[0] must be an int, not a bool"),
    ("a", {"logit_bias": [(1, 2)]}, "logit_bias must be a mapping, not a list"),
    ("a", {"logit_bias": {"1": 2}}, "a key of logit_bias must be an int, not a str"),
    ("a", {"logit_bias": OrderedDict({1: "2"})}, "logit_bias[1] must be a number, not a str"),
    ("a", {"logit_bias": {1: True}}, "logit_bias[1] must be a number, not a bool"),
    ("a", {"max_tokens": True}, "max_tokens must be an int, not a bool"),
    ("a", {"max_tokens": 5.0}, "max_tokens must be an int, not a float"),
    ("a", {"max_tokens": "5"}, "max_tokens must be an int, not a str"),
    ("a", {"seed": np.bool_(True)}, "seed must be an int, not a bool"),
    ("a", {"temperature": "0.5"}, "temperature must be a number, not a str"),
    ("a", {"temperature": True}, "temperature must be a number, not a bool"),
    ("a", {"ignore_eos": 1}, "ignore_eos must be a bool, not an int"),
    ("a", {"logprobs": True}, "logprobs must be an int, not a bool"),
    ("a", {"cache_salt": 1}, "cache_salt must be bytes or a str, not an int"),
    ("a", {"cache_salt": bytearray(b"s")}, "cache_salt must be bytes or a str, not a bytearray"),
    ("a", {"worker": 1}, "worker must be a str, not an int"),
    ("a", {"request_id": 1}, "request_id must be a str, not an int"),
    ("a", {"split": "auto"}, "split must be an int, not a str"),
    ("a", {"residency": 1}, "residency must be a Residency or its value, not an int"),
    ("a", {"restore": 1}, "restore must be a RestoreMethod or its value, not an int"),
    ("a", {"speculate": 1}, "speculate must be a DraftMethod or its value, not an int"),
    ("a", {"speculative_tokens": "4"}, "speculative_tokens must be an int, not a str"),
    ("a", {"prompt_lookup_min": True}, "prompt_lookup_min must be an int, not a bool"),
    ("a", {"select": 0.1}, "select must be a str, not a float"),
    ("a", {"timeout": "5"}, "timeout must be a number, not a str"),
]


def test_every_sampling_field_refuses_a_foreign_object() -> None:
    # Structured output has options of its own, and `generate` returns no embeddings.
    without = {"structured_output", "returns_hidden_state"}
    sampling = [
        each for each in types_pb2.SamplingParams.DESCRIPTOR.fields if each.name not in without
    ]
    structures = types_pb2.StructuredOutput.DESCRIPTOR.fields
    for field in [*sampling, *structures]:
        with pytest.raises(TypeError, match=rf"^{field.name}\b.* must be .*, not an object$"):
            generate_request("a", {field.name: object()})  # type: ignore[misc]


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ([1, 1 << 40], {}, "prompt[1]"),
        ("\ud800", {}, "prompt"),
        ("a", {"stop": ["x", "\ud800"]}, "stop[1]"),
        ("a", {"max_tokens": 1 << 40}, "max_tokens"),
        ("a", {"seed": 1 << 63}, "seed"),
        ("a", {"temperature": 10**400}, "temperature"),
        ("a", {"residency": "elsewhere"}, "residency"),
        ("a", {"restore": "magic"}, "restore"),
        ("a", {"speculate": "eagle"}, "speculate"),
        ("a", {"speculative_tokens": 1 << 40}, "speculative_tokens"),
        ("a", {"timeout": float("nan")}, "timeout"),
        ("a", {"timeout": 0}, "timeout"),
    ],
)
def test_a_value_that_no_field_holds_names_its_argument(
    script: Script, prompt: Any, options: Any, field: str
) -> None:
    with Client(script.address) as client:
        with pytest.raises(errors.InvalidArgument) as caught:
            client.generate(prompt, **options)
        assert caught.value.field == field
        assert caught.value.message.startswith(field)
    assert script.requests == []


def test_what_enumerations_and_numbers_may_be() -> None:
    request = generate_request(
        "a",
        {
            "residency": "streamed",  # type: ignore[typeddict-item]
            "restore": RestoreMethod.LOAD,
            "temperature": Fraction(1, 2),  # type: ignore[typeddict-item]
            "stop": None,
            "seed": None,
        },
    )
    assert request.residency == types_pb2.RESIDENCY_STREAMED
    assert request.restore_method == types_pb2.RESTORE_METHOD_LOAD
    assert request.sampling.temperature == 0.5
    assert not request.sampling.HasField("seed")
    same = generate_request("a", {"residency": Residency.STREAMED})
    assert same.residency == request.residency


def test_a_salt_is_bytes_or_text_in_utf_8() -> None:
    salts = [generate_request("a", {"cache_salt": salt}).cache_salt for salt in (b"\xff", "é", "")]
    assert salts == [b"\xff", "é".encode(), b""]
    with pytest.raises(errors.InvalidArgument, match="cache_salt is not valid UTF-8"):
        generate_request("a", {"cache_salt": "\ud800"})


def test_speculation_is_sent_as_far_as_it_is_given() -> None:
    plain = generate_request("a", {"speculate": None})
    assert not plain.HasField("speculation"), "the worker's"
    asked = generate_request("a", {"speculate": DraftMethod.SUFFIX, "speculative_tokens": 0})
    assert asked.speculation == types_pb2.SpeculativeParams(
        method=types_pb2.DRAFT_METHOD_SUFFIX, num_speculative_tokens=0
    )
    assert asked.speculation.HasField("num_speculative_tokens")
    least = generate_request("a", {"prompt_lookup_min": 3})
    assert least.speculation == types_pb2.SpeculativeParams(prompt_lookup_min=3)


async def test_other_calls_check_their_arguments_too(script: Script) -> None:
    wrong: Any = 5
    with Client(script.address) as client:
        with pytest.raises(TypeError, match="text must be a str, not an int"):
            client.tokenize(wrong)
        with pytest.raises(TypeError, match="name must be a str, not an int"):
            client.get_model(wrong)
        with pytest.raises(TypeError, match="cached_tokens must be an int, not a str"):
            client.explain_plan("1", 2)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"unexpected keyword arguments: max_token$"):
            client.explain_plan(1, 2, max_token=3)  # type: ignore[call-arg]
        with pytest.raises(errors.InvalidArgument, match="objective 'x' is not one of latency"):
            client.explain_plan(1, 2, objective="x")  # type: ignore[arg-type]
    async with AsyncClient(script.address) as other:
        with pytest.raises(TypeError, match="text must be a str, not an int"):
            await other.tokenize(wrong)
    assert script.explained == []


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_what_is_too_large_is_refused_before_it_is_sent(
    script: Script, kind: type[Client] | type[AsyncClient]
) -> None:
    client = kind(script.address)
    for prompt in ("x" * (32 << 20), [1 << 20] * (2 << 20)):
        with pytest.raises(errors.ResourceExhausted, match="at most 4 MiB can be sent") as caught:
            client.generate(prompt)
        assert caught.value.metadata["limit_bytes"] == str(4 << 20)
    closing = client.close()
    if closing is not None:
        await closing
    assert script.requests == []


async def test_other_requests_that_are_too_large_are_refused_as_well(script: Script) -> None:
    text = "x" * (32 << 20)
    said = "at most 4 MiB can be sent"
    with Client(script.address) as client, pytest.raises(errors.ResourceExhausted, match=said):
        client.tokenize(text)
    async with AsyncClient(script.address) as other:
        with pytest.raises(errors.ResourceExhausted, match=said):
            await other.tokenize(text)


async def test_a_deadline_that_has_passed_says_what_did_not_happen(script: Script) -> None:
    script.endless = True
    said = r"the generation did not end within 0\.1 s"
    with Client(script.address) as client, pytest.raises(errors.DeadlineExceeded, match=said):
        client.generate("abc", timeout=0.1).complete()
    async with AsyncClient(script.address) as other:
        with pytest.raises(errors.DeadlineExceeded, match=said):
            await other.generate("abc", timeout=0.1).complete()


def test_a_selection_is_sent_from_its_text_and_as_it_is() -> None:
    assert not generate_request("a", {"select": None}).HasField("selection")
    for text in (
        *("columns:0.1", "infinigen:alpha=inf,cap=1.0,int8=no", "window:0.05,verify"),
        *("columns:0.1,full_layers=0,pool=0.6", "lowrank:0.1,full_layers=0,pool=0.6,policy=lru"),
    ):
        selection = Selection.parsed(text)
        sent = generate_request("a", {"select": text}).selection
        assert convert.selection_from_proto(sent) == selection
        assert generate_request("a", {"select": selection}).selection == sent
    for text, field in (
        ("best:0.1", "selection.method"),
        ("columns:2", "selection.ratio"),
        ("h2o:0.1", "selection.method"),
        ("columns:0.1,pool=0.8", "selection.pool"),
        (f"columns:budget_tokens={1 << 40}", "budget_tokens"),
    ):
        with pytest.raises(errors.InvalidArgument) as caught:
            generate_request("a", {"select": text})
        assert caught.value.field == field


MESSAGES = [{"role": "user", "content": "naïve 😀"}]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_chat_is_sent_as_json(script: Script, asynchronous: bool) -> None:
    async def chat(messages: Any, **options: Any) -> scheduler_pb2.GenerateRequest:
        if asynchronous:
            async with AsyncClient(script.address) as client:
                await client.chat(messages, **options).complete()
        else:
            with Client(script.address) as client:
                client.chat(messages, **options).complete()
        return script.requests[-1]

    request = await chat(MESSAGES, max_tokens=3, worker="1")
    assert json.loads(request.chat.messages) == MESSAGES
    assert "naïve 😀" in request.chat.messages  # escapes would be longer
    assert (request.chat.tools, request.chat.template_arguments) == ("", "")
    assert (request.sampling.max_tokens, request.worker_id) == (3, "1")
    assert not request.chat.omits_generation_prompt
    tools = ({"type": "function", "function": MappingProxyType({"name": "f"})} for _ in range(2))
    request = await chat(
        (MappingProxyType(each) for each in MESSAGES),
        tools=tools,
        template_arguments={"enable_thinking": False},
        add_generation_prompt=False,
        continue_final_message=True,
        json_schema={"type": "integer"},
    )
    assert json.loads(request.chat.messages) == MESSAGES
    assert json.loads(request.chat.tools) == [{"type": "function", "function": {"name": "f"}}] * 2
    assert json.loads(request.chat.template_arguments) == {"enable_thinking": False}
    assert request.chat.omits_generation_prompt
    assert request.chat.continues_final_message
    assert json.loads(request.sampling.structured_output.json_schema) == {"type": "integer"}


@pytest.mark.parametrize(
    ("messages", "options", "said"),
    [
        ("hello", {}, "messages must be a list of mappings"),
        ({"role": "user"}, {}, "messages must be a list of mappings"),
        (None, {}, "messages must be a list of mappings"),
        ([{"role": "user", "content": object()}], {}, "messages must hold what JSON can hold"),
        ([{"role": "user", "content": math.nan}], {}, "messages must hold what JSON can hold"),
        (MESSAGES, {"tools": "f"}, "tools must be a list of mappings"),
        (MESSAGES, {"add_generation_prompt": 1}, "add_generation_prompt must be a bool"),
        (MESSAGES, {"continue_final_message": "x"}, "continue_final_message must be a bool"),
        (MESSAGES, {"template_arguments": "x"}, "template_arguments must be a mapping"),
        (MESSAGES, {"template_argument": {}}, "chat.. got unexpected keyword"),
    ],
)
def test_a_chat_of_the_wrong_type_names_its_argument(
    script: Script, messages: Any, options: Any, said: str
) -> None:
    with Client(script.address) as client, pytest.raises(TypeError, match=said):
        client.chat(messages, **options)
    assert script.requests == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"json_object": True}, types_pb2.StructuredOutput(json_object=True)),
        ({"json_object": False, "regex": "a"}, types_pb2.StructuredOutput(regex="a")),
        ({"json_object": False}, None),
        ({"json_schema": '{"a": 1}'}, types_pb2.StructuredOutput(json_schema='{"a": 1}')),
        ({"json_schema": {"a": "é"}}, types_pb2.StructuredOutput(json_schema='{"a": "é"}')),
        ({"grammar": "start: X"}, types_pb2.StructuredOutput(grammar="start: X")),
        (
            {"choice": ("a", "b")},
            types_pb2.StructuredOutput(choice=types_pb2.Choices(texts=["a", "b"])),
        ),
        (
            {"choice": "one"},
            types_pb2.StructuredOutput(choice=types_pb2.Choices(texts=["one"])),
        ),
    ],
)
def test_what_the_answer_must_look_like(options: Any, expected: Any) -> None:
    sampling = generate_request("a", options).sampling
    assert sampling.HasField("structured_output") == (expected is not None)
    if expected is not None:
        assert sampling.structured_output == expected


def test_an_answer_has_one_form() -> None:
    with pytest.raises(errors.InvalidArgument, match="one of json_schema, regex"):
        generate_request("a", {"json_schema": {}, "regex": "a"})


def test_tokenize_takes_a_text_or_a_chat(script: Script) -> None:
    with Client(script.address) as client:
        assert client.tokenize("ab").token_ids == (97, 98)
        for wrong in ({}, {"text": "a", "messages": MESSAGES}, {"text": "a", "tools": []}):
            with pytest.raises(TypeError, match="tokenize"):
                client.tokenize(**wrong)


def test_a_client_for_another_caller_never_sends_its_token_unencrypted() -> None:
    with (
        Client("scheduler.example:1") as client,
        pytest.raises(errors.InvalidArgument, match="never sent"),
    ):
        client.with_token("sp-secret")
    with Client("127.0.0.1:1") as client:
        for token in ("", "with\nnewline", "é"):
            with pytest.raises(errors.InvalidArgument, match="printable"):
                client.with_token(token)
    with (
        Client("127.0.0.1:1", token="own") as client,
        pytest.raises(errors.InvalidArgument, match="own"),
    ):
        client.with_token("sp-secret")


def test_options_of_generate_become_the_request(script: Script, tmp_path: Path) -> None:
    """From the command line, a file and `--set`, of which the command line counts most."""
    config = tmp_path / "request.toml"
    config.write_text(
        'min-p = 0.25\ntop-k = 9\nseed = 3\nstop = ["a", "b"]\nlogit-bias = ["5=-1", "6=2"]\n'
        'keep-special-tokens = true\nresidency = "streamed"\ntimeout = 60\n'
    )
    done = CliRunner().invoke(
        app,
        [
            *("generate", "abc", "--address", script.address, "--config", str(config)),
            *("--set", "top-k=8", "--set", "seed=4", "--seed", "5", "--presence-penalty", "0.5"),
            *("--max-tokens", "3", "--allowed-token-id", "97", "--allowed-token-id", "98"),
        ],
    )
    assert done.exit_code == 0, done.output
    [request] = script.requests
    wanted = types_pb2.SamplingParams(
        max_tokens=3,
        temperature=0.0,
        top_k=8,
        top_p=1.0,
        min_p=0.25,
        seed=5,
        presence_penalty=0.5,
        repetition_penalty=1.0,
        logit_bias={5: -1.0, 6: 2.0},
        stop=["a", "b"],
        keeps_special_tokens=True,
        allowed_token_ids=[97, 98],
    )
    assert request.sampling == wanted
    assert request.residency == types_pb2.RESIDENCY_STREAMED
    for text, field in (
        ("temperature = -1", "temperature"),
        ('speculate = "magic"', "speculate"),
        ("min_p = 0.1", "min_p"),
    ):
        config.write_text(text)
        done = CliRunner().invoke(app, ["generate", "abc", "--config", str(config)])
        assert isinstance(done.exception, errors.InvalidArgument), text
        assert done.exception.field == field
        assert str(config) in done.exception.message
    assert len(script.requests) == 1

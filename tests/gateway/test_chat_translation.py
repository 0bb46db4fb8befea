"""Bodies of /v1/chat/completions as requests, and answers as OpenAI's: no process, no HTTP."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway_service.openai.answers import Answer
from gateway_service.openai.chat_completions import ChatJob, read_chat
from splitpoint.errors import InvalidArgument
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
STOP = {"type": "function", "function": {"name": "stop"}}
HERMES = 'Yes.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}


def job_of(**fields: Any) -> ChatJob:
    return read_chat(body(**fields), request_id="chat-1", created=7)


def request_of(**fields: Any) -> pb.GenerateRequest:
    return job_of(**fields).requests[0]


# -- requests ----------------------------------------------------------------------------------


def test_a_plain_chat() -> None:
    request = request_of()
    assert request.model == "m"
    assert request.request_id == "chat-1"
    assert json.loads(request.chat.messages) == [{"role": "user", "content": "Hi"}]
    assert request.chat.tools == request.chat.template_arguments == ""
    assert request.sampling.fills_context
    assert not request.sampling.HasField("max_tokens")
    assert request.sampling.temperature == 1.0
    assert not request.sampling.HasField("structured_output")


def test_fields_go_where_the_scheduler_reads_them() -> None:
    request = request_of(
        max_completion_tokens=9,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
        seed=4,
        stop="x",
        continue_final_message=True,
        chat_template_kwargs={"enable_thinking": False},
        top_k=5,
        priority=-2,
        cache_salt="s",
    )
    assert (request.sampling.max_tokens, request.sampling.fills_context) == (9, False)
    assert (request.sampling.logprobs, request.sampling.seed) == (3, 4)
    assert [*request.sampling.stop] == ["x"]
    assert request.chat.continues_final_message
    assert json.loads(request.chat.template_arguments) == {"enable_thinking": False}
    assert (request.sampling.top_k, request.priority, request.cache_salt) == (5, 2, b"s")


def test_choices_have_ids_and_seeds_of_their_own() -> None:
    requests = job_of(n=3, seed=5).requests
    assert [each.request_id for each in requests] == ["chat-1", "chat-1-1", "chat-1-2"]
    assert [each.sampling.seed for each in requests] == [5, 6, 7]


def test_messages_are_brought_into_form() -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}], "name": None},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "refusal": "no", "audio": None},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    sent = json.loads(request_of(messages=messages).chat.messages)
    assert [message["role"] for message in sent] == [
        *("system", "user", "assistant", "assistant", "tool")
    ]
    assert sent[0] == {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    assert sent[2] == {"role": "assistant", "content": "no"}
    assert sent[3]["content"] is None
    assert sent[4]["tool_call_id"] == "1"


def test_the_model_does_not_see_tools_that_it_may_not_call() -> None:
    assert request_of(tools=[ADD], tool_choice="none").chat.tools == ""
    assert json.loads(request_of(tools=[ADD]).chat.tools) == [ADD]


def test_forced_calls_follow_a_schema() -> None:
    request = request_of(tools=[ADD, STOP], tool_choice="required", parallel_tool_calls=False)
    schema = json.loads(request.sampling.structured_output.json_schema)
    assert schema["maxItems"] == 1
    assert [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]] == [
        *("add", "stop")
    ]
    named = request_of(
        tools=[ADD, STOP], tool_choice={"type": "function", "function": {"name": "add"}}
    )
    assert json.loads(named.sampling.structured_output.json_schema) == ADD["function"]["parameters"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("form", "keeps"), [("hermes", True), ("llama3_json", False), ("mistral", True)]
)
def test_auto_needs_to_know_the_models_form(form: str, keeps: bool) -> None:
    job = job_of(tools=[ADD])
    assert job.needs_model
    job.model_found(pb.Model(tool_call_format=form))
    assert job.requests[0].sampling.keeps_special_tokens is keeps
    with pytest.raises(InvalidArgument, match="required"):
        job_of(tools=[ADD]).model_found(pb.Model())
    assert not job_of(tools=[ADD], tool_choice="required").needs_model


def test_a_client_may_ask_for_special_tokens_itself() -> None:
    job = job_of(tools=[ADD], skip_special_tokens=False)
    job.model_found(pb.Model(tool_call_format="llama3_json"))
    assert job.requests[0].sampling.keeps_special_tokens


# -- answers -----------------------------------------------------------------------------------


def messages_of(
    texts: list[str], *, finish: int = types_pb2.FINISH_REASON_STOP, held: str = ""
) -> Iterator[pb.GenerateResponse]:
    """The scheduler's messages of an answer: a token for each text."""
    for index, text in enumerate(texts):
        position = types_pb2.PositionLogprobs(
            chosen_logprob=-0.5,
            chosen_token_bytes=text.encode(),
            top=[types_pb2.TokenLogprob(token_id=9, logprob=float("-inf"), token_bytes=b"\xe2")],
        )
        chunk = pb.GenerateChunk(index=index, token_ids=[9], text=text, logprobs=[position])
        yield pb.GenerateResponse(chunk=chunk)
    complete = pb.GenerateComplete(
        finish_reason=finish,  # type: ignore[arg-type]
        text=held,
        usage=pb.Usage(prompt_tokens=11, completion_tokens=len(texts), cached_tokens=8),
    )
    yield pb.GenerateResponse(complete=complete)


def whole(job: ChatJob, *answers: list[pb.GenerateResponse]) -> ChatCompletion:
    found = []
    for messages in answers:
        answer = Answer()
        for message in messages:
            answer.add(message)
        found.append(answer)
    # Through text, as a client reads it.
    return ChatCompletion.model_validate_json(json.dumps(job.result(found), allow_nan=False))


def streamed(job: ChatJob, *answers: list[pb.GenerateResponse]) -> list[ChatCompletionChunk]:
    writer = job.writer()
    written = writer.begin(1)
    for index, messages in enumerate(answers):
        for message in messages:
            if message.HasField("chunk"):
                written += writer.chunk(index, message.chunk)
            else:
                written += writer.complete(index, message.complete)
    written += writer.end()
    frames = written.decode().split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    return [
        ChatCompletionChunk.model_validate_json(frame.removeprefix("data: ")) for frame in frames
    ]


def joined(chunks: list[ChatCompletionChunk], index: int = 0) -> dict[str, Any]:
    """What a client makes of the deltas of a choice."""
    content, finish = "", None
    calls: list[list[str | None]] = []
    logprobs: list[Any] = []
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            if choice.logprobs is not None:
                logprobs += choice.logprobs.content or []
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                if call.id is not None:
                    assert call.index == len(calls)
                    calls.append([call.function.name, ""])
                calls[call.index][1] = f"{calls[call.index][1]}{call.function.arguments or ''}"
    return {"content": content, "calls": calls, "finish": finish, "logprobs": logprobs}


def test_a_whole_answer() -> None:
    job = job_of(logprobs=True, top_logprobs=1)
    found = whole(job, [*messages_of(["Hel", "lo"], held="!")])
    assert (found.id, found.object, found.created) == ("chat-1", "chat.completion", 7)
    choice = found.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello!", "stop")
    assert choice.message.tool_calls is None
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert [each.token for each in choice.logprobs.content] == ["Hel", "lo"]
    top = choice.logprobs.content[0].top_logprobs[0]
    assert (top.bytes, top.logprob) == ([0xE2], -9999.0)
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (11, 13)
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == 8


def test_a_prompt_counts_once() -> None:
    found = whole(job_of(n=2), [*messages_of(["a"])], [*messages_of(["b", "c"])])
    assert [choice.message.content for choice in found.choices] == ["a", "bc"]
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (11, 3)


def test_a_stream_has_the_same() -> None:
    job = job_of(n=2, stream=True, stream_options={"include_usage": True})
    answers = [[*messages_of(["a", "", 'b"\n'], held="c")], [*messages_of(["é"])]]
    chunks = streamed(job, *answers)
    assert [choice.delta.role for chunk in chunks[:2] for choice in chunk.choices] == [
        *("assistant", "assistant")
    ]
    assert joined(chunks)["content"] == 'ab"\nc'
    assert joined(chunks, 1)["content"] == "é"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("cuts", range(8))
def test_calls_are_the_same_whole_and_streamed(cuts: int) -> None:
    rng = random.Random(cuts)
    places = sorted(rng.choices(range(len(HERMES) + 1), k=6))
    texts = [HERMES[a:b] for a, b in zip([0, *places], [*places, len(HERMES)], strict=True)]
    job = job_of(tools=[ADD], stream=True, logprobs=True)
    job.model_found(pb.Model(tool_call_format="hermes"))
    found = joined(streamed(job, [*messages_of(texts)]))
    assert found["content"] == "Yes."
    assert found["calls"] == [["add", '{"a": 1}']]
    assert found["finish"] == "tool_calls"
    assert len(found["logprobs"]) == len(texts)
    message = whole(job, [*messages_of(texts)]).choices[0].message
    assert message.content == "Yes."
    assert message.tool_calls is not None
    assert message.tool_calls[0].type == "function"
    assert message.tool_calls[0].function.arguments == '{"a": 1}'


def test_forced_calls() -> None:
    job = job_of(tools=[ADD, STOP], tool_choice="required")
    text = '[{"name": "add", "parameters": {"a": 1}}, {"name": "stop", "parameters": {}}]'
    found = whole(job, [*messages_of([text])]).choices[0]
    assert (found.message.content, found.finish_reason) == (None, "tool_calls")
    assert found.message.tool_calls is not None
    assert [call.function.name for call in found.message.tool_calls if call.type == "function"] == [
        *("add", "stop")
    ]
    named = job_of(tools=[ADD], tool_choice={"type": "function", "function": {"name": "add"}})
    choice = whole(named, [*messages_of(['{"a"', ": 2}"])]).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].type == "function"
    assert choice.message.tool_calls[0].function.arguments == '{"a": 2}'


def test_one_call_at_most() -> None:
    job = job_of(tools=[ADD], parallel_tool_calls=False)
    job.model_found(pb.Model(tool_call_format="hermes"))
    assert len(whole(job, [*messages_of([HERMES * 2])]).choices[0].message.tool_calls or ()) == 1


def test_ids_of_mistrals_calls_suit_its_template() -> None:
    job = job_of(tools=[ADD])
    job.model_found(pb.Model(tool_call_format="mistral"))
    text = '[TOOL_CALLS]add[ARGS]{"a": 1}'
    calls = whole(job, [*messages_of([text])]).choices[0].message.tool_calls
    assert calls is not None
    assert re.fullmatch("[a-zA-Z0-9]{9}", calls[0].id)


def test_a_cut_call_ends_by_length() -> None:
    job = job_of(tools=[ADD])
    job.model_found(pb.Model(tool_call_format="hermes"))
    cut = [*messages_of([HERMES[:-18]], finish=types_pb2.FINISH_REASON_LENGTH)]
    choice = whole(job, cut).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None

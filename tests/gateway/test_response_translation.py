"""Bodies of /v1/responses as requests, and answers as OpenAI's: no process, no HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway_service.openai.answers import Answer
from gateway_service.openai.responses import ResponseJob, read_response
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
HERMES = (
    'Yes.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
)
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def job_of(**fields: Any) -> ResponseJob:
    body = {"model": "m", "input": "Hi", **fields}
    return read_response(body, request_id="resp-1", created=7)


def hermes_job(**fields: Any) -> ResponseJob:
    job = job_of(tools=[ADD], **fields)
    assert job.needs_model
    job.model_found(pb.Model(tool_call_format="hermes"))
    return job


# -- requests ----------------------------------------------------------------------------------


def test_a_plain_response() -> None:
    [request] = job_of(instructions="Be brief.", max_output_tokens=4).requests
    assert request.request_id == "resp-1"
    assert json.loads(request.chat.messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ]
    assert request.sampling.max_tokens == 4
    assert job_of().requests[0].sampling.fills_context


def test_items_become_messages() -> None:
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    messages = json.loads(job_of(input=items).requests[0].chat.messages)
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["c1", "c2"]
    assert messages[2]["content"] == [{"type": "text", "text": "I add."}]
    assert messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "2"}


def test_formats_and_forced_calls_constrain_the_text() -> None:
    schema = {"type": "object"}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    [request] = job_of(text=text).requests
    assert json.loads(request.sampling.structured_output.json_schema) == schema
    [request] = job_of(text={"format": {"type": "json_object"}}).requests
    assert request.sampling.structured_output.json_object
    [request] = job_of(tools=[ADD], tool_choice={"type": "function", "name": "add"}).requests
    assert json.loads(request.sampling.structured_output.json_schema) == ADD["parameters"]


# -- answers -----------------------------------------------------------------------------------


def chunks_of(texts: list[str]) -> list[pb.GenerateChunk]:
    return [
        pb.GenerateChunk(
            index=index,
            token_ids=[9],
            text=text,
            logprobs=[
                types_pb2.PositionLogprobs(chosen_logprob=-1, chosen_token_bytes=text.encode())
            ],
        )
        for index, text in enumerate(texts)
    ]


def complete_of(
    count: int, finish: types_pb2.FinishReason = types_pb2.FINISH_REASON_STOP
) -> pb.GenerateComplete:
    usage = pb.Usage(prompt_tokens=11, completion_tokens=count, cached_tokens=8)
    return pb.GenerateComplete(finish_reason=finish, usage=usage)


def whole(job: ResponseJob, texts: list[str], complete: pb.GenerateComplete) -> Response:
    answer = Answer()
    for chunk in chunks_of(texts):
        answer.add(pb.GenerateResponse(chunk=chunk))
    answer.add(pb.GenerateResponse(complete=complete))
    return Response.model_validate_json(json.dumps(job.result([answer])))


def streamed(job: ResponseJob, texts: list[str], complete: pb.GenerateComplete) -> list[Any]:
    writer = job.writer()
    written = writer.begin(1)
    for chunk in chunks_of(texts):
        written += writer.chunk(0, chunk)
    written += writer.complete(0, complete) + writer.end()
    events = []
    for frame in written.decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = EVENTS.validate_json(data.removeprefix("data: "))
        assert name == f"event: {event.type}"
        events.append(event)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    return events


def without_ids(response: Response) -> dict[str, Any]:
    found = response.model_dump()
    for item in found["output"]:
        del item["id"]
        item.pop("call_id", None)
    return found


def test_a_whole_response() -> None:
    job = job_of(metadata={"a": "b"}, include=["message.output_text.logprobs"])
    found = whole(job, ["Hel", "lo"], complete_of(2))
    assert (found.id, found.status, found.output_text) == ("resp-1", "completed", "Hello")
    assert found.metadata == {"a": "b"}
    assert found.usage is not None
    assert found.usage.input_tokens_details.cached_tokens == 8
    assert found.usage.total_tokens == 13
    content = found.output[0].content[0]  # type: ignore[index, union-attr]
    assert [each.token for each in content.logprobs or ()] == ["Hel", "lo"]  # type: ignore[union-attr]


def test_a_cut_response_is_incomplete() -> None:
    found = whole(job_of(), ["a"], complete_of(1, types_pb2.FINISH_REASON_LENGTH))
    assert found.status == "incomplete"
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"


def test_an_empty_answer_has_a_message() -> None:
    found = whole(job_of(), [], complete_of(1))
    assert (len(found.output), found.output_text) == (1, "")


@pytest.mark.parametrize("texts", [["Hel", "", 'lo "\n'], [], ["a"]])
@pytest.mark.parametrize("include", [[], ["message.output_text.logprobs"]])
def test_streamed_text_is_the_whole_text(texts: list[str], include: list[str]) -> None:
    job = job_of(stream=True, include=include)
    events = streamed(job, texts, complete_of(len(texts)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "".join(texts)
    assert without_ids(events[-1].response) == without_ids(
        whole(job, texts, complete_of(len(texts)))
    )


def test_a_stream_that_fails_ends_with_a_typed_event() -> None:
    writer = job_of(stream=True).writer()
    written = writer.begin(1) + writer.chunk(0, chunks_of(["a"])[0])
    error = {"message": "gone", "type": "service_unavailable_error", "param": None, "code": "lost"}
    last = writer.failed(error).decode()
    assert last.startswith("event: error\ndata: ")
    event = EVENTS.validate_json(last.partition("data: ")[2])
    assert (event.type, event.code, event.message) == ("error", "lost", "gone")
    assert event.sequence_number == written.count(b"event: ")


@pytest.mark.parametrize("size", [1, 2, 5, 11, 400])
def test_streamed_calls_are_the_whole_calls(size: int) -> None:
    texts = [HERMES[at : at + size] for at in range(0, len(HERMES), size)]
    job = hermes_job(stream=True)
    events = streamed(job, texts, complete_of(len(texts)))
    found = whole(job, texts, complete_of(len(texts)))
    assert [item.type for item in found.output] == ["message", "function_call", "function_call"]
    assert [item.arguments for item in found.output if item.type == "function_call"] == [
        *('{"a": 1}', "{}")
    ]
    assert without_ids(events[-1].response) == without_ids(found)
    # Every item is told from its begin to its end, one after the other.
    places = [event.output_index for event in events if hasattr(event, "output_index")]
    assert places == sorted(places)
    arguments = ["", "", ""]
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            arguments[event.output_index] += event.delta
        elif event.type == "response.function_call_arguments.done":
            assert event.arguments == arguments[event.output_index]
            assert event.name == "add"
    assert arguments[1:] == ['{"a": 1}', "{}"]

"""/v1/chat/completions: its fields, and the requests of a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_service.openai.answers import (
    Answer,
    head_of,
    plan_of,
    prompt_logprobs_of,
    usage_of,
)
from gateway_service.openai.chat.answers import ChatStream, choice_of
from gateway_service.openai.chat.messages import CHAT_PROMPT_FIELDS, MESSAGES, chat_prompt
from gateway_service.openai.chat.tools import (
    PARALLEL_TOOL_CALLS,
    TOOL_CHOICE,
    TOOLS,
    CallingJob,
    ToolUse,
    tool_use,
)
from gateway_service.openai.fields import Field, Table, Use
from gateway_service.openai.sampling import (
    MOST_LOGPROBS,
    TEXT_FIELDS,
    choices_of,
    constraint_names,
    generate_request,
    has_running_usage,
    stream_options,
)
from gateway_service.openai.values import BOOLEAN, integer, wrong

OBJECT_NAME = "chat.completion"


def _refused(name: str, help: str, *neutral: Any, is_extension: bool = False) -> Field:
    return Field(name, None, help, Use.REFUSED, neutral=neutral, is_extension=is_extension)


def _ignored(name: str, help: str) -> Field:
    return Field(name, None, help, Use.IGNORED)


CHAT_FIELDS = Table(
    [
        Field("messages", MESSAGES, "The conversation so far.", is_required=True),
        *TEXT_FIELDS,
        Field(
            "max_completion_tokens",
            integer(1),
            "Most tokens of an answer. Absent: until the context is full.",
        ),
        Field("max_tokens", integer(1), "Former name of max_completion_tokens."),
        Field("logprobs", BOOLEAN, "Return log-probabilities of the tokens.", default=False),
        Field(
            "top_logprobs",
            integer(0, MOST_LOGPROBS),
            "Likeliest tokens to return at each position; needs logprobs.",
        ),
        TOOLS,
        TOOL_CHOICE,
        PARALLEL_TOOL_CALLS,
        *CHAT_PROMPT_FIELDS,
        _ignored("prediction", "It could only change the speed."),
        _refused("audio", "answers are text"),
        _refused("function_call", "use tool_choice"),
        _refused("functions", "use tools"),
        _refused("modalities", "answers are text", ["text"]),
        _refused("verbosity", "say it in a message", "medium"),
        _refused("web_search_options", "there is no search"),
        _refused(
            "add_special_tokens",
            "a chat's special tokens come from its template",
            False,
            is_extension=True,
        ),
        _refused("chat_template", "it is the model's", is_extension=True),
        _refused("documents", "put them in a message", is_extension=True),
        _refused("echo", "only the continuation is returned", False, is_extension=True),
    ]
)


@dataclass(slots=True, kw_only=True)
class ChatJob(CallingJob):
    """A body of /v1/chat/completions (`answers.Job`)."""

    has_usage: bool
    # In each chunk, too.
    has_running_usage: bool
    # Likeliest tokens to report at each position of the prompt; None: no position.
    prompt_logprobs: int | None

    def result(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the answer's JSON object. Raises Internal, Unavailable if one is not whole."""
        completes = [answer.finished for answer in answers]
        found = {
            **head_of(self, OBJECT_NAME),
            "choices": [choice_of(self, index, answer) for index, answer in enumerate(answers)],
            "usage": usage_of(completes, len(completes)),
        }
        if self.prompt_logprobs is not None:
            # As vLLM: once, since all choices have the same prompt.
            positions = answers[0].prompt_logprobs
            found["prompt_logprobs"] = prompt_logprobs_of(positions, self.prompt_logprobs)
        if self.has_plan:
            found["splitpoint"] = plan_of(completes)
        return found

    def writer(self) -> ChatStream:
        return ChatStream(self)


def read_chat(body: Any, *, request_id: str, created: int) -> ChatJob:
    """Return what a body asks for. Raises InvalidArgument with the field as the client wrote it.

    Args:
        body: the JSON value.
        request_id: of the answer, at most 60 characters; further requests of it add an index.
        created: seconds since 1970.
    """
    values = CHAT_FIELDS.read(body)
    tools = tool_use(values)
    request = generate_request(values)
    request.chat.CopyFrom(chat_prompt(values, values["messages"], tools.tools))
    tools.constrain(request.sampling)
    most_tokens = values.get("max_completion_tokens", values.get("max_tokens"))
    if most_tokens is None:
        request.sampling.fills_context = True
    else:
        request.sampling.max_tokens = most_tokens
    has_logprobs = values.get("logprobs", False)
    if has_logprobs:
        request.sampling.logprobs = values.get("top_logprobs", 0)
    elif values.get("top_logprobs"):
        raise wrong("top_logprobs", "needs logprobs to be true")
    options = stream_options(values)
    return ChatJob(
        id=request_id,
        created=created,
        model=values["model"],
        requests=choices_of(request, request_id, 0, values.get("n", 1)),
        is_stream=values.get("stream", False),
        has_usage=options.get("include_usage", False),
        has_running_usage=has_running_usage(options),
        has_plan=options.get("include_plan", False) or values.get("include_plan", False),
        has_logprobs=has_logprobs,
        prompt_logprobs=values.get("prompt_logprobs"),
        tools=tools,
        parameter_names=_parameter_names(values, tools),
    )


def _parameter_names(values: Mapping[str, Any], tools: ToolUse) -> dict[str, str]:
    """Return the client's names of fields that the scheduler may find wrong."""
    limit = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    names = {"sampling.max_tokens": limit, "sampling.logprobs": "top_logprobs"}
    if tools.is_forced:
        kinds = ("", ".json_schema", ".json_object")
        return names | {f"sampling.structured_output{kind}": "tools" for kind in kinds}
    return names | constraint_names(values)

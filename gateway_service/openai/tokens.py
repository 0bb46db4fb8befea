"""/v1/models as OpenAI lists them, and /tokenize and /detokenize with vLLM's fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

from gateway_service.openai.answers import Seconds
from gateway_service.openai.fields import BOOLEAN, TOKEN_IDS, Field, Table, text_of, wrong
from gateway_service.openai.messages import CHAT_PROMPT_FIELDS, MESSAGES, chat_prompt
from gateway_service.openai.tools import TOOLS
from splitpoint.v1 import scheduler_pb2 as pb


class Model(TypedDict):
    id: str
    object: Literal["model"]
    created: Seconds
    owned_by: str
    max_model_len: Annotated[int, "Tokens of prompt and answer together."]
    vocabulary_size: int
    has_chat_template: bool
    has_structured_output: bool
    tool_call_format: Annotated[str | None, "hermes, llama3_json or mistral."]
    ready_worker_count: int


class Models(TypedDict):
    object: Literal["list"]
    data: list[Model]


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(TypedDict):
    prompt: str


def model_object(model: pb.Model, created: int) -> Model:
    """Return one model. `created`: seconds since 1970, which the scheduler does not know."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "splitpoint",
        "max_model_len": model.context_length,
        "vocabulary_size": model.shape.vocabulary_size,
        "has_chat_template": model.has_chat_template,
        "has_structured_output": model.has_structured_output,
        "tool_call_format": model.tool_call_format or None,
        "ready_worker_count": model.ready_worker_count,
    }


def model_list(models: Iterable[pb.Model], created: int) -> Models:
    """Return all served models."""
    return {"object": "list", "data": [model_object(model, created) for model in models]}


_MODEL = Field("model", text_of(), "Name of a served model; absent: the only one.")

TOKENIZE_FIELDS = Table(
    [
        _MODEL,
        Field("prompt", text_of(least=1), "A text; or give messages."),
        Field("messages", MESSAGES, "A chat; or give a prompt."),
        Field(
            "add_special_tokens",
            BOOLEAN,
            "Put the model's special tokens around the prompt; default: true. Only false for a "
            "chat, whose special tokens come from its template.",
        ),
        Field("return_token_strs", BOOLEAN, "Return the tokens' texts, too.", default=False),
        TOOLS,
        *CHAT_PROMPT_FIELDS,
    ]
)
DETOKENIZE_FIELDS = Table(
    [
        _MODEL,
        Field(
            "tokens",
            TOKEN_IDS,
            "Token ids.",
            is_required=True,
        ),
    ]
)
_OF_CHATS = ("add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class TokenizeJob:
    """A body of /tokenize."""

    request: pb.TokenizeRequest
    has_texts: bool

    def result(self, response: pb.TokenizeResponse, context_length: int) -> Tokens:
        return {
            "count": len(response.token_ids),
            "max_model_len": context_length,
            "tokens": [*response.token_ids],
            "token_strs": [*response.tokens] if self.has_texts else None,
        }


def read_tokenize(body: Any) -> TokenizeJob:
    """Return what a body asks for. Raises InvalidArgument with the field."""
    values = TOKENIZE_FIELDS.read(body)
    if ("prompt" in values) == ("messages" in values):
        raise wrong("prompt", "or messages: give one of them", reason="MISSING_REQUIRED_PARAMETER")
    request = pb.TokenizeRequest(model=values.get("model", ""))
    if "prompt" in values:
        for name in _OF_CHATS:
            if name in values:
                raise wrong(name, "is for messages")
        request.text = values["prompt"]
        request.omits_special_tokens = not values.get("add_special_tokens", True)
    else:
        if values.get("add_special_tokens", False):
            raise wrong("add_special_tokens", "is for a prompt: a chat's come from its template")
        chat = chat_prompt(values, values["messages"], values.get("tools"))
        request.chat.CopyFrom(chat)
    return TokenizeJob(request, values.get("return_token_strs", False))


def read_detokenize(body: Any) -> pb.DetokenizeRequest:
    """Return what a body asks for. Raises InvalidArgument with the field."""
    values = DETOKENIZE_FIELDS.read(body)
    return pb.DetokenizeRequest(
        model=values.get("model", ""), token_ids=values["tokens"], keeps_special_tokens=True
    )

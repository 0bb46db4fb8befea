"""/v1/embeddings: its fields, the requests of a body, and its answer.

An embedding is the model's final hidden state at the last token of the input, behind the last norm.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from gateway_service.openai.answers import Answer, dumped
from gateway_service.openai.completions import ADD_SPECIAL_TOKENS, PROMPT, request_of
from gateway_service.openai.fields import (
    BOOLEAN,
    Field,
    Table,
    extra,
    ignored,
    one_of,
    refused,
    text_of,
)
from gateway_service.openai.sampling import CACHE_SALT, PRIORITY, check_copies
from splitpoint.errors import Internal
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class _Rest(TypedDict):
    object: Literal["list"]
    model: str
    pooling: Annotated[Literal["last"], "The state of the last token is the embedding."]
    usage: EmbeddingUsage


class Embeddings(_Rest):
    data: list[Embedding]


EMBEDDING_FIELDS = Table(
    [
        Field(
            "input",
            PROMPT,
            "A text, an array of token ids, or an array of these.",
            is_required=True,
        ),
        Field("model", text_of(least=1), "Name of a served model.", is_required=True),
        Field(
            "encoding_format",
            one_of("float", "base64"),
            "base64: little-endian 32-bit floats.",
            default="float",
        ),
        refused("dimensions", "the models are not trained for fewer"),
        ignored("user", "Tenants come from the key."),
        extra(
            "normalize",
            BOOLEAN,
            "Scale to length 1, as OpenAI's are; false: as the model computed it.",
            True,
        ),
        ADD_SPECIAL_TOKENS,
        CACHE_SALT,
        PRIORITY,
    ]
)


@dataclass(slots=True)
class EmbeddingJob:
    """A body of /v1/embeddings."""

    id: str
    model: str
    requests: Sequence[pb.GenerateRequest]
    is_base64: bool
    is_normalized: bool
    parameter_names: dict[str, str] = field(
        default_factory=lambda: dict.fromkeys(("text", "token_ids", "token_ids.ids"), "input")
    )

    def item(self, index: int, answer: Answer) -> bytes:
        """Return the JSON of one embedding. Raises Internal if the answer lacks it."""
        states = [each.hidden_state for each in answer.logprobs if each.hidden_state]
        if not states:
            raise Internal("the answer has no hidden state")
        values = array("f", states[0])
        if self.is_normalized:
            length = math.hypot(*values)
            if length > 0:
                values = array("f", [value / length for value in values])
        found: Embedding = {"object": "embedding", "index": index, "embedding": values.tolist()}
        if self.is_base64:
            found["embedding"] = base64.b64encode(values.tobytes()).decode()
        return dumped(found)

    def body(self, items: Sequence[bytes], answers: Sequence[Answer]) -> bytes:
        """Return the JSON of the whole answer."""
        usages = [answer.finished.usage for answer in answers]
        count = sum(usage.prompt_tokens for usage in usages)
        rest: _Rest = {
            "object": "list",
            "model": self.model,
            "pooling": "last",
            "usage": {
                "prompt_tokens": count,
                "total_tokens": count,
                "prompt_tokens_details": {
                    "cached_tokens": sum(usage.cached_tokens for usage in usages)
                },
            },
        }
        return b'{"data":[' + b",".join(items) + b"]," + dumped(rest)[1:]


def read_embedding(body: Any, *, request_id: str) -> EmbeddingJob:
    """Return what a body asks for. Raises InvalidArgument with the field as the client wrote it.

    `request_id`: of the answer, at most 60 characters; further requests of it add an index.
    """
    values = EMBEDDING_FIELDS.read(body)
    shared = pb.GenerateRequest(
        model=values["model"],
        sampling=types_pb2.SamplingParams(max_tokens=1, returns_hidden_state=True),
        omits_special_tokens=not values.get("add_special_tokens", True),
        priority=-values.get("priority", 0),
        cache_salt=values.get("cache_salt", "").encode(),
    )
    check_copies(shared.ByteSize(), len(values["input"]))
    requests = []
    for index, each in enumerate(values["input"]):
        request = request_of(each, shared)
        request.request_id = f"{request_id}-{index}" if index else request_id
        requests.append(request)
    return EmbeddingJob(
        id=request_id,
        model=values["model"],
        requests=requests,
        is_base64=values.get("encoding_format") == "base64",
        is_normalized=values.get("normalize", True),
    )

"""/v1/models: the served models as OpenAI lists them, with vLLM's and some fields of our own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from splitpoint.v1 import scheduler_pb2 as pb


def model_object(model: pb.Model, created: int) -> dict[str, Any]:
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


def model_list(models: Iterable[pb.Model], created: int) -> dict[str, Any]:
    """Return all served models."""
    return {"object": "list", "data": [model_object(model, created) for model in models]}

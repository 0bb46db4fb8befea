"""schemathesis on the OpenAPI document of a running gateway: no 5xx, and nothing but what it says.

Bodies are made from the document, right and wrong. A wrong one must be refused, and every answer
must have a status, a content type and a form that the document names.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gateway_stack import HERMES_TEMPLATE, MODEL, GatewayStack, gateway_stack, logs

# Most tokens of an answer, so that bodies that pass cost little.
_TOKENS = 4
_BUDGETS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

_DEPENDENT = {
    *("stream_options", "tool_choice", "tools", "structured_outputs", "response_format", "text"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "include"),
    *("top_logprobs", "continue_final_message", "add_generation_prompt", "best_of", "echo"),
    *("min_tokens", "add_special_tokens", "chat_template_kwargs"),
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "user", "assistant"]},
        "content": {"type": "string"},
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}
_WITH_BODIES = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/tokenize", "/detokenize"),
)


@pytest.fixture(scope="module")
def stack() -> Iterator[GatewayStack]:
    with gateway_stack(chat_template=HERMES_TEMPLATE) as running:
        yield running


def published(stack: GatewayStack) -> dict[str, Any]:
    with urllib.request.urlopen(f"{stack.url}/openapi.json") as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The document for bodies that get far: the model is there, and answers are short.

    Left out is what depends on other fields. Answers may have no field that the document does not
    name.
    """
    for name, schema in document["components"]["schemas"].items():
        if not name.endswith("Request"):
            forbid_more(schema)
            continue
        fields, required = schema["properties"], schema["required"]
        for field in fields.keys() & _DEPENDENT:
            del fields[field]
        fields["model"] = {"enum": [MODEL] if "model" in required else [MODEL, None]}
        if "n" in fields:
            fields["n"] = {"type": "integer", "minimum": 1, "maximum": 2}
        if "messages" in fields:
            fields["messages"] = {"type": "array", "items": _MESSAGE, "minItems": 1}
            schema["required"] = required = [*{*required, "messages"}]
            if name == "TokenizeRequest":
                del fields["prompt"]
        for budget in fields.keys() & {*_BUDGETS}:
            fields[budget] = {"type": "integer", "minimum": 1, "maximum": _TOKENS}
            required.append(budget)
    return document


def without_twins(document: dict[str, Any]) -> dict[str, Any]:
    """The document with each field that bodies of one table share in the chat's only.

    One function reads it in all of them. The coverage of its bounds is most of a run.
    """
    schemas = document["components"]["schemas"]
    once = schemas["ChatCompletionRequest"]["properties"]
    for name in ("CompletionRequest", "ResponseRequest"):
        fields, required = schemas[name]["properties"], schemas[name]["required"]
        for field in fields.keys() - {*required}:
            if once.get(field) == fields[field]:
                del fields[field]
    return document


def forbid_more(schema: Any) -> None:
    if isinstance(schema, list):
        for each in schema:
            forbid_more(each)
    elif isinstance(schema, dict):
        for each in schema.values():
            forbid_more(each)
        if schema.get("type") == "object" and schema.get("properties"):
            schema["additionalProperties"] = False


def run(stack: GatewayStack, document: dict[str, Any], folder: Path, *options: str) -> None:
    file = folder / "openapi.json"
    file.write_text(json.dumps(document))
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", str(file), "--url", stack.url),
            # A body may be refused for what a schema cannot say, such as a context that is full.
            *("--exclude-checks", "positive_data_acceptance", "--continue-on-failure"),
            *("--request-timeout", "60", "--no-color"),
            *options,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "incident" not in logs(stack)


def answered(stack: GatewayStack, path: str) -> int:
    """Return how often the gateway has answered 200 there."""
    with urllib.request.urlopen(f"{stack.url}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    name = f'splitpoint_gateway_requests_total{{endpoint="{path}",status="200"}} '
    return sum(int(float(line.removeprefix(name))) for line in lines if line.startswith(name))


def test_bodies_that_get_far(stack: GatewayStack, tmp_path: Path) -> None:
    document = narrowed(published(stack))
    # What is outside the narrowed bounds need not be wrong.
    only = ("--mode", "positive", "--phases", "fuzzing")
    run(stack, document, tmp_path, *only, "--max-examples", "15", "--seed", "17")
    assert {path for path in _WITH_BODIES if answered(stack, path) < 5} == set()


def test_any_bodies(stack: GatewayStack, tmp_path: Path) -> None:
    both = ("--phases", "coverage,fuzzing")
    document = without_twins(published(stack))
    run(stack, document, tmp_path, *both, "--max-examples", "8", "--seed", "17")


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", ["1", "2"])
def test_many_bodies(stack: GatewayStack, tmp_path: Path, seed: str) -> None:
    options = ("--max-examples", "250", "--seed", seed)
    narrow = narrowed(published(stack))
    run(stack, narrow, tmp_path, "--mode", "positive", "--phases", "fuzzing", *options)
    run(stack, published(stack), tmp_path, "--phases", "coverage,fuzzing", *options)

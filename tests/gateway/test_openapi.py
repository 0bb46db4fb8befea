"""The OpenAPI document: it is one, and names every route. Real requests: test_schemathesis.py."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from gateway_service.app import routes_of
from gateway_service.endpoints.endpoint import Gateway
from gateway_service.openai.chat_completions import CHAT_FIELDS
from gateway_service.openai.fields import Table
from gateway_service.openai.responses import RESPONSE_FIELDS
from gateway_service.openapi import document
from splitpoint.sampling import FIELDS

# The page for people, and its files.
_NO_API = {"/", "/page/{name}"}


def test_every_route_is_in_it() -> None:
    paths = document("1", needs_key=False)["paths"]
    described = {
        (path, verb.upper())
        for path, item in paths.items()
        for verb in item
        if verb != "parameters"
    }
    gateway: Any = object.__new__(Gateway)
    routes = {
        (route.path.replace(":path}", "}"), verb)
        for route in routes_of(gateway)
        for verb in route.methods or ()
        if route.path not in _NO_API and verb != "HEAD"
    }
    assert described == routes


def schemas_in(value: Any) -> list[dict[str, Any]]:
    """Return every JSON schema of a document."""
    found = []
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "schema":
                found.append(each)
            else:
                found += schemas_in(each)
    elif isinstance(value, list):
        for each in value:
            found += schemas_in(each)
    return found


@pytest.mark.parametrize("needs_key", [False, True])
def test_its_schemas_are_schemas(needs_key: bool) -> None:
    found = document("1", needs_key=needs_key)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    named = found["components"]["schemas"]
    for schema in (*named.values(), *schemas_in(found["paths"])):
        jsonschema.Draft202012Validator.check_schema(schema)
        for reference in references_in(schema):
            assert reference.removeprefix("#/components/schemas/") in named


def references_in(value: Any) -> list[str]:
    if isinstance(value, list):
        return [each for item in value for each in references_in(item)]
    if not isinstance(value, dict):
        return []
    inner = [each for item in value.values() for each in references_in(item)]
    return [value["$ref"], *inner] if isinstance(value.get("$ref"), str) else inner


def test_keys_are_demanded_where_they_are_checked() -> None:
    found = document("1", needs_key=True)
    assert found["security"] == [{"bearer": []}]
    assert found["paths"]["/health"]["get"]["security"] == []
    assert {} in document("1", needs_key=False)["security"]


@pytest.mark.parametrize(
    ("table", "body", "wrong"),
    [
        (
            CHAT_FIELDS,
            {
                "model": "m",
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": [{"type": "function", "function": {"name": "stop"}}],
                "tool_choice": "required",
                "stop": ["a"],
                "n": 2,
            },
            [{"messages": []}, {"nonsense": 1}],
        ),
        (
            RESPONSE_FIELDS,
            {"model": "m", "input": [{"role": "user", "content": "a"}]},
            [{"input": []}],
        ),
    ],
)
def test_schemas_of_bodies_tell_right_from_wrong(
    table: Table, body: dict[str, Any], wrong: list[dict[str, Any]]
) -> None:
    validator = jsonschema.Draft202012Validator(table.schema)
    assert validator.is_valid(body)
    assert not any(validator.is_valid({**body, **fields}) for fields in wrong)


def test_every_sampling_field_is_one_of_every_chat() -> None:
    """A field that is added to the shared table is served without a change here."""
    elsewhere = {"fills_context", "keeps_special_tokens"}
    assert {*FIELDS} - elsewhere <= {*CHAT_FIELDS.fields}

"""The OpenAPI document: it is one, and names every route. Real requests: test_schemathesis.py."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from gateway_service.app import routes_of
from gateway_service.endpoints.endpoint import Gateway
from gateway_service.openapi import document

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

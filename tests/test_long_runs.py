"""Tests that do less in `make test` are marked, so that `make chaos` runs them in full."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MODULES = [path for path in sorted(TESTS.rglob("*.py")) if "from long_runs" in path.read_text()]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_what_reaches_a_scaled_number_has_the_marker(path: Path) -> None:
    assert unmarked(path.read_text()) == []


@pytest.mark.parametrize(
    "marker", ["pytestmark = pytest.mark.scaled", "pytestmark = [mark.other, pytest.mark.scaled]"]
)
def test_a_test_is_found_by_what_it_uses(marker: str) -> None:
    source = """
NEW = scaled(40, chaos=64)
def helper(): return NEW
def test_by_helper(): helper()
async def test_itself(): scaled(1, chaos=2)
@pytest.mark.parametrize("seed", range(NEW))
def test_by_decorator(seed): pass
@pytest.mark.scaled
def test_marked(): helper()
def test_other(): pass
"""
    assert unmarked(source) == ["test_by_helper", "test_itself", "test_by_decorator"]
    assert unmarked(f"{marker}\n{source}") == []


def unmarked(source: str) -> list[str]:
    """Return the tests of a module that reach a call of `scaled` and lack the marker."""
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        defined.update(dict.fromkeys(_names_of(node), node))
    if "pytestmark" in defined and _is_marked(defined["pytestmark"]):
        return []
    reach, count = {"scaled"}, 0
    while len(reach) > count:
        count = len(reach)
        reach |= {name for name, node in defined.items() if reach & _used_by(node)}
    return [
        name
        for name, node in defined.items()
        if name in reach and name.startswith("test_") and not _is_marked(node)
    ]


def _names_of(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement of a module defines."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Assign():
            for target in node.targets:
                yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name


def _used_by(node: ast.AST) -> set[str]:
    """Return the names that a statement reads; fixtures, by the names of arguments."""
    named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return named | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}


def _is_marked(node: ast.stmt) -> bool:
    """Return True for a decorated test, or `pytestmark`, with the marker `scaled`."""
    marks: list[ast.expr] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        marks = node.decorator_list
    elif isinstance(node, ast.Assign):
        marks = [node.value]
    return any(
        isinstance(each, ast.Attribute) and each.attr == "scaled"
        for mark in marks
        for each in ast.walk(mark)
    )

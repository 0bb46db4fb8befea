"""Counts in sentences: one token, two tokens, and no message that says "1 tokens"."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from splitpoint.config import counted

ROOT = Path(__file__).resolve().parents[2]
# What people read. Errors of formats and of services among themselves count layouts.
PACKAGES = ("splitpoint_cli", "scheduler_service")
# Workloads of benchmarks are never 1; what doctor and top count on a machine rarely is.
LEFT_OUT = {"bench", "checks", "top"}
NOUN = re.compile(
    r" (?:(?:prompt|cached|new|generated|streamed) )?"
    r"(tokens|chunks|slots|requests|workers|reservations|damages)\b(?!/s)"
)


def counts_with_a_fixed_plural(path: Path) -> list[str]:
    """Places of f-strings in which a value is followed by a noun in the plural."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                named = ast.unparse(value.value).isupper()  # a constant, which is never 1
                if NOUN.match(str(text.value)) and not named:
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    found.append(f"{where} {ast.unparse(value.value)}{str(text.value)[:24]!r}")
    return found


def test_one_and_many() -> None:
    assert [counted(n, "token") for n in (0, 1, 2, 3000)] == [
        "0 tokens",
        "1 token",
        "2 tokens",
        "3,000 tokens",
    ]
    assert counted(1, "entry", "entries") == "1 entry"
    assert counted(2, "token is", "tokens are") == "2 tokens are"


def test_every_count_in_a_message_has_its_singular() -> None:
    found = [
        place
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not LEFT_OUT & set(path.parts)
        for place in counts_with_a_fixed_plural(path)
    ]
    assert found == []

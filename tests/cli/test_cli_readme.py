"""The documentation's commands and links exist."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import typer.main

from splitpoint_cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "models/README.md")
] + sorted((ROOT / "docs").glob("*.md"))


@cache
def options_of(command: tuple[str, ...]) -> set[str]:
    """Every option string of a (sub)command."""
    found = typer.main.get_command(app)
    for name in command:
        found = found.commands[name]  # type: ignore[attr-defined]
    return {option for parameter in found.params for option in parameter.opts}


def test_commands_in_the_readme_exist() -> None:
    lines = re.findall(
        r"^    (?:cat .* \| )?splitpoint (.*)$", (ROOT / "README.md").read_text(), re.M
    )
    assert len(lines) > 8
    for line in lines:
        words = shlex.split(line.partition("#")[0])
        command = tuple(words[:2]) if words[0] == "bench" else (words[0],)
        used = {word for word in words if word.startswith("--")}
        assert used <= options_of(command), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    anchors = {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-")
        for h in re.findall(r"^#+ (.*)$", text, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        if target.startswith("#"):
            assert target[1:] in anchors, target
        else:
            assert (page.parent / target).exists(), target


def test_make_targets_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        used = set(re.findall(r"(?:^    |`)make (\w+)", page.read_text(), re.M))
        assert used <= targets, page.name

"""The documentation's commands and links exist."""

from __future__ import annotations

import contextlib
import importlib
import io
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


def commands_in(page: Path) -> list[str]:
    """Commands of the blocks that are indented or fenced, each on one line."""
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
    text = page.read_text()
    blocks = [body for language, body in fenced.findall(text) if language in ("", "sh")]
    blocks += re.findall(r"^    .*$", fenced.sub("", text), re.M)
    lines = re.sub(r"\\\n\s*", "", "\n".join(blocks)).splitlines()
    command = re.compile(r"\s*(?:cat \S+ \| )?((?:splitpoint|python -m \w+_service) .*)$")
    found = [match for line in lines if (match := command.match(line))]
    return [match[1].partition(" #")[0].rstrip(" .") for match in found if match]


@cache
def options_of_service(name: str) -> set[str]:
    """What a service says of itself in `--help`."""
    module = importlib.import_module(f"{name}.__main__")
    parse = module.parse_arguments
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit):
        parse(["--help"])
    return set(re.findall(r"--[a-z-]+", said.getvalue()))


def anchors_of(page: Path) -> set[str]:
    return {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    }


def test_the_readme_shows_commands() -> None:
    assert len(commands_in(ROOT / "README.md")) > 16


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_documentation_exist(page: Path) -> None:
    for line in commands_in(page):
        words = shlex.split(line)
        used = {word for word in words if word.startswith("--")}
        if words[0] == "python":
            known = options_of_service(words[2])
        else:
            known = options_of(tuple(words[1 : 3 if words[1] in ("bench", "arena") else 2]))
        assert used <= known, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors_of(there), target


def test_make_targets_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        used = set(re.findall(r"(?:^    |`)make ([a-z][\w-]*)", page.read_text(), re.M))
        assert used <= targets, page.name

"""The documentation's commands and links exist, and what of the README can run here does."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main
from fake_scheduler import Script, fake_scheduler
from typer.testing import CliRunner

from splitpoint.transport.tls import client_identity
from splitpoint_cli.main import app
from splitpoint_cli.stack.child import child_environment

ROOT = Path(__file__).resolve().parents[2]
README, USAGE = ROOT / "README.md", ROOT / "docs" / "usage.md"
PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "models/README.md")
] + sorted((ROOT / "docs").rglob("*.md"))


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


def test_the_guides_show_commands() -> None:
    assert len(commands_in(README)) > 6
    assert len(commands_in(USAGE)) > 16


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


# Those that start nothing, measure nothing and need no terminal.
RUNNING = {"generate", "plan", "bottleneck", "size", "status", "certs", "token", "compose"}


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with fake_scheduler("127.0.0.1:0") as script:
        yield script


@pytest.fixture
def here(tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to run commands in, which ask the fake scheduler."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPLITPOINT_ADDRESS", script.address)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield tmp_path
    for number, handler in handlers.items():  # `generate` has its own
        signal.signal(number, handler)


def runnable() -> list[str]:
    """Commands of README and guide that need no other host and no container."""
    commands = [*commands_in(README), *commands_in(USAGE)]
    lines = [line.partition(" < ")[0].strip() for line in commands]
    return [
        line
        for line in lines
        if shlex.split(line)[1] in RUNNING and "--ca " not in line and "DIR" not in line
    ]


def test_commands_of_the_guides_run(here: Path, script: Script) -> None:
    lines = runnable()
    assert {shlex.split(line)[1] for line in lines} == RUNNING
    for line in lines:
        done = CliRunner().invoke(app, shlex.split(line)[1:], input="a prompt")
        assert done.exit_code == 0, (line, done.output)
    # Each option of `generate` arrived as what the line says that it is.
    penalties = [request.sampling.repetition_penalty for request in script.requests]
    assert 1.1 in penalties
    assert any(request.text == "a prompt" and request.sampling.stop for request in script.requests)
    # The tokens are as `--token-file` wants them.
    tokens = sorted(here.glob("*.token"))
    assert [path.name for path in tokens] == ["alice.token", "operator.token"]
    for path in tokens:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert client_identity(token_file=path, environment={}).token
    assert (here / "certificates" / "ca.pem").exists()


def test_the_python_of_the_usage_guide_runs(script: Script) -> None:
    """That of README.md runs on a real stack (tests/e2e/test_e2e_readme.py)."""
    expected_lines = {USAGE: 3}
    blocks = {
        page: re.findall(r"^```python\n(import asyncio\n.*?)^```$", page.read_text(), re.M | re.S)
        for page in expected_lines
    }
    assert [len(found) for found in blocks.values()] == [1]
    processes = {
        page: subprocess.Popen(
            [sys.executable, "-W", "error", "-c", block.replace("127.0.0.1:50050", script.address)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**child_environment({}), "SPLITPOINT_ADDRESS": script.address},
        )
        for page, [block] in blocks.items()
    }
    for page, process in processes.items():
        printed, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")
        assert len(printed.splitlines()) == expected_lines[page]


def test_the_documented_extras_are_those_that_can_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    section = USAGE.read_text().partition("\n## Install\n")[2].partition("\n## ")[0]
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section, re.M)
    named = {name for row in table for name in re.findall(r"`(\w+)`", row)}
    assert named == set(project["optional-dependencies"]) - {"dev", "service"}

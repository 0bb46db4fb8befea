"""Every command: `--json` is a flag, `--output FILE` writes, and tables can be read."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_cli_bench_offload
import test_cli_bench_restore
import typer
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from splitpoint_cli.bench import decode_report, offload_report, restore_report
from splitpoint_cli.bench.harness import LINE_SECONDS, Progress
from splitpoint_cli.main import app
from splitpoint_cli.stack.child import child_environment

# What reports nothing: it runs a stack, stops one, asks for health, or makes files.
# `vllm-config` prints the object that vLLM takes, whatever it is asked.
SILENT = {
    *("up", "down", "store", "vllm-config"),
    *("probe", "certs", "token", "compose", "arena rm"),
}
ROOT = Path(__file__).resolve().parents[2]
# Programs that benchmarks start: they have the options of a worker and report nothing.
STARTED = {"double_worker"}
BENCHMARKS = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if "__main__" in path.read_text(encoding="utf-8") and path.stem not in STARTED
)

# Runs each module that it is given as a program with --help; prints what each one says.
HELPS = """
import contextlib, io, json, runpy, sys

names, helps = sys.argv[1:], {}
sys.path.insert(0, "")
for name in names:
    sys.argv = [name, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    helps[name] = said.getvalue()
print(json.dumps(helps))
"""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    below = getattr(command, "commands", None)
    if below is None:
        yield " ".join(path), command
        return
    for name, each in below.items():
        yield from commands(each, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


def options_of(name: str) -> dict[str, Any]:
    """Each option's first spelling."""
    found = {}
    for each in COMMANDS[name].params:
        for spelling in each.opts:
            if spelling.startswith("--"):
                found[spelling] = each
    return found


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_report_can_be_json_and_go_to_a_file(name: str) -> None:
    options = options_of(name)
    assert "--out" not in options or name == "token"  # a secret, not a report
    if name in SILENT:
        assert "--json" not in options
        return
    assert options["--json"].is_flag
    assert not options["--output"].is_flag
    assert options["--output"].metavar == "FILE"


@pytest.mark.parametrize(("name", "most"), [("up", 40), ("generate", 28), ("chat", 28)])
def test_help_has_the_frequent_options_and_help_all_the_rest(name: str, most: int) -> None:
    def shown(flag: str) -> int:
        said = CliRunner().invoke(app, [name, flag]).output
        return sum(line.startswith(("│ --", "│ *  --")) for line in said.splitlines())

    assert shown("--help") <= most < len(COMMANDS[name].params) <= shown("--help-all")


@pytest.fixture(scope="module")
def benchmark_helps() -> dict[str, str]:
    """`--help` of every benchmark; one process for all, since most of its time loads torch."""
    done = subprocess.run(
        [sys.executable, "-c", HELPS, *BENCHMARKS],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=child_environment({"COLUMNS": "80"}),
    )
    helps: dict[str, str] = json.loads(done.stdout)
    return helps


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_that_are_no_commands_have_the_same_options(
    name: str, benchmark_helps: dict[str, str]
) -> None:
    options = benchmark_helps[name].partition("options:")[2]
    assert "--json " in options
    assert "--json FILE" not in benchmark_helps[name]
    assert "--output FILE" in options


PLAN = ("--model", "opt-6.7b", "--profile", "a100-80", "--cached", "1000", "--new", "10")


@pytest.mark.parametrize(
    "arguments",
    [("plan", *PLAN), ("size",), ("bottleneck", "--model", "opt-6.7b"), ("metrics",), ("doctor",)],
    ids=lambda arguments: arguments[0],
)
def test_json_is_all_there_is_and_the_file_has_the_same(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    target = tmp_path / "report.json"
    done = CliRunner().invoke(app, [*arguments, "--json", "--output", str(target)])
    assert done.exit_code in (0, 1), done.output
    told = json.loads(done.stdout)
    assert isinstance(told, dict)
    assert json.loads(target.read_text()) == told
    target.unlink()
    shown = CliRunner().invoke(app, [*arguments, "--output", str(target)])
    with pytest.raises(json.JSONDecodeError):
        json.loads(shown.stdout)
    if arguments[0] != "doctor":  # free memory changes meanwhile
        assert json.loads(target.read_text()) == told
    nowhere = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "no" / "file")])
    assert "is no folder" in str(nowhere.exception)
    assert not nowhere.stdout


def decode_table() -> Table:
    runs = {
        name: [decode_report.Run(20.0, 2.0, 8, ((1, 2, 3),) * 8)]
        for name in (decode_report.OURS, "transformers dynamic eager", "transformers static sdpa")
    }
    workload = decode_report.Workload("opt-125m", "float32", 8, 512, 128, 1, "cpu", 2, 0)
    peer_of = dict.fromkeys([*runs][1:], "transformers")
    measured = decode_report.Measured(runs, peer_of, 20e9, 10**9)
    return decode_report.table_of(decode_report.report_of(workload, measured))


def tables() -> dict[str, Table]:
    restore = test_cli_bench_restore
    swept = restore.found(*restore.WIDE, sweep=restore.SWEEP)
    return {
        "decode": decode_table(),
        "restore": restore_report.table_of(restore_report.report_of(restore.WORKLOAD, swept)),
        "offload": offload_report.table_of(test_cli_bench_offload.some_report()),
    }


@pytest.mark.parametrize("name", ["decode", "restore", "offload"])
def test_a_table_fits_80_columns_without_losing_anything(name: str) -> None:
    table = tables()[name]
    table.title = table.caption = None
    console = Console(file=io.StringIO(), width=80)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "…" not in shown
    lines = shown.splitlines()
    assert len(lines) == 1 + table.row_count
    for heading in table.columns:
        assert str(heading.header) in lines[0]


def test_a_piped_table_has_a_line_for_each_row() -> None:
    """However long its cells are, and whatever COLUMNS says."""
    done = subprocess.run(
        [sys.executable, "-m", "splitpoint_cli", "plan", *PLAN],
        capture_output=True,
        text=True,
        check=True,
        env=child_environment({"COLUMNS": "80"}),
    )
    report = CliRunner().invoke(app, ["plan", *PLAN, "--json"])
    reason = json.loads(report.stdout)["reason"]
    assert len(reason) > 80
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.endswith(reason)]
    assert [line for line in lines if line != line.rstrip()] == []


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_a_benchmark_tells_now_and_then_how_long_it_will_take() -> None:
    clock, console = Clock(), Console(file=io.StringIO(), width=200)
    progress = Progress(console, clock)
    done = []
    for item in progress.rounds("timed runs", ("a", "b"), 20):
        clock.now += LINE_SECONDS / 4
        done.append(item)
    assert done[:4] == ["a", "b", "b", "a"]
    assert (done.count("a"), done.count("b")) == (20, 20)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "timed runs: 40 in all"
    # The last of the 40 says nothing: it is done.
    assert len(lines) == 1 + 9
    assert lines[1] == "timed runs: 4 of 40, about 90 s left"


def test_on_a_terminal_a_benchmark_has_a_bar_with_the_time_that_is_left() -> None:
    clock = Clock()
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    for _ in Progress(console, clock).track("timed runs", range(4)):
        clock.now += 30
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "2/4" in shown
    assert "0:01:00" in shown

"""`make gpu`: what it concludes from reports, and that its parts end in time."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import Part, parts_of, run_part, tests_outcome
from benchmarks.gpu_claims import (
    GRAPHS,
    LLAMA,
    NUMERICS,
    OPT_LONG,
    OPT_SHORT,
    REQUIRED_TESTS,
    SELECT_LLAMA,
    SELECT_OPT,
    TESTS,
    Outcome,
    claims_of,
    over_peer,
)
from benchmarks.gpu_environment import missing_packages, prepared

tests_outcome.__test__ = False  # type: ignore[attr-defined]


def offload_report(ours: float, peer: float | None, ratio: float) -> dict[str, Any]:
    contenders = {"pipelined split": {"step_seconds_of_last_run": [ours] * 127}}
    if peer is not None:
        contenders["transformers offloaded sdpa"] = {"step_seconds_of_last_run": [peer] * 127}
    return {
        "contenders": contenders,
        "link": {"efficiency": 0.95},
        "ratios": {"pipelined_over_full_load": ratio},
    }


def select_report(*speed_ups: float) -> dict[str, Any]:
    return {
        "results": [
            {"contenders": {"columns:0.1": {"step_over_full_load": 1 / each}}} for each in speed_ups
        ]
    }


def test_claims_about_selections() -> None:
    outcomes = {
        SELECT_LLAMA: Outcome(1.0, select_report(3.0, 4.5, 4.0)),
        SELECT_OPT: Outcome(1.0, select_report(5.0)),
    }
    held = {claim.text: claim for claim in claims_of(outcomes)}
    longest = "a step at 10 % over full load, at the longest"
    assert held[f"{SELECT_LLAMA}: {longest}"].holds
    assert held[f"{SELECT_OPT}: {longest}"].measured == 0.2
    grows = held[f"{SELECT_LLAMA}: speed-up of a length over that of the one before"]
    assert (grows.measured, grows.holds) == (4.0 / 4.5, False)
    assert all(claim.measured is None for claim in claims_of({}))


def part(name: str, code: str) -> Part:
    return Part(name, (sys.executable, "-c", code), 60, 0)


def test_claims_are_compared_with_what_was_measured() -> None:
    outcomes = {
        TESTS: Outcome(1.0, {"passed": 3, "failed": 1, "error": 0}),
        OPT_LONG: Outcome(1.0, offload_report(0.2, 0.5, 0.55)),
        OPT_SHORT: Outcome(1.0, offload_report(0.4, 0.5, 0.7)),
        LLAMA: Outcome(0.0, problem="skipped"),
    }
    held = {claim.text: (claim.measured, claim.holds) for claim in claims_of(outcomes)}
    assert held["CUDA tests that fail"] == (1, False)
    assert held[f"{OPT_LONG}, 128 new: decode over transformers' offloaded cache"] == (0.4, True)
    assert held[f"{OPT_SHORT}, 32 new: decode over transformers' offloaded cache"] == (0.8, False)
    assert held[f"{OPT_LONG}: link efficiency at l = 0"] == (0.95, True)
    assert held[f"{OPT_SHORT}: pipelined over full load"] == (0.7, False)
    assert held[f"{LLAMA}: planned over full load"] == (None, None)


def test_graphs_are_compared_with_their_twin() -> None:
    def measured(batch: int, eager: float, graphs: float | None, *, equal: bool) -> dict[str, Any]:
        ways = {"eager": {"step_milliseconds": eager}}
        if graphs is not None:
            ways["graphs"] = {"step_milliseconds": graphs}
        return {"batch": batch, "drafts": 0, "equal": equal, "ways": ways}

    cases = [
        measured(1, 10.0, 6.0, equal=True),
        measured(8, 10.0, 11.0, equal=False),
        measured(32, 10.0, None, equal=True),
    ]
    outcomes = {GRAPHS: Outcome(1.0, {"cases": cases})}
    held = {claim.text: (claim.measured, claim.holds) for claim in claims_of(outcomes)}
    assert held["graphs: cases whose tokens differ from the same rows computed eagerly"] == (
        1,
        False,
    )
    text = "graphs, batch {}: time of a step over the eager twin's"
    assert held[text.format(1)] == (0.6, True)
    assert held[text.format(8)] == (1.1, False)
    assert held[text.format(32)] == (None, None)
    # A machine without graphs has no twins to compare.
    eager = {GRAPHS: Outcome(1.0, {"cases": cases[2:]})}
    assert {claim.holds for claim in claims_of(eager)} == {None}


def test_invariant_numerics_are_counted_and_weighed() -> None:
    cost = {"batch": 8, "step_ratio": 1.1, "first_token_ratio": 2.5}
    report = {
        "numerics": "fast",
        "variants": [{"first_difference": None}, {"first_difference": {"prompt": 0}}],
        "costs": [cost],
    }
    claims = claims_of({NUMERICS: Outcome(1.0, report)})
    held = {claim.text: (claim.measured, claim.holds) for claim in claims}
    text = "numerics: operators that the check at the start finds dependent"
    assert held[text] == (1, False)
    assert held["numerics: variants whose bits differ from the same prompt alone"] == (1, False)
    assert held["numerics, batch 8: time of a step over fast"] == (1.1, True)
    assert held["numerics, batch 8: time of the first token over fast"] == (2.5, False)
    assert held["numerics, batch 1: time of a step over fast"] == (None, None)


def test_what_is_missing_is_not_measured() -> None:
    assert over_peer(None, 32) is None
    assert over_peer(offload_report(0.2, None, 1.0), 32) is None
    assert over_peer(offload_report(0.2, 0.4, 1.0), 200) is None
    everything_skipped = {TESTS: Outcome(1.0, {"passed": 0, "failed": 0, "error": 0})}
    assert {claim.holds for claim in claims_of(everything_skipped)} == {None}


def test_pytest_is_understood() -> None:
    first, second, *others = REQUIRED_TESTS
    lines = [
        f"tests/a.py::{first}[bf16-a b] PASSED [ 10%]",
        f"tests/a.py::{first}[fp16-a b] SKIPPED (no card) [ 20%]",
        f"tests/a.py::{second}[1] PASSED [ 30%]",
        f"tests/a.py::{second}[2] FAILED [ 40%]",
        "tests/b.py::test_c ERROR [ 50%]",
    ]
    end = [f"FAILED tests/a.py::{second}[2] - x", "1 failed, 2 passed, 1 skipped, 1 error in 5.0s"]
    counts = {"passed": 2, "failed": 1, "skipped": 1, "error": 1}
    done = tests_outcome(5.0, 1, [*lines, *end])
    assert done.report == {**counts, "lines": [end[0]], "unproved": [second, *others]}
    assert done.problem == ""
    # What was done counts, also if the time is over.
    late = tests_outcome(220.0, None, lines)
    assert late.report == {**counts, "lines": [], "unproved": [second, *others]}
    assert late.problem == "not done after 220 s"
    held = {claim.text: claim for claim in claims_of({TESTS: late})}
    assert held["required CUDA tests that did not pass"].holds is False
    assert "pytest ended with 4" in tests_outcome(5.0, 4, ["usage: ..."]).problem


def test_a_part_gives_its_report_or_its_complaint(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('a table'); open(sys.argv[-1], 'w').write('{\"a\": 1}')"
    good = run_part(part("x", code), 60, os.environ)
    assert (good.report, good.problem) == ({"a": 1}, "")
    assert "a table" in capfd.readouterr().out
    bad = run_part(part("x", "import sys; sys.exit('no room')"), 60, os.environ)
    assert (bad.report, bad.problem) == (None, "exit code 1: no room")


def test_a_part_that_takes_too_long_ends_with_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    late = run_part(part("x", code), 2.0, os.environ)
    assert late.problem == "not done after 2 s"
    child = int((tmp_path / "pid").read_text())
    # A killed process that is no child of this one ends when the kernel gets to it.
    deadline = time.monotonic() + 60
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def is_running(process_id: int) -> bool:
    """Return True if the process is neither gone nor a zombie."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state.rpartition(")")[2].split()[0] != "Z"


def test_its_parts_are_real_commands() -> None:
    """Of both sizes the same parts, in the same order; test files are found by their mark."""
    real, tiny = parts_of("cuda", is_tiny=False), parts_of("cpu", is_tiny=True)
    assert [each.name for each in real] == [each.name for each in tiny]
    assert "tests/worker/device/test_worker_gpu.py" in real[0].command
    assert sum(each.least for each in real) < 540
    assert json.dumps([each.command for each in real])


def test_required_tests_are_tests_that_a_gpu_runs() -> None:
    command = parts_of("cuda", is_tiny=False)[0].command
    text = "".join(Path(each).read_text() for each in command if each.endswith(".py"))
    assert [name for name in REQUIRED_TESTS if f"def {name}(" not in text] == []


def test_here_nothing_is_missing(tmp_path: Path) -> None:
    assert missing_packages() == []
    with pytest.raises(SystemExit, match="there are no wheels"):
        prepared(tmp_path, tmp_path / "site")

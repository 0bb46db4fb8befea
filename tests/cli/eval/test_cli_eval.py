"""`splitpoint eval`: its tasks, its report, and small runs. About ten seconds."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.errors import InvalidArgument, NotFound
from splitpoint.selection import FULL, Selection, SelectionMethod
from splitpoint_cli.eval.report import Answers, SelectionResult, Texts, report_of, table_of
from splitpoint_cli.eval.runs import perplexity_interval
from splitpoint_cli.eval.tasks import TaskKind, extraction, needle
from splitpoint_cli.eval.workload import (
    RATIOS,
    EvalWorkload,
    default_selections,
    read_selections,
)
from splitpoint_cli.main import app

WORKLOAD = EvalWorkload(
    model=None,
    selections=(),
    is_default=False,
    tokens=2048,
    prompt=1024,
    windows=1,
    tasks=1,
    text=(),
    guess="own",
    norm="own",
    kv_heads=None,
    artifacts=None,
    threads=1,
    seed=0,
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.load(resolve_model(None))
    assert found is not None
    return found


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_is_asked_for_in_its_own_tokens(tokenizer: Tokenizer, depth: float) -> None:
    filler = tokenizer.encode("def add(one, other):\n    return one + other\n" * 100)
    task = needle(tokenizer, filler, 400, depth, seed=3)
    [answer] = task.answers
    ids, first = task.token_ids, task.prompt_tokens
    assert len(ids) == 400
    assert answer.stop == len(ids)
    asked = tokenizer.decode(ids[first:])
    assert asked.strip().partition(" = ")[2].isdigit()
    # The assignment is in the prompt once, with the same tokens, at its depth.
    places = [n for n in range(first) if ids[n : n + len(ids) - first] == ids[first:]]
    assert places == [pytest.approx(depth * (first - 2), abs=len(ids) - first + 2)]
    assert needle(tokenizer, filler, 400, depth, seed=4).token_ids != ids
    with pytest.raises(InvalidArgument, match="of other text"):
        needle(tokenizer, filler[:50], 400, depth, seed=3)


def test_a_table_is_asked_for_in_another_order(tokenizer: Tokenizer) -> None:
    task = extraction(tokenizer, 600, seed=1)
    assert task.kind is TaskKind.EXTRACTION
    assert len(task.token_ids) <= 600
    table, asked = (
        dict(line.strip().rstrip(",").split(": ") for line in part.splitlines() if ": " in line)
        for part in (
            tokenizer.decode(task.token_ids[: task.prompt_tokens]),
            tokenizer.decode(task.token_ids[task.prompt_tokens :]),
        )
    )
    assert len(asked) == len(task.answers) > 5
    assert asked.items() <= table.items()
    assert [*asked] != [*table][: len(asked)]
    values = [tokenizer.decode(task.token_ids[each.start : each.stop]) for each in task.answers]
    assert values == [*asked.values()]
    assert all(one.stop < other.start for one, other in pairwise(task.answers))
    with pytest.raises(InvalidArgument, match="hold no table"):
        extraction(tokenizer, 64, seed=1)


def test_every_screen_is_evaluated_at_every_ratio_unless_told_otherwise() -> None:
    found = default_selections()
    for method in SelectionMethod:
        ratios = {each.ratio for each in found if each.method is method}
        assert ratios >= ({*RATIOS} if method is not SelectionMethod.FULL else set())
    assert Selection.parsed("infinigen:alpha=4") in found
    assert len({*found}) == len(found)
    assert read_selections(["columns:0.1", "full", "columns:0.10"]) == (
        Selection.parsed("columns:0.1"),
    )


def test_nonsense_is_refused() -> None:
    for changed, match in (
        ({"tokens": 8}, "at least 64"),
        ({"prompt": 0}, "not 0"),
        ({"prompt": 2047}, "must leave two"),
        ({"guess": "next"}, "guess must be one of"),
        ({"norm": "next"}, "norm must be one of"),
    ):
        with pytest.raises(InvalidArgument, match=match):
            replace(WORKLOAD, **changed)


def result(words: str, perplexity: float, read: float) -> SelectionResult:
    selection = Selection.parsed(words)
    return SelectionResult(
        selection=str(selection),
        method=str(selection.method),
        perplexity=perplexity,
        interval=(perplexity / 10 - 1.02, perplexity / 10 - 0.99),
        agreement=0.9,
        far_right=read,
        read_ratio=read,
        screened_ratio=read,
        device_ratio=0.1,
        recall=read,
        recalls=(read, read),
        held_weight=0.9,
        overlap=0.8,
        evicted=0.2 if selection.pool else 0.0,
        needle=Answers(4, 0.25, -2.0),
        extraction=None,
        seconds=1.0,
    )


RESULTS = [
    result("full", 10.0, 1.0),
    result("columns:0.1", 10.01, 0.1),
    result("columns:0.05", 10.1, 0.05),
    result("columns:0.05,int8", 10.2, 0.05),
    result("infinigen:alpha=4", 9.999, 0.03),
]
TEXTS = Texts(files={"asyncio": ["asyncio/a.py"]}, windows=1, far_tokens=40, tasks=1)


def test_the_report_is_json_and_a_table() -> None:
    report = report_of(WORKLOAD, TEXTS, RESULTS)
    assert json.loads(json.dumps(report)) == report
    assert [each["perplexity_over_full"] for each in report["selections"]] == [
        0,
        0.001,
        0.01,
        0.02,
        -0.0001,
    ]
    table = table_of(report)
    assert [*table.columns[5].cells][1] == "-1.9% to +1.1%"
    assert table.row_count == len(RESULTS)
    assert [*table.columns[4].cells] == ["+0.00%", "+0.10%", "+1.00%", "+2.00%", "-0.01%"]
    assert [*table.columns[-1].cells] == ["-"] * len(RESULTS)
    assert "this model itself does not solve needle 25%" in str(table.caption)


def test_what_left_a_pool_has_a_column() -> None:
    pooled = [*RESULTS, result("columns:0.1,pool=0.8", 10.0, 0.1)]
    table = table_of(report_of(WORKLOAD, TEXTS, pooled))
    assert [*table.columns[-1].cells] == ["0.0%"] * len(RESULTS) + ["20.0%"]


def test_intervals_hold_the_true_difference() -> None:
    """Of texts with a known mean difference and correlated tokens, 95 % of the intervals do."""
    random = np.random.default_rng(1)
    held = 0
    for seed in range(200):
        texts = [
            np.repeat(random.normal(0.01, 0.3, 75), 8) + random.normal(0, 0.1, 600)
            for _ in range(3)
        ]
        low, high = perplexity_interval(texts, seed)
        held += low <= math.expm1(0.01) <= high
        assert low < math.expm1(np.concatenate(texts).mean()) < high
    assert 178 <= held <= 198
    assert perplexity_interval(texts, 0) == perplexity_interval(texts, 0)
    assert perplexity_interval([np.full(100, 0.5)], 0) == pytest.approx((math.expm1(0.5),) * 2)


def test_a_small_run_in_full(tmp_path: Path) -> None:
    """Reading everything changes nothing; less does, and is measured beside it."""
    output = tmp_path / "eval.json"
    words = [*("--tokens", "192"), *("--windows", "1"), *("--tasks", "1"), *("--threads", "1")]
    for selection in ("columns:1.0", "columns:0.2", "window:0.2", "oracle:0.2,pool=0.7"):
        words += ["--select", selection]
    ran = CliRunner().invoke(app, ["eval", *words, "--json", "--output", str(output)])
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    assert json.loads(output.read_text()) == report
    full, everything, columns, window, pooled = report["selections"]
    assert [each["selection"] for each in report["selections"]] == [
        "full",
        "columns:1.0",
        "columns:0.2",
        "window:0.2",
        "oracle:0.2,pool=0.7",
    ]
    assert [each["evicted"] for each in report["selections"][:4]] == [0] * 4
    assert pooled["evicted"] == pytest.approx(0.3, abs=0.02)
    assert full["interval"] == everything["interval"] == [0, 0]
    assert columns["interval"][0] < columns["perplexity_over_full"] < columns["interval"][1]
    same = ("perplexity", "agreement", "far_right", "screened_ratio", "needle", "extraction")
    assert [everything[name] for name in same] == [full[name] for name in same]
    assert full["far_right"] == full["agreement"] == full["recall"] == 1
    assert 1 < full["perplexity"] < 100
    for each in (columns, window):
        assert 0.18 < each["screened_ratio"] < 0.22
        assert each["read_ratio"] == pytest.approx((2 + 6 * each["screened_ratio"]) / 8, abs=1e-5)
        assert 0 < each["overlap"] < 1
    assert columns["recall"] > window["recall"]
    assert columns["far_right"] > window["far_right"]
    assert columns["device_ratio"] == pytest.approx(19 / 128, abs=1e-6)
    assert window["device_ratio"] == 0
    assert full["needle"]["tokens"] > 0
    assert math.isfinite(full["extraction"]["logprob"])
    assert {*report["files"]} == {"asyncio", "unittest", "_pytest", "hypothesis"}


def test_grouped_queries_by_averaged_heads(tmp_path: Path) -> None:
    """A group chooses together; calibrated screens are left out."""
    words = [*("--tokens", "160"), *("--windows", "1"), *("--tasks", "0"), *("--threads", "1")]
    words += [*("--select", "oracle:0.2"), *("--kv-heads", "1"), "--json"]
    ran = CliRunner().invoke(app, ["eval", *words])
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    full, selected = report["selections"]
    assert report["kv_heads"] == 1
    assert "averaged to 1 KV head" in str(table_of(report).title)
    assert full["perplexity"] != selected["perplexity"]
    assert selected["recall"] < 1
    words = ["--kv-heads", "1", "--select", "lowrank:0.1", "--artifacts", str(tmp_path)]
    error = CliRunner().invoke(app, ["eval", *words]).exception
    assert isinstance(error, NotFound)
    assert "averaged KV heads" in error.message


def test_a_text_of_the_users_own(tmp_path: Path) -> None:
    file, output = tmp_path / "own.py", tmp_path / "eval.json"
    file.write_text("".join(f"value_{number} = {number}\n" for number in range(200)))
    words = [*("--tokens", "128"), *("--windows", "2"), *("--tasks", "0"), *("--prompt", "32")]
    words += [*("--text", str(file)), *("--select", "window:0.5"), *("--guess", "previous")]
    ran = CliRunner().invoke(app, ["eval", *words, "--output", str(output)])
    assert ran.exit_code == 0, ran.output
    report = json.loads(output.read_text())
    assert report["files"] == {"text": ["own.py"]}
    assert report["windows"] == 2
    assert report["selections"][1]["needle"] is None


def test_what_cannot_be_evaluated_is_refused(tmp_path: Path) -> None:
    def refused(*words: str) -> BaseException | None:
        return CliRunner().invoke(app, ["eval", *words]).exception

    assert isinstance(refused("--tokens", "8192"), InvalidArgument)
    assert isinstance(refused("--select", "columns"), InvalidArgument)
    # Named ones need their calibration; of the default ones those without are left out.
    words = ("--tokens", "128", "--artifacts", str(tmp_path), "--select", "infinigen:0.1")
    assert isinstance(refused(*words), NotFound)


def test_full_is_always_there() -> None:
    assert read_selections(["full"]) == ()
    assert FULL not in default_selections()

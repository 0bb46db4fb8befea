"""`splitpoint bench numerics`: its comparison, its report, and a small run. About five seconds."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tiny_models import write_tiny
from typer.testing import CliRunner

from splitpoint.errors import Internal, InvalidArgument
from splitpoint.host.processor import compiler
from splitpoint.shapes import Numerics
from splitpoint_cli.bench.decode_report import Run
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.bench.numerics import runs
from splitpoint_cli.bench.numerics.host import NumericsHost
from splitpoint_cli.bench.numerics.report import (
    Answer,
    Cost,
    NumericsResults,
    NumericsWorkload,
    VariantResult,
    Work,
    report_of,
    table_of,
)
from splitpoint_cli.bench.numerics.runs import Unfinished, check_work, compare_all
from splitpoint_cli.bench.numerics.variants import REFERENCE, Cached, Split, Variant, variants
from splitpoint_cli.bench.texts import Prompts
from splitpoint_cli.main import app

WORKLOAD = NumericsWorkload(
    *("folder", "bfloat16", 4, 64, 3, 16, "auto", "auto", "opt-125m", 2, "cpu", 1, 0)
)
ONE_ORDER = "decode=fused,prefill=fused,linear=panels"
WANTED = Answer((5, 6, 7), ((-0.1, ((5, -0.1),)), (-0.2, ((6, -0.2),)), (-0.3, ((7, -0.3),))))


def result(variant: Variant = REFERENCE) -> VariantResult:
    return VariantResult(variant)


def test_an_equal_answer_has_no_difference() -> None:
    found = result()
    found.compare(0, 9, WANTED, WANTED)
    assert (found.answers, found.equal_answers, found.equal_logprobs) == (1, 1, 1)
    assert found.is_equal


def test_another_token_is_found_with_its_place() -> None:
    found = result()
    other = replace(WANTED, tokens=(5, 8, 7), logprobs=((-0.1, ((5, -0.1),)), *WANTED.logprobs[1:]))
    found.compare(3, 9, other, WANTED)
    assert (found.equal_answers, found.equal_logprobs) == (0, 1)
    [difference] = found.differences
    assert (difference.prompt, difference.position) == (3, 1)
    assert (difference.wanted, difference.found) == (6, 8)


def test_the_smallest_difference_of_a_probability_counts() -> None:
    found = result()
    # The last bit of the second one; and of an alternative of the third.
    nudged = ((-0.1, ((5, -0.1),)), (-0.2 - 2**-54, ((6, -0.2),)), (-0.3, ((7, -0.3),)))
    found.compare(0, 9, replace(WANTED, logprobs=nudged), WANTED)
    assert nudged[1] != WANTED.logprobs[1]
    assert (found.equal_answers, found.equal_logprobs) == (1, 0)
    assert found.differences[0].position == 1
    assert 0 < found.largest_logprob_difference < 1e-15
    alternative = (*WANTED.logprobs[:2], (-0.3, ((7, -0.30000001),)))
    found.compare(1, 9, replace(WANTED, logprobs=alternative), WANTED)
    assert found.differences[1].position == 2


def test_a_continued_answer_is_compared_from_where_it_began() -> None:
    found = result()
    rest = Answer(WANTED.tokens[1:], WANTED.logprobs[1:], first=1)
    found.compare(0, 9, rest, WANTED)
    assert found.is_equal
    found.compare(0, 9, replace(rest, tokens=(6, 9)), WANTED)
    assert found.differences[0].position == 2


def test_an_answer_that_ends_early_differs() -> None:
    found = result()
    found.compare(0, 9, Answer(WANTED.tokens[:2], WANTED.logprobs[:2]), WANTED)
    assert not found.is_equal


def test_variants_have_names_of_their_own_and_splits_only_where_x_is_stored() -> None:
    names = [each.name for each in variants(has_activations=True)]
    assert len({*names, REFERENCE.name}) == len(names) + 1
    plain = variants(has_activations=False)
    assert {each.split for each in plain} == {Split.NONE}
    assert any(each.cached is Cached.STORED for each in plain)


def test_variants_that_read_chunks_of_the_reference_come_first() -> None:
    warm = [each.is_warm for each in variants(has_activations=True)]
    assert warm == sorted(warm, reverse=True)


@pytest.mark.parametrize(
    ("variant", "work"),
    [
        (Variant("warm", cached=Cached.STORED), Work(rebuilt=5)),
        (Variant("split", cached=Cached.STORED, split=Split.MIDDLE), Work(loaded=5)),
        (Variant("device", cached=Cached.ON_DEVICE), Work(loaded=5)),
        (Variant("drafts", draft_tokens=4), Work(loaded=5)),
    ],
)
def test_a_variant_that_went_another_way_is_an_error(variant: Variant, work: Work) -> None:
    found = VariantResult(variant, work=work)
    with pytest.raises(Internal, match=f"{variant.name}: nothing was"):
        check_work(found)
    check_work(VariantResult(variant, work=Work(5, 5, 5, 5, 5, 5, 5, 5)))


def some_results() -> NumericsResults:
    equal, differing = (result(each) for each in variants(has_activations=True)[:2])
    equal.compare(0, 9, WANTED, WANTED)
    differing.compare(0, 9, WANTED, WANTED)
    differing.compare(2, 9, replace(WANTED, tokens=(5, 6, 8)), WANTED)
    ours, fast = [Run(4.0, 1.0, 1, ((1,),))] * 2, [Run(3.0, 2.0, 1, ((1,),))] * 2
    return NumericsResults(
        *("tiny", "linear=plain", "fast", "as asked for", [equal, differing], "linear=packed"),
        [Cost(8, 512, 4, ours, fast)],
    )


def test_the_report_names_what_differs_and_what_it_costs() -> None:
    report = json.loads(json.dumps(report_of(WORKLOAD, some_results())))
    assert not report["equal"]
    first, second = report["variants"]
    assert first["first_difference"] is None
    assert (second["answers"], second["equal_answers"]) == (2, 1)
    assert second["first_difference"]["prompt"] == 2
    assert second["first_difference"]["position"] == 2
    [cost] = report["costs"]
    assert (cost["step_ratio"], cost["first_token_ratio"]) == (3.0, 0.5)
    table = table_of(report)
    assert table.row_count == 2
    assert "1 of 2 variants differ" in str(table.caption)
    assert "3.0 x fast" in str(table.caption)
    assert [*table.columns[-1].cells] == ["", "2:2"]


class FailingHost(NumericsHost):
    """Answers two groups, and then fails in the third."""

    def __init__(self) -> None:
        self.has_activations = True
        self._left = 2

    def run(
        self,
        variant: Variant,
        prompts: Prompts,
        indices: Sequence[int],
        reference: Mapping[int, Answer],
        work: Work,
    ) -> dict[int, Answer]:
        self._left -= 1
        if self._left < 0:
            raise Internal("the store holds too little")
        return dict.fromkeys(indices, WANTED)


def test_what_was_compared_before_a_failure_is_kept() -> None:
    prompts = tuple((1, 2, 3) for _ in range(16))
    said = io.StringIO()
    with pytest.raises(Unfinished, match="the store holds too little") as raised:
        compare_all(FailingHost(), prompts, 4, Progress(Console(file=said)))
    [kept] = raised.value.results
    assert (kept.variant, kept.answers) == (variants(has_activations=True)[0], 4)
    assert "the first of 30 took" in said.getvalue()


def test_a_failure_is_reported_and_is_the_exit_code(
    bundled_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = replace(some_results(), error="warm: nothing was loaded", costs=[])
    monkeypatch.setattr(runs, "run_all", lambda *_: failed)
    ran = CliRunner().invoke(app, ["bench", "numerics", "--model", str(bundled_model), "--json"])
    assert ran.exit_code == 1
    assert isinstance(ran.exception, Internal)
    report = json.loads(ran.stdout)
    assert (report["equal"], report["error"]) == (False, failed.error)
    assert len(report["variants"]) == 2
    assert f"FAILED: {failed.error}" in str(table_of(report).caption)


def test_a_small_run_of_all_variants(tmp_path: Path) -> None:
    folder, output = write_tiny("llama-3", tmp_path / "tiny"), tmp_path / "out.json"
    ran = CliRunner().invoke(
        app,
        [
            *("bench", "numerics", "--model", str(folder), "--dtype", "float32"),
            *("--prompts", "2", "--prompt", "96", "--new", "6", "--page-tokens", "16"),
            *("--cost-shape", "none", "--threads", "1", "--json", "--output", str(output)),
            *(() if compiler() is None else ("--cpu-kernels", ONE_ORDER)),
        ],
    )
    assert ran.exit_code == 0, ran.output
    report = json.loads(ran.stdout)
    assert json.loads(output.read_text()) == report
    if compiler() is None:
        assert report["numerics"] in list(Numerics)
    else:
        assert report["equal"]
        assert report["numerics"] == Numerics.INVARIANT
    assert report["costs"] == []
    names = [each.name for each in variants(has_activations=True)]
    assert [each["name"] for each in report["variants"]] == names
    for each in report["variants"]:
        assert each["answers"] == 2
        # In fp32 the texts of clear choices are equal by any kernels.
        assert each["largest_logprob_difference"] < 1e-3


def test_prompts_that_do_not_fit_are_refused(bundled_model: Path) -> None:
    ran = CliRunner().invoke(
        app, ["bench", "numerics", "--model", str(bundled_model), "--prompt", "4090"]
    )
    assert ran.exit_code != 0


def test_a_prompt_of_too_few_pages_is_refused_at_once(bundled_model: Path) -> None:
    result = CliRunner().invoke(
        app, ["bench", "numerics", "--model", str(bundled_model), "--prompt", "100"]
    )
    assert isinstance(result.exception, InvalidArgument)
    assert "at least 6 pages of 64 tokens" in str(result.exception)

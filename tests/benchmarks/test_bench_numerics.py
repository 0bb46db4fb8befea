"""`benchmarks.numerics`: its comparison, its report, and a small run. About five seconds."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tiny_models import write_tiny

from benchmarks import numerics
from benchmarks.numerics import (
    REFERENCE,
    Answer,
    Cached,
    Host,
    Split,
    Unfinished,
    Variant,
    VariantResult,
    Work,
    compare_all,
    cost_of,
    main,
    variants,
)
from splitpoint.errors import Internal, InvalidArgument
from splitpoint.host.processor import compiler
from splitpoint.shapes import Numerics
from splitpoint_cli.bench.decode_report import Run
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.bench.texts import Prompts

ONE_ORDER = "decode=fused,prefill=fused,linear=panels"
WANTED = Answer((5, 6, 7), ((-0.1, ((5, -0.1),)), (-0.2, ((6, -0.2),)), (-0.3, ((7, -0.3),))))


def result(variant: Variant = REFERENCE) -> VariantResult:
    return VariantResult(variant)


def test_an_equal_answer_has_no_difference() -> None:
    found = result()
    found.compare(0, 9, WANTED, WANTED)
    assert (found.answers, found.equal_answers, found.equal_logprobs) == (1, 1, 1)
    assert not found.differences


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
    assert not found.differences
    found.compare(0, 9, replace(rest, tokens=(6, 9)), WANTED)
    assert found.differences[0].position == 2


def test_an_answer_that_ends_early_differs() -> None:
    found = result()
    found.compare(0, 9, Answer(WANTED.tokens[:2], WANTED.logprobs[:2]), WANTED)
    assert found.differences


def test_variants_have_names_of_their_own() -> None:
    names = [each.name for each in variants()]
    assert len(names) == 29
    assert len({*names, REFERENCE.name}) == len(names) + 1


def test_variants_that_read_chunks_of_the_reference_come_first() -> None:
    warm = [each.is_warm for each in variants()]
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
        found.check_work()
    VariantResult(variant, work=Work(5, 5, 5, 5, 5, 5, 5, 5)).check_work()


def test_the_report_names_what_differs() -> None:
    equal, differing = (result(each) for each in variants()[:2])
    equal.compare(0, 9, WANTED, WANTED)
    differing.compare(0, 9, WANTED, WANTED)
    differing.compare(2, 9, replace(WANTED, tokens=(5, 6, 8)), WANTED)
    first, second = json.loads(json.dumps([equal.report(), differing.report()]))
    assert first["first_difference"] is None
    assert (second["answers"], second["equal_answers"]) == (2, 1)
    assert second["first_difference"]["prompt"] == 2
    assert second["first_difference"]["position"] == 2


def test_the_cost_is_a_ratio_of_medians() -> None:
    step = numerics.COST_NEW - 1
    ours, fast = [Run(1.0 + 3 * step, 1.0, 1, ((1,),))] * 2, [Run(2.0 + step, 2.0, 1, ((1,),))] * 2
    cost = cost_of(8, ours, fast)
    assert (cost["step_ratio"], cost["first_token_ratio"]) == (3.0, 0.5)


class FailingHost(Host):
    """Answers two groups, and then fails in the third."""

    def __init__(self) -> None:
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
    with pytest.raises(Unfinished, match="the store holds too little") as raised:
        compare_all(FailingHost(), prompts, 4, Progress(Console(file=io.StringIO())))
    [kept] = raised.value.results
    assert (kept.variant, kept.answers) == (variants()[0], 4)


def test_a_failure_is_reported_and_is_the_exit_code(
    bundled_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {"equal": False, "error": "warm: nothing was loaded"}
    monkeypatch.setattr(numerics, "measure", lambda *_: failed)
    assert main(["--model", str(bundled_model), "--json"]) == 1
    assert json.loads(capsys.readouterr().out).items() >= failed.items()


def test_a_small_run_of_all_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, output = write_tiny("llama-3", tmp_path / "tiny"), tmp_path / "out.json"
    words = [
        *("--model", str(folder), "--dtype", "float32"),
        *("--prompts", "2", "--prompt", "96", "--new", "6", "--page-tokens", "16"),
        *("--cost-shape", "none", "--threads", "1", "--json", "--output", str(output)),
        *(() if compiler() is None else ("--cpu-kernels", ONE_ORDER)),
    ]
    assert main(words) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert json.loads(output.read_text()) == report
    if compiler() is None:
        assert report["numerics"] in list(Numerics)
    else:
        assert report["equal"]
        assert report["numerics"] == Numerics.INVARIANT
    assert report["costs"] == []
    names = [each.name for each in variants()]
    assert [each["name"] for each in report["variants"]] == names
    for each in report["variants"]:
        assert each["answers"] == 2
        # In fp32 the texts of clear choices are equal by any kernels.
        assert each["largest_logprob_difference"] < 1e-3


def test_prompts_that_do_not_fit_are_refused(bundled_model: Path) -> None:
    with pytest.raises(InvalidArgument, match="more than the context"):
        main(["--model", str(bundled_model), "--prompt", "4090"])


def test_a_prompt_of_too_few_pages_is_refused_at_once(bundled_model: Path) -> None:
    with pytest.raises(InvalidArgument, match="at least 6 pages of 64 tokens"):
        main(["--model", str(bundled_model), "--prompt", "100"])

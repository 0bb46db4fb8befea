"""`bench decode`: its arithmetic, and that all contenders answer alike on small weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import VOCABULARY, build_tiny, write_tiny
from typer.testing import CliRunner

from splitpoint.errors import InvalidArgument
from splitpoint_cli.bench.decode.command import decode
from splitpoint_cli.bench.decode.report import OURS, Run, Workload, report_of, table_of
from splitpoint_cli.bench.decode.runs import OurWorker, Transformers
from splitpoint_cli.main import app

WORKLOAD = Workload("opt-125m", "float32", 2, 20, 6, 3, "cpu", 1, 0)


def run(seconds: float, first: float, tokens: tuple[tuple[int, ...], ...]) -> Run:
    return Run(seconds, first, len(tokens), tokens)


def test_the_report_compares_medians_with_the_fastest_peer() -> None:
    tokens = ((1, 2, 3, 4), (5, 6, 7, 8))
    other = ((1, 2, 9, 4), (5, 6, 7, 8))
    runs = {
        OURS: [run(2.0, 0.5, tokens), run(1.0, 0.5, tokens), run(9.0, 0.5, tokens)],
        "slow sdpa": [run(8.0, 2.0, tokens)] * 3,
        "fast": [run(4.0, 3.0, other)] * 3,
    }
    report = report_of(WORKLOAD, runs)
    assert report["fastest_peer"] == "fast"
    assert report["ratio"] == 2.0
    assert report["ratio_to_default_attention"] == 4.0
    # 6 tokens after the first ones: 4 a second, against 1 (slow) and 6 (fast).
    assert report["decode_ratio"] == round(4 / 6, 3)
    assert report["agreeing_token_share"] == 6 / 8
    assert not report["tokens_agree"]
    assert json.loads(json.dumps(report)) == report
    assert table_of(report).row_count == 3


@pytest.mark.parametrize(
    ("field", "value", "there_are"),
    [("shape", "opt-1", "opt-125m, opt-6.7b"), ("dtype", "int4", "bfloat16")],
)
def test_unknown_choices_are_named(field: str, value: str, there_are: str) -> None:
    with pytest.raises(InvalidArgument, match=there_are) as caught:
        decode(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_a_report_without_a_place_is_refused_before_anything_runs(tmp_path: Path) -> None:
    command = ["bench", "decode", "--output", str(tmp_path / "no" / "out.json")]
    with pytest.raises(InvalidArgument, match=r"--output: .* is no folder"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_all_contenders_give_the_same_tokens(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCABULARY, (2, 20), generator=generator)
    runs = [OurWorker(write_tiny("opt", tmp_path), WORKLOAD).run(prompts, 6)]
    for cache in ("dynamic", "static"):
        for attention in ("sdpa", "eager"):
            runs.append(Transformers(build_tiny("opt"), cache, attention).run(prompts, 6))
    assert len({each.tokens for each in runs}) == 1
    for each in runs:
        assert each.token_count == 12
        assert 0 < each.first_token_seconds < each.seconds
        assert each.tokens_per_second > 0
        assert each.decode_tokens_per_second > 0

"""`bench decode`: its arithmetic, and that all contenders answer alike on small weights."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, write_tiny
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.errors import InvalidArgument
from splitpoint.host.processor import compiler
from splitpoint.speculation import DraftMethod
from splitpoint_cli.bench.decode import decode
from splitpoint_cli.bench.decode_report import (
    OURS,
    OURS_INT8,
    Measured,
    Parts,
    Run,
    Workload,
    report_of,
    table_of,
    too_slow,
)
from splitpoint_cli.bench.decode_runs import ask_peer, perplexity
from splitpoint_cli.bench.limits import MemoryReads
from splitpoint_cli.bench.our_worker import OurWorker, TimedStep, load_decoder, parts_of
from splitpoint_cli.bench.peer_child import Load
from splitpoint_cli.bench.peers import interpreters_of, start_peer
from splitpoint_cli.bench.texts import passages, random_prompts, text_prompts
from splitpoint_cli.main import app
from worker_service.model.decoder import Decoder

WORKLOAD = Workload("opt-125m", "float32", 2, 20, 6, 3, "cpu", 1, 0)


def run(seconds: float, first: float, tokens: tuple[tuple[int, ...], ...]) -> Run:
    return Run(seconds, first, len(tokens), tokens)


def test_the_report_compares_medians_with_the_fastest_peer() -> None:
    tokens = ((1, 2, 3, 4), (5, 6, 7, 8))
    other = ((1, 2, 9, 4), (5, 6, 7, 8))
    runs = {
        OURS: [run(2.0, 0.5, tokens), run(1.0, 0.5, tokens), run(9.0, 0.5, tokens)],
        "transformers slow sdpa": [run(8.0, 2.0, tokens)] * 3,
        "transformers fast": [run(4.0, 3.0, other)] * 3,
        "vllm": [run(1.0, 0.25, tokens)] * 3,
    }
    peer_of = {name: name.split()[0] for name in runs if name != OURS}
    # A step of two sequences takes 0.1 s at least.
    report = report_of(WORKLOAD, Measured(runs, peer_of, 20e9, 2 * 10**9))
    assert report["ratios"]["vllm"]["ratio"] == 0.5
    beside = report["ratios"]["transformers"]
    assert beside["fastest_peer"] == "transformers fast"
    assert beside["ratio"] == 2.0
    # 6 tokens after the first ones: 4 a second, against 1 (slow) and 6 (fast).
    assert beside["decode_ratio"] == round(4 / 6, 3)
    assert beside["first_token_ratio"] == round(0.5 / 2.0, 3)
    assert beside["agreeing_token_share"] == 6 / 8
    assert not beside["tokens_agree"]
    assert report["ratios"]["vllm"]["tokens_agree"]
    assert report["memory_limit"]["step_seconds"] == 0.1
    # 4 tokens a second of two sequences: a step takes 0.5 s.
    assert report["contenders"][OURS]["step_seconds"] == 0.5
    assert report["contenders"][OURS]["step_over_limit"] == 5.0
    assert json.loads(json.dumps(report)) == json.loads(json.dumps(dict(report)))
    table = table_of(report)
    assert table.row_count == 5
    assert "0.50 x vllm in all" in str(table.caption)


def test_settings_run_again_if_they_may_be_their_peers_fastest_in_any_figure() -> None:
    tokens = ((1, 2, 3, 4), (5, 6, 7, 8))
    runs = {
        OURS: [run(1.0, 0.5, tokens)],
        "a fastest": [run(4.0, 2.0, tokens)],
        "a as fast": [run(4.9, 2.4, tokens)],
        "a early": [run(9.0, 1.0, tokens)],
        "a slow": [run(9.0, 3.0, tokens)],
        "b slow": [run(30.0, 20.0, tokens)],
    }
    peer_of = {name: name[0] for name in runs if name != OURS}
    assert too_slow(runs, peer_of) == {"a slow"}


def test_without_peers_the_limit_is_all_there_is() -> None:
    runs = {OURS: [run(2.0, 0.5, ((1, 2, 3),))]}
    report = report_of(WORKLOAD, Measured(runs, {}, 20e9, 10**9))
    assert report["ratios"] == {}
    assert table_of(report).row_count == 2
    assert report["parts"] is None


def test_each_part_of_a_step_stands_beside_its_limit() -> None:
    runs = {OURS: [run(2.0, 0.5, ((1, 2, 3),))]}
    parts = Parts(products=0.05, attention=0.02, rest=0.01)
    measured = Measured(runs, {}, 20e9, 10**9, cache_bytes=2 * 10**8, parts=parts)
    report = report_of(WORKLOAD, measured)
    assert report["parts"] == {
        "products": {"seconds": 0.05, "bytes": 8 * 10**8, "limit_seconds": 0.04},
        "attention": {"seconds": 0.02, "bytes": 2 * 10**8, "limit_seconds": 0.01},
        "rest": {"seconds": 0.01, "bytes": 0, "limit_seconds": 0.0},
    }
    lines = str(table_of(report).caption)
    assert "products 50.0 ms for 800 MB (limit 40.0), attention 20.0 ms" in lines
    assert "rest 10.0 ms" in lines


def test_parts_are_medians_over_steps_that_another_one_follows() -> None:
    other = None  # a step with other rows
    steps = [
        *(other, TimedStep(1.0, 0.5, 0.2), TimedStep(2.0, 0.6, 0.3), TimedStep(4.0, 0.9, 0.1)),
        *(TimedStep(9.0, 0.1, 0.1), other, TimedStep(20.0, 0.2, 0.2)),
    ]
    parts = parts_of(steps)
    assert parts is not None
    assert parts.products == pytest.approx(0.6)
    assert parts.attention == pytest.approx(0.2)
    assert parts.rest == pytest.approx(1.1)  # of 0.3, 1.1, 4.0
    assert parts_of([other, TimedStep(1.0), other]) is None


def test_the_parts_of_a_step_are_timed_in_a_run_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all layers and the head, once in each step, and beside the time of the whole run."""
    prompts = random_prompts(VOCABULARY, 2, 20, seed=0)
    model = load_decoder(write_tiny("opt", tmp_path), WORKLOAD)
    worker = OurWorker(model, WORKLOAD)
    noted: list[str] = []
    timed, timing = worker._timed, worker._timed._timed

    def noting(part: str, *more: Any) -> Any:
        if timed.steps and timed.steps[-1] is not None:
            noted.append(part)
        return timing(part, *more)

    monkeypatch.setattr(timed, "_timed", noting)
    began = time.perf_counter()
    parts = worker.parts(prompts, 6)
    seconds = time.perf_counter() - began
    # The first tokens come from the prompts' own steps.
    assert noted.count("attention") == 5 * len(model.layers)
    assert noted.count("products") % 5 == 0
    assert parts is not None
    assert min(parts.products, parts.attention) > 0
    assert parts.products + parts.attention + parts.rest < seconds
    noted.clear()
    worker.run(prompts, 6)
    assert not noted
    assert timed.steps is None


def test_passages_spread_evenly_and_begin_as_texts_do() -> None:
    tokens = range(100, 120)
    assert passages([0], tokens, 3, 5) == (
        (0, 100, 101, 102, 103),
        (0, 108, 109, 110, 111),
        (0, 116, 117, 118, 119),
    )
    assert passages([], tokens, 1, 20) == (tuple(tokens),)
    with pytest.raises(InvalidArgument, match="the text has 20 tokens"):
        passages([0], tokens, 1, 22)


def test_a_text_gives_prompts_in_the_models_tokens(tmp_path: Path) -> None:
    folder = resolve_model(None)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    text = tmp_path / "code.py"
    text.write_text("import os\nimport sys\n\nclass Queue:\n    pass\n" * 20)
    [prompt] = text_prompts(text, folder, 1, 40)
    assert prompt == tuple(tokenizer.encode(text.read_text())[:40])
    with pytest.raises(InvalidArgument, match="cannot be read") as caught:
        text_prompts(tmp_path / "none.py", folder, 1, 40)
    assert caught.value.field == "text"


def test_memory_is_read_at_a_rate_that_only_grows() -> None:
    reads = MemoryReads(torch.device("cpu"), buffer_bytes=1 << 20)
    assert reads.bytes_per_second == 0
    first = reads.measure(1)
    # No memory is as slow as 10 MB/s.
    assert first > 1e7
    assert reads.measure(1) >= first


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
    prompts = random_prompts(VOCABULARY, 2, 20, seed=0)
    model = load_decoder(write_tiny("opt", tmp_path), WORKLOAD)
    runs = [OurWorker(model, WORKLOAD).run(prompts, 6)]
    asked = Load("transformers", str(tmp_path), "float32", threads=1, batch=2, tokens=26)
    process = start_peer(asked, interpreters_of(()))
    try:
        assert process.variants == ("dynamic sdpa", "dynamic eager", "static sdpa", "static eager")
        assert process.version.startswith("transformers ")
        runs += [ask_peer(process, each, prompts, 6) for each in process.variants]
    finally:
        process.close()
    assert len({each.tokens for each in runs}) == 1
    for each in runs:
        assert each.token_count == 12
        assert 0 < each.first_token_seconds < each.seconds
        assert each.tokens_per_second > 0
        assert each.decode_tokens_per_second > 0


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("method", [DraftMethod.SUFFIX, DraftMethod.MODEL])
def test_drafts_give_the_same_tokens_and_are_counted(
    method: DraftMethod, temperature: float, tmp_path: Path
) -> None:
    folder = write_tiny("opt", tmp_path)
    # The best of all draft models: the model itself.
    workload = replace(
        WORKLOAD, new=30, speculative_tokens=3, draft_model=str(folder), temperature=temperature
    )
    model = load_decoder(folder, workload)
    # The prompt repeats itself, and so do suffixes' drafts.
    prompts = tuple((*each, *each) for each in random_prompts(VOCABULARY, 2, 20, seed=0))
    plain = OurWorker(model, workload).run(prompts, 30)
    assert (plain.drafted, plain.accepted) == (0, 0)
    drafted = OurWorker(model, workload, method, folder)
    runs = [drafted.run(prompts, 30) for _ in range(2)]
    assert all(run.tokens == plain.tokens for run in runs)
    assert all(0 < run.accepted <= run.drafted for run in runs if method is DraftMethod.MODEL)
    # A later run has no advantage of an earlier one's answers.
    assert runs[0].drafted == runs[1].drafted
    assert runs[0].accepted == runs[1].accepted


def test_the_report_says_what_drafts_came_to() -> None:
    tokens = ((1, 2, 3, 4), (5, 6, 7, 8))
    with_drafts = replace(run(1.25, 0.5, tokens), drafted=8, accepted=6)
    runs = {OURS: [run(2.0, 0.5, tokens)], f"{OURS} suffix": [with_drafts] * 2}
    report = report_of(WORKLOAD, Measured(runs, {}, 20e9, 10**9))
    assert report["speculation"] == {
        "suffix": {
            "ratio": 1.6,
            "decode_ratio": 2.0,
            "drafted": 16,
            "accepted": 12,
            "acceptance": 0.75,
            "tokens_agree": True,
        }
    }
    assert "2.00 x plain decode, 12 of 16 drafted tokens accepted" in str(table_of(report).caption)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"speculate": ["self"]}, "speculate"),
        ({"speculate": ["model"]}, "draft_model"),
        ({"model": "somewhere"}, "model"),
        ({"peers": "sglang"}, "peers"),
        ({"temperature": 0.8}, "temperature"),
        ({"weights": "int3"}, "weights"),
        ({"weights": "int8", "device": "cuda"}, "weights"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode(**options)
    assert caught.value.field == field


@torch.inference_mode()
def test_perplexity_is_that_of_transformers() -> None:
    folder = resolve_model(None)
    passages = text_prompts(Path(__file__), folder, 2, 100)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(passages)
    expected = float(theirs(ids, labels=ids).loss.exp())
    model = Decoder.load(folder, torch.device("cpu"), torch.float32)
    assert perplexity(model, passages) == pytest.approx(expected, rel=1e-3)


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
def test_a_run_compares_int8_weights_with_native_ones(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    decode(
        text=Path(__file__),
        weights="int8",
        peers="none",
        batch=2,
        prompt=100,
        new=8,
        repeats=1,
        threads=1,
        as_json=True,
        output=found,
    )
    report = json.loads(found.read_text())
    assert set(report["contenders"]) == {OURS, OURS_INT8}
    assert report["speculation"] == {}
    facts = report["int8_weights"]
    assert facts["step_ratio"] > 0
    assert facts["agreeing_token_share"] > 0.5
    # Other weights, and nearly the same predictions.
    assert facts["int8_perplexity"] != facts["native_perplexity"]
    assert facts["int8_perplexity"] == pytest.approx(facts["native_perplexity"], rel=0.05)

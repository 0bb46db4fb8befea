"""`bench decode --weights int8`: what it gains, and what it costs on a text. About 25 s."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.errors import InvalidArgument
from splitpoint.host.processor import compiler
from splitpoint_cli.bench.decode.command import decode
from splitpoint_cli.bench.decode.perplexity import perplexity
from splitpoint_cli.bench.decode.report import OURS, OURS_INT8
from splitpoint_cli.bench.texts import text_prompts
from worker_service.model.decoder import Decoder

TEXT = Path(__file__)


@torch.inference_mode()
def test_perplexity_is_that_of_transformers() -> None:
    folder = resolve_model(None)
    passages = text_prompts(TEXT, folder, 2, 100)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(passages)
    expected = float(theirs(ids, labels=ids).loss.exp())
    model = Decoder.load(folder, torch.device("cpu"), torch.float32)
    assert perplexity(model, passages) == pytest.approx(expected, rel=1e-3)


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
def test_a_run_compares_int8_weights_with_native_ones(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    decode(
        text=TEXT,
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


@pytest.mark.parametrize(("weights", "device"), [("int3", "cpu"), ("int8", "cuda")])
def test_what_cannot_be_compared_is_refused(weights: str, device: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        decode(weights=weights, device=device)
    assert refused.value.field == "weights"

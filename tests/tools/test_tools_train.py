"""The training tool at its smallest size: it learns, and others load what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from splitpoint.checkpoint.config import read_config
from splitpoint.checkpoint.decoder import shape_from_config
from splitpoint.checkpoint.resolve import eos_token_ids, weight_files
from splitpoint.checkpoint.text import Tokenizer

TOOL = Path(__file__).resolve().parents[2] / "tools" / "train_stdlib_model.py"
TEXT = "def add(left, right):\n    return left + right"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    folder = tmp_path_factory.mktemp("trained")
    done = subprocess.run(
        [sys.executable, str(TOOL), "--smoke", "--threads", "1", "--out", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    report: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return folder, report


def test_it_learns(trained: tuple[Path, dict[str, object]]) -> None:
    _, report = trained
    assert float(str(report["last_loss"])) < 0.9 * float(str(report["first_loss"]))
    measured = report["held_out_perplexity"]
    assert isinstance(measured, dict)
    assert set(measured) == {"asyncio", "unittest"}
    assert all(1 < value < 512 for value in measured.values())


def test_transformers_loads_it(trained: tuple[Path, dict[str, object]]) -> None:
    folder, _ = trained
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    assert ids[0, 0] == tokenizer.bos_token_id == 0
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == TEXT
    with torch.inference_mode():
        logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], 512)
    assert torch.isfinite(logits).all()


def test_splitpoint_understands_it(trained: tuple[Path, dict[str, object]]) -> None:
    folder, _ = trained
    shape = shape_from_config(read_config(folder))
    assert (shape.layer_count, shape.kv_head_count, shape.tied_embeddings) == (2, 2, True)
    assert shape.rho == 0.5
    assert eos_token_ids(folder) == (1,)
    assert len(weight_files(folder)) == 1
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    assert list(tokenizer.encode(TEXT)) == AutoTokenizer.from_pretrained(folder)(TEXT).input_ids

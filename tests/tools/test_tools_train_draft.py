"""Distilling a draft model at its smallest size: it learns, and a worker accepts the result.

Takes about 15 seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from splitpoint.checkpoint.config import read_config
from splitpoint.checkpoint.decoder import shape_from_config
from worker_service.speculation.model_draft import DraftModel

ROOT = Path(__file__).resolve().parents[2]
TEACHER = ROOT / "models" / "stdlib-llama"


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("distilled")
    command = [sys.executable, "-m", "tools.train_draft_model", "--smoke", "--threads", "1"]
    done = subprocess.run(
        [*command, "--teacher", str(TEACHER), "--out", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return folder, json.loads(done.stdout.splitlines()[-1])


def test_it_learns_what_the_teacher_would_say(distilled: tuple[Path, dict[str, Any]]) -> None:
    _, report = distilled
    assert report["trained_tokens"] == 40 * 256
    assert report["last_loss"] < 0.8 * report["first_loss"]
    assert set(report["agreement"]) == {"asyncio", "unittest"}
    assert all(share > 0.05 for share in report["agreement"].values())
    assert report["agreement"]["unittest"] > report["agreement_before"]


def test_a_worker_accepts_it_beside_its_teacher(distilled: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = distilled
    companion = DraftModel.plan(
        folder,
        TEACHER,
        shape_from_config(read_config(TEACHER)),
        torch.device("cpu"),
        chunk_tokens=64,
        budget_bytes=256 << 20,
        max_batch_size=2,
        max_batched_tokens=512,
    )
    assert companion.config.shape.layer_count == 2
    assert companion.config.shape.vocabulary_size == 4096
    ids = AutoTokenizer.from_pretrained(folder)("def add(left):", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert torch.isfinite(AutoModelForCausalLM.from_pretrained(folder)(ids).logits).all()

"""The bundled draft model is small, fits the bundled model, and is often right."""

from __future__ import annotations

import asyncio.base_events
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runner import CPU, admission, make_engine, run_all

from splitpoint.checkpoint.config import read_config
from splitpoint.checkpoint.decoder import shape_from_config
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.speculation import DraftMethod, Speculation
from worker_service.engine.sampling import Sampling
from worker_service.model.decoder import Decoder
from worker_service.speculation.model_draft import DraftModel

COMPANION = Path(__file__).resolve().parents[3] / "models" / "stdlib-llama-draft"


def test_its_weights_are_below_4_mb() -> None:
    assert sum(file.stat().st_size for file in COMPANION.iterdir()) < 4_000_000
    assert read_config(COMPANION)["num_hidden_layers"] <= 2


@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.chaos), 3])
def test_it_speeds_up_text_that_neither_model_was_trained_on(bundled_model: Path, k: int) -> None:
    """Four places of asyncio: the same tokens in fewer steps."""
    served = Decoder.load(bundled_model, CPU, torch.float32)
    tokenizer = Tokenizer.load(bundled_model)
    assert tokenizer is not None
    text = tokenizer.encode(Path(asyncio.base_events.__file__).read_text())
    sampling = Sampling(max_tokens=48, ignore_eos=True)
    plain = [
        admission(str(start), text[start : start + 200], sampling) for start in range(0, 4000, 1000)
    ]
    speculation = Speculation(DraftMethod.MODEL, num_speculative_tokens=k)
    drafter = DraftModel.plan(
        COMPANION,
        bundled_model,
        shape_from_config(read_config(bundled_model), data_type=served.shape.data_type),
        CPU,
        chunk_tokens=64,
        budget_bytes=256 << 20,
        max_batch_size=4,
        max_batched_tokens=512,
    ).load()
    memory = 1 << 28
    wanted = run_all(make_engine(served, chunk_tokens=64, device_memory_bytes=memory), plain)
    found = run_all(
        make_engine(
            served,
            chunk_tokens=64,
            device_memory_bytes=memory,
            drafters={DraftMethod.MODEL: drafter},
        ),
        [replace(each, speculation=speculation) for each in plain],
    )
    assert found.tokens == wanted.tokens
    drafted = sum(event.drafted for event in found.drafts)
    accepted = sum(event.accepted for event in found.drafts)
    assert accepted > 0.35 * drafted > 0
    assert found.steps < 0.9 * wanted.steps

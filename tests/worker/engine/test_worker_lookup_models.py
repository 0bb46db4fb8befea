"""Served selections on models that look values up far back: what they read decides the answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_runner import CPU, make_engine
from selecting import select_always
from store_runner import store_runner, streamed

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.selection import Selection
from splitpoint.shapes import ArenaLayout
from splitpoint_cli.eval.tasks import extraction
from worker_service.engine.sampling import Sampling
from worker_service.lanes.lanes import SerialLanes
from worker_service.model.decoder import Decoder

MODELS = Path(__file__).resolve().parents[3] / "models"
TOKENS, QUESTIONS = 512, 6

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["lookup-opt", "lookup-llama"])
def test_values_of_a_table_are_found_by_a_screen_and_not_by_a_window(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    select_always(monkeypatch)
    tokenizer = Tokenizer.load(MODELS / name)
    assert tokenizer is not None
    model = Decoder.load(MODELS / name, CPU, torch.float32)
    table = extraction(tokenizer, TOKENS, seed=7)
    asked = table.answers[-QUESTIONS:]
    layout = ArenaLayout.of(model.shape, chunk_tokens=16, has_activations=False)

    def right_answers(selection: str) -> int:
        """Return how many questions are answered right, each in a request of its own."""
        folder = tmp_path / selection.partition(":")[0]
        folder.mkdir()
        with store_runner(layout, folder, 40 * QUESTIONS) as runner:
            engine = make_engine(
                model,
                has_activations=False,
                lanes=SerialLanes(CPU),
                staging_pages=48,
                cache_pages=40 * QUESTIONS,
            )
            requests = [
                streamed(
                    str(number),
                    list(table.token_ids[: each.start]),
                    Sampling(max_tokens=len(each), ignore_eos=True),
                    selection=Selection.parsed(selection),
                )
                for number, each in enumerate(asked)
            ]
            transcript = runner.run(engine, requests)
        return sum(
            tuple(transcript.tokens[str(number)]) == table.token_ids[each.start : each.stop]
            for number, each in enumerate(asked)
        )

    assert right_answers("columns:0.1,full_layers=0") >= QUESTIONS - 1
    assert right_answers("window:0.1,full_layers=0") <= 1

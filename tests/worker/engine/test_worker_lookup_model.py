"""Served selections on a model that looks values up far back: what is read decides the answer."""

from __future__ import annotations

import asyncio.base_events
from pathlib import Path

import pytest
import torch
from engine_runner import CPU, make_engine
from selecting import select_always
from store_runner import store_runner, streamed

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.selection import Selection
from splitpoint.shapes import ArenaLayout
from splitpoint_cli.eval.tasks import needle
from worker_service.engine.sampling import Sampling
from worker_service.lanes.lanes import SerialLanes
from worker_service.model.decoder import Decoder

MODEL = Path(__file__).resolve().parents[3] / "models" / "lookup-llama"
TOKENS, QUESTIONS = 512, 6
# It was not trained on it.
FILLER = Path(asyncio.base_events.__file__)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_hidden_value_is_found_by_a_screen_and_not_by_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    select_always(monkeypatch)
    tokenizer = Tokenizer.load(MODEL)
    assert tokenizer is not None
    model = Decoder.load(MODEL, CPU, torch.float32)
    filler = tokenizer.encode(FILLER.read_text())
    # Not in the newest tenth of the tokens.
    tasks = [
        needle(tokenizer, filler[TOKENS * seed :], TOKENS, seed / QUESTIONS, seed)
        for seed in range(QUESTIONS)
    ]
    answers = [task.token_ids[each.start : each.stop] for task in tasks for each in task.answers]
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
                    list(task.token_ids[: task.answers[0].start]),
                    Sampling(max_tokens=len(answer), ignore_eos=True),
                    selection=Selection.parsed(selection),
                )
                for number, (task, answer) in enumerate(zip(tasks, answers, strict=True))
            ]
            transcript = runner.run(engine, requests)
        return sum(
            tuple(transcript.tokens[str(number)]) == answer for number, answer in enumerate(answers)
        )

    assert right_answers("columns:0.1,full_layers=0") >= QUESTIONS - 1
    assert right_answers("window:0.1,full_layers=0") <= 1

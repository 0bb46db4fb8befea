"""What a layer is asked ahead: its own queries of the residual that entered the layer before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from engine_runner import CPU
from tiny_models import VOCABULARY, write_tiny

from worker_service.model.attention import prefill_alone
from worker_service.model.decoder import Decoder
from worker_service.model.model import CarryOut, Layer
from worker_service.retrieval.ahead import RowReader, RowsAhead
from worker_service.retrieval.sequence_reads import SequenceReads
from worker_service.selection.guess import guess_of
from worker_service.selection.screen import Guess

TOKENS, FIRST_POSITION = 20, 7


@dataclass
class Asked:
    """Stands for what a sequence reads; keeps what its layers are asked, but the first one's."""

    guesses: dict[int, Guess] = field(default_factory=dict)

    def selects(self, index: int) -> bool:
        return index > 0

    def begin(self, index: int, guess: Guess, _carry_out: CarryOut, _: torch.Tensor) -> None:
        self.guesses[index] = guess


def attend(_index: int, layer: Layer, _inputs: torch.Tensor, *heads: torch.Tensor) -> torch.Tensor:
    queries, keys, values = heads
    return prefill_alone(
        queries, keys, values, window=layer.window, scale=layer.scale, cap=layer.cap
    )


@pytest.mark.parametrize("case", ["llama-3", "opt", "gemma3"])
def test_a_guess_is_that_of_the_evaluation(case: str, tmp_path: Path) -> None:
    """Equal to `eval --guess previous`, row for row."""
    model = Decoder.load(write_tiny(case, tmp_path), CPU, torch.float32)
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(FIRST_POSITION, FIRST_POSITION + TOKENS)
    rows = torch.tensor([3, 11])
    asked = [Asked() for _ in rows]
    readers = [
        RowReader(row, FIRST_POSITION + row, cast(SequenceReads, each), rows[:0])
        for row, each in zip(rows.tolist(), asked, strict=True)
    ]
    ahead = RowsAhead(model, readers, rows, positions[rows])
    residuals: list[torch.Tensor] = []

    def enter(index: int, hidden: torch.Tensor) -> None:
        residuals.append(hidden.clone())
        ahead.enter(index, hidden)

    step: Any = attend
    model.run(ids, positions, step, enter=enter)
    for reader, each in zip(readers, asked, strict=True):
        assert list(each.guesses) == list(range(1, len(model.layers)))
        place = slice(reader.row, reader.row + 1)
        for index, guess in each.guesses.items():
            layer, rotary = model.layers[index], model.rotary(positions[place])
            wanted = guess_of(residuals[index - 1][place], layer, layer, rotary, reader.position)
            torch.testing.assert_close(guess.inputs, wanted.inputs)
            torch.testing.assert_close(guess.queries, wanted.queries)
            assert guess.first_position == reader.position

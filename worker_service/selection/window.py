"""The first and the newest tokens (StreamingLLM): nothing is kept, newer tokens score higher."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from splitpoint.selection import SelectionMethod
from worker_service.selection.screen import AttentionShape, Guess, Maker, TokenRows


class WindowScreen:
    """The baseline that looks at positions alone."""

    device_bytes = 0

    def __init__(self, shape: AttentionShape) -> None:
        self._query_heads = shape.query_heads
        self._tokens = 0

    def extend(self, rows: TokenRows) -> None:
        self._tokens += len(rows.keys)

    def scores(self, guess: Guess) -> torch.Tensor:
        positions = torch.arange(self._tokens, dtype=torch.float32, device=guess.queries.device)
        return positions.expand(len(guess.queries), self._query_heads, -1)


MAKERS: Mapping[SelectionMethod, Maker] = {
    SelectionMethod.WINDOW: lambda _, shape, *__: WindowScreen(shape)
}

"""Calibration samples: what each layer makes of passages of text, on the frozen model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker_service.model.attention import prefill_alone
from worker_service.model.decoder import Decoder
from worker_service.model.forward import through_layers
from worker_service.model.layer import DecoderLayer
from worker_service.selection.screen import TokenRows


@torch.no_grad()
def sampled(model: Decoder, passage: Sequence[int]) -> list[TokenRows]:
    """Return X, q and k of every layer for one passage, which is attended by itself."""
    recorder = _Recorder()
    ids = torch.tensor(passage, device=model.device)
    positions = torch.arange(len(ids), device=model.device)
    hidden = model.embed(ids, positions)
    through_layers(model.visit(), hidden, model.rotary(positions), recorder)
    return recorder.rows


class _Recorder:
    """Attends a whole passage, and keeps what its layers made of it, in order."""

    def __init__(self) -> None:
        self.rows: list[TokenRows] = []

    def __call__(
        self,
        _index: int,
        layer: DecoderLayer,
        inputs: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        # Copies: keys are a view of keys and values.
        self.rows.append(TokenRows(inputs, queries, keys.clone()))
        return prefill_alone(
            queries, keys, values, window=layer.window, scale=layer.scale, cap=layer.cap
        )

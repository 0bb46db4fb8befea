"""The peer that keeps heavy hitters on the host evicts what the measured form of H2O does."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tiny_models import write_tiny

from splitpoint.errors import InvalidArgument
from splitpoint.selection import Selection
from splitpoint_cli.bench.heavy_hitters import HeavyHitterHost
from worker_service.model.attention import prefill_alone
from worker_service.model.decoder import Decoder
from worker_service.model.model import Layer
from worker_service.selection.h2o import HeavyHitterScreen
from worker_service.selection.screen import AttentionShape, Guess, TokenRows

CPU = torch.device("cpu")
PROMPT = [3 + (7 * index) % 100 for index in range(90)]


@torch.inference_mode()
def test_it_keeps_what_the_measured_form_keeps(tmp_path: Path) -> None:
    """In the layer below which nothing is evicted: its queries and keys are those of full text."""
    model = Decoder.load(write_tiny("llama-3", tmp_path), CPU, torch.float32)
    selection = Selection.parsed("h2o:0.3,recent=4,full_layers=1")
    host = HeavyHitterHost(model, selection, None)
    stored = host.prefill(PROMPT, 12)
    kept = [layer.copy() for layer in stored[0]]
    text = [stored[1]]
    buffers = torch.empty(2, 1, 2, *kept[0].planes.shape[1:])
    for position in range(len(PROMPT), len(PROMPT) + 11):
        text += host._step([text[-1]], [position], [kept], buffers)
    assert host.decode(12, [stored], (tuple(PROMPT),)).tokens == (tuple(text),)
    host.close()
    rows: list[TokenRows] = []

    def record(
        _index: int,
        layer: Layer,
        inputs: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        rows.append(TokenRows(inputs, queries, keys.clone()))
        return prefill_alone(
            queries, keys, values, window=layer.window, scale=layer.scale, cap=layer.cap
        )

    tokens = torch.tensor([*PROMPT, *text[:-1]])
    model.run(tokens, torch.arange(len(tokens)), record)
    # All of the full layer's tokens are left, and the next layer evicts by exact inputs.
    assert kept[0].count == len(tokens)
    screen = HeavyHitterScreen(AttentionShape.of(model.config, 1), selection)
    for part in (slice(len(PROMPT)), slice(len(PROMPT), None)):
        of = rows[1]
        screen.extend(TokenRows(of.inputs[part], of.queries[part], of.keys[part]))
    last = Guess(rows[1].inputs[-1:], rows[1].queries[-1:], len(tokens) - 1)
    scores = screen.scores(last)[0, :: model.shape.query_head_count // len(kept[1].positions)]
    wanted = [head.nonzero().flatten().tolist() for head in scores > -math.inf]
    assert [sorted(head) for head in kept[1].positions.tolist()] == wanted
    assert kept[1].count == math.ceil(0.3 * len(tokens))
    # Each slot has the key of the token that it is said to hold.
    for head, held in enumerate(kept[1].positions):
        keys = kept[1].planes[0, head, : kept[1].count]
        torch.testing.assert_close(keys, rows[1].keys[held, head], atol=1e-4, rtol=1e-4)


def test_models_with_windows_are_refused(tmp_path: Path) -> None:
    model = Decoder.load(write_tiny("mistral", tmp_path), CPU, torch.float32)
    with pytest.raises(InvalidArgument, match="without sliding windows"):
        HeavyHitterHost(model, Selection.parsed("h2o:0.1"), None)

"""The perplexity of a text under a model, teacher-forced: each passage by itself.

Attention is by torch's products, whatever the worker's kernel is: models that are compared differ
in their weights only.
"""

from __future__ import annotations

import math

import torch

from splitpoint_cli.bench.texts import Prompts
from worker_service.model.attention import prefill_alone
from worker_service.model.decoder import Decoder
from worker_service.model.forward import through_layers
from worker_service.model.layer import DecoderLayer


@torch.inference_mode()
def perplexity(model: Decoder, passages: Prompts) -> float:
    """Return e to the mean negative log-probability of all tokens but each passage's first.

    All weights are on the device.
    """
    total, count = 0.0, 0
    for passage in passages:
        logits = _logits(model, passage)[:-1].double()
        targets = torch.tensor(passage[1:], device=logits.device)
        chosen = logits.log_softmax(-1).gather(1, targets[:, None])
        total -= float(chosen.sum())
        count += len(targets)
    return math.exp(total / count)


def _logits(model: Decoder, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return the logits after each token, fp32 `[T, vocabulary]`."""

    def attend(
        _index: int,
        layer: DecoderLayer,
        _inputs: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        return prefill_alone(
            queries, keys, values, window=layer.window, scale=layer.scale, cap=layer.cap
        )

    ids = torch.tensor(tokens, device=model.device)
    positions = torch.arange(len(tokens), device=model.device)
    hidden = model.embed(ids, positions)
    return model.logits(through_layers(model.layers, hidden, model.rotary(positions), attend))

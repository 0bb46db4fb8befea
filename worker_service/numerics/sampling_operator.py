"""Choices and log-probabilities as an operator: those of a row alone beside those of a batch."""

from __future__ import annotations

import struct

import torch

from worker_service.engine.sampling import Choice, Sampling, SamplingRow, choose_with_flags
from worker_service.numerics.operators import Operator

_ROWS = 3
_SEED = 15
# Few steps between two logits, so that the largest occur twice, as they do in bfloat16.
_STEPS_PER_UNIT = 4
_SAMPLINGS = (
    Sampling(),
    Sampling(logprobs=4),
    Sampling(temperature=0.8, top_k=40, seed=3, logprobs=2),
    Sampling(temperature=1.1, top_p=0.9, min_p=0.01, seed=4),
)


def sampling_operator(vocabulary: int, device: torch.device) -> Operator:
    """Return the operator from fp32 logits `[N, vocabulary]` to numbers of each choice."""
    generator = torch.Generator().manual_seed(_SEED)
    logits = torch.randn(_ROWS, vocabulary, generator=generator)
    logits = (3 * _STEPS_PER_UNIT * logits).round() / _STEPS_PER_UNIT

    def choices(logits: torch.Tensor) -> torch.Tensor:
        flags = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        found = []
        for sampling in _SAMPLINGS:
            _, chosen = choose_with_flags(logits, flags, [SamplingRow(sampling)] * len(logits))
            found.append(torch.stack([_numbers(each) for each in chosen]))
        return torch.cat(found, dim=1)

    return Operator("sampling", (logits.to(device),), choices, most_calls=1)


def _numbers(choice: object) -> torch.Tensor:
    """Return token ids, and log-probabilities by their bits, as int64 `[5]` or more."""
    if not isinstance(choice, Choice):
        raise RuntimeError("finite logits gave no choice")
    pairs = [(choice.token_id, choice.logprob or 0.0), *choice.top_logprobs]
    bits = [struct.unpack("<q", struct.pack("<d", logprob))[0] for _, logprob in pairs]
    return torch.tensor([*(token for token, _ in pairs), *bits])

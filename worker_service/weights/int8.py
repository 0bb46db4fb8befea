"""Quantises matrices to int8, each output channel by itself: symmetric, by its largest weight."""

from __future__ import annotations

import torch

_LARGEST = 127
# Elements that are quantised at once: a head of 256k rows has no second copy in fp32.
_BLOCK = 1 << 22


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, int8 `[out, in]`, and scales, fp32 `[out]`, of a matrix `[out, in]`.

    `weight[o] ~ codes[o] * scales[o]`, with scales[o] = max |weight[o]| / 127: an element is
    off by half a scale at most. A row that is not finite gets a scale that is not, either.
    """
    codes = torch.empty_like(weight, dtype=torch.int8)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    count = max(1, _BLOCK // weight.shape[1])
    for first in range(0, len(weight), count):
        rows = slice(first, first + count)
        block = weight[rows].to(torch.float32)
        scales[rows] = block.abs().amax(dim=1) / _LARGEST
        block = (block / scales[rows, None]).nan_to_num_(nan=0.0).round_()
        codes[rows] = block.clamp_(-_LARGEST, _LARGEST)
    return codes, scales

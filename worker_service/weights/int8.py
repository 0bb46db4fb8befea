"""Quantises matrices to int8, each output channel by itself: symmetric, by its largest weight."""

from __future__ import annotations

import torch

_LARGEST = 127


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, int8 `[out, in]`, and scales, fp32 `[out]`, of a matrix `[out, in]`.

    `weight[o] ~ codes[o] * scales[o]`, with scales[o] = max |weight[o]| / 127: an element is
    off by half a scale at most. A row that is not finite gets a scale that is not, either.
    """
    weight = weight.to(torch.float32)
    scales = weight.abs().amax(dim=1) / _LARGEST
    codes = (weight / scales[:, None]).nan_to_num_(nan=0.0).round_()
    return codes.clamp_(-_LARGEST, _LARGEST).to(torch.int8), scales

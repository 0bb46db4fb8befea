"""Layer norm and RMS norm, with their weights as values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from splitpoint.checkpoint.decoder import Norm


@dataclass(frozen=True, slots=True)
class NormWeights:
    """One norm over the last dimension; RMS norms have no bias.

    RMS is `x / sqrt(mean(x^2) + epsilon) * weight`, with the mean in fp32. For RMS_PLUS_ONE
    `weight` holds `1 + weight` as fp32, and only the result is rounded.
    """

    kind: Norm
    weight: torch.Tensor
    bias: torch.Tensor | None
    epsilon: float

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self.kind is Norm.LAYER:
            return functional.layer_norm(
                rows, self.weight.shape, self.weight, self.bias, self.epsilon
            )
        if self.kind is Norm.RMS_PLUS_ONE:
            wide = rows.to(torch.float32)
            scaled = functional.rms_norm(wide, self.weight.shape, self.weight, self.epsilon)
            return scaled.to(rows.dtype)
        if rows.dtype == torch.float32:
            return functional.rms_norm(rows, self.weight.shape, self.weight, self.epsilon)
        # As in the training of the checkpoints: normalise in fp32, round, then scale.
        wide = rows.to(torch.float32)
        return (
            functional.rms_norm(wide, self.weight.shape, None, self.epsilon)
            .to(rows.dtype)
            .mul_(self.weight)
        )

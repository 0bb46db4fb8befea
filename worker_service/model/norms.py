"""Layer norm and RMS norm as values: weights in, normalised rows out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from worker_service.checkpoint.config import Norm


@dataclass(frozen=True, slots=True)
class NormWeights:
    """One norm over the last dimension; RMS norms have no bias.

    RMS: `x / sqrt(mean(x^2) + epsilon) * weight`, the mean in fp32. RMS_PLUS_ONE: the same
    with `1 + weight`, which is what `weight` holds then, as fp32, and rounded at the end only.
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
        # As the checkpoints were trained: normalise in fp32, round, then scale.
        wide = rows.to(torch.float32)
        return (
            functional.rms_norm(wide, self.weight.shape, None, self.epsilon)
            .to(rows.dtype)
            .mul_(self.weight)
        )

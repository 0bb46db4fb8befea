"""Rotary positions: frequencies from the config, angles per step, and the rotation.

Dimension i pairs with i + d/2, as in Hugging Face checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from splitpoint.checkpoint.rope_config import Rope


@dataclass(frozen=True, slots=True)
class Rotary:
    """Angles of N positions, shared by all layers of a step.

    Attributes:
        cosine: `[N, 1, d]`.
        sine: `[N, 1, d]`, its first half negated, so that the rotation is
            `x * cosine + swap_halves(x) * sine`.
        local: angles of the layers with a window, if they differ.
    """

    cosine: torch.Tensor
    sine: torch.Tensor
    local: Rotary | None = None

    def of(self, window: int | None) -> Rotary:
        """Return the angles of a layer with this window."""
        return self if self.local is None or window is None else self.local

    @property
    def angles(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine."""
        return self.cosine, self.sine

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate `[N, heads, d]`; returns a new tensor."""
        half = heads.shape[-1] // 2
        swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
        return torch.addcmul(heads * self.cosine, swapped, self.sine)


class RotaryTable:
    """Computes `Rotary` from positions and the d/2 inverse frequencies in fp32."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device, dtype: torch.dtype) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._dtype = dtype

    def at(self, positions: torch.Tensor) -> Rotary:
        """Return the angles of `positions` `[N]`, computed in fp32 and rounded once."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self._frequencies
        cosine, sine = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        return Rotary(
            torch.cat((cosine, cosine), dim=-1).unsqueeze(1),
            torch.cat((-sine, sine), dim=-1).unsqueeze(1),
        )


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Return fp32 `[d/2]`, scaled as `rope` says (see its docstring)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Scale for Llama 3.1: weight 1 keeps a frequency, weight 0 divides it by `factor`."""
    wavelengths = 2 * math.pi / frequencies
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    keep = ((rope.original_context / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies

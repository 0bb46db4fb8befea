"""One decoder layer, divided at the cache: before, at and after attention; its norms.

`attention_input` gives the X that the arena stores, `project_kv` rebuilds K and V from
it, and `finish` computes the rest after attention. This module knows neither attention
nor where K and V live.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch.nn import functional

from splitpoint.checkpoint.decoder import Activation, Norm
from splitpoint.planning.weight_schedule import WeightPiece
from worker_service.model.linear import Linear
from worker_service.model.rope import Rotary


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


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """The weights of one layer. N tokens may belong to any requests.

    Attributes:
        scale: factor of attention scores.
        cap: soft cap of attention scores; None: no cap.
        window: tokens that a query sees, itself included; None: all.
        norm_before: see DecoderConfig.
        arrival: lets compute wait for a piece of the weights; None: all are on the device.
    """

    head_dim: int
    scale: float
    cap: float | None
    window: int | None
    norm_before: bool
    activation: Activation
    query: Linear
    key_value: Linear
    output: Linear
    gate: Linear | None
    up: Linear
    down: Linear
    attention_norm: NormWeights
    mlp_norm: NormWeights
    query_norm: NormWeights | None
    key_norm: NormWeights | None
    post_attention_norm: NormWeights | None
    post_mlp_norm: NormWeights | None
    arrival: Callable[[WeightPiece], None] | None = None

    @property
    def sinks(self) -> torch.Tensor | None:
        """See `Layer`: none of our families has any."""
        return None

    @property
    def structure(self) -> Hashable:
        """See `Layer`: all layers of a model are alike."""
        return None

    def await_weights(self, *pieces: WeightPiece) -> None:
        """Let compute that is issued from now on begin once these are on the device.

        Products wait for their weights anyway; waiting before keeps it out of their spans.
        """
        if self.arrival is not None:
            for piece in pieces:
                self.arrival(piece)

    def attention_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return X `[N, h]`: the input of the projections, which the arena stores."""
        return self.attention_norm(hidden) if self.norm_before else hidden

    def project(
        self, inputs: torch.Tensor, rotary: Rotary | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project X `[N, h]` to q `[N, n_q, d]`, k and v `[N, n_kv, d]`, q and k after RoPE."""
        queries = self.project_queries(inputs, rotary)
        keys, values = self.project_kv(inputs, rotary)
        return queries, keys, values

    def ask(self, hidden: torch.Tensor, rotary: Rotary | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return X `[N, h]` and q `[N, n_q, d]` of residuals `[N, h]`."""
        inputs = self.attention_input(hidden)
        return inputs, self.project_queries(inputs, rotary)

    def project_queries(self, inputs: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Project X `[N, h]` to q `[N, n_q, d]`, after RoPE."""
        queries = self.query(inputs).view(inputs.shape[0], -1, self.head_dim)
        if self.query_norm is not None:
            queries = self.query_norm(queries)
        if rotary is not None:
            queries = rotary.of(self.window).rotate(queries)
        return queries

    def project_kv(
        self, inputs: torch.Tensor, rotary: Rotary | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project X `[N, h]` to k and v `[N, n_kv, d]`: the rebuild GEMM (KVPR Eq. 7).

        `K = RoPE(norm_k(X W_K + b_K))`, `V = X W_V + b_V`, with `rotary` of the tokens'
        positions. `project` runs this code, too.
        """
        both = self.key_value(inputs).view(inputs.shape[0], 2, -1, self.head_dim)
        keys, values = both[:, 0], both[:, 1]
        if self.key_norm is not None:
            keys = self.key_norm(keys)
        if rotary is not None:
            keys = rotary.of(self.window).rotate(keys)
        return keys, values

    def work(self, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Compute the next hidden `[N, h]` with queries in the place of what they attend."""
        queries, _, _ = self.project(self.attention_input(hidden), rotary)
        return self.finish(hidden, queries.flatten(1))

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Compute the next hidden `[N, h]` from `attended` `[N, n_q * d]`."""
        return self.add_mlp(self.add_attention(hidden, attended))

    def add_attention(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Add `attended` `[N, n_q * d]`, through W_O, to the hidden `[N, h]`."""
        if self.post_attention_norm is not None:
            return hidden + self.post_attention_norm(self.output(attended))
        hidden = self.output.added_to(attended, hidden)
        return hidden if self.norm_before else self.attention_norm(hidden)

    def add_mlp(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the next hidden `[N, h]` from the result of `add_attention`."""
        if self.post_mlp_norm is not None:
            return hidden + self.post_mlp_norm(self.down(self._inner(self.mlp_norm(hidden))))
        if self.norm_before:
            return self.down.added_to(self._inner(self.mlp_norm(hidden)), hidden)
        return self.mlp_norm(self.down.added_to(self._inner(hidden), hidden))

    def _inner(self, rows: torch.Tensor) -> torch.Tensor:
        if self.gate is None:
            return self.up(rows, self.activation)
        return self.up.times(rows, self.gate(rows, self.activation))

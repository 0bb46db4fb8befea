"""One decoder layer, divided at the cache: before, at and after attention; its norms.

`attention_input` gives the X that the arena stores, `project_kv` rebuilds K and V from
it, and `finish` computes the rest after attention. This module knows neither attention
nor where K and V live.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from splitpoint.checkpoint.decoder import Activation, Norm
from splitpoint.planning.weight_schedule import WeightPiece
from worker_service.kernels import row_wise
from worker_service.kernels.whole_layer import NORMS, WholeLayer
from worker_service.model.linear import OPERATIONS, Linear
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

    def takes(self, rows: torch.Tensor) -> bool:
        """Return True if our kernel normalises these rows."""
        wanted = torch.float32 if self.kind is Norm.RMS_PLUS_ONE else rows.dtype
        is_fit = self.weight.dtype == wanted and self.weight.shape == rows.shape[-1:]
        return is_fit and row_wise.takes(rows)

    @property
    def for_kernel(self) -> row_wise.Norm:
        """The norm as `takes` allows it."""
        is_wide = self.kind is Norm.RMS_PLUS_ONE
        return row_wise.Norm.of(self.weight, self.bias, self.epsilon, is_wide=is_wide)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self.takes(rows):
            return row_wise.turned(rows, self.for_kernel)
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
        whole: the same layer in two calls; None: it is computed operator by operator.
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
    whole: WholeLayer | None = None

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

    def begin(
        self, hidden: torch.Tensor, rotary: Rotary | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return X, q, k and v of residuals `[N, h]`."""
        if self.whole is not None:
            angles = None if rotary is None else rotary.of(self.window).angles
            return self.whole.begin(hidden, angles)
        inputs = self.attention_input(hidden)
        return inputs, *self.project(inputs, rotary)

    def project_queries(self, inputs: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Project X `[N, h]` to q `[N, n_q, d]`, after RoPE."""
        queries = self.query(inputs).view(inputs.shape[0], -1, self.head_dim)
        return self._turned(queries, self.query_norm, rotary)

    def project_kv(
        self, inputs: torch.Tensor, rotary: Rotary | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project X `[N, h]` to k and v `[N, n_kv, d]`: the rebuild GEMM (KVPR Eq. 7).

        `K = RoPE(norm_k(X W_K + b_K))`, `V = X W_V + b_V`, with `rotary` of the tokens'
        positions. `project` runs this code, too.
        """
        both = self.key_value(inputs).view(inputs.shape[0], 2, -1, self.head_dim)
        return self._turned(both[:, 0], self.key_norm, rotary), both[:, 1]

    def _turned(
        self, heads: torch.Tensor, norm: NormWeights | None, rotary: Rotary | None
    ) -> torch.Tensor:
        """Return heads `[N, heads, d]` after their norm, if they have one, and RoPE."""
        if rotary is not None:
            rotary = rotary.of(self.window)
            if norm is None and row_wise.takes(heads):
                return row_wise.turned(heads, angles=rotary.angles)
            if norm is not None and norm.takes(heads):
                return row_wise.turned(heads, norm.for_kernel, rotary.angles)
        if norm is not None:
            heads = norm(heads)
        return heads if rotary is None else rotary.rotate(heads)

    def work(self, hidden: torch.Tensor, rotary: Rotary | None) -> torch.Tensor:
        """Compute the next hidden `[N, h]` with queries in the place of what they attend."""
        return self.finish(hidden, self.begin(hidden, rotary)[1].flatten(1))

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Compute the next hidden `[N, h]` from `attended` `[N, n_q * d]`."""
        if self.whole is not None:
            return self.whole.end(hidden, attended)
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

    def in_two_calls(self, dtype: torch.dtype) -> DecoderLayer:
        """Return the layer with `whole` for rows of this type, if there are kernels for it."""
        posts = (self.post_attention_norm, self.post_mlp_norm)
        if not self.norm_before or any(each is not None for each in posts):
            return self
        matrices = {"query": self.query, "key": self.key_value, "output": self.output}
        matrices |= {"up": self.up, "down": self.down}
        if self.gate is not None:
            matrices["gate"] = self.gate
        norms = {name: getattr(self, name) for name in NORMS}
        return replace(self, whole=whole_of(matrices, norms, self.head_dim, self.activation, dtype))


def whole_of(
    matrices: Mapping[str, Linear],
    norms: Mapping[str, NormWeights | None],
    head_dim: int,
    activation: Activation | None,
    dtype: torch.dtype,
) -> WholeLayer | None:
    """Return the layer that has these by role; None if there are no kernels for it."""
    held = {role: each.in_panels for role, each in matrices.items()}
    in_panels = {role: each for role, each in held.items() if each is not None}
    if in_panels.keys() != held.keys() or len({each.kind for each in in_panels.values()}) > 1:
        return None
    found = {role: each.for_kernel for role, each in norms.items() if each is not None}
    return WholeLayer(in_panels, found, head_dim, OPERATIONS[activation], dtype)

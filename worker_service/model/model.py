"""What the engine asks of a model: of our own decoder, and of transformers' code.

A step is `hidden = run(ids, positions, attend)`, then `logits(hidden[rows])`. The caller decides
where K and V go, and what is attended to. N tokens may belong to any requests.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from splitpoint.checkpoint.decoder import AttentionConfig
from splitpoint.planning.weight_schedule import WeightPiece
from splitpoint.shapes import ModelShape, WeightFormat
from worker_service.lanes.lanes import Lanes
from worker_service.weights.stream import WeightStream

Result = TypeVar("Result")

# What layers need to know of N tokens' positions, such as the angles of RoPE. It belongs to the
# model that made it.
Angles = Any


class Layer(Protocol):
    """One layer, divided at the cache."""

    @property
    def head_dim(self) -> int:
        """Elements of a query, key or value head, d."""

    @property
    def scale(self) -> float:
        """Factor of attention scores."""

    @property
    def cap(self) -> float | None:
        """Soft cap of attention scores; None: no cap."""

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included; None: all."""

    @property
    def sinks(self) -> torch.Tensor | None:
        """Fp32 `[n_q]`, a score of each head beside those of keys, without a value; None: none."""

    @property
    def structure(self) -> Hashable:
        """Equal for layers of equal operators, their weights and attention aside."""

    def await_weights(self, *pieces: WeightPiece) -> None:
        """Let compute that is issued from now on begin once these are on the device."""

    def project_kv(self, inputs: torch.Tensor, rotary: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Project X `[N, h]` to k and v `[N, n_kv, d]`: the rebuild (KVPR Eq. 7)."""

    def ask(self, hidden: torch.Tensor, rotary: Angles) -> tuple[torch.Tensor, torch.Tensor]:
        """Return X `[N, h]` and q `[N, n_q, d]` of residuals `[N, h]`."""

    def work(self, hidden: torch.Tensor, rotary: Angles) -> torch.Tensor:
        """Compute the next hidden `[N, h]` with queries in the place of what they attend."""


# Stores a layer's new K and V (and X, if wanted), and attends over the cache. Takes the layer's
# index, the layer, X `[N, h]`, q `[N, n_q, d]`, k and v `[N, n_kv, d]`; returns `[N, n_q * d]`.
Attend = Callable[
    [int, Layer, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]

# Is given the index of a layer and the residual `[N, h]` that enters it, before it computes.
Enter = Callable[[int, torch.Tensor], None]

# Takes K and V `[N, n_kv, d]` of the last layer.
WriteLast = Callable[[torch.Tensor, torch.Tensor], None]


class CarryOut(Protocol):
    """Calls a named part of the layer with this index, and returns its result."""

    def __call__(self, name: str, index: int, call: Callable[[], Result], /) -> Result: ...


def at_once(_name: str, _index: int, call: Callable[[], Result], /) -> Result:
    """Call the part directly, without a lane."""
    return call()


class Model(Protocol):
    """A decoder-only transformer on one device. Its weights may stream from the host."""

    @property
    def config(self) -> AttentionConfig: ...
    @property
    def shape(self) -> ModelShape: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def code(self) -> str:
        """Whose code computes it, with what that depends on, in words."""

    @property
    def weights(self) -> WeightFormat:
        """The format of the matrices of layers and head."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights on the device."""

    @property
    def layers(self) -> Sequence[Layer]:
        """All layers. If a layer's weights are on the host, its computations wait for them."""

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        carry_out: CarryOut = at_once,
        enter: Enter | None = None,
    ) -> torch.Tensor:
        """Compute the last hidden `[N, h]` of int64 `[N]` ids and positions."""

    def fill(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        write_last: WriteLast,
    ) -> None:
        """Compute K and V of tokens in every layer, and nothing behind them.

        `attend` is called for all layers but the last, which leads to logits only.
        """

    def first_inputs(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return X `[N, h]` of the first layer."""

    def rotary(self, positions: torch.Tensor) -> Angles:
        """Return what layers need of int64 `[N]` positions."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map the last hidden `[M, h]` to fp32 logits `[M, vocabulary]`."""

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map the last hidden `[M, h]` to what the head reads."""

    def head(self, final: torch.Tensor) -> torch.Tensor:
        """Map what `final` returned to fp32 logits `[M, vocabulary]`."""

    def visit(self) -> Generator[Layer]:
        """Yield the layers in order; each may be used until the next one is requested."""

    # -- weights on the host ----------------------------------------------------------------

    @property
    def layer_weights(self) -> WeightStream | None:
        """Streams the layers' weights from the host; None: all are on the device."""

    @property
    def is_resident(self) -> bool:
        """True if no matrix streams from the host."""

    @property
    def host_memory(self) -> list[torch.Tensor]:
        """The mappings of weights on the host; empty if all are on the device."""

    def host_weight_bytes(self, piece: WeightPiece | None = None) -> int:
        """Return the bytes that cross the link in each step, of one piece or of all."""

    def use_lanes(self, lanes: Lanes) -> None:
        """Set the lanes that stream weights, before the first pass."""

    def look_ahead(self) -> None:
        """Begin to stream the first weights of the next pass, if any are on the host."""

"""What every screen is: it keeps a little of each cached token on the device, and scores tokens.

A screen belongs to one layer of one sequence. `extend` takes the layer's new tokens in order;
`scores` guesses the scaled logits of queries, from which `choose` takes the tokens to read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from splitpoint.checkpoint.decoder import AttentionConfig
from splitpoint.selection import Selection
from worker_service.selection.records import Records

# Tokens that a screen maps, widens or encodes at once: the keys of a long context are many.
PIECE_TOKENS = 1024
# The newest queries of a prompt, from which a served screen learns: older ones are not computed if
# the prompt was in the store.
OBSERVED_QUERIES = 32


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One layer's attention, as screens need it.

    Attributes:
        scale: factor of scores; cap: their soft cap, None: no cap.
        window: tokens that a query sees, itself included; None: all.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    cap: float | None
    window: int | None

    @classmethod
    def of(cls, config: AttentionConfig, layer: int) -> AttentionShape:
        """Return the attention of a model's layer."""
        shape = config.shape
        return cls(
            query_heads=shape.query_head_count,
            kv_heads=shape.kv_head_count,
            head_dim=shape.head_dim,
            scale=config.score_scale,
            cap=config.score_cap,
            window=config.windows[layer],
        )


@dataclass(frozen=True, slots=True)
class TokenRows:
    """What a layer makes of T consecutive tokens of one sequence.

    Attributes:
        inputs: X `[T, h]`.
        queries: `[T, n_q, d]`, after RoPE.
        keys: `[T, n_kv, d]`, after RoPE.
        first_position: of the first token.
    """

    inputs: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    first_position: int = 0


@dataclass(frozen=True, slots=True)
class Guess:
    """T consecutive tokens whose attention is guessed, the first at `first_position`.

    Attributes:
        inputs: X `[T, h]` of the layer, or a guess of it from an earlier residual.
        queries: `[T, n_q, d]`, after RoPE, made from `inputs`.
    """

    inputs: torch.Tensor
    queries: torch.Tensor
    first_position: int


class LayerScreen(Protocol):
    """The screen of one layer of one sequence.

    Attributes:
        device_bytes: bytes kept on the device for the tokens so far.
    """

    @property
    def device_bytes(self) -> int: ...

    def extend(self, rows: TokenRows) -> None:
        """Take the next tokens. The first call has the prompt, from which a screen may learn."""

    def scores(self, guess: Guess) -> torch.Tensor:
        """Return guessed scaled logits, fp32 `[T, n_q, S]`, of all tokens taken so far.

        Tokens behind a query's own position may have any score: `choose` drops them.
        """


@runtime_checkable
class KeyScreen(LayerScreen, Protocol):
    """A screen whose scores approximate logits and follow from keys."""

    def scores_of(self, guess: Guess, keys: torch.Tensor) -> torch.Tensor:
        """Return the scores of tokens that it was not given, fp32 `[T, n_q, S]`.

        They are those of `scores`, without the rounding of kept rows. `keys`: `[S, n_kv, d]`.
        """


@runtime_checkable
class PooledScreen(LayerScreen, Protocol):
    """A screen whose tokens can leave, and give their places to others, each head its own."""

    def keep(self, places: torch.Tensor) -> None:
        """Leave out all tokens but those in places `[n_kv, n]`, which become 0, 1, ..."""

    def overwrite(self, places: npt.NDArray[np.int64], keys: torch.Tensor) -> None:
        """Put tokens with keys `[T, n_kv, d]` in the places `[n_kv, T]` of others."""


# Returns a layer's tensor of the artefacts by its name; raises InvalidArgument if there is none.
Factor = Callable[[str], torch.Tensor]


class Maker(Protocol):
    """Makes an empty screen of a layer; `MAKERS` of a module has those of its methods."""

    def __call__(
        self, selection: Selection, shape: AttentionShape, records: Records, factor: Factor, /
    ) -> LayerScreen:
        """`records`: the memory for what it keeps."""


def in_pieces(keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of keys `[T, n_kv, d]`, of at most PIECE_TOKENS tokens each."""
    return torch.split(keys, PIECE_TOKENS)


def to_logits(products: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Scale and cap products of queries and keys, in place."""
    products.mul_(shape.scale)
    return products if shape.cap is None else products.div_(shape.cap).tanh_().mul_(shape.cap)


def grouped_products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Multiply queries `[T, n_q, r]` by their KV heads' keys `[S, n_kv, r]`: fp32 `[T, n_q, S]`."""
    count, query_heads, width = queries.shape
    tokens, kv_heads, _ = keys.shape
    group = query_heads // kv_heads
    folded = queries.view(count, kv_heads, group, width).permute(1, 2, 0, 3)
    products = torch.bmm(folded.reshape(kv_heads, group * count, width), keys.permute(1, 2, 0)).to(
        torch.float32
    )
    by_head = products.view(kv_heads * group, count, tokens)
    return by_head.transpose(0, 1).contiguous()

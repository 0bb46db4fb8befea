"""Attention as operators: one sequence's queries, by the plans and kernels that serve requests.

The keys and values are random. A row is a query with its position: alone, with any others of its
sequence, as a decoded token, as one of several guesses, and as a part of a prompt's piece it should
have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from worker_service.model.attention import decode_partial, prefill
from worker_service.model.attention_plan import DecodePlan, PrefillPlan
from worker_service.model.decoder import Decoder
from worker_service.model.layer import DecoderLayer
from worker_service.numerics.operators import MOST_ROWS, Operator

_SEED = 16
# Calls of so many queries decode, as guesses do; those of more prefill.
_MOST_GUESSES = 8


def attention_operators(model: Decoder, chunk_tokens: int) -> Iterator[Operator]:
    """Yield the operators of each kind of layer."""
    seen: set[tuple[object, ...]] = set()
    for index, layer in enumerate(model.layers):
        kind = (layer.window, layer.scale, layer.cap)
        if kind not in seen:
            seen.add(kind)
            sequence = _Sequence.random(model, layer, chunk_tokens)
            inputs = (sequence.queries, sequence.positions)
            name = f"layer {index}: attention, decoding"
            yield Operator(name, inputs, sequence.decoded)
            name = f"layer {index}: attention, in pieces of a prompt and one by one,"
            yield Operator(name, inputs, sequence.by_count, is_ordered=True)


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """Cached tokens of one sequence, and as many queries.

    Attributes:
        keys, values: the pool, `[pages, n_kv, C, d]`.
        pages: the page of each chunk, in no order.
    """

    layer: DecoderLayer
    queries: torch.Tensor
    positions: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: Sequence[int]

    @classmethod
    def random(cls, model: Decoder, layer: DecoderLayer, chunk_tokens: int) -> _Sequence:
        generator = torch.Generator().manual_seed(_SEED)
        shape, count = model.shape, -(-MOST_ROWS // chunk_tokens)

        def values(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator).to(model.device, model.dtype)

        pool = (count + 1, shape.kv_head_count, chunk_tokens, shape.head_dim)
        return cls(
            layer,
            values(MOST_ROWS, shape.query_head_count, shape.head_dim),
            torch.arange(MOST_ROWS),
            values(*pool),
            values(*pool),
            (1 + torch.randperm(count, generator=generator)).tolist(),
        )

    @property
    def _chunk(self) -> int:
        return self.keys.shape[2]

    def decoded(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attend with each query as one that decodes, all in one step."""
        plan = DecodePlan.of_sequences(
            [self.pages] * len(queries),
            (positions + 1).tolist(),
            chunk_tokens=self._chunk,
            windows=[self.layer.window],
            device=queries.device,
        )
        attended = decode_partial(
            queries,
            self.keys,
            self.values,
            plan,
            window=self.layer.window,
            scale=self.layer.scale,
            cap=self.layer.cap,
        )
        return attended.attended(queries.dtype)

    def by_count(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Attend with consecutive queries as a step does: few of them decode, many prefill."""
        if len(queries) <= _MOST_GUESSES:
            return self.decoded(queries, positions)
        first, end = int(positions[0]), int(positions[-1]) + 1
        plan = PrefillPlan.of_prefix(
            self.pages,
            first,
            end - first,
            chunk_tokens=self._chunk,
            windows=[self.layer.window],
            device=queries.device,
        )
        new = slice(first, end)
        return prefill(
            queries,
            self._rows(self.keys)[new],
            self._rows(self.values)[new],
            self.keys,
            self.values,
            plan,
            window=self.layer.window,
            scale=self.layer.scale,
            cap=self.layer.cap,
        )

    def _rows(self, plane: torch.Tensor) -> torch.Tensor:
        """Return the sequence's rows of a plane, `[N, n_kv, d]`."""
        return plane[list(self.pages)].transpose(1, 2).flatten(0, 1)

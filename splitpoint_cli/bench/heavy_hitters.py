"""H2O with offloading, the peer of InfiniGen's paper: only heavy hitters are kept, and loaded.

K and V of the tokens that are left lie in host memory. Each decode step loads all of them, a layer
while the one before computes (as FlexGen does), attends them, and evicts the token that received
the least attention so far; an evicted token never returns. Half of the budget belongs to the
newest tokens. The first `exact_layers` of the selection keep everything, as for its competitors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from splitpoint.errors import InvalidArgument
from splitpoint.planning.schedule import Lane
from splitpoint.residency.selecting import wanted_rows
from splitpoint.selection import Selection
from splitpoint_cli.bench.offload_report import OffloadSample, Step
from splitpoint_cli.bench.texts import Prompts
from worker_service.device.copies import copy as copied
from worker_service.lanes.lanes import EmulatedLink, Event, Lanes
from worker_service.lanes.select import lanes_of
from worker_service.lanes.work import Work
from worker_service.model.attention import prefill_alone
from worker_service.model.decoder import Decoder
from worker_service.model.model import Layer
from worker_service.selection.screen import AttentionShape, grouped_products, to_logits

# Queries of the prompt whose attention is summed at once: it bounds memory.
_BLOCK_QUERIES = 128
# Layers whose K and V the device holds at once.
_BUFFERS = 2


@dataclass(slots=True)
class KeptTokens:
    """What is left of one layer of one sequence, on the host.

    Attributes:
        selection: the budget; None: nothing is evicted.
        planes: K and V `[2, n_kv, room, d]`; a new token takes its victim's slot.
        positions: int64 `[n_kv, m]` of the m tokens that are left; received: fp32, the attention
            that each received so far.
    """

    selection: Selection | None
    planes: torch.Tensor
    positions: torch.Tensor
    received: torch.Tensor

    @classmethod
    def of_prompt(
        cls,
        selection: Selection | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        received: torch.Tensor,
        room_tokens: int,
    ) -> KeptTokens:
        """Keep what the budget allows of a prompt's K and V `[S, n_kv, d]`.

        Args:
            received: fp32 `[n_kv, S]`.
            room_tokens: of the whole sequence at last.
        """
        tokens, heads, width = keys.shape
        left = torch.arange(tokens, device=keys.device).repeat(heads, 1)
        room = room_tokens
        if selection is not None:
            room = wanted_rows(selection, room_tokens)
            budget = wanted_rows(selection, tokens)
            rank = received.masked_fill(_protected(selection, left, tokens), float("inf"))
            left = rank.topk(budget, sorted=False).indices.sort(-1).values
        is_pinned = keys.device.type == "cuda"
        planes = torch.empty((2, heads, room, width), dtype=keys.dtype, pin_memory=is_pinned)
        index = left.unsqueeze(-1).expand(-1, -1, width)
        for plane, rows in zip(planes, (keys, values), strict=True):
            plane[:, : left.shape[1]] = rows.transpose(0, 1).gather(1, index)
        return cls(selection, planes, left, received.gather(1, left))

    @property
    def count(self) -> int:
        """Tokens that are left in each head."""
        return self.positions.shape[1]

    def admit(self, position: int) -> torch.Tensor:
        """Give the token at `position`, the newest, a slot; return its slot `[n_kv]`."""
        tokens, heads = position + 1, len(self.positions)
        selection = self.selection
        if selection is None or self.count < wanted_rows(selection, tokens):
            slots = torch.full((heads,), self.count, device=self.positions.device)
            self.positions = torch.cat((self.positions, slots.unsqueeze(1)), 1)
            self.received = torch.cat((self.received, self.received.new_zeros((heads, 1))), 1)
        else:
            protected = _protected(selection, self.positions, tokens)
            slots = self.received.masked_fill(protected, float("inf")).argmin(1)
        self.positions.scatter_(1, slots.unsqueeze(1), position)
        self.received.scatter_(1, slots.unsqueeze(1), 0.0)
        return slots

    def copy(self) -> KeptTokens:
        return KeptTokens(
            self.selection, self.planes.clone(), self.positions.clone(), self.received.clone()
        )


def _protected(selection: Selection, positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return which tokens may not be evicted: the first, and the newest half of the budget."""
    newest = tokens - max(selection.recent, wanted_rows(selection, tokens) // 2)
    return (positions < selection.sinks) | (positions >= newest)


class HeavyHitterHost:
    """One model whose sequences keep their heavy hitters on the host. Close it."""

    def __init__(self, model: Decoder, selection: Selection, link: EmulatedLink | None) -> None:
        """Raises InvalidArgument for a model whose layers do not see everything."""
        if any(layer.window is not None or layer.sinks is not None for layer in model.layers):
            raise InvalidArgument(
                "h2o is measured for models without sliding windows and attention sinks",
                field="select",
            )
        self._model = model
        self._selection = selection
        self._lanes: Lanes = lanes_of(model.device, overlapped=True, link=link)
        self._shapes = [
            AttentionShape.of(model.config, index) for index in range(len(model.layers))
        ]

    def close(self) -> None:
        self._lanes.close()

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int], new_tokens: int) -> tuple[list[KeptTokens], int]:
        """Return what is left of a prompt in each layer, and the token that follows it."""
        kept: list[KeptTokens] = []
        room = len(prompt) + new_tokens

        def attend(
            index: int,
            layer: Layer,
            _inputs: torch.Tensor,
            queries: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
        ) -> torch.Tensor:
            selection = None if index < self._selection.exact_layers else self._selection
            received = keys.new_zeros((keys.shape[1], len(prompt)), dtype=torch.float32)
            if selection is not None:
                _sum_attention(self._shapes[index], queries, keys, received)
            kept.append(KeptTokens.of_prompt(selection, keys, values, received, room))
            return prefill_alone(
                queries, keys, values, window=None, scale=layer.scale, cap=layer.cap
            )

        device = self._model.device
        ids = torch.tensor(prompt, device=device)
        positions = torch.arange(len(prompt), device=device)
        hidden = self._model.run(ids, positions, attend)
        return kept, int(self._model.logits(hidden[-1:]).argmax())

    @torch.inference_mode()
    def decode(
        self, new_tokens: int, stored: Sequence[tuple[list[KeptTokens], int]], prompts: Prompts
    ) -> OffloadSample:
        """Decode sequences together from what `prefill` left of them, which does not change."""
        kept = [[layer.copy() for layer in layers] for layers, _ in stored]
        texts = [[first] for _, first in stored]
        most = max(layer.planes.shape[2] for layers in kept for layer in layers)
        shape = (_BUFFERS, len(kept), 2, *kept[0][0].planes.shape[1:])
        room = torch.empty((*shape[:4], most, shape[5]), dtype=kept[0][0].planes.dtype)
        buffers = room.to(self._model.device)
        steps = []
        for _ in range(new_tokens - 1):
            began = time.perf_counter()
            positions = [
                len(prompt) + len(text) - 1 for prompt, text in zip(prompts, texts, strict=True)
            ]
            chosen = self._step([text[-1] for text in texts], positions, kept, buffers)
            for text, token in zip(texts, chosen, strict=True):
                text.append(token)
            spans = self._lanes.finish()
            moved = sum(int(span.amount) for span in spans if span.lane is Lane.LINK_IN)
            seconds = time.perf_counter() - began
            steps.append(Step(seconds, link_bytes=moved, token_count=len(texts)))
        tables = [(layer.received, layer.positions) for layers in kept for layer in layers]
        sums = sum(table.nbytes for pair in tables for table in pair)
        return OffloadSample(
            steps=tuple(steps),
            tokens=tuple(map(tuple, texts)),
            device_bytes=self._model.weight_bytes + buffers.nbytes + sums,
            token_count=len(steps) * len(texts),
            pull_count=len(steps) * len(texts),
        )

    def _step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        kept: Sequence[list[KeptTokens]],
        buffers: torch.Tensor,
    ) -> list[int]:
        """Run one row of each sequence; return the tokens that follow."""
        events: list[Event] = []

        def load(index: int) -> None:
            if index < len(self._model.layers):
                layers = [layers[index] for layers in kept]
                size = sum(layer.planes[:, :, : layer.count].nbytes for layer in layers)
                call = partial(_load, layers, buffers[index % _BUFFERS])
                work = Work("load kept", call, size, size, index)
                after = [self._lanes.record_event()]
                events.append(self._lanes.run(Lane.LINK_IN, work, after))

        def attend(
            index: int,
            _layer: Layer,
            _inputs: torch.Tensor,
            queries: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
        ) -> torch.Tensor:
            self._lanes.wait_event(events[index])
            rows = [
                self._attend(index, layers[index], buffer, position, query, key, value)
                for layers, buffer, position, query, key, value in zip(
                    kept,
                    buffers[index % _BUFFERS],
                    positions,
                    queries.unsqueeze(1),
                    keys,
                    values,
                    strict=True,
                )
            ]
            load(index + _BUFFERS)
            return torch.cat(rows)

        for index in range(_BUFFERS):
            load(index)
        device = self._model.device
        ids = torch.tensor(tokens, device=device)
        hidden = self._model.run(ids, torch.tensor(positions, device=device), attend)
        return self._model.logits(hidden).argmax(-1).tolist()

    def _attend(
        self,
        index: int,
        kept: KeptTokens,
        buffer: torch.Tensor,
        position: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Attend what was loaded, and the new token, which takes its place; `[1, n_q * d]`."""
        slots = kept.admit(position)
        heads = torch.arange(len(slots), device=slots.device)
        for plane, host, row in zip(buffer, kept.planes, (key, value), strict=True):
            plane[heads, slots] = row
            host[heads.cpu(), slots.cpu()] = row.to(host.device)
        keys, values = buffer[:, :, : kept.count]
        logits = to_logits(grouped_products(query, keys.transpose(0, 1)), self._shapes[index])
        weights = logits.view(len(slots), -1, kept.count).softmax(-1)
        if kept.selection is not None:
            kept.received += weights.sum(1)
        return torch.matmul(weights.to(values.dtype), values).view(1, -1)


def _load(kept: Sequence[KeptTokens], buffer: torch.Tensor) -> None:
    """Copy all that is left of a layer to the device, `[sequences, 2, n_kv, room, d]`."""
    for layer, target in zip(kept, buffer, strict=True):
        for plane, into in zip(layer.planes.flatten(0, 1), target.flatten(0, 1), strict=True):
            copied(into[: layer.count], plane[: layer.count])


def _sum_attention(
    shape: AttentionShape, queries: torch.Tensor, keys: torch.Tensor, received: torch.Tensor
) -> None:
    """Add the attention that a prompt's tokens receive in each KV head, `[n_kv, S]`."""
    tokens = torch.arange(len(keys), device=keys.device)
    for first in range(0, len(queries), _BLOCK_QUERIES):
        block = queries[first : first + _BLOCK_QUERIES]
        end = first + len(block)
        logits = to_logits(grouped_products(block, keys[:end]), shape)
        hidden = tokens[:end] > tokens[first:end].unsqueeze(1)
        weights = logits.masked_fill(hidden.unsqueeze(1), float("-inf")).softmax(-1)
        received[:, :end] += weights.view(len(block), len(received), -1, end).sum((0, 2))

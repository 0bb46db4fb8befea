"""A bare paged runner for tests: one pool, scattered pages, no engine."""

from __future__ import annotations

import torch

from worker_service.model.attention import decode_partial, prefill
from worker_service.model.attention_plan import DecodePlan, PrefillPlan
from worker_service.model.decoder import Decoder

CHUNK = 8


class PagedRunner:
    """Runs sequences over a pool of pages; page numbers are handed out in a given order."""

    def __init__(self, model: Decoder, page_order: list[int]) -> None:
        self.model = model
        shape = model.shape
        pool = (max(page_order) + 1, shape.kv_head_count, CHUNK, shape.head_dim)
        # Spare rows hold garbage, as they may in a worker.
        self.keys = [torch.full(pool, 1e4, dtype=model.dtype) for _ in model.layers]
        self.values = [torch.full(pool, 1e4, dtype=model.dtype) for _ in model.layers]
        self.inputs: list[list[torch.Tensor]] = [[] for _ in model.layers]
        self._free = list(page_order)

    def grow(self, pages: list[int], length: int) -> None:
        while len(pages) * CHUNK < length:
            pages.append(self._free.pop(0))

    def _write(
        self, layer: int, pages: list[int], first: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        for row in range(len(keys)):
            page, place = pages[(first + row) // CHUNK], (first + row) % CHUNK
            self.keys[layer][page, :, place] = keys[row]
            self.values[layer][page, :, place] = values[row]

    @torch.inference_mode()
    def prefill(self, tokens: list[int], pages: list[int], first: int) -> torch.Tensor:
        """Logits of every new token `[T, vocabulary]`."""
        model, count = self.model, len(tokens)
        self.grow(pages, first + count)
        positions = torch.arange(first, first + count)
        plan = PrefillPlan.of_prefix(
            pages,
            first,
            count,
            chunk_tokens=CHUNK,
            windows=model.config.windows,
            device=model.device,
        )
        hidden = model.embed(torch.tensor(tokens), positions)
        rotary = model.rotary(positions)
        for index, layer in enumerate(model.layers):
            inputs = layer.attention_input(hidden)
            self.inputs[index].append(inputs)
            queries, keys, values = layer.project(inputs, rotary)
            attended = prefill(
                queries,
                keys,
                values,
                self.keys[index],
                self.values[index],
                plan,
                window=layer.window,
                scale=layer.scale,
                cap=layer.cap,
            )
            self._write(index, pages, first, keys, values)
            hidden = layer.finish(hidden, attended)
        return model.logits(hidden)

    @torch.inference_mode()
    def decode(
        self, tokens: list[int], page_tables: list[list[int]], lengths: list[int]
    ) -> torch.Tensor:
        """One token for each sequence, the b-th at position `lengths[b]`: `[B, vocabulary]`."""
        model = self.model
        for pages, length in zip(page_tables, lengths, strict=True):
            self.grow(pages, length + 1)
        positions = torch.tensor(lengths)
        plan = DecodePlan.of_sequences(
            page_tables,
            [length + 1 for length in lengths],
            chunk_tokens=CHUNK,
            windows=model.config.windows,
            device=model.device,
        )
        hidden = model.embed(torch.tensor(tokens), positions)
        rotary = model.rotary(positions)
        for index, layer in enumerate(model.layers):
            queries, keys, values = layer.project(layer.attention_input(hidden), rotary)
            for row, (pages, length) in enumerate(zip(page_tables, lengths, strict=True)):
                self._write(index, pages, length, keys[row : row + 1], values[row : row + 1])
            partial = decode_partial(
                queries,
                self.keys[index],
                self.values[index],
                plan,
                window=layer.window,
                scale=layer.scale,
                cap=layer.cap,
            )
            hidden = layer.finish(hidden, partial.attended(queries.dtype))
        return model.logits(hidden)

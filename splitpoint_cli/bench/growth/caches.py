"""Caches that grow by one token a step: contiguous buckets, and the worker's pages.

Every cache gets the same rows and queries, in all layers, so that all of them have to
attend to the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from splitpoint.shapes import ArenaLayout, ModelShape, chunks_of
from splitpoint_cli.bench.shared.engine_memory import exact_memory
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.model.attention import decode_partial
from worker_service.model.attention_plan import DecodePlan

CPU = torch.device("cpu")
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What all caches are given, in every layer alike.

    Attributes:
        prompt_keys, prompt_values: `[B, n_kv, s, d]`.
        keys, values: `[N, B, n_kv, d]`, one row of each sequence a step.
        queries: `[N, B, n_q, d]`.
    """

    prompt_keys: torch.Tensor
    prompt_values: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor

    @classmethod
    def of(cls, shape: ModelShape, *, batch: int, prompt: int, new: int, seed: int) -> Drawn:
        generator = torch.Generator().manual_seed(seed)
        kept = (batch, shape.kv_head_count)

        def draw(*size: int) -> torch.Tensor:
            drawn = torch.randn(*size, shape.head_dim, generator=generator)
            return drawn.to(TORCH_TYPES[shape.data_type])

        return cls(
            prompt_keys=draw(*kept, prompt),
            prompt_values=draw(*kept, prompt),
            keys=draw(new, *kept),
            values=draw(new, *kept),
            queries=draw(new, batch, shape.query_head_count),
        )

    @property
    def steps(self) -> int:
        return len(self.queries)


class Cache(Protocol):
    """K and V of some layers. Attributes: growths: how often memory was added."""

    growths: int

    def step(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Add a row `[B, n_kv, d]` of K and V to each layer, and attend to all rows there are
        with `[B, n_q, d]`; return the last layer's result, `[B, n_q, d]`."""
        ...


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the parts of one step; growth is None in a step that did not grow."""

    growth: float | None
    writing: float
    attention: float


class BucketCache:
    """Contiguous K and V of a batch, `[B, n_kv, capacity, d]` per layer, that grow by a bucket.

    To grow is to allocate larger buffers, to copy all rows and to clear the spare ones. A bucket
    of 1 is iterative allocation, one of all new tokens is upfront allocation.

    Args:
        masks: attend to the spare rows, too, behind one additive mask (the paper's way);
            False: attend to a slice of the rows in use.
        spare: what spare rows hold. Only tests want something else than zeros.
    """

    def __init__(
        self, shape: ModelShape, drawn: Drawn, bucket: int, *, masks: bool, spare: float = 0.0
    ) -> None:
        self._bucket = bucket
        self._masks = masks
        self._spare = spare
        self._group = shape.query_head_count // shape.kv_head_count
        self.length = drawn.prompt_keys.shape[2]
        self.growths = 0
        self._mask = drawn.prompt_keys.new_zeros(self.length)
        self._keys = [drawn.prompt_keys.clone() for _ in range(shape.layer_count)]
        self._values = [drawn.prompt_values.clone() for _ in range(shape.layer_count)]

    @property
    def capacity(self) -> int:
        """Rows that the buffers have, spare ones included."""
        return len(self._mask)

    def step(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if self.length == self.capacity:
            self._grow()
        self._write(keys, values)
        return self._attend(queries)

    def timed_step(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, clock: Clock
    ) -> StepTimes:
        """Do as `step`, and return the seconds of its parts."""
        started = clock()
        is_full = self.length == self.capacity
        if is_full:
            self._grow()
        grown = clock()
        self._write(keys, values)
        written = clock()
        self._attend(queries)
        ended = clock()
        return StepTimes(grown - started if is_full else None, written - grown, ended - written)

    def _write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        row = self.length
        self.length += 1
        self._mask[row] = 0
        for all_keys, all_values in zip(self._keys, self._values, strict=True):
            all_keys[:, :, row] = keys
            all_values[:, :, row] = values

    def _grow(self) -> None:
        self.growths += 1
        for planes in (self._keys, self._values):
            for layer, plane in enumerate(planes):
                planes[layer] = self._grown(plane)
        grown = self._mask.new_full((len(self._mask) + self._bucket,), _least(self._mask))
        grown[: self.length] = 0
        self._mask = grown

    def _grown(self, plane: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, width = plane.shape
        grown = plane.new_empty((batch, heads, rows + self._bucket, width))
        grown[:, :, :rows] = plane
        # Not left as they were found: 0 * NaN is NaN.
        grown[:, :, rows:] = self._spare
        return grown

    def _attend(self, queries: torch.Tensor) -> torch.Tensor:
        batch, heads, width = queries.shape
        folded = (queries / math.sqrt(width)).view(batch, heads // self._group, self._group, width)
        attended = folded
        for keys, values in zip(self._keys, self._values, strict=True):
            if self._masks:
                scores = folded @ keys.transpose(2, 3) + self._mask
            else:
                keys, values = keys[:, :, : self.length], values[:, :, : self.length]
                scores = folded @ keys.transpose(2, 3)
            attended = scores.softmax(-1) @ values
        return attended.reshape(batch, heads, width)


class PagedCache:
    """The worker's own cache and attention: a growth takes one page for each sequence."""

    def __init__(self, shape: ModelShape, drawn: Drawn, page: int, *, spare: float = 0.0) -> None:
        batch, _, prompt, width = drawn.prompt_keys.shape
        layout = ArenaLayout.of(shape, chunk_tokens=page, has_activations=False)
        tokens = prompt + drawn.steps
        memory = exact_memory(shape, layout, weight_bytes=0, batch=batch, tokens=tokens)
        self._cache = DeviceCache(layout, memory, CPU)
        for plane in (*self._cache.keys, *self._cache.values):
            # Also touches the pages' memory, as a worker that has run for a while has.
            plane.fill_(spare)
        self._page = page
        self._scale = 1 / math.sqrt(width)
        self._tables: list[list[int]] = [[] for _ in range(batch)]
        self.length = prompt
        self.growths = 0
        for _ in range(chunks_of(prompt, page)):
            self._take_pages()
        for row in range(prompt):
            self._write(row, drawn.prompt_keys[:, :, row], drawn.prompt_values[:, :, row])

    def step(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if self.length == self._page * len(self._tables[0]):
            self.growths += 1
            self._take_pages()
        self._write(self.length, keys, values)
        self.length += 1
        return self._attend(queries)

    def _take_pages(self) -> None:
        for table in self._tables:
            table.append(self._cache.pages.allocate())

    def _write(self, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        pages = torch.tensor([table[row // self._page] for table in self._tables])
        rows = torch.full_like(pages, row % self._page)
        for layer in range(len(self._cache.keys)):
            self._cache.write(layer, pages, rows, keys, values)

    def _attend(self, queries: torch.Tensor) -> torch.Tensor:
        """Attend in every layer by one plan, as an engine step does."""
        plan = DecodePlan.of_sequences(
            self._tables,
            [self.length] * len(self._tables),
            chunk_tokens=self._page,
            windows=(None,),
            device=CPU,
        )
        attended = queries.flatten(1)
        for keys, values in zip(self._cache.keys, self._cache.values, strict=True):
            attended = decode_partial(
                queries, keys, values, plan, window=None, scale=self._scale
            ).attended(queries.dtype)
        return attended.view(queries.shape)


def _least(like: torch.Tensor) -> float:
    """Return the least finite number: -1e9 is minus infinity in half precision."""
    return torch.finfo(like.dtype).min

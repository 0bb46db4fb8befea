"""One sequence on pages, and its attention in each way in which a worker computes it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from worker_service.device.upload import Upload
from worker_service.kernels.paged_attention import PromptPages
from worker_service.kernels.units import HasSortKeys, UnitOrder, UnitView
from worker_service.model.attention import decode_partial, prefill
from worker_service.model.attention_parts import DecodeParts, PrefillParts
from worker_service.model.attention_plan import DecodePlan, PrefillPlan
from worker_service.model.span_attention import SpanView

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    chunk: int = 16
    window: int | None = None
    cap: float | None = None
    has_sinks: bool = False


class Sequence:
    """One sequence on shuffled pages. All that it does not hold is poison, or `poison`."""

    def __init__(
        self,
        length: int,
        dtype: torch.dtype,
        shape: Shape,
        *,
        seed: int = 0,
        poison: float = 6e4,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.length, self.shape = length, shape
        count = -(-length // shape.chunk)
        self.pages = torch.randperm(2 * count, generator=generator)[:count].tolist()
        size = (length, shape.heads, shape.head_dim)
        self.queries = 2 * torch.randn(size, generator=generator)
        self.queries = self.queries.to(dtype)
        pool = (2 * count, shape.kv_heads, shape.chunk, shape.head_dim)
        self.keys, self.values = (torch.full(pool, poison, dtype=dtype) for _ in range(2))
        sinks = torch.linspace(-2, 9, shape.heads)
        self.sinks = sinks if shape.has_sinks else None
        self.rows = []
        for plane in (self.keys, self.values):
            drawn = torch.randn(length, shape.kv_heads, shape.head_dim, generator=generator)
            drawn = drawn.to(dtype)
            self.rows.append(drawn)
            for index, page in enumerate(self.pages):
                part = drawn[index * shape.chunk : (index + 1) * shape.chunk]
                plane[page, :, : len(part)] = part.transpose(0, 1)

    @property
    def options(self) -> dict[str, float | None]:
        return {"scale": self.shape.head_dim**-0.5, "cap": self.shape.cap}

    def decoded(self, rows: range) -> torch.Tensor:
        """The rows of these positions, each as a decoded token of its own, in one step."""
        plan = DecodePlan.of_sequences(
            [self.pages] * len(rows),
            [row + 1 for row in rows],
            chunk_tokens=self.shape.chunk,
            windows=[self.shape.window],
            device=CPU,
        )
        queries = self.queries[rows.start : rows.stop]
        part = decode_partial(
            queries,
            self.keys,
            self.values,
            plan,
            window=self.shape.window,
            **self.options,  # type: ignore[arg-type]
        )
        return part.attended(queries.dtype, self.sinks)

    def prefilled(self, rows: range) -> torch.Tensor:
        """The same as one piece of a prompt, behind what is before."""
        plan = PrefillPlan.of_prefix(
            self.pages,
            rows.start,
            len(rows),
            chunk_tokens=self.shape.chunk,
            windows=[self.shape.window],
            device=CPU,
        )
        assert isinstance(plan.views[self.shape.window], PromptPages)
        span = slice(rows.start, rows.stop)
        keys, values = self.rows
        return prefill(
            self.queries[span],
            keys[span],
            values[span],
            self.keys,
            self.values,
            plan,
            window=self.shape.window,
            sinks=self.sinks,
            **self.options,  # type: ignore[arg-type]
        )

    def expected(self) -> torch.Tensor:
        """All rows in fp64."""
        keys, values = (
            rows.double().repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=1)
            for rows in self.rows
        )
        scores = torch.einsum("qhd,khd->hqk", self.queries.double(), keys)
        scores *= self.shape.head_dim**-0.5
        if self.shape.cap is not None:
            scores = self.shape.cap * torch.tanh(scores / self.shape.cap)
        behind = torch.arange(self.length)[:, None] - torch.arange(self.length)
        hidden = (behind < 0) | (behind >= (self.shape.window or self.length))
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            column = self.sinks.double().view(-1, 1, 1).expand(-1, self.length, 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : self.length]
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)

    def streamed(self, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest rows: prefilled, and decoded, with the middle in tiles of other places.

        The beginning and the newest rows are on the device. Decoding gets the last parts first.
        """
        chunk, count = self.shape.chunk, len(self.pages)
        cuts = sorted({0, count // 4, count // 2, count - 1, count})
        parts = [range(first, last) for first, last in itertools.pairwise(cuts)]
        queries = self.queries[rows.start : rows.stop]
        options: dict[str, Any] = {"window": self.shape.window, "sinks": self.sinks}
        options |= self.options
        prefilled = PrefillParts(queries, first_position=rows.start, **options)
        plans = []
        for part in parts:
            numbers = torch.tensor(self.pages[part.start : part.stop])
            end = min(part.stop * chunk, self.length) - part.start * chunk
            is_tile = 0 < part.start < count - 1
            keys, values = self.keys, self.values
            if is_tile:
                keys, values = keys[numbers], values[numbers]
            prefilled.add(
                keys,
                values,
                pages=None if is_tile else numbers,
                rows=end,
                first_position=part.start * chunk,
            )
            listed = range(len(part)) if is_tile else numbers.tolist()
            plan = DecodePlan.of_pages(
                listed,
                owners=[0] * len(part),
                first_positions=[page * chunk for page in part],
                query_positions=[rows.start],
                query_counts=[len(rows)],
                chunk_tokens=chunk,
                windows=[self.shape.window],
                device=CPU,
            )
            plans.append((plan, keys, values))
        plans.reverse()
        views: list[HasSortKeys] = []
        for plan, *_ in plans:
            view = plan.views[self.shape.window]
            assert isinstance(view, UnitView | SpanView)
            views.append(view)
        order = UnitOrder.of(views, len(rows), Upload(CPU))
        decoded = DecodeParts(queries, order=order, **options)
        for plan, keys, values in plans:
            decoded.add(keys, values, plan=plan)
        return prefilled.attended(), decoded.attended()

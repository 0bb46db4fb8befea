"""Attention that is taken part by part: over pages on the device, and tiles from the host.

Each part is merged as it comes. The kernels of units (kernels/units.py) merge in the order of
positions, so a step that streams gives the bits of one that does not: a few parts that come in
another order are kept until all are there, on a GPU all (span_attention.py).
"""

from __future__ import annotations

import torch

from worker_service.kernels.paged_attention import PromptPages, PromptParts, UnitParts
from worker_service.kernels.units import UnitOrder, UnitView, prefills_in_units
from worker_service.model.attention import (
    PartialAttention,
    decode_partial,
    prefill_partial,
    tile_rows,
)
from worker_service.model.attention_plan import DecodePlan
from worker_service.model.span_attention import SpanParts, SpanPrompt, SpanView, kernels_of


class DecodeParts:
    """Attention of one layer's decoding queries `[N, n_q, d]`, after RoPE."""

    def __init__(
        self,
        queries: torch.Tensor,
        *,
        window: int | None,
        scale: float,
        cap: float | None,
        sinks: torch.Tensor | None,
        order: UnitOrder | None,
    ) -> None:
        """`order`: of all plans that will be added, one after the other; None: see `UnitParts`."""
        self._queries, self._order, self._sinks = queries, order, sinks
        self._window, self._scale, self._cap = window, scale, cap
        self._units: UnitParts | None = None
        self._spans: SpanParts | None = None
        self._merged: PartialAttention | None = None

    def add(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        plan: DecodePlan,
        seen: torch.Tensor | None = None,
    ) -> None:
        """Attend pages `[P, n_kv, C, d]` of the pool or of a tile, as the plan says.

        `seen`: see `decode_partial`.
        """
        view = plan.views[self._window]
        if isinstance(view, UnitView):
            if self._units is None:
                self._units = UnitParts(self._queries, self._order)
            self._units.add(view, keys, values, scale=self._scale, cap=self._cap, seen=seen)
            return
        if isinstance(view, SpanView) and self._order is not None:
            if self._spans is None:
                self._spans = SpanParts(self._queries, self._order, kernels_of(keys.device))
            self._spans.add(view, keys, values, scale=self._scale, cap=self._cap, seen=seen)
            return
        part = decode_partial(
            self._queries,
            keys,
            values,
            plan,
            window=self._window,
            scale=self._scale,
            cap=self._cap,
            seen=seen,
        )
        self._merged = part if self._merged is None else self._merged.merge(part)

    def attended(self) -> torch.Tensor:
        """Return the attention over all parts, `[N, n_q * d]`; see `PartialAttention`."""
        whole = self._merged
        ordered = self._units or self._spans
        if ordered is not None:
            whole = PartialAttention(*ordered.merged())
        if whole is None:
            raise RuntimeError("queries attend nothing, not even themselves")
        return whole.attended(self._queries.dtype, self._sinks)


class PrefillParts:
    """Attention of one layer's T consecutive queries `[T, n_q, d]` of one sequence, after RoPE.

    Parts must come in the order of positions, the queries' own last.
    """

    def __init__(
        self,
        queries: torch.Tensor,
        *,
        first_position: int,
        window: int | None,
        scale: float,
        cap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """`first_position`: of the first query."""
        self._queries, self._position, self._sinks = queries, first_position, sinks
        self._window, self._scale, self._cap = window, scale, cap
        self._units: PromptParts | SpanPrompt | None = None
        if prefills_in_units(queries.device):
            kernels = kernels_of(queries.device)
            self._units = PromptParts(queries) if kernels is None else SpanPrompt(queries, kernels)
        self._merged: PartialAttention | None = None

    def add(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        pages: torch.Tensor | None,
        rows: int,
        first_position: int,
    ) -> None:
        """Attend the first `rows` rows of consecutive pages, which begin at `first_position`.

        Args:
            keys, values: the pool, or a tile, `[P, n_kv, C, d]`.
            pages: int64, the pages' numbers; None: a tile's, from its first one on.
        """
        if self._units is not None:
            if pages is None:
                pages = torch.arange(-(-rows // keys.shape[2]), device=keys.device)
            view = PromptPages(pages.int(), first_position, self._position, self._window)
            self._units.add(view, keys, values, scale=self._scale, cap=self._cap)
            return
        if pages is not None:
            keys, values = keys.index_select(0, pages), values.index_select(0, pages)
        part = prefill_partial(
            self._queries,
            tile_rows(keys, rows),
            tile_rows(values, rows),
            query_position=self._position,
            key_position=first_position,
            window=self._window,
            scale=self._scale,
            cap=self._cap,
        )
        self._merged = part if self._merged is None else self._merged.merge(part)

    def attended(self) -> torch.Tensor:
        """Return the attention over all parts, `[T, n_q * d]`; see `PartialAttention`."""
        whole = self._merged
        if self._units is not None:
            whole = PartialAttention(*self._units.state)
        if whole is None:
            raise RuntimeError("queries attend nothing, not even themselves")
        return whole.attended(self._queries.dtype, self._sinks)

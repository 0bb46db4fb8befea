"""Attention of a GPU that reads pages where they lie, by number: Triton kernels.

The units of each decoding query are cut into spans, whatever else is in the batch, so a query's
result does not depend on the others. With kernels of one order (kernels/choice.py) each unit is
a span, and the same compiled kernel prefills: as on a CPU (kernels/units.py), a row then has the
same bits as a decoded token, a guess or a part of a prompt, and from pages of several planes.
This module knows no plans and no requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from splitpoint.checkpoint.decoder import AttentionConfig
from worker_service.device.cache import TORCH_TYPES
from worker_service.device.memory import UNIT_ROWS
from worker_service.device.upload import Upload
from worker_service.kernels.choice import adds_in_one_order
from worker_service.kernels.paged_attention import Partial, PromptPages
from worker_service.kernels.units import Numbers, UnitOrder, bounds, cut_units, units_per_page

log = logging.getLogger(__name__)

# Tokens of a span. Shorter ones fill a GPU with few queries, longer ones leave less to merge.
SPAN_TOKENS = 256
_LEAST = float(np.finfo(np.float32).min)
# Elements of the tile of K or V that a program holds at once.
_TILE_ELEMENTS = 4096
# Query heads of a program with kernels of one order, at least: a prompt's queries share the keys
# that it reads, and decoding still waits for these. Without tensor cores more would take longer.
_MEMBERS = {torch.float32: 16}
_HALF_MEMBERS = 32
# Further back than any query sees.
_NO_WINDOW = 1 << 30


@dataclass(frozen=True, slots=True)
class Variant:
    """What selects the compiled kernels of a model's attention.

    Attributes:
        query_heads, kv_heads: of a layer; programs have room for the query heads of a KV head.
        has_cap: scores are capped.
    """

    dtype: torch.dtype
    page_tokens: int
    head_dim: int
    query_heads: int
    kv_heads: int
    has_cap: bool

    @classmethod
    def of(cls, config: AttentionConfig, page_tokens: int) -> Variant:
        shape = config.shape
        return cls(
            TORCH_TYPES[shape.data_type],
            page_tokens,
            shape.head_dim,
            shape.query_head_count,
            shape.kv_head_count,
            config.score_cap is not None,
        )


# For callers that tried nothing before: benchmarks and tests.
_SMALL = Variant(torch.float32, 16, 16, 1, 1, has_cap=False)
_tried: dict[torch.device, Any] = {}


@dataclass(frozen=True, slots=True)
class SpanView:
    """The units that B queries read, in spans of one query each; int32 on the device.

    Attributes:
        units: `[U]`, unit i is part `units[i] % n` of page `units[i] // n`, of n units each.
        lows, highs: `[U]`, it is read in the rows [lows[i], highs[i]) of its page.
        starts: `[S + 1]`, span s has units[starts[s] : starts[s + 1]].
        owners: `[S]`, the query of each span, in order.
        firsts: `[B + 1]`, query b has spans [firsts[b], firsts[b + 1]).
        sort_keys: the query and the first position of each span, on the host.
    """

    units: torch.Tensor
    lows: torch.Tensor
    highs: torch.Tensor
    starts: torch.Tensor
    owners: torch.Tensor
    firsts: torch.Tensor
    sort_keys: tuple[Numbers, Numbers]

    @property
    def tables(self) -> list[torch.Tensor]:
        return [self.units, self.lows, self.highs, self.starts, self.owners, self.firsts]

    @classmethod
    def of(
        cls,
        numbers: Numbers,
        owners: Numbers,
        positions: Numbers,
        seen: npt.NDArray[np.bool_],
        query_count: int,
        upload: Upload,
        padded_count: int | None = None,
    ) -> SpanView:
        """Cut pages into spans.

        Query `owners[i]` sees the rows `seen[i]` `[C]` of page `numbers[i]`: at least one, and
        no two with a gap between them. The page's first row is at `positions[i]`.
        `padded_count`: spans for which the tables have room; no query owns those without pages.
        Raises ValueError if there are more.
        """
        rows = seen.shape[1]
        cut = cut_units(seen)
        owners, positions = owners[cut.page], positions[cut.page] + cut.start
        order = np.lexsort((positions, owners))
        owners, positions = owners[order], positions[order]
        units = numbers[cut.page] * units_per_page(rows) + cut.start // UNIT_ROWS
        per_span = units_per_span(rows)
        counts = np.bincount(owners, minlength=query_count)
        # The place of each unit among those of its query.
        place = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        starts = np.flatnonzero(place % per_span == 0)

        spans = len(starts) if padded_count is None else padded_count
        size = len(owners) if padded_count is None else padded_count * per_span

        def table(values: npt.NDArray[Any], size: int, padding: int = 0) -> torch.Tensor:
            missing = size - len(values)
            if missing:
                values = np.pad(values, (0, missing), constant_values=padding)
            return upload.table(values, np.int32)

        return cls(
            units=table(units[order], size),
            lows=table(cut.low[order], size),
            highs=table(cut.high[order], size),
            starts=table(starts, spans + 1, padding=len(owners)),
            owners=table(owners[starts], spans),
            firsts=table(bounds(owners[starts], query_count), query_count + 1),
            sort_keys=(owners[starts], positions[starts]),
        )

    def attend(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        cap: float | None,
        kernels: Any,
        seen: torch.Tensor | None = None,
    ) -> Partial:
        """Attend pages of `keys`, `values` `[pages, n_kv, C, d]` with queries `[B, n_q, d]`.

        `kernels`: the result of `kernels_of`; `seen`: see `decode_partial`.
        """
        parts = _rooms(len(self.owners), queries)
        _attend_spans(self, parts, queries, keys, values, scale, cap, seen, kernels)
        return _merged(parts, queries, self.firsts, None, kernels)


class SpanParts:
    """Parts of the attention of queries `[B, n_q, d]`, from pages of several planes.

    They are merged once all are there: in the order of positions, however they came.
    """

    def __init__(self, queries: torch.Tensor, order: UnitOrder, kernels: Any) -> None:
        """Make room for the spans of an order, which are numbered as they are added."""
        self._queries, self._kernels = queries, kernels
        self._listing, self._firsts = order.listing, order.firsts
        self._parts, self._count = _rooms(len(order.listing), queries), 0

    def add(
        self,
        view: SpanView,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        cap: float | None,
        seen: torch.Tensor | None = None,
    ) -> None:
        """Attend the next spans: see `SpanView.attend`. Raises ValueError if there is no room."""
        first, self._count = self._count, self._count + len(view.owners)
        if self._count > len(self._listing):
            raise ValueError(f"{self._count} spans where {len(self._listing)} were planned")
        rooms = [room[first : self._count] for room in self._parts]
        _attend_spans(view, rooms, self._queries, keys, values, scale, cap, seen, self._kernels)

    def merged(self) -> Partial:
        """Return the attention over all spans. Raises ValueError if some are missing."""
        if self._count != len(self._listing):
            raise ValueError(f"{self._count} spans where {len(self._listing)} were planned")
        return _merged(self._parts, self._queries, self._firsts, self._listing, self._kernels)


class SpanPrompt:
    """Attention of T consecutive queries `[T, n_q, d]` over parts, in the order of positions.

    Attributes:
        sums, peaks, totals: of the parts so far; see `PartialAttention`.
    """

    def __init__(self, queries: torch.Tensor, kernels: Any) -> None:
        self._queries, self._kernels = queries, kernels
        self.sums, self.peaks, self.totals = _rooms(len(queries), queries)
        self.sums.zero_()
        self.peaks.fill_(_LEAST)
        self.totals.zero_()

    @property
    def state(self) -> Partial:
        """The parts so far: sums, peaks and totals of `PartialAttention`."""
        return self.sums, self.peaks, self.totals

    def add(
        self,
        pages: PromptPages,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        cap: float | None,
    ) -> None:
        """Attend the next pages, which are behind those before, `[pages, n_kv, C, d]`."""
        count, query_heads, _ = self._queries.shape
        kv_heads, table = keys.shape[1], pages.pages
        group = query_heads // kv_heads
        block = member_block(group, keys.dtype) // group
        queries = self._queries.contiguous()
        self._kernels.attend_spans[(-(-count // block), kv_heads)](
            *(self.sums, self.peaks, self.totals, queries, keys, values),
            *(table, table, table, table, table, _mask(None, queries)),
            *(len(table), pages.page_position, pages.query_position),
            *(pages.window or _NO_WINDOW, count, block, 1, 0),
            **_constants(self._queries, keys, scale, cap),
        )


def _attend_spans(
    view: SpanView,
    parts: list[torch.Tensor],
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    cap: float | None,
    seen: torch.Tensor | None,
    kernels: Any,
) -> None:
    """Write the part of each span of a view."""
    if len(view.owners):
        queries = queries.contiguous()
        kernels.attend_spans[(len(view.owners), keys.shape[1])](
            *(*parts, queries, keys, values),
            *(view.units, view.lows, view.highs, view.starts, view.owners, _mask(seen, queries)),
            *(0, 0, 0, _NO_WINDOW, len(queries), 1, 0, int(seen is not None)),
            **_constants(queries, keys, scale, cap),
        )


def _mask(seen: torch.Tensor | None, queries: torch.Tensor) -> torch.Tensor:
    """Return a mask of rows; without one any bytes, since their type selects the kernel, too."""
    return queries.view(torch.uint8) if seen is None else seen


def _constants(
    queries: torch.Tensor, keys: torch.Tensor, scale: float, cap: float | None
) -> dict[str, Any]:
    """Return what all calls for layers of one kind share: they decide the compiled kernel."""
    _, query_heads, head_dim = queries.shape
    _, kv_heads, chunk, _ = keys.shape
    group, unit_rows = query_heads // kv_heads, min(chunk, UNIT_ROWS)
    dim_block = _block(head_dim)
    return {
        "scale": scale,
        "cap": cap or 1.0,
        "query_heads": query_heads,
        "kv_heads": kv_heads,
        "has_cap": cap is not None,
        "group": group,
        "chunk": chunk,
        "head_dim": head_dim,
        "unit_rows": unit_rows,
        "member_block": member_block(group, keys.dtype),
        "row_block": _row_block(unit_rows, dim_block),
        "dim_block": dim_block,
        "least": _LEAST,
    }


def _merged(
    parts: list[torch.Tensor],
    queries: torch.Tensor,
    firsts: torch.Tensor,
    listing: torch.Tensor | None,
    kernels: Any,
) -> Partial:
    count, query_heads, head_dim = queries.shape
    merged = _rooms(count, queries)
    kernels.merge_spans[(count, query_heads)](
        *(*merged, *parts, firsts, firsts if listing is None else listing, query_heads),
        is_listed=listing is not None,
        head_dim=head_dim,
        dim_block=_block(head_dim),
        least=_LEAST,
    )
    return merged[0], merged[1], merged[2]


def _rooms(count: int, queries: torch.Tensor) -> list[torch.Tensor]:
    """Return room for this many parts: sums `[N, n_q, d]`, peaks and totals `[N, n_q]`, in fp32."""
    _, heads, width = queries.shape
    sizes = [(count, heads, width), (count, heads), (count, heads)]
    return [queries.new_empty(size, dtype=torch.float32) for size in sizes]


def units_per_span(page_rows: int) -> int:
    """Return the units of a span, the last one of a query excepted."""
    return 1 if adds_in_one_order() else max(1, SPAN_TOKENS // min(page_rows, UNIT_ROWS))


def member_block(group: int, dtype: torch.dtype) -> int:
    """Return the query heads of one KV head that a program has room for, of one query or more."""
    if not adds_in_one_order():
        return _block(group)
    return max(_block(group), _MEMBERS.get(dtype, _HALF_MEMBERS))


def _block(size: int) -> int:
    """Return the power of two that holds `size`, at least 16: the least side of a product."""
    return max(16, 1 << (size - 1).bit_length())


def _row_block(rows: int, dim_block: int) -> int:
    """Return the rows of a unit that a program holds at once."""
    return min(_block(rows), max(16, _TILE_ELEMENTS // dim_block))


def load_kernels() -> Any:
    """Return the module of the kernels. Raises ModuleNotFoundError without Triton."""
    from worker_service.model import span_kernel

    return span_kernel


def kernels_of(device: torch.device) -> Any:
    """Return the kernels; None if they cannot be built or run here.

    `try_kernels` decides it. If nothing was tried yet, the first call tries a small variant, which
    takes a second or two.
    """
    if device.type != "cuda":
        return None
    if device not in _tried:
        try_kernels(device, [_SMALL])
    return _tried[device]


def try_kernels(
    device: torch.device,
    variants: Iterable[Variant],
    cuda: Any = torch.cuda,
    load: Callable[[], Any] = load_kernels,
) -> Any:
    """Build and run the kernels of these variants, and return them; None if one of them fails.

    `kernels_of` returns the same from then on, so a worker tries what its models will run before
    they plan a step. `cuda` is torch.cuda, and `load` loads the kernels; tests have doubles.
    """
    kernels = None
    try:
        # Triton launches on the thread's current device.
        with cuda.device(device):
            kernels = load()
            for variant in variants:
                _try(device, kernels, variant)
    except Exception as error:
        # Plain products give the same result; the log says why the faster way is missing.
        log.warning("decode attention gathers pages: %s: %s", type(error).__name__, error)
        kernels = None
    _tried[device] = kernels
    return kernels


@torch.inference_mode()
def _try(device: torch.device, kernels: Any, variant: Variant) -> None:
    """Attend one page of ones. Raises RuntimeError if the result is not one."""
    upload = Upload(device)
    pages = np.zeros(1, dtype=np.int64)
    seen = np.ones((1, variant.page_tokens), dtype=np.bool_)
    view = SpanView.of(pages, pages, pages, seen, 1, upload)
    upload.send()
    # Whole tensors as a step's: what they are aligned to selects the kernel, too.
    queries = torch.ones(
        1, variant.query_heads, variant.head_dim, device=device, dtype=variant.dtype
    )
    page = queries.new_ones(1, variant.kv_heads, variant.page_tokens, variant.head_dim)
    weighted, _, total = view.attend(
        queries, page, page, scale=1.0, cap=1.0 if variant.has_cap else None, kernels=kernels
    )
    if not torch.allclose(weighted / total.unsqueeze(-1), torch.ones_like(weighted)):
        raise RuntimeError(f"a trial of {variant} gave a wrong result")

"""Attention metadata of a step: which pages its queries read, and which rows are masked.

A plan is built once per step, from page tables (vLLM's block tables) and sequence
lengths, and is shared by all layers. Pages that lie close together become a range of the
pool that is read in place. This module knows no keys, values or requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from worker_service.device.upload import Upload
from worker_service.kernels.paged_attention import PromptPages
from worker_service.kernels.units import UnitView, decodes_in_units, prefills_in_units
from worker_service.model.library_attention import WholeSequences, library_of
from worker_service.model.span_attention import SpanView, kernels_of

# Reading a foreign page costs one read; gathering a page costs two reads and a write. A
# range may therefore hold this many pages per wanted page.
_SPREAD = 2.0
LEAST = np.finfo(np.float32).min

Integers = Sequence[int] | npt.NDArray[np.int64]


# -- decode: one query per request, or a few ---------------------------------------


@dataclass(frozen=True, slots=True)
class PageView:
    """The pages that B queries read in the layers of one sliding window.

    Attributes:
        pages: a range of the pool that is read in place, or page numbers to gather.
        readers: k, how many queries attend each page.
        reader: int64 `[P * k]`, the queries that attend each page.
        owner: int64 `[P * k]`, the row that receives a result: its reader, or B for a
            foreign page of the range, whose values (even NaN) reach no query.
        limit: fp32 `[P * k, 1, C]`, the largest score of a row: infinity if the reader
            sees it, the least finite number if it is masked. Masked rows may have any
            finite values.
    """

    pages: slice | torch.Tensor
    reader: torch.Tensor
    owner: torch.Tensor
    limit: torch.Tensor
    readers: int = 1

    def of(self, pool: torch.Tensor) -> torch.Tensor:
        """Return the view's pages of one plane, `[P, n_kv, C, d]`."""
        if isinstance(self.pages, slice):
            return pool[self.pages]
        return pool.index_select(0, self.pages)


# What the kernel of a device reads; see `DecodePlan.views`.
DecodeView = PageView | SpanView | UnitView


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Pages of B decoding queries in one step: one view per distinct window.

    A sequence whose guesses are verified has several queries, one behind the other.

    Attributes:
        views: spans or units where there is a kernel for them, otherwise pages.
        shared: further views, of pages that several queries read; empty with a kernel.
        whole: the same for the library, if there is one and sequences are planned whole.
    """

    query_count: int
    views: Mapping[int | None, DecodeView]
    shared: Mapping[int | None, tuple[PageView, ...]] = field(default_factory=dict)
    whole: Mapping[int | None, WholeSequences] = field(default_factory=dict)

    @classmethod
    def of_sequences(
        cls,
        page_tables: Iterable[Sequence[int]],
        lengths: Integers,
        *,
        chunk_tokens: int,
        windows: Iterable[int | None],
        device: torch.device,
        upload: Upload | None = None,
        padded_spans: Mapping[int | None, int] | None = None,
    ) -> DecodePlan:
        """Plan for whole sequences, where `page_tables[b][i]` holds chunk i of sequence b.

        `lengths[b]` counts the tokens whose K and V are in place, the query's own
        included. Pages past the length are ignored. `upload` collects the plan's tables for
        the device; without it they are sent at once. `padded_spans`: spans for which the
        tables of each window have room (`SpanView.of`).
        """
        sizes = np.asarray(lengths, dtype=np.int64)
        counts = -(-sizes // chunk_tokens)
        pages = np.concatenate(
            [
                np.asarray(listed[:count], dtype=np.int64)
                for listed, count in zip(page_tables, counts.tolist(), strict=True)
            ]
        )
        ends = np.cumsum(counts)
        chunks = np.arange(len(pages)) - np.repeat(ends - counts, counts)
        tables = Upload(device) if upload is None else upload
        windows = set(windows)
        plan = cls.of_pages(
            pages,
            owners=np.repeat(np.arange(len(sizes)), counts),
            first_positions=chunks * chunk_tokens,
            query_positions=sizes - 1,
            chunk_tokens=chunk_tokens,
            windows=windows,
            device=device,
            upload=tables,
            padded_spans=padded_spans,
        )
        # The library's tables are never padded.
        if padded_spans is None and library_of(device) is not None:
            whole = {
                window: WholeSequences.of(pages, sizes, chunk_tokens, window, tables)
                for window in windows
            }
            plan = replace(plan, whole=whole)
        if upload is None:
            tables.send()
        return plan

    @classmethod
    def of_pages(
        cls,
        pages: Integers,
        *,
        owners: Integers,
        first_positions: Integers,
        query_positions: Integers,
        chunk_tokens: int,
        windows: Iterable[int | None],
        device: torch.device,
        upload: Upload | None = None,
        row_counts: Integers | None = None,
        padded_spans: Mapping[int | None, int] | None = None,
        query_counts: Sequence[int] | None = None,
        is_masked: bool = False,
    ) -> DecodePlan:
        """Plan for any pages: a tile of one sequence, or the tails of streamed ones.

        Page i belongs to sequence `owners[i]`. Its row r is position
        `first_positions[i] + r`, and its first `row_counts[i]` rows are in use (default:
        all up to the query). Sequence b has `query_counts[b]` queries (default: one), from
        `query_positions[b]` on; none sees a later position.

        If `is_masked`, `decode_partial` is told which rows of the pages are seen. They are then
        whole, before their query's position, distinct, and listed by query and position.
        """
        numbers, owner = np.asarray(pages, dtype=np.int64), np.asarray(owners, dtype=np.int64)
        first = np.asarray(first_positions, dtype=np.int64)
        query = np.asarray(query_positions, dtype=np.int64)
        used = None if row_counts is None else np.asarray(row_counts, dtype=np.int64)
        if query_counts is not None:
            rows = _Rows.of(query_counts)
            query = query[rows.owner] + rows.offset
            page, owner = rows.readers(owner)
            numbers, first = numbers[page], first[page]
            used = None if used is None else used[page]
        place = np.arange(chunk_tokens)
        behind = query[owner][:, None] - (first[:, None] + place)
        seen = behind >= 0
        if used is not None:
            seen &= place < used[:, None]
        tables = Upload(device) if upload is None else upload
        views: dict[int | None, DecodeView] = {}
        shared: dict[int | None, tuple[PageView, ...]] = {}
        for window in set(windows):
            visible = seen if window is None else seen & (behind < window)
            padded = None if padded_spans is None else padded_spans[window]
            views[window], more = _decode_views(
                numbers, owner, first, visible, len(query), tables, padded, is_masked=is_masked
            )
            if more:
                shared[window] = more
        plan = cls(query_count=len(query), views=views, shared=shared)
        if upload is None:
            tables.send()
        return plan


# -- prefill: T consecutive queries of one request ----------------------------------


@dataclass(frozen=True, slots=True)
class PrefillView:
    """The pages that T new tokens read in the layers of one sliding window.

    Query i is at row `row_count + i` of all keys: the pages' rows, then the new tokens.

    Attributes:
        pages: pages of the visible prefix; None if no row of it is visible.
        row_count: the pages' rows in use, from the first one on.
        query_count: T.
        window: the sliding window, if it masks some of these rows; otherwise None.
    """

    pages: slice | torch.Tensor | None
    row_count: int
    query_count: int
    window: int | None
    device: torch.device
    # The mask of all queries, made by the first layer that wants it.
    _whole: list[torch.Tensor] = field(default_factory=list, repr=False, compare=False)

    def masked(self, first: int, last: int, start: int = 0) -> torch.Tensor | None:
        """Return bool `[last - first, row_count + last - start]` for queries [first, last).

        It is True where a query must not see a key; keys begin at row `start`. None if these
        queries see all of them.
        """
        queries, keys = last - first, self.row_count + last - start
        position = self.row_count + first
        return masked_keys(position, queries, start, keys, self.window, self.device)

    def seen(self, first: int, last: int) -> torch.Tensor | None:
        """Return bool `[last - first, row_count + last]`, True where a query sees a key.

        None if it is the plain triangle of a prompt without a prefix.
        """
        if not self.row_count and self.window is None and first == 0:
            return None
        is_whole = last - first == self.query_count
        if is_whole and self._whole:
            return self._whole[0]
        masked = self.masked(first, last)
        # A single new token may see all keys.
        shape = (last - first, self.row_count + last)
        seen = (
            torch.ones(shape, dtype=torch.bool, device=self.device) if masked is None else ~masked
        )
        if is_whole:
            self._whole.append(seen)
        return seen


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Pages of T new tokens after a prefix: one view per distinct window.

    With a kernel that reads pages the new tokens' own are among them.
    """

    views: Mapping[int | None, PrefillView | PromptPages]

    @classmethod
    def of_prefix(
        cls,
        pages: Sequence[int],
        prefix_tokens: int,
        new_tokens: int,
        *,
        chunk_tokens: int,
        windows: Iterable[int | None],
        device: torch.device,
        upload: Upload | None = None,
    ) -> PrefillPlan:
        """Plan where `pages[i]` holds chunk i, of the prefix and of the new tokens.

        Pages past the prefix are read by a kernel for pages alone, and may be missing without.
        `upload`: see `DecodePlan.of_sequences`. Raises ValueError if that kernel lacks pages.
        """
        tables = Upload(device) if upload is None else upload
        make_view = _prompt_view if prefills_in_units(device) else _prefill_view
        plan = cls(
            views={
                window: make_view(pages, prefix_tokens, new_tokens, chunk_tokens, window, tables)
                for window in set(windows)
            }
        )
        if upload is None:
            tables.send()
        return plan


# -- building the views ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """The queries of sequences that have several: int64 arrays.

    Attributes:
        first: `[B]`, the first query of each sequence.
        count: `[B]`, how many it has.
        owner: `[N]`, the sequence of each query.
        offset: `[N]`, how many queries of its sequence are before it.
    """

    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    owner: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]

    @classmethod
    def of(cls, query_counts: Sequence[int]) -> _Rows:
        count = np.asarray(query_counts, dtype=np.int64)
        first = np.cumsum(count) - count
        owner = np.repeat(np.arange(len(count)), count)
        return cls(first, count, owner, np.arange(len(owner)) - first[owner])

    def readers(
        self, owner: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return each page as often as its sequence `owner[i]` has queries, with the query."""
        count = self.count[owner]
        page = np.repeat(np.arange(len(owner)), count)
        before = np.cumsum(count) - count
        return page, self.first[owner][page] + np.arange(len(page)) - before[page]


def _decode_views(
    numbers: npt.NDArray[np.int64],
    owner: npt.NDArray[np.int64],
    first_positions: npt.NDArray[np.int64],
    seen: npt.NDArray[np.bool_],
    query_count: int,
    upload: Upload,
    padded_spans: int | None,
    *,
    is_masked: bool,
) -> tuple[DecodeView, tuple[PageView, ...]]:
    """Return the view of pages that one query reads, and views of those that several read.

    With a kernel one view has all of them, and can be padded. Those that are masked keep their
    order.
    """
    used = seen.any(axis=1)
    if not used.all():
        numbers, owner, seen = numbers[used], owner[used], seen[used]
        first_positions = first_positions[used]
    if kernels_of(upload.device) is not None:
        view = SpanView.of(numbers, owner, first_positions, seen, query_count, upload, padded_spans)
        return view, ()
    if decodes_in_units(upload.device):
        return UnitView.of(numbers, owner, first_positions, seen, query_count), ()
    pages, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    if len(pages) == len(numbers):
        spread = 0.0 if is_masked else _SPREAD
        return _page_view(numbers, owner[:, None], seen[:, None], query_count, upload, spread), ()
    readers = counts[inverse]
    shared = []
    for count in np.unique(counts[counts > 1]).tolist():
        # The readers of a page become neighbours.
        unordered = np.flatnonzero(readers == count)
        order = np.argsort(numbers[unordered], kind="stable")
        entries = unordered[order].reshape(-1, count)
        shared.append(
            _page_view(numbers[entries[:, 0]], owner[entries], seen[entries], query_count, upload)
        )
    alone = readers == 1
    if not alone.any():
        return shared[0], tuple(shared[1:])
    own = _page_view(
        numbers[alone], owner[alone][:, None], seen[alone][:, None], query_count, upload
    )
    return own, tuple(shared)


def _page_view(
    numbers: npt.NDArray[np.int64],
    owner: npt.NDArray[np.int64],
    seen: npt.NDArray[np.bool_],
    query_count: int,
    upload: Upload,
    spread: float = _SPREAD,
) -> PageView:
    """Read distinct pages in place if they lie close together; otherwise gather them.

    Page `numbers[i]` is read by the queries `owner[i]` `[k]`, in the rows `seen[i]` `[k, C]`.
    """
    pages: slice | torch.Tensor = slice(0, 0)
    readers, rows = seen.shape[1:]
    if len(numbers):
        first = int(numbers.min())
        place = numbers - first
        span = int(place.max()) + 1
        if span <= spread * len(numbers):
            pages = slice(first, first + span)
            spread_owner = np.full((span, readers), query_count, dtype=np.int64)
            spread_owner[place] = owner
            spread_seen = np.zeros((span, readers, rows), dtype=np.bool_)
            spread_seen[place] = seen
            owner, seen = spread_owner, spread_seen
        else:
            pages = upload.table(numbers)
    owner = owner.reshape(-1)
    limit = np.where(seen.reshape(-1, rows), np.float32(np.inf), LEAST)
    return PageView(
        pages,
        reader=upload.table(np.minimum(owner, query_count - 1)),
        owner=upload.table(owner),
        limit=upload.table(limit, np.float32).unsqueeze(1),
        readers=readers,
    )


def _prompt_view(
    pages: Sequence[int],
    prefix_tokens: int,
    new_tokens: int,
    chunk_tokens: int,
    window: int | None,
    upload: Upload,
) -> PromptPages:
    first_seen = 0 if window is None else max(0, prefix_tokens - window + 1)
    first_chunk = first_seen // chunk_tokens
    last_chunk = -(-(prefix_tokens + new_tokens) // chunk_tokens)
    if len(pages) < last_chunk:
        # A query without keys would be 0 / 0.
        raise ValueError(f"{len(pages)} pages where queries read {last_chunk}")
    listed = pages[first_chunk:last_chunk]
    table = upload.table(listed, np.int32)
    return PromptPages(table, first_chunk * chunk_tokens, prefix_tokens, window)


def _prefill_view(
    prefix_pages: Sequence[int],
    prefix_tokens: int,
    new_tokens: int,
    chunk_tokens: int,
    window: int | None,
    upload: Upload,
) -> PrefillView:
    # The first new token sees the fewest later and the most earlier tokens.
    first_seen = 0 if window is None else max(0, prefix_tokens - window + 1)
    first_chunk = first_seen // chunk_tokens
    listed = prefix_pages[first_chunk : -(-prefix_tokens // chunk_tokens)]
    first_row = first_chunk * chunk_tokens
    pages = _selection(listed, upload) if prefix_tokens > first_seen else None
    rows = prefix_tokens - first_row if pages is not None else 0
    # The last new token masks the first row that is read.
    is_windowed = window is not None and rows + new_tokens > window
    return PrefillView(pages, rows, new_tokens, window if is_windowed else None, upload.device)


def _selection(pages: Sequence[int], upload: Upload) -> slice | torch.Tensor:
    """Return page numbers in this order, as a range if they are one."""
    first = pages[0]
    if list(pages) == list(range(first, first + len(pages))):
        return slice(first, first + len(pages))
    return upload.table(list(pages))


def masked_keys(
    query_position: int,
    query_count: int,
    key_position: int,
    key_count: int,
    window: int | None,
    device: torch.device,
) -> torch.Tensor | None:
    """Return bool `[T, S]`, True where a query must not see a key; None if it sees all."""
    last_query = query_position + query_count - 1
    causal = key_position + key_count - 1 > query_position
    outside = window is not None and last_query - key_position >= window
    if not causal and not outside:
        return None
    queries = torch.arange(query_position, last_query + 1, device=device).unsqueeze(1)
    behind = queries - torch.arange(key_position, key_position + key_count, device=device)
    masked = behind < 0
    if window is not None:
        masked |= behind >= window
    return masked

"""Paged attention equals naive fp32 attention, however pages lie and however it is cut."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

from splitpoint.host.processor import AMX_BF16
from worker_service.model.attention import (
    decode_partial,
    prefill,
    prefill_fused,
    prefill_in_blocks,
    prefill_partial,
    prefills_in_blocks,
    tile_rows,
)
from worker_service.model.attention_plan import DecodePlan, PageView, PrefillPlan, PrefillView

CPU = torch.device("cpu")
CHUNK, HEAD = 8, 16
SCALE = HEAD**-0.5
LENGTHS = (1, 8, 9, 37)


def naive(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int | None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query `[n_q, d]` at the last of `[rows, n_kv, d]` keys, head by head."""
    start = 0 if window is None else max(0, len(keys) - window)
    group = query.shape[0] // keys.shape[1]
    heads = []
    for head in range(query.shape[0]):
        seen = keys[start:, head // group].float()
        scores = seen @ query[head].float() * SCALE
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if sinks is not None:
            scores = torch.cat((scores, sinks[head : head + 1]))
        weights = torch.softmax(scores, dim=0)[: len(keys) - start]
        heads.append(weights @ values[start:, head // group].float())
    return torch.cat(heads)


class Pool:
    """Sequences of given lengths in pages of a pool; everything else is poison."""

    def __init__(self, lengths: tuple[int, ...], kv_heads: int, order: list[int]) -> None:
        generator = torch.Generator().manual_seed(5)
        self.keys = torch.full((max(order) + 1, kv_heads, CHUNK, HEAD), 1e4)
        self.values = self.keys.clone()
        self.page_tables: list[list[int]] = []
        self.sequences: list[tuple[torch.Tensor, torch.Tensor]] = []
        free = list(order)
        for length in lengths:
            keys = torch.randn((length, kv_heads, HEAD), generator=generator)
            values = torch.randn((length, kv_heads, HEAD), generator=generator)
            pages = [free.pop(0) for _ in range(math.ceil(length / CHUNK))]
            for row in range(length):
                self.keys[pages[row // CHUNK], :, row % CHUNK] = keys[row]
                self.values[pages[row // CHUNK], :, row % CHUNK] = values[row]
            self.page_tables.append(pages)
            self.sequences.append((keys, values))


# Low enough to change most scores.
CAPS = (None, 0.7)
ORDERS = {
    "in order": list(range(20)),
    "holes": [page + page // 2 for page in range(20)],
    "scattered": [(page * 7 % 20) * 5 for page in range(20)],
}


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 5, 16])
def test_decode(order: str, heads: tuple[int, int], window: int | None, cap: float | None) -> None:
    pool = Pool(LENGTHS, heads[1], ORDERS[order])
    queries = torch.randn(
        (len(LENGTHS), heads[0], HEAD), generator=torch.Generator().manual_seed(6)
    )
    plan = DecodePlan.of_sequences(
        pool.page_tables, LENGTHS, chunk_tokens=CHUNK, windows={None, window}, device=CPU
    )
    got = decode_partial(
        queries, pool.keys, pool.values, plan, window=window, scale=SCALE, cap=cap
    ).attended(queries.dtype)
    for row, (keys, values) in enumerate(pool.sequences):
        wanted = naive(queries[row], keys, values, window, cap)
        torch.testing.assert_close(got[row], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_that_a_head_does_not_see(order: str) -> None:
    """Pages whose rows are masked by a head of K and V each, beside a page of all queries."""
    masked_decode(Pool((3 * CHUNK, 2 * CHUNK, 5), 2, ORDERS[order]))


def masked_decode(pool: Pool) -> None:
    """Check attention to two sequences of whole pages by a mask; the third sees all of its own."""
    generator = torch.Generator().manual_seed(11)
    queries = torch.randn((3, 6, HEAD), generator=generator)
    seen = (torch.rand((5, 2, CHUNK), generator=generator) < 0.3).to(torch.uint8)
    seen[:, 1, 3] = 1
    # The first head of the second sequence sees nothing there.
    seen[3:, 0] = 0
    tables = pool.page_tables
    plan = DecodePlan.of_pages(
        [*tables[0], *tables[1]],
        owners=[0, 0, 0, 1, 1],
        first_positions=[0, CHUNK, 2 * CHUNK, 0, CHUNK],
        query_positions=[9 * CHUNK] * 3,
        chunk_tokens=CHUNK,
        windows={None},
        device=CPU,
        is_masked=True,
    )
    own = DecodePlan.of_pages(
        [tables[2][0]] * 3,
        owners=[0, 1, 2],
        first_positions=[0] * 3,
        query_positions=[4] * 3,
        chunk_tokens=CHUNK,
        windows={None},
        device=CPU,
    )
    for cap in CAPS:
        part = decode_partial(
            queries,
            pool.keys,
            pool.values,
            plan,
            window=None,
            scale=SCALE,
            cap=cap,
            seen=seen,
        )
        mine = decode_partial(
            queries, pool.keys, pool.values, own, window=None, scale=SCALE, cap=cap
        )
        got = part.merge(mine).attended(queries.dtype).view(3, 6, HEAD)
        keys, values = pool.sequences[2]
        for row, rows in ((0, seen[:3]), (1, seen[3:]), (2, seen[:0])):
            for head in range(6):
                is_seen = rows[:, head // 3].flatten().bool()
                shared_head = slice(head // 3, head // 3 + 1)
                pair = [
                    torch.cat((whole[: len(is_seen)][is_seen], shared))[:, shared_head]
                    for whole, shared in zip(pool.sequences[row], (keys, values), strict=True)
                ]
                wanted = naive(queries[row, head : head + 1], pair[0], pair[1], None, cap)
                torch.testing.assert_close(got[row, head], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [None, 5, 16])
@pytest.mark.parametrize("order", ORDERS)
def test_several_queries_of_a_sequence(
    order: str, window: int | None, heads: tuple[int, int]
) -> None:
    """Attend with the last `counts[b]` tokens of each sequence at once."""
    counts = [1, 3, 1, 5]
    pool = Pool(LENGTHS, heads[1], ORDERS[order])
    queries = torch.randn((10, heads[0], HEAD), generator=torch.Generator().manual_seed(7))
    chunks = [(b, i) for b, table in enumerate(pool.page_tables) for i in range(len(table))]
    plan = DecodePlan.of_pages(
        [pool.page_tables[b][i] for b, i in chunks],
        owners=[b for b, _ in chunks],
        first_positions=[i * CHUNK for _, i in chunks],
        query_positions=[length - count for length, count in zip(LENGTHS, counts, strict=True)],
        query_counts=counts,
        chunk_tokens=CHUNK,
        windows={None, window},
        device=CPU,
    )
    got = decode_partial(
        queries, pool.keys, pool.values, plan, window=window, scale=SCALE
    ).attended(queries.dtype)
    row = 0
    for (keys, values), count in zip(pool.sequences, counts, strict=True):
        for length in range(len(keys) - count + 1, len(keys) + 1):
            wanted = naive(queries[row], keys[:length], values[:length], window)
            torch.testing.assert_close(got[row], wanted, atol=1e-5, rtol=1e-5)
            row += 1
    assert row == plan.query_count == 10


def test_ranges_are_read_in_place_and_far_pages_gathered() -> None:
    def selection(order: str) -> slice | torch.Tensor:
        pool = Pool(LENGTHS, 1, ORDERS[order])
        plan = DecodePlan.of_sequences(
            pool.page_tables, LENGTHS, chunk_tokens=CHUNK, windows=[None], device=CPU
        )
        view = plan.views[None]
        assert isinstance(view, PageView)
        return view.pages

    assert selection("in order") == slice(0, 9)
    assert selection("holes") == slice(0, 13)
    assert isinstance(selection("scattered"), torch.Tensor)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("order", ORDERS)
def test_pages_that_queries_share_are_read_once(
    order: str, window: int | None, heads: tuple[int, int], cap: float | None
) -> None:
    """Some by all four queries, some by two; nothing is gathered that lies close together."""
    lengths = (37, 45, 50, 20)
    pool = Pool((37, 45, 50, 20), heads[1], ORDERS[order] + list(range(200, 220)))
    for row, count in ((1, 2), (2, 2), (3, 2), (2, 4)):
        source = 0 if count == 2 else 1
        shared = range(min(count, len(pool.page_tables[row])))
        for chunk in shared:
            page = pool.page_tables[source][chunk]
            pool.page_tables[row][chunk] = page
            rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
            for mine, theirs in zip(pool.sequences[row], pool.sequences[source], strict=True):
                mine[rows] = theirs[rows]
    plan = DecodePlan.of_sequences(
        pool.page_tables, lengths, chunk_tokens=CHUNK, windows=[window], device=CPU
    )
    if window is None:
        assert [view.readers for view in plan.shared[None]] == [2, 4]
    if order == "in order":
        assert all(isinstance(view.pages, slice) for view in plan.shared.get(window, ()))
    queries = torch.randn((4, heads[0], HEAD), generator=torch.Generator().manual_seed(6))
    got = decode_partial(
        queries, pool.keys, pool.values, plan, window=window, scale=SCALE, cap=cap
    ).attended(queries.dtype)
    for row, (keys, values) in enumerate(pool.sequences):
        wanted = naive(queries[row], keys, values, window, cap)
        torch.testing.assert_close(got[row], wanted, atol=1e-5, rtol=1e-5)


def test_a_foreign_page_of_nan_inside_the_range_changes_nothing() -> None:
    """Another request's broken cache must stay that request's failure."""
    pool = Pool((9, 9), 2, ORDERS["holes"])
    pool.keys[2], pool.values[2] = math.nan, math.nan  # a hole of the order
    queries = torch.ones((2, 2, HEAD))
    plan = DecodePlan.of_sequences(
        pool.page_tables, [9, 9], chunk_tokens=CHUNK, windows=[None], device=CPU
    )
    view = plan.views[None]
    assert isinstance(view, PageView)
    assert view.pages == slice(0, 5)
    got = decode_partial(queries, pool.keys, pool.values, plan, window=None, scale=SCALE).attended(
        queries.dtype
    )
    for row, (keys, values) in enumerate(pool.sequences):
        torch.testing.assert_close(got[row], naive(queries[row], keys, values, None))


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("window", [None, 3, 20])
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_decode_tile_by_tile(cut: int, window: int | None, cap: float | None) -> None:
    """The front staged in tiles, the tail on the device, merged (streamed residency)."""
    length = 37
    pool = Pool((length,), 2, list(range(5)))
    pages = pool.page_tables[0]
    queries = torch.randn((1, 6, HEAD), generator=torch.Generator().manual_seed(7))

    def part(first: int, last: int) -> DecodePlan:
        return DecodePlan.of_pages(
            pages[first:last],
            owners=[0] * (last - first),
            first_positions=[CHUNK * page for page in range(first, last)],
            query_positions=[length - 1],
            chunk_tokens=CHUNK,
            windows=[window],
            device=CPU,
        )

    bounds = [*range(0, 5, cut), 5]
    whole = None
    for first, last in itertools.pairwise(bounds):
        partial = decode_partial(
            queries, pool.keys, pool.values, part(first, last), window=window, scale=SCALE, cap=cap
        )
        whole = partial if whole is None else whole.merge(partial)
    assert whole is not None
    wanted = naive(queries[0], *pool.sequences[0], window, cap)
    torch.testing.assert_close(whole.attended(torch.float32)[0], wanted, atol=1e-5, rtol=1e-5)


def test_rows_past_a_partial_chunk_are_hidden() -> None:
    pool = Pool((6,), 2, [0])
    queries = torch.ones((1, 2, HEAD))
    plan = DecodePlan.of_pages(
        [0],
        owners=[0],
        first_positions=[0],
        query_positions=[100],
        row_counts=[6],
        chunk_tokens=CHUNK,
        windows=[None],
        device=CPU,
    )
    got = decode_partial(queries, pool.keys, pool.values, plan, window=None, scale=SCALE).attended(
        queries.dtype
    )
    torch.testing.assert_close(got[0], naive(queries[0], *pool.sequences[0], None))


def queries_of(new: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn((new, 6, HEAD), generator=generator).to(dtype)


@functools.cache
def prefilled(
    prefix: int, new: int, window: int | None, cap: float | None, dtype: torch.dtype
) -> torch.Tensor:
    """What each query of a prompt's end gives by naive attention, wherever pages lie."""
    keys, values = (
        each.to(dtype) for each in Pool((prefix + new,), 2, ORDERS["in order"]).sequences[0]
    )
    ends = range(prefix + 1, prefix + new + 1)
    queries = queries_of(new, dtype)
    return torch.stack(
        [
            naive(query, keys[:end], values[:end], window, cap)
            for query, end in zip(queries, ends, strict=True)
        ]
    )


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ["in order", "scattered"])
@pytest.mark.parametrize(("prefix", "new"), [(0, 1), (0, 90), (5, 1), (16, 70), (37, 9)])
@pytest.mark.parametrize("window", [None, 4, 40])
@pytest.mark.parametrize("flags", [(), (AMX_BF16,)])
def test_prefill(
    dtype: torch.dtype,
    order: str,
    prefix: int,
    new: int,
    window: int | None,
    cap: float | None,
    flags: tuple[str, ...],
) -> None:
    """With the kernels of either kind of processor."""
    pool = Pool((prefix + new,), 2, ORDERS[order])
    keys, values = (each.to(dtype) for each in pool.sequences[0])
    queries = queries_of(new, dtype)
    plan = PrefillPlan.of_prefix(
        pool.page_tables[0], prefix, new, chunk_tokens=CHUNK, windows=[window], device=CPU
    )
    got = prefill(
        queries,
        keys[prefix:],
        values[prefix:],
        pool.keys.to(dtype),
        pool.values.to(dtype),
        plan,
        window=window,
        scale=SCALE,
        cap=cap,
        flags=flags,
    )
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    wanted = prefilled(prefix, new, window, cap, dtype)
    torch.testing.assert_close(got.float(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize(("prefix", "new"), [(0, 1), (0, 90), (5, 1), (60, 70)])
@pytest.mark.parametrize("window", [None, 4, 40])
@pytest.mark.parametrize("most_scores", [1, 20_000, 1 << 20])
def test_prefill_in_blocks_of_bounded_scores(
    most_scores: int, prefix: int, new: int, window: int | None, cap: float | None
) -> None:
    """As a GPU prefills what no fused kernel takes."""
    pool = Pool((prefix + new,), 2, ORDERS["in order"])
    keys, values = pool.sequences[0]
    queries = queries_of(new, torch.float32)
    plan = PrefillPlan.of_prefix(
        pool.page_tables[0], prefix, new, chunk_tokens=CHUNK, windows=[window], device=CPU
    )
    view = plan.views[window]
    assert isinstance(view, PrefillView)
    rows = slice(prefix - view.row_count, None)
    got = prefill_in_blocks(
        queries,
        keys[rows].transpose(0, 1),
        values[rows].transpose(0, 1),
        view,
        SCALE,
        cap,
        most_scores,
    )
    wanted = prefilled(prefix, new, window, cap, torch.float32)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("flags", [(), (AMX_BF16,)])
@pytest.mark.parametrize("window", [None, 20])
def test_sinks(window: int | None, flags: tuple[str, ...]) -> None:
    """A head's sink weighs from nothing to nearly all, prefilled and decoded."""
    prefix, new = 37, 70
    pool = Pool((prefix + new,), 2, ORDERS["in order"])
    keys, values = pool.sequences[0]
    queries, sinks = queries_of(new, torch.float32), torch.linspace(-3, 8, 6)
    pages, planes = pool.page_tables[0], (pool.keys, pool.values)
    prefix_plan = PrefillPlan.of_prefix(
        pages, prefix, new, chunk_tokens=CHUNK, windows=[window], device=CPU
    )
    lengths = range(prefix + 1, prefix + new + 1)
    plan = DecodePlan.of_sequences(
        [pages] * new, list(lengths), chunk_tokens=CHUNK, windows=[window], device=CPU
    )
    results = (
        prefill(
            *(queries, keys[prefix:], values[prefix:], *planes, prefix_plan),
            window=window,
            scale=SCALE,
            sinks=sinks,
            flags=flags,
        ),
        decode_partial(queries, *planes, plan, window=window, scale=SCALE).attended(
            torch.float32, sinks
        ),
    )
    wanted = torch.stack(
        [
            naive(query, keys[:length], values[:length], window, sinks=sinks)
            for query, length in zip(queries, lengths, strict=True)
        ]
    )
    for got in results:
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize(("prefix", "new"), [(0, 90), (5, 1), (60, 70)])
def test_a_fused_prefill_is_aligned_to_the_lower_right(
    prefix: int, new: int, heads: tuple[int, int]
) -> None:
    """By the materialised mask here; the flash kernels need a GPU."""
    pool = Pool((prefix + new,), heads[1], ORDERS["in order"])
    keys, values = pool.sequences[0]
    queries = torch.randn((new, heads[0], HEAD), generator=torch.Generator().manual_seed(8))
    got = prefill_fused(queries, keys.transpose(0, 1), values.transpose(0, 1), SCALE)
    for row in range(new):
        end = prefix + row + 1
        wanted = naive(queries[row], keys[:end], values[:end], None)
        torch.testing.assert_close(got[row], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("prefix", "window"), [(0, None), (100, None), (100, 30)])
def test_masks_are_made_in_pieces_if_they_are_large(prefix: int, window: int | None) -> None:
    """And once a step, for all layers, if they are not."""
    new = 130
    view = PrefillPlan.of_prefix(
        range(20), prefix, new, chunk_tokens=CHUNK, windows=[window], device=CPU
    ).views[window]
    assert isinstance(view, PrefillView)
    whole = view.seen(0, new)
    if not view.row_count and view.window is None:
        assert whole is None
        whole = torch.ones(new, new, dtype=torch.bool).tril()
    else:
        assert view.seen(0, new) is whole
    assert whole is not None
    for first, last in ((0, 64), (64, 128), (128, 130)):
        seen = view.seen(first, last)
        columns = view.row_count + last
        if seen is None:
            seen = torch.ones(last, last, dtype=torch.bool).tril()
        assert torch.equal(seen, whole[first:last, :columns])
        assert not whole[first:last, columns:].any()


def test_products_or_sdpa_by_processor_type_and_cap() -> None:
    amx, other, gpu = (AMX_BF16,), ("avx512f",), torch.device("cuda")
    assert prefills_in_blocks(CPU, torch.bfloat16, None, other)
    assert not prefills_in_blocks(CPU, torch.bfloat16, None, amx)
    assert prefills_in_blocks(CPU, torch.float16, None, amx), "AMX here multiplies bfloat16 only"
    assert not prefills_in_blocks(CPU, torch.float32, None, other)
    assert not prefills_in_blocks(gpu, torch.bfloat16, None, other)
    for device, dtype in ((CPU, torch.bfloat16), (CPU, torch.float32), (gpu, torch.bfloat16)):
        assert prefills_in_blocks(device, dtype, 50.0, amx), "SDPA cannot cap scores"


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("window", [None, 4, 30])
def test_prefill_tile_by_tile(window: int | None, cap: float | None) -> None:
    """A streamed prefix in tiles and the tokens' own part, merged in any order."""
    prefix, new = 32, 11
    pool = Pool((prefix + new,), 2, list(range(6)))
    keys, values = pool.sequences[0]
    queries = torch.randn((new, 4, HEAD), generator=torch.Generator().manual_seed(9))

    def part(k: torch.Tensor, v: torch.Tensor, position: int):  # type: ignore[no-untyped-def]
        return prefill_partial(
            queries,
            k,
            v,
            query_position=prefix,
            key_position=position,
            window=window,
            scale=SCALE,
            cap=cap,
        )

    whole = part(keys[prefix:].transpose(0, 1), values[prefix:].transpose(0, 1), prefix)
    for first, count in ((2, 2), (0, 2)):
        tile = slice(first, first + count)
        whole = whole.merge(
            part(
                tile_rows(pool.keys[tile], count * CHUNK),
                tile_rows(pool.values[tile], count * CHUNK),
                first * CHUNK,
            )
        )
    got = whole.attended(torch.float32)
    for row in range(new):
        end = prefix + row + 1
        wanted = naive(queries[row], keys[:end], values[:end], window, cap)
        torch.testing.assert_close(got[row], wanted, atol=1e-5, rtol=1e-5)

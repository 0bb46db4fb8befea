"""Triton kernels of paged attention; imported only where Triton is wanted.

They read pages where they lie, by number, and know no requests. Sums are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _merged(peak, total, result, other_peak, other_total, other_result):
    """Return two parts as one. Explicit operations: no compiler may contract them otherwise.

    A part of nothing, with a total of 0, changes no bit.
    """
    higher = tl.maximum(peak, other_peak)
    mine, theirs = tl.exp(peak - higher), tl.exp(other_peak - higher)
    is_something = other_total != 0.0  # also if it is not a number
    total = tl.where(is_something, tl.fma(total, mine, other_total * theirs), total)
    both = tl.fma(result, mine[:, None], other_result * theirs[:, None])
    result = tl.where(is_something[:, None], both, result)
    return higher, total, result


@triton.jit
def _pages_seen(nearest, block, window, page_count, chunk: tl.constexpr):
    """Return the first and last + 1 page that some of a prompt's `block` queries see.

    The first query is `nearest` positions behind the first page's first row.
    """
    end = (tl.maximum(nearest + block, 0) + chunk - 1) // chunk
    return tl.maximum(nearest - window + 1, 0) // chunk, tl.minimum(end, page_count)


@triton.jit
def _unit_at(units, entry, is_decode, per_page: tl.constexpr, unit_rows: tl.constexpr):
    """Return the page of a program's unit, and the row of the page where the unit begins."""
    number = tl.load(units + tl.where(is_decode, entry, entry // per_page))
    page = tl.where(is_decode, number // per_page, number).to(tl.int64)
    return page, tl.where(is_decode, number, entry) % per_page * unit_rows


@triton.jit
def _unit(
    query,
    keys,
    values,
    seen_rows,
    is_masked,
    first_row,
    start,
    low,
    high,
    later,
    block,
    scale,
    cap,
    has_cap: tl.constexpr,
    chunk: tl.constexpr,
    head_dim: tl.constexpr,
    unit_rows: tl.constexpr,
    member_block: tl.constexpr,
    row_block: tl.constexpr,
    dim_block: tl.constexpr,
    least: tl.constexpr,
):
    """Return the part of one unit: peak, total and sums of each query head.

    Its rows begin at `start` of a page that begins at `first_row`. A head that is `later[i]`
    queries behind the first one sees the rows [low + later[i], high + later[i]); if `is_masked`,
    without those of the page at a 0 of `seen_rows`.
    """
    dims = tl.arange(0, dim_block)
    inside = dims < head_dim
    part_peak = tl.full([member_block], least, tl.float32)
    part_total = tl.zeros([member_block], tl.float32)
    part = tl.zeros([member_block, dim_block], tl.float32)
    for below in range(0, unit_rows, row_block):
        rows = start + below + tl.arange(0, row_block)
        is_row = (below + tl.arange(0, row_block) < unit_rows) & (rows < chunk)
        is_row = is_row & (tl.load(seen_rows + rows, mask=is_row & (is_masked != 0), other=1) != 0)
        read = is_row & (rows >= low) & (rows < high + block - 1)
        seen = (rows[None, :] >= low + later[:, None]) & (rows[None, :] < high + later[:, None])
        seen = seen & is_row[None, :]
        at = (first_row + rows[:, None]) * head_dim + dims[None, :]
        read = read[:, None] & inside[None, :]
        key = tl.load(keys + at, mask=read, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if has_cap:
            scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))
        scores = tl.where(seen, scores, least)
        higher = tl.maximum(part_peak, tl.max(scores, 1))
        # Without a row that is seen yet, the peak is the least number: weights are 0.
        weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
        shrink = tl.exp(part_peak - higher)
        part_total = part_total * shrink + tl.sum(weights, 1)
        value = tl.load(values + at, mask=read, other=0.0)
        weights = weights.to(value.dtype)
        part = tl.dot(weights, value, part * shrink[:, None], input_precision="ieee")
        part_peak = higher
    return part_peak, part_total, part


# If `is_prompt`, program (b, h) attends with the queries from `b * block_queries` on, the first
# of all at `query_position`, the pages units[: page_count], the first one at `page_position`,
# of which a query sees `window` positions up to its own. It continues the part of each query.
#
# One compiled kernel computes decoded rows, guesses and prompts of a model in one order: what
# differs between their calls must not select another.
@triton.jit(
    do_not_specialize=[
        "units",
        "lows",
        "highs",
        "starts",
        "owners",
        "seen",
        "page_count",
        "page_position",
        "query_position",
        "window",
        "query_count",
        "block_queries",
        "is_prompt",
        "is_masked",
    ],
)
def attend_spans(
    weighted,
    peaks,
    totals,
    queries,
    keys,
    values,
    units,
    lows,
    highs,
    starts,
    owners,
    seen,
    page_count,
    page_position,
    query_position,
    window,
    query_count,
    block_queries,
    is_prompt,
    is_masked,
    scale,
    cap,
    query_heads,
    kv_heads,
    has_cap: tl.constexpr,
    group: tl.constexpr,
    chunk: tl.constexpr,
    head_dim: tl.constexpr,
    unit_rows: tl.constexpr,
    member_block: tl.constexpr,
    row_block: tl.constexpr,
    dim_block: tl.constexpr,
    least: tl.constexpr,
):
    """Attend units of pages with the query heads of one KV head, one unit after the other.

    A unit's part is computed by itself, and merged with those before it. Of a decoding query,
    program (s, h) attends units[starts[s] : starts[s + 1]] with query owners[s], of unit i the
    rows [lows[i], highs[i]) of its page, and writes part s. Unit u is the
    part `u % n` of page `u // n`, where pages have n units. For prompts: see above. If `is_masked`,
    units i n to i n + n - 1 are those of one page, whose rows at a 0 of `seen[i, h]` are not read.

    Rows that no query of a program sees are not read: they may hold anything.
    """
    span, head = tl.program_id(0), tl.program_id(1)
    per_page: tl.constexpr = (chunk + unit_rows - 1) // unit_rows
    members, dims = tl.arange(0, member_block), tl.arange(0, dim_block)
    inside = dims < head_dim
    is_decode = is_prompt == 0
    owner = tl.load(owners + span, mask=is_decode, other=span * block_queries)
    later = members // group
    block = tl.minimum(block_queries, query_count - owner)
    is_member = later < block
    heads = head * group + members % group
    row = (owner + later).to(tl.int64) * query_heads + heads
    place = tl.where(is_decode, span.to(tl.int64) * query_heads + heads, row)
    wanted = is_member[:, None] & inside[None, :]
    query = tl.load(queries + row[:, None] * head_dim + dims[None, :], mask=wanted, other=0.0)
    begun = later < block * is_prompt
    peak = tl.load(peaks + place, mask=begun, other=least)
    total = tl.load(totals + place, mask=begun, other=0.0)
    at_result = weighted + place[:, None] * head_dim + dims[None, :]
    result = tl.load(at_result, mask=begun[:, None] & inside[None, :], other=0.0)
    nearest = query_position + owner - page_position
    first_unit, end_unit = _pages_seen(nearest, block, window, page_count, chunk)
    first_unit = tl.load(starts + span, mask=is_decode, other=first_unit * per_page)
    end_unit = tl.load(starts + span + 1, mask=is_decode, other=end_unit * per_page)
    for entry in range(first_unit, end_unit):
        page, start = _unit_at(units, entry, is_decode, per_page, unit_rows)
        # What the first query of the program sees of the page; each later one sees one row more.
        high = nearest + 1 - entry // per_page * chunk
        low = tl.load(lows + entry, mask=is_decode, other=high - window)
        high = tl.load(highs + entry, mask=is_decode, other=high)
        part_peak, part_total, part = _unit(
            *(query, keys, values, seen + (entry // per_page * kv_heads + head) * chunk, is_masked),
            *((page * kv_heads + head) * chunk, start, low, high, later),
            *(block, scale, cap, has_cap, chunk, head_dim, unit_rows),
            *(member_block, row_block, dim_block, least),
        )
        peak, total, result = _merged(peak, total, result, part_peak, part_total, part)
    tl.store(peaks + place, peak, mask=is_member)
    tl.store(totals + place, total, mask=is_member)
    tl.store(at_result, result, mask=wanted)


@triton.jit(do_not_specialize=["firsts", "listing"])
def merge_spans(
    merged,
    merged_peaks,
    merged_totals,
    weighted,
    peaks,
    totals,
    firsts,
    listing,
    query_heads,
    is_listed: tl.constexpr,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    least: tl.constexpr,
):
    """Merge the spans [firsts[b], firsts[b + 1]) of query b and one head, in order.

    The order makes the sum the same in every run, whatever else is in the batch. If `is_listed`,
    they are the spans `listing[i]`. A query without spans has the peak `least` and sums of 0.
    """
    query, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, dim_block)
    inside = dims < head_dim
    peak = tl.full([1], least, tl.float32)
    total = tl.zeros([1], tl.float32)
    result = tl.zeros([1, dim_block], tl.float32)
    for entry in range(tl.load(firsts + query), tl.load(firsts + query + 1)):
        span = entry
        if is_listed:
            span = tl.load(listing + entry)
        place = (span + tl.zeros([1], tl.int64)) * query_heads + head
        at = place[:, None] * head_dim + dims[None, :]
        part = tl.load(weighted + at, mask=inside[None, :], other=0.0)
        theirs = tl.load(peaks + place)
        peak, total, result = _merged(peak, total, result, theirs, tl.load(totals + place), part)
    place = (query + tl.zeros([1], tl.int64)) * query_heads + head
    tl.store(merged_peaks + place, peak)
    tl.store(merged_totals + place, total)
    tl.store(merged + place[:, None] * head_dim + dims[None, :], result, mask=inside[None, :])

"""Triton kernels of paged decode attention; imported only where Triton is wanted.

They read pages where they lie, by number, and know no requests. Sums are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["pages", "lows", "highs", "starts", "owners"],
)
def attend_spans(
    weighted,
    peaks,
    totals,
    queries,
    keys,
    values,
    pages,
    lows,
    highs,
    starts,
    owners,
    scale,
    cap,
    query_heads,
    kv_heads,
    has_cap: tl.constexpr,
    group: tl.constexpr,
    chunk: tl.constexpr,
    head_dim: tl.constexpr,
    group_block: tl.constexpr,
    row_block: tl.constexpr,
    dim_block: tl.constexpr,
    least: tl.constexpr,
):
    """Attend one span of pages with the query heads of one KV head, by online softmax.

    Program (s, h) reads pages[starts[s] : starts[s + 1]] of query owners[s], of page i its
    rows [lows[i], highs[i]). Rows outside are not read: they may hold anything.
    """
    span, head = tl.program_id(0), tl.program_id(1)
    members = tl.arange(0, group_block)
    dims = tl.arange(0, dim_block)
    inside = dims < head_dim
    heads = head * group + members
    is_member = members < group
    row = tl.load(owners + span).to(tl.int64) * query_heads + heads
    query = tl.load(
        queries + row[:, None] * head_dim + dims[None, :],
        mask=is_member[:, None] & inside[None, :],
        other=0.0,
    )
    peak = tl.full([group_block], least, tl.float32)
    total = tl.zeros([group_block], tl.float32)
    result = tl.zeros([group_block, dim_block], tl.float32)
    for entry in range(tl.load(starts + span), tl.load(starts + span + 1)):
        page = tl.load(pages + entry).to(tl.int64)
        low, high = tl.load(lows + entry), tl.load(highs + entry)
        for first in range(0, chunk, row_block):
            rows = first + tl.arange(0, row_block)
            seen = (rows >= low) & (rows < high)
            at = ((page * kv_heads + head) * chunk + rows[:, None]) * head_dim + dims[None, :]
            wanted = seen[:, None] & inside[None, :]
            key = tl.load(keys + at, mask=wanted, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if has_cap:
                scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))
            scores = tl.where(seen[None, :], scores, least)
            higher = tl.maximum(peak, tl.max(scores, 1))
            # Without a row that is seen yet, the peak is the least number: weights are 0.
            weights = tl.where(seen[None, :], tl.exp(scores - higher[:, None]), 0.0)
            shrink = tl.exp(peak - higher)
            total = total * shrink + tl.sum(weights, 1)
            value = tl.load(values + at, mask=wanted, other=0.0)
            product = tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            result = result * shrink[:, None] + product
            peak = higher
    place = span.to(tl.int64) * query_heads + heads
    tl.store(peaks + place, peak, mask=is_member)
    tl.store(totals + place, total, mask=is_member)
    tl.store(
        weighted + place[:, None] * head_dim + dims[None, :],
        result,
        mask=is_member[:, None] & inside[None, :],
    )


@triton.jit(do_not_specialize=["firsts"])
def merge_spans(
    merged,
    merged_peaks,
    merged_totals,
    weighted,
    peaks,
    totals,
    firsts,
    query_heads,
    head_dim: tl.constexpr,
    dim_block: tl.constexpr,
    least: tl.constexpr,
):
    """Merge the spans [firsts[b], firsts[b + 1]) of query b and one head, in order.

    The order makes the sum the same in every run, whatever else is in the batch. A query
    without spans has the peak `least` and sums of 0.
    """
    query, head = tl.program_id(0), tl.program_id(1)
    dims = tl.arange(0, dim_block)
    inside = dims < head_dim
    peak = tl.full([1], least, tl.float32)
    total = tl.zeros([1], tl.float32)
    result = tl.zeros([dim_block], tl.float32)
    for span in range(tl.load(firsts + query), tl.load(firsts + query + 1)):
        place = (span + tl.zeros([1], tl.int64)) * query_heads + head
        theirs = tl.load(peaks + place)
        higher = tl.maximum(peak, theirs)
        mine, other = tl.exp(peak - higher), tl.exp(theirs - higher)
        part = tl.load(weighted + place * head_dim + dims, mask=inside, other=0.0)
        result = result * mine + part * other
        total = total * mine + tl.load(totals + place) * other
        peak = higher
    place = (query + tl.zeros([1], tl.int64)) * query_heads + head
    tl.store(merged_peaks + place, peak)
    tl.store(merged_totals + place, total)
    tl.store(merged + place * head_dim + dims, result, mask=inside)

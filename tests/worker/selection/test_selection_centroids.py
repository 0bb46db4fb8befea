"""Centroids of what is not read: nothing where all is read, and closer to full attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_rows import SHAPE, SHAPES, random_rows, true_logits, visible

from splitpoint.residency.selecting import CLUSTER_TOKENS, SEGMENT_TOKENS
from splitpoint.selection import Selection
from worker_service.model.attention import PartialAttention
from worker_service.selection.clusters import Centroids
from worker_service.selection.screen import AttentionShape, TokenRows
from worker_service.selection.token_choice import choose

TOKENS, FIRST = 2 * SEGMENT_TOKENS + 60, 2 * SEGMENT_TOKENS + 40


def values_of(rows: TokenRows) -> torch.Tensor:
    """Return values that depend on the keys, as a model's do."""
    mixing = torch.randn((16, 16), generator=torch.Generator().manual_seed(4))
    return rows.keys @ mixing


def attended(rows: TokenRows, read: torch.Tensor, shape: AttentionShape) -> PartialAttention:
    """Return the attention of the queries from FIRST on over what is read."""
    group = shape.query_heads // shape.kv_heads
    seen = read.repeat_interleave(group, 1)
    logits = true_logits(rows, FIRST, shape).masked_fill(~seen, -torch.inf)
    peak = logits.amax(-1)
    weights = (logits - peak.unsqueeze(-1)).exp()
    weighted = torch.einsum("tqs,sqd->tqd", weights, values_of(rows).repeat_interleave(group, 1))
    return PartialAttention(weighted, peak, weights.sum(-1))


def clustered(rows: TokenRows, shape: AttentionShape) -> Centroids:
    centroids = Centroids(shape)
    values = values_of(rows)
    for first, last in ((0, 100), (100, 400), (400, TOKENS)):
        centroids.extend(rows.keys[first:last], values[first:last])
    return centroids


@pytest.mark.parametrize("name", ["grouped", "multi-head", "cap"])
def test_the_estimate_is_closer_to_full_attention_than_what_is_read_alone(name: str) -> None:
    shape = SHAPES[name]
    rows = random_rows(TOKENS, shape)
    queries = rows.queries[FIRST:]
    everything = visible(rows, FIRST, shape).unsqueeze(1).expand(-1, shape.kv_heads, -1)
    full = attended(rows, everything, shape).attended(torch.float32)
    read = choose(
        true_logits(rows, FIRST, shape),
        Selection.parsed("columns:0.1"),
        first_position=FIRST,
        tokens=TOKENS,
        kv_heads=shape.kv_heads,
    )
    alone = attended(rows, read, shape)
    rest = clustered(rows, shape).estimate(queries, read, FIRST)
    assert rest is not None
    errors = [
        float((each.attended(torch.float32) - full).norm() / full.norm())
        for each in (alone, alone.merge(rest))
    ]
    assert errors[1] < 0.6 * errors[0]


def test_nothing_is_added_where_everything_is_read() -> None:
    rows = random_rows(TOKENS)
    everything = visible(rows, FIRST).unsqueeze(1).expand(-1, SHAPE.kv_heads, -1)
    rest = clustered(rows, SHAPE).estimate(rows.queries[FIRST:], everything, FIRST)
    assert rest is not None
    exact = attended(rows, everything, SHAPE)
    assert torch.equal(exact.merge(rest).attended(torch.float32), exact.attended(torch.float32))


def test_every_token_in_a_whole_segment_counts_once() -> None:
    """With equal keys the estimate is the mean of all values that are not read, exactly."""
    rows = random_rows(TOKENS)
    same = TokenRows(rows.inputs, rows.queries, rows.keys[:1].expand(TOKENS, -1, -1).contiguous())
    centroids = Centroids(SHAPE)
    values = torch.randn((TOKENS, 2, 16), generator=torch.Generator().manual_seed(2))
    centroids.extend(same.keys, values)
    read = torch.zeros((TOKENS - FIRST, 2, TOKENS), dtype=torch.bool)
    read[..., :10] = True
    rest = centroids.estimate(same.queries[FIRST:], read, FIRST)
    assert rest is not None
    mean = values[10 : 2 * SEGMENT_TOKENS].mean(0).repeat_interleave(2, 0).flatten()
    got = rest.attended(torch.float32)
    torch.testing.assert_close(got, mean.expand_as(got), atol=1e-4, rtol=1e-4)


def test_a_window_hides_clusters_and_few_tokens_make_none() -> None:
    rows = random_rows(TOKENS)
    shape = replace(SHAPE, window=20)
    read = visible(rows, FIRST, shape).unsqueeze(1).expand(-1, 2, -1)
    rest = clustered(rows, shape).estimate(rows.queries[FIRST:], read, FIRST)
    assert rest is not None
    assert float(rest.total.sum()) == 0
    short = Centroids(SHAPE)
    short.extend(rows.keys[:100], values_of(rows)[:100])
    assert short.estimate(rows.queries[99:100], read[:1, :, :100], 99) is None
    assert short.device_bytes == 0
    per_cluster = 2 * 16 * 4 + 4
    clusters = 2 * SEGMENT_TOKENS // CLUSTER_TOKENS
    assert clustered(rows, SHAPE).device_bytes == clusters * 2 * per_cluster

"""Clusters that are served stand for the same as those that are measured offline."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from selecting import cache_of, empty_reads
from stored_prefix import CPU, StoredPrefix, tiny_prefix

from splitpoint.residency.selecting import SEGMENT_TOKENS, selection_pages
from splitpoint.selection import Selection
from splitpoint.shapes import Encoding
from worker_service.device.cache import DeviceCache
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.model.attention import PartialAttention
from worker_service.retrieval.sequence_reads import SequenceReads
from worker_service.selection.clusters import Centroids
from worker_service.selection.screen import AttentionShape, Guess

CHUNK = 16
SEGMENT_CHUNKS = SEGMENT_TOKENS // CHUNK
# Two segments, and tokens that are in none.
CHUNKS = 2 * SEGMENT_CHUNKS + 2
STORED = CHUNKS * CHUNK
PAGES = 90
OTHER = 1e3


@pytest.fixture(scope="module")
def prefix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StoredPrefix]:
    encoding = getattr(request, "param", Encoding.NATIVE)
    with torch.inference_mode():
        yield from tiny_prefix("llama", tmp_path_factory, STORED, encoding)


def reads_of(
    prefix: StoredPrefix, text: str, cache: DeviceCache, lanes: Lanes, chunks: int = CHUNKS
) -> SequenceReads:
    """Return reads of the first chunks, built, in pages counted for all. Fill other pages."""
    selection = Selection.parsed(text)
    pages = selection_pages(prefix.model.shape, selection, STORED, CHUNK)
    assert pages.centroids
    for plane in (*cache.keys, *cache.values):
        plane.fill_(OTHER)
    free = list(range(PAGES - 1, PAGES - 1 - pages.count, -1))
    reads = empty_reads(
        prefix, selection, cache, lanes, pages=pages, free=free, final_tokens=STORED
    )
    for layer in reads.layers:
        reads.observe(layer, guess_at(prefix, layer).queries)
        keys, values = (
            plane[layer][: chunks * CHUNK]
            for plane in (prefix.computed.keys, prefix.computed.values)
        )
        reads.build(layer, keys, prefix.transfer(), prefix.chunks[:chunks], 0, values)
    return reads


def guess_at(prefix: StoredPrefix, layer: int) -> Guess:
    """Return what the layer asks at the last position."""
    inputs = prefix.computed.inputs[layer][-1:]
    rotary = prefix.model.rotary(torch.tensor([STORED - 1]))
    return Guess(inputs, prefix.model.layers[layer].project(inputs, rotary)[0], STORED)


def estimated(
    prefix: StoredPrefix, reads: SequenceReads, lanes: Lanes, layer: int
) -> PartialAttention | None:
    guess = guess_at(prefix, layer)
    lanes.wait_event(reads.begin(layer, guess))
    return reads.estimate(layer, guess.queries)


def measured(prefix: StoredPrefix, reads: SequenceReads, layer: int) -> PartialAttention | None:
    """Return what `splitpoint eval` estimates if the same tokens are read."""
    stored = reads.stored_tokens
    centroids = Centroids(AttentionShape.of(prefix.model.config, layer))
    centroids.extend(
        *(plane[layer][:stored] for plane in (prefix.computed.keys, prefix.computed.values))
    )
    read = torch.zeros((1, len(reads.tokens(layer)), stored), dtype=torch.bool)
    read[0].scatter_(1, reads.tokens(layer), True)
    return centroids.estimate(guess_at(prefix, layer).queries, read, STORED)


def check_same(prefix: StoredPrefix, reads: SequenceReads, lanes: Lanes) -> None:
    for layer in reads.layers:
        served, offline = (
            estimated(prefix, reads, lanes, layer),
            measured(prefix, reads, layer),
        )
        assert served is not None
        assert offline is not None
        torch.testing.assert_close(served.peak, offline.peak, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(served.total, offline.total, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(served.weighted, offline.weighted, atol=1e-4, rtol=1e-4)
        assert float(served.total.min()) > 0


@torch.inference_mode()
@pytest.mark.parametrize("text", ["columns:0.2", "quest:0.1", "window:0.5"])
@pytest.mark.parametrize("lanes_type", [SerialLanes, ThreadLanes])
def test_what_is_served_is_what_is_measured(
    prefix: StoredPrefix, text: str, lanes_type: type[Lanes]
) -> None:
    lanes = lanes_type(CPU)
    reads = reads_of(prefix, f"{text},estimate,full_layers=0", cache_of(prefix, PAGES), lanes)
    check_same(prefix, reads, lanes)
    # The sums are as they were.
    check_same(prefix, reads, lanes)
    lanes.close()


@torch.inference_mode()
@pytest.mark.parametrize("prefix", [Encoding.NATIVE, Encoding.INT4], indirect=True)
def test_segments_that_chunks_fill_later_are_clustered_and_cross_once(
    prefix: StoredPrefix,
) -> None:
    """Of the pages that leave none is needed: the store has their tokens."""
    cache, lanes = cache_of(prefix, PAGES), SerialLanes(CPU)
    text = "columns:0.2,estimate,full_layers=0"
    reads = reads_of(prefix, text, cache, lanes, SEGMENT_CHUNKS - 3)
    assert all(estimated(prefix, reads, lanes, layer) is None for layer in reads.layers)
    for index in range(SEGMENT_CHUNKS - 3, CHUNKS):
        for layer, keys in enumerate(cache.keys):
            rows = prefix.computed.keys[layer][index * CHUNK : (index + 1) * CHUNK]
            keys[0] = rows.transpose(0, 1)
        reads.extend(0, prefix.chunks[index])
        if index == SEGMENT_CHUNKS:
            check_same(prefix, reads, lanes)
    before = reads.counts
    check_same(prefix, reads, lanes)
    new = reads.counts - before
    crossed = len(reads.layers) * prefix.model.shape.kv_head_count * SEGMENT_TOKENS
    spans = [span for span in lanes.finish() if span.tokens]
    assert sum(span.amount for span in spans) == reads.counts.link_bytes
    assert reads.counts.link_bytes == reads.counts.fetched * 2 * prefix.layout.kv_row_bytes
    assert new.fetched >= crossed
    check_same(prefix, reads, lanes)
    again = reads.counts - before - new
    assert again.fetched == 0


@torch.inference_mode()
def test_nothing_stands_for_tokens_that_are_all_read(prefix: StoredPrefix) -> None:
    lanes = SerialLanes(CPU)
    reads = reads_of(prefix, "columns:0.999,estimate,full_layers=0", cache_of(prefix, PAGES), lanes)
    assert reads.row_count == STORED
    for layer in reads.layers:
        part = estimated(prefix, reads, lanes, layer)
        assert part is not None
        assert not part.total.any()
        assert not part.weighted.any()


@torch.inference_mode()
def test_pages_hold_it_and_no_other_is_written(prefix: StoredPrefix) -> None:
    cache, lanes = cache_of(prefix, PAGES), SerialLanes(CPU)
    selection = Selection.parsed("columns:0.2,columns=5,estimate,full_layers=0")
    reads = reads_of(prefix, str(selection), cache, lanes)
    count = selection_pages(prefix.model.shape, selection, STORED, CHUNK).count
    check_same(prefix, reads, lanes)
    for plane in (*cache.keys, *cache.values):
        assert (plane[: PAGES - count] == OTHER).all()
    # The last page is one of centroids, of which there are no more than it takes.
    assert any((plane[PAGES - count] != OTHER).any() for plane in cache.keys)
    reads.drop()
    for plane in (*cache.keys, *cache.values):
        assert not plane[PAGES - count :].any()

"""The rows that a selection chose lie in device pages, and only what was missing is fetched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from stored_prefix import CPU, StoredPrefix, tiny_prefix

from splitpoint.planning.schedule import Lane
from splitpoint.residency.selecting import selection_pages
from splitpoint.selection import Selection
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import MemoryPlan
from worker_service.lanes.lanes import Lanes, SerialLanes
from worker_service.retrieval.sequence_reads import SequenceReads
from worker_service.selection.screen import Guess
from worker_service.selection.screens import Screens

CHUNK = 16
STORED = 12 * CHUNK
PAGES = 40


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredPrefix]:
    with torch.inference_mode():
        yield from tiny_prefix("llama", tmp_path_factory, STORED)


def cache_of(prefix: StoredPrefix) -> DeviceCache:
    page_bytes = prefix.model.shape.page_bytes(CHUNK)
    return DeviceCache(prefix.layout, MemoryPlan(1 << 30, 0, 0, page_bytes, PAGES, 0), CPU)


def reads_of(
    prefix: StoredPrefix, text: str, cache: DeviceCache, lanes: Lanes, chunks: int = 12
) -> SequenceReads:
    """Return reads of the first chunks, built; their pages are spread over the cache."""
    selection = Selection.parsed(text)
    pages = selection_pages(prefix.model.shape, selection, STORED, CHUNK)
    free = list(range(1, PAGES, 2))
    reads = SequenceReads(
        Screens(prefix.model.config, selection),
        prefix.model.config,
        cache,
        lanes,
        row_pages=free[: pages.rows],
        screen_pages=free[pages.rows : pages.count],
        final_tokens=STORED,
    )
    for layer in reads.layers:
        reads.observe(layer, guess_at(prefix, layer, chunks * CHUNK - 1).queries)
        keys = prefix.computed.keys[layer][: chunks * CHUNK]
        reads.build(layer, keys, prefix.tensors, prefix.chunks[:chunks], 0)
    return reads


def guess_at(prefix: StoredPrefix, layer: int, position: int) -> Guess:
    """Return what the layer asks at a position, from X that was computed."""
    model = prefix.model
    inputs = prefix.computed.inputs[layer][position : position + 1]
    rotary = model.rotary(torch.tensor([position]))
    queries = model.layers[layer].project(inputs, rotary)[0]
    return Guess(inputs, queries, position)


@torch.inference_mode()
@pytest.mark.parametrize("text", ["columns:0.2,full_layers=0", "quest:0.2,full_layers=0"])
def test_rows_of_the_pages_are_those_of_the_store(prefix: StoredPrefix, text: str) -> None:
    cache, lanes = cache_of(prefix), SerialLanes(CPU)
    reads = reads_of(prefix, text, cache, lanes)
    assert reads.is_built
    assert reads.row_count == 48
    for position in (STORED - 1, STORED - 5, STORED - 9):
        for layer in reads.layers:
            lanes.wait_event(reads.begin(layer, guess_at(prefix, layer, position)))
            tokens = reads.tokens(layer)
            for head, held in enumerate(tokens):
                assert len(set(held.tolist())) == reads.row_count
                for plane, truth in (
                    (cache.keys, prefix.computed.keys),
                    (cache.values, prefix.computed.values),
                ):
                    rows = plane[layer][reads.row_pages, head].flatten(0, 1)
                    assert torch.equal(rows, truth[layer][held, head])
    spans = [span for span in lanes.finish() if span.lane is Lane.LINK_IN]
    counts = reads.counts
    assert sum(span.amount for span in spans) == counts.link_bytes
    assert counts.fetched < counts.wanted

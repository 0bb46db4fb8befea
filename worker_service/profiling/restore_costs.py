"""Measures the overhead of restores beside their copies and products, at a worker's start.

Most of a short restore's time goes into laying out work, handing it to lanes and waiting.
The worker restores a few chunks of zeros into its free pages, by each method, and learns
from these as from any other restore.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from splitpoint.costs.profile import Profile
from splitpoint.shapes import ArenaLayout
from worker_service.engine.engine import Engine
from worker_service.engine.restorer import TILE_PAGES
from worker_service.lanes.cost_watch import CostWatch
from worker_service.lanes.timeline import Span
from worker_service.pipeline.executor import restore
from worker_service.pipeline.front import restore_from_both_ends
from worker_service.pipeline.task_work import Prefix
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk
from worker_service.store.quantization import ChunkCodec

# Chunks of the measured restores, in turn, so that their operations differ.
CHUNKS = (1, 2, 4, 8)
ROUNDS = 3
# Seconds after which measuring ends: a large model's restores on a CPU take long.
MOST_SECONDS = 1.0


class _Zeros(ArenaTensors):
    """Chunks of zeros in the arena's layout; all layers share the same memory."""

    def __init__(self, layout: ArenaLayout, chunk_count: int) -> None:
        self.layout = layout
        self.codec = codec = ChunkCodec(layout)

        def planes(tensor: str) -> list[torch.Tensor]:
            shape = (chunk_count, *codec.stored_shape(tensor))
            return [torch.zeros(shape, dtype=codec.stored_type)] * layout.layer_count

        self.keys = planes("K")
        self.values = planes("V")
        self.inputs = planes("X") if layout.has_activations else []

    def check_current(self, chunks: Sequence[StoredChunk]) -> None:
        return


@torch.inference_mode()
def measure_overheads(engine: Engine, profile: Profile) -> Profile:
    """Return the profile with the overheads of restores, and with their rates of products."""
    chunk, pages = engine.chunk_tokens, engine.cache.pages
    most = min(CHUNKS[-1], pages.page_count, engine.model.shape.context_length // chunk)
    if most < 1 or pages.free_count < pages.page_count:
        return profile
    watch = CostWatch(profile)
    tensors = _Zeros(engine.cache.layout, most)
    transfer = CacheTransfer(engine.model, tensors, engine.staging)
    try:
        _restore_all(engine, transfer, most, watch)
    finally:
        engine.lanes.pop_totals()  # no request's traffic
    return watch.fits


def _restore_all(engine: Engine, transfer: CacheTransfer, most: int, watch: CostWatch) -> None:
    deadline = time.perf_counter() + MOST_SECONDS
    for number in range(ROUNDS):
        for count in (count for count in CHUNKS if count <= most):
            for bring, is_handed in _ways(engine, transfer, count):
                started = time.perf_counter()
                spans = bring()
                seconds = time.perf_counter() - started
                if number:  # the first round compiles kernels
                    watch.computed(spans)
                    if is_handed:
                        watch.took(seconds, spans, engine.lanes.schedule)
                if time.perf_counter() > deadline:
                    return


def _ways(
    engine: Engine, transfer: CacheTransfer, count: int
) -> Iterator[tuple[Callable[[], list[Span]], bool]]:
    """Yield ways to restore `count` chunks, and whether each hands its copies to lanes."""
    cache, lanes, chunk = engine.cache, engine.lanes, engine.chunk_tokens
    tokens = count * chunk
    chunks = [StoredChunk(slot, 0, chunk, b"", 0) for slot in range(count)]

    def prefix(split: int) -> Prefix:
        return Prefix(chunks, 0, list(range(count)), [0] * tokens, tokens, split)

    def split_at(split: int) -> Callable[[], list[Span]]:
        return lambda: restore(
            transfer,
            lanes,
            prefix(split),
            cache.keys,
            cache.values,
            tile_tokens=TILE_PAGES * chunk,
        )

    yield split_at(0), True
    if cache.layout.has_activations:
        yield split_at(tokens), True

    def from_both_ends() -> list[Span]:
        return restore_from_both_ends(
            transfer,
            lanes,
            prefix(0),
            cache.keys,
            cache.values,
            block_tokens=engine.max_batched_tokens,
            expected_tokens=tokens,
        )

    yield from_both_ends, False

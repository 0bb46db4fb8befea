"""What tests of selections share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from stored_prefix import CPU, StoredPrefix

from splitpoint.residency.selecting import SelectionPages, selection_pages
from splitpoint.selection import Selection, SelectionMethod
from splitpoint.shapes import ModelShape, chunks_of
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import MemoryPlan
from worker_service.lanes.lanes import Lanes
from worker_service.retrieval import selector
from worker_service.retrieval.sequence_reads import SequenceReads
from worker_service.selection.artifacts import Artifacts
from worker_service.selection.maple import sparse_signs
from worker_service.selection.screen_factory import Screens


def select_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let short sequences select, too: they need as many pages as they save."""

    def pages(
        shape: ModelShape, selection: Selection, final_tokens: int, chunk_tokens: int
    ) -> SelectionPages:
        stored = (chunks_of(final_tokens, chunk_tokens) - 1) * chunk_tokens
        return selection_pages(shape, selection, stored, chunk_tokens)

    monkeypatch.setattr(selector, "pages_at_last", pages)
    monkeypatch.setattr(selector, "why_not_selected", lambda *_, **__: "")


def cache_of(prefix: StoredPrefix, page_count: int) -> DeviceCache:
    """Return a cache for the prefix's model, with this number of pages."""
    page_bytes = prefix.model.shape.page_bytes(prefix.layout.chunk_tokens)
    plan = MemoryPlan(1 << 30, 0, 0, page_bytes, page_count, 0)
    return DeviceCache(prefix.layout, plan, CPU)


def empty_reads(
    prefix: StoredPrefix,
    selection: Selection,
    cache: DeviceCache,
    lanes: Lanes,
    *,
    pages: SelectionPages,
    free: Sequence[int],
    final_tokens: int,
    artifacts: Artifacts | None = None,
) -> SequenceReads:
    """Return reads that are not built, in the first of the free pages."""
    return SequenceReads(
        Screens(prefix.model.config, selection, artifacts),
        prefix.model.config,
        cache,
        lanes,
        row_pages=free[: pages.rows],
        screen_pages=free[pages.rows : pages.count],
        final_tokens=final_tokens,
    )


def maple_artifacts(shape: ModelShape, rank: int, projection: int = 0) -> Artifacts:
    """Return factors of no use to ranking, as `splitpoint calibrate --screen maple` writes them."""
    random = torch.Generator().manual_seed(3)
    rows = (projection or shape.hidden_size) + 1
    made: dict[str, torch.Tensor] = {}
    for index in range(shape.layer_count):
        made[f"layers.{index}.projection"] = sparse_signs(shape.hidden_size, projection, random)
        made[f"layers.{index}.frequencies"] = torch.rand(
            (shape.kv_head_count, rank // 2), generator=random
        )
        for name, heads in (("query", shape.query_head_count), ("key", shape.kv_head_count)):
            size = (rows, heads, rank)
            drawn = torch.randint(-127, 128, size, generator=random, dtype=torch.int8)
            made[f"layers.{index}.{name}"] = drawn
            scale = torch.rand((1, heads, rank), generator=random) / 127
            made[f"layers.{index}.{name}_scale"] = scale
    return Artifacts(SelectionMethod.MAPLE, made, {})

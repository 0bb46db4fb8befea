"""Prefixes in a real arena, computed by the engine, for benchmarks that restore them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from splitpoint.errors import Internal
from splitpoint.shapes import ArenaLayout, chunks_of
from splitpoint_cli.bench.engine import admission_of, exact_memory, outputs_until_idle
from splitpoint_cli.bench.harness import CHUNK_TOKENS, MAX_BATCHED_TOKENS
from splitpoint_cli.bench.local_store import LocalStore
from splitpoint_cli.bench.restore_report import TOLERANCES, RestoreWorkload
from worker_service.device.cache import DeviceCache
from worker_service.engine.engine import Engine
from worker_service.model.decoder import Decoder
from worker_service.pipeline.task_work import Prefix
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk

# No key or value is that large: the comparison finds rows that were not restored.
_POISON = 1e4


@dataclass(frozen=True, slots=True)
class Pages:
    """K and V of all sequences on the device: per layer `[pages, n_kv, C, d]`."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def poison(self) -> None:
        for plane in (*self.keys, *self.values):
            plane.fill_(_POISON)


@dataclass(frozen=True, slots=True)
class StoredSequence:
    """One sealed prefix, and the device pages it goes to."""

    token_ids: list[int]
    chunks: tuple[StoredChunk, ...]
    pages: range

    def prefix(self, split: int) -> Prefix:
        return Prefix(self.chunks, 0, list(self.pages), self.token_ids, len(self.token_ids), split)


@dataclass(frozen=True, slots=True)
class Stored:
    """All that a restore needs. `memory`: how the device sees the arena, in words."""

    model: Decoder
    device: torch.device
    tensors: ArenaTensors
    sequences: tuple[StoredSequence, ...]
    pages: Pages
    memory: str

    @torch.inference_mode()
    def largest_difference(self) -> float:
        """Return the largest difference of a page, as a share of the largest stored value."""
        difference = largest = 0.0
        for sequence in self.sequences:
            slots = [chunk.slot for chunk in sequence.chunks]
            rows = len(sequence.token_ids)
            for planes, stored in (
                (self.pages.keys, self.tensors.keys),
                (self.pages.values, self.tensors.values),
            ):
                for mine, wanted in zip(planes, stored, strict=True):
                    found = _rows(mine[sequence.pages.start : sequence.pages.stop], rows)
                    kept = _rows(wanted[slots].to(self.device), rows)
                    difference = max(difference, (found - kept).abs().max().item())
                    largest = max(largest, kept.abs().max().item())
        return difference / largest

    def check(self, name: str) -> float:
        """Return `largest_difference`. Raises Internal if it is above the tolerance."""
        found = self.largest_difference()
        allowed = TOLERANCES[self.model.shape.data_type]
        if not found <= allowed:
            raise Internal(f"{name}: K and V differ from the stored ones by {found:g} of the most")
        return found


@contextmanager
def stored_prefixes(
    workload: RestoreWorkload, model: Decoder, device: torch.device
) -> Iterator[Stored]:
    """Prefill random prompts and seal all of their chunks; remove the arena afterwards.

    The pages are those that the engine computed them in: they were written once, so that a
    run does not pay for fresh memory.
    """
    shape = model.shape
    layout = ArenaLayout.of(
        shape, chunk_tokens=CHUNK_TOKENS, has_activations=shape.activations_can_pay
    )
    count = chunks_of(workload.prompt, CHUNK_TOKENS)
    memory = exact_memory(
        shape,
        layout,
        weight_bytes=model.weight_bytes,
        batch=workload.batch,
        # The engine keeps room for the token that it is asked for, too.
        tokens=workload.prompt + 1,
    )
    cache = DeviceCache(layout, memory, device)
    with closing(LocalStore(layout, workload.batch * count, device)) as store:
        engine = Engine(
            model,
            cache,
            max_batch_size=1,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            # All pages are those of the prefixes that are measured.
            shares_prefixes=False,
        )
        generator = torch.Generator().manual_seed(workload.seed)
        sequences = []
        with closing(engine.lanes):
            for number in range(workload.batch):
                drawn = torch.randint(
                    shape.vocabulary_size, (workload.prompt,), generator=generator
                )
                mine = range(number * count, (number + 1) * count)
                sequences.append(_store_sequence(engine, store, drawn.tolist(), mine))
        keys, values = (
            [plane[: workload.batch * count] for plane in planes]
            for planes in (cache.keys, cache.values)
        )
        pages = Pages(keys, values)
        pages.poison()
        tensors = store.connection.tensors
        yield Stored(model, device, tensors, tuple(sequences), pages, f"mapped, {store.pinning}")


def _store_sequence(
    engine: Engine, store: LocalStore, token_ids: list[int], pages: range
) -> StoredSequence:
    """Compute a prefix, and seal all of its chunks."""
    admission = admission_of(f"prefix {pages.start}", token_ids, 1)
    engine.admit(admission, store.match(admission.key, token_ids))
    for _ in outputs_until_idle(engine, store):
        pass
    found = store.match(("stored", pages.start, 0), token_ids)
    if found.cached_tokens != len(token_ids):
        raise Internal("the benchmark's store did not take all chunks")
    return StoredSequence(token_ids, found.chunks, pages)


def _rows(pages: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` tokens of `[pages, n_kv, C, d]` as fp32 `[count, n_kv, d]`."""
    return pages.transpose(1, 2).flatten(0, 1)[:count].to(torch.float32)

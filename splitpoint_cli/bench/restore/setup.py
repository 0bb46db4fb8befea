"""Prefixes in a real arena, computed by the model, for benchmarks that restore them.

The store runs in this process. The measured worker side maps the arena as it always does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.sessions import ProcessIdentity
from kvstore_service.store import KvStore
from splitpoint.arena.owner import open_or_create_arena
from splitpoint.errors import Internal
from splitpoint.keys import chunk_key
from splitpoint.shapes import ArenaLayout, chunks_of
from splitpoint_cli.bench.restore.workload import (
    CHUNK_TOKENS,
    MAX_BATCHED_TOKENS,
    TOLERANCES,
    RestoreWorkload,
)
from splitpoint_cli.bench.shared.arena import bench_arena_path
from worker_service.device.registrar import CudaRegistrar, PinningFailed
from worker_service.model.attention import prefill
from worker_service.model.attention_plan import PrefillPlan
from worker_service.model.decoder import Decoder
from worker_service.model.forward import through_layers
from worker_service.model.layer import DecoderLayer
from worker_service.pipeline.restore import Prefix
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk

# The store's sessions end after so long without a heartbeat; this one sends none.
_LEASE_SECONDS = 24 * 3600.0
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
            first, count = sequence.chunks[0].slot, len(sequence.chunks)
            rows = len(sequence.token_ids)
            for planes, stored in (
                (self.pages.keys, self.tensors.keys),
                (self.pages.values, self.tensors.values),
            ):
                for mine, wanted in zip(planes, stored, strict=True):
                    found = _rows(mine[sequence.pages.start : sequence.pages.stop], rows)
                    kept = _rows(wanted[first : first + count].to(self.device), rows)
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
    """Prefill random prompts and seal all of their chunks; remove the arena afterwards."""
    layout = ArenaLayout.of(
        model.shape,
        chunk_tokens=CHUNK_TOKENS,
        has_activations=model.shape.activations_can_pay,
    )
    count = chunks_of(workload.prompt, CHUNK_TOKENS)
    opened = open_or_create_arena(bench_arena_path(), layout, workload.batch * count)
    store = KvStore(
        opened.arena, clock=time.monotonic, lease_seconds=_LEASE_SECONDS, is_present=lambda _: True
    )
    try:
        session = store.sessions.attach("bench restore", ProcessIdentity(os.getpid(), os.getuid()))
        tensors = ArenaTensors(opened.arena)
        pages = _empty_pages(tensors, workload.batch * count, device)
        generator = torch.Generator().manual_seed(workload.seed)
        sequences = []
        for number in range(workload.batch):
            drawn = torch.randint(
                model.shape.vocabulary_size, (workload.prompt,), generator=generator
            )
            token_ids: list[int] = drawn.tolist()
            mine = range(number * count, (number + 1) * count)
            chunks = _store_sequence(
                store, session.session_id, tensors, model, token_ids, pages, mine
            )
            sequences.append(StoredSequence(token_ids, chunks, mine))
        memory, unlock = _lock_memory(tensors, device)
        try:
            yield Stored(model, device, tensors, tuple(sequences), pages, memory)
        finally:
            unlock()
    finally:
        store.close()
        opened.owner.remove()


@torch.inference_mode()
def fill_pages(
    model: Decoder,
    token_ids: Sequence[int],
    pages: Pages,
    numbers: Sequence[int],
    keep_inputs: Callable[[int, range, torch.Tensor], None] | None = None,
) -> None:
    """Prefill the whole prefix into its pages, in a worker's pieces, without logits.

    `keep_inputs` gets each layer's index, the positions of a piece, and its X `[N, h]`.
    """
    for start in range(0, len(token_ids), MAX_BATCHED_TOKENS):
        piece = range(start, min(start + MAX_BATCHED_TOKENS, len(token_ids)))
        _fill_piece(model, token_ids, piece, pages, numbers, keep_inputs)


def _fill_piece(
    model: Decoder,
    token_ids: Sequence[int],
    piece: range,
    pages: Pages,
    numbers: Sequence[int],
    keep_inputs: Callable[[int, range, torch.Tensor], None] | None,
) -> None:
    device = pages.keys[0].device
    positions = torch.arange(piece.start, piece.stop, device=device)
    page_of = torch.tensor([numbers[each // CHUNK_TOKENS] for each in piece], device=device)
    row_of = positions % CHUNK_TOKENS
    plan = PrefillPlan.of_prefix(
        numbers,
        piece.start,
        len(piece),
        chunk_tokens=CHUNK_TOKENS,
        windows={layer.window for layer in model.layers},
        device=device,
    )

    def attend(
        index: int,
        layer: DecoderLayer,
        inputs: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        pages.keys[index][page_of, :, row_of] = keys
        pages.values[index][page_of, :, row_of] = values
        if keep_inputs is not None:
            keep_inputs(index, piece, inputs)
        planes = pages.keys[index], pages.values[index]
        return prefill(
            queries,
            keys,
            values,
            *planes,
            plan,
            window=layer.window,
            scale=layer.scale,
            cap=layer.cap,
        )

    hidden = model.embed(
        torch.tensor(token_ids[piece.start : piece.stop], device=device), positions
    )
    through_layers(model.layers, hidden, model.rotary(positions), attend)


def _store_sequence(
    store: KvStore,
    session: bytes,
    tensors: ArenaTensors,
    model: Decoder,
    token_ids: list[int],
    pages: Pages,
    numbers: range,
) -> tuple[StoredChunk, ...]:
    """Compute and seal one sequence; an empty store grants one run."""
    [run] = store.reserve(session, len(numbers))
    slots = range(run.first, run.first + len(run.generations))

    def keep_inputs(layer: int, piece: range, inputs: torch.Tensor) -> None:
        if tensors.inputs:
            plane = tensors.inputs[layer][slots.start : slots.stop].flatten(0, 1)
            plane[piece.start : piece.stop] = inputs.to(plane.device)

    fill_pages(model, token_ids, pages, numbers, keep_inputs)
    for stored, computed in ((tensors.keys, pages.keys), (tensors.values, pages.values)):
        for plane, found in zip(stored, computed, strict=True):
            plane[slots.start : slots.stop] = found[numbers.start : numbers.stop].to(plane.device)
    return _seal(store, session, tensors, token_ids, slots, run.generations)


def _seal(
    store: KvStore,
    session: bytes,
    tensors: ArenaTensors,
    token_ids: list[int],
    slots: range,
    generations: Sequence[int],
) -> tuple[StoredChunk, ...]:
    parent, written, chunks = b"", [], []
    for index, (slot, generation) in enumerate(zip(slots, generations, strict=True)):
        piece = tuple(token_ids[index * CHUNK_TOKENS : (index + 1) * CHUNK_TOKENS])
        checksum = tensors.arena.checksum(slot)
        written.append(WrittenChunk(slot, generation, parent, piece, checksum))
        parent = chunk_key(tensors.layout.layout_hash, b"", parent, piece)
        chunks.append(StoredChunk(slot, generation, len(piece), parent, checksum))
    outcome = store.seal(session, b"", written, store.verify(written), keep_leased=True)
    if len(outcome.chunks) != len(written):
        raise Internal("the benchmark's store did not take all chunks")
    return tuple(chunks)


def _empty_pages(tensors: ArenaTensors, count: int, device: torch.device) -> Pages:
    """Return zeros that were written once: a run must not pay for fresh memory."""

    def planes(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        shape = tensors.keys[0].shape[1:]
        return [
            torch.full((count, *shape), 0.0, dtype=layer.dtype, device=device) for layer in layers
        ]

    return Pages(planes(tensors.keys), planes(tensors.values))


def _lock_memory(tensors: ArenaTensors, device: torch.device) -> tuple[str, Callable[[], None]]:
    """Page-lock the arena for a GPU if the driver can; return the state and how to undo it."""
    payload = tensors.arena.payload
    if device.type != "cuda":
        return "mapped", lambda: None
    registrar, address = CudaRegistrar(device), payload.ctypes.data
    try:
        registrar.register(address, payload.nbytes)
    except PinningFailed as error:
        return f"mapped, not page-locked: {error}", lambda: None
    return "mapped, page-locked", lambda: registrar.unregister(address)


def _rows(pages: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` tokens of `[pages, n_kv, C, d]` as fp32 `[count, n_kv, d]`."""
    return pages.transpose(1, 2).flatten(0, 1)[:count].to(torch.float32)

"""A prefix in a real arena, written there by a real store from what the model computed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tiny_models import VOCABULARY, write_tiny

from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.sessions import ProcessIdentity
from kvstore_service.store import KvStore
from splitpoint.arena.owner import open_or_create_arena
from splitpoint.keys import chunk_key
from splitpoint.shapes import ArenaLayout, Encoding, chunks_of
from worker_service.device.memory import STAGING_PAGES
from worker_service.model.attention import prefill
from worker_service.model.attention_plan import PrefillPlan
from worker_service.model.decoder import Decoder
from worker_service.pipeline.staging import Staging
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk
from worker_service.store.quantization import decode, encode

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Computed:
    """Per layer: K and V `[n, n_kv, d]`, X `[n, h]` of every token."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    inputs: list[torch.Tensor]


@torch.inference_mode()
def compute(model: Decoder, token_ids: Sequence[int]) -> Computed:
    """Prefill the whole prefix at once."""
    ids = torch.tensor(token_ids)
    positions = torch.arange(len(token_ids))
    hidden, rotary = model.embed(ids, positions), model.rotary(positions)
    plan = PrefillPlan.of_prefix(
        [],
        0,
        len(token_ids),
        chunk_tokens=16,
        windows={layer.window for layer in model.layers},
        device=CPU,
    )
    computed = Computed([], [], [])
    for layer in model.layers:
        inputs = layer.attention_input(hidden)
        queries, keys, values = layer.project(inputs, rotary)
        attended = prefill(
            queries,
            keys,
            values,
            keys,
            values,
            plan,
            window=layer.window,
            scale=layer.scale,
            cap=layer.cap,
        )
        hidden = layer.finish(hidden, attended)
        computed.keys.append(keys.clone())
        computed.values.append(values.clone())
        computed.inputs.append(inputs.clone())
    return computed


@dataclass
class StoredPrefix:
    """Sealed chunks of one sequence, front first, and what they hold, once decoded."""

    model: Decoder
    store: KvStore
    session_id: bytes
    tensors: ArenaTensors
    token_ids: list[int]
    chunks: tuple[StoredChunk, ...]
    computed: Computed

    @property
    def layout(self) -> ArenaLayout:
        return self.tensors.layout

    def transfer(self, staging_pages: int = STAGING_PAGES) -> CacheTransfer:
        return CacheTransfer(self.model, self.tensors, Staging(self.layout, staging_pages, CPU))

    def empty_cache(self, page_count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return poisoned device planes `[pages, n_kv, C, d]` of every layer."""
        like = self.tensors.keys[0]
        planes = [
            [torch.full((page_count, *like.shape[1:]), 1e4, dtype=like.dtype) for _ in layers]
            for layers in (self.tensors.keys, self.tensors.values)
        ]
        return planes[0], planes[1]

    def rows(self, plane: torch.Tensor, pages: Sequence[int], count: int) -> torch.Tensor:
        """Return the first `count` rows of these pages as `[count, n_kv, d]`."""
        return plane[list(pages)].transpose(1, 2).flatten(0, 1)[:count]

    def lose(self, index: int) -> None:
        """Withdraw a chunk, as the store does with damaged ones."""
        chunk = self.chunks[index]
        self.store.drop_damaged(
            self.store.leased_chunk(self.session_id, chunk.slot, chunk.generation)
        )


def token_ids(count: int) -> list[int]:
    """Return random ids, the same for the same count."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def tiny_prefix(
    case: str,
    folders: pytest.TempPathFactory,
    token_count: int,
    encoding: Encoding = Encoding.NATIVE,
) -> Iterator[StoredPrefix]:
    """Yield the prefix of a tiny model in fp32, for a fixture."""
    model = Decoder.load(write_tiny(case, folders.mktemp("model")), CPU, torch.float32)
    ids = token_ids(token_count)
    with stored_prefix(model, folders.mktemp("arena"), ids, encoding=encoding) as prefix:
        yield prefix


@contextmanager
def stored_prefix(
    model: Decoder,
    folder: Path,
    token_ids: Sequence[int],
    *,
    chunk_tokens: int = 16,
    encoding: Encoding = Encoding.NATIVE,
) -> Iterator[StoredPrefix]:
    """Write a chunk into every other slot, so that runs are short as in a used arena."""
    layout = ArenaLayout.of(
        model.shape, chunk_tokens=chunk_tokens, has_activations=True, encoding=encoding
    )
    count = chunks_of(len(token_ids), chunk_tokens)
    opened = open_or_create_arena(folder / "store" / "arena", layout, count + count // 2 + 2)
    store = KvStore(opened.arena, clock=time.monotonic, lease_seconds=60, is_present=lambda _: True)
    try:
        computed = compute(model, token_ids)
        session = store.sessions.attach("test", ProcessIdentity(1, 1)).session_id
        tensors = ArenaTensors(opened.arena)
        if encoding is not Encoding.NATIVE:
            for planes in (computed.keys, computed.values, computed.inputs):
                for rows in planes:
                    # Rows are encoded one by one, whatever they lie in.
                    decode(encode(rows, encoding), encoding, rows)
        chunks = _seal(store, session, tensors, list(token_ids), computed)
        yield StoredPrefix(model, store, session, tensors, list(token_ids), chunks, computed)
    finally:
        store.close()
        opened.owner.remove()


def _seal(
    store: KvStore,
    session: bytes,
    tensors: ArenaTensors,
    token_ids: list[int],
    computed: Computed,
) -> tuple[StoredChunk, ...]:
    layout, codec = tensors.layout, tensors.codec
    size = layout.chunk_tokens
    parent, chunks, stored = b"", [], []
    for start in range(0, len(token_ids), size):
        if start // size % 4 == 2:
            store.reserve(session, 1)  # a gap
        run = store.reserve(session, 1)[0]
        slot, generation = run.first_slot, run.generations[0]
        piece = tuple(token_ids[start : start + size])
        rows = slice(start, start + len(piece))
        for layer in range(layout.layer_count):
            for plane, source in ((tensors.keys, computed.keys), (tensors.values, computed.values)):
                plane[layer][slot].zero_()
                plane[layer][slot, :, : len(piece)] = codec.encode(
                    source[layer][rows].transpose(0, 1)
                )
            tensors.inputs[layer][slot].zero_()
            tensors.inputs[layer][slot, : len(piece)] = codec.encode(computed.inputs[layer][rows])
        chunks.append(WrittenChunk(slot, generation, parent, piece, store.arena.checksum(slot)))
        parent = chunk_key(layout.layout_hash, b"", parent, piece)
        stored.append((slot, generation, len(piece), parent, chunks[-1].checksum))
    outcome = store.seal(session, b"", chunks, store.verify(chunks), keep_leased=True)
    assert len(outcome.chunks) == len(chunks)
    return tuple(StoredChunk(*entry) for entry in stored)

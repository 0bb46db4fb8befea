"""Helpers: a small layout, a manual clock, simulated processes, a writer and a reader of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvstore_service.integrity.checker import IntegrityChecker
from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.sessions import ProcessIdentity
from kvstore_service.slots import places
from kvstore_service.store import KvStore
from splitpoint.arena.mapping import Arena
from splitpoint.arena.owner import open_or_create_arena
from splitpoint.arena.records import SlotState
from splitpoint.keys import chunk_key, pack_tokens
from splitpoint.shapes import ArenaLayout, DataType

LAYOUT = ArenaLayout(
    chunk_tokens=4,
    layer_count=2,
    kv_head_count=2,
    head_dim=4,
    hidden_size=8,
    data_type=DataType.FLOAT32,
    has_activations=True,
    model_fingerprint=b"test model",
)


# Slots of the arena behind the fixtures.
SLOTS = 8


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakePresence:
    """Presence of sessions: all are present until added to `gone`."""

    def __init__(self) -> None:
        self.gone: set[bytes] = set()

    def is_present(self, session_id: bytes) -> bool:
        return session_id not in self.gone


def payload_of(layout: ArenaLayout, seed: int, token_count: int) -> dict[tuple[int, str], bytes]:
    """Return random rows for the tokens, then zeros, for every plane of one slot."""
    generator = np.random.default_rng(seed)
    planes = {}
    for layer in range(layout.layer_count):
        for tensor in layout.tensors:
            heads = 1 if tensor == "X" else layout.kv_head_count
            size = layout.x_slot_bytes if tensor == "X" else layout.kv_slot_bytes
            rows = generator.integers(
                0, 256, size=(heads, layout.chunk_tokens, size), dtype=np.uint8
            )
            rows = rows[:, :, : size // heads // layout.chunk_tokens].copy()
            rows[:, token_count:] = 0
            planes[layer, tensor] = rows.tobytes()
    return planes


def write_payload(arena: Arena, slot: int, seed: int, token_count: int) -> int:
    """Write a granted slot as a worker does. Return the checksum."""
    for (layer, tensor), rows in payload_of(arena.layout, seed, token_count).items():
        arena.plane(layer, tensor)[slot] = np.frombuffer(rows, dtype=np.uint8)
    return arena.checksum(slot)


def read_payload(arena: Arena, slot: int) -> dict[tuple[int, str], bytes]:
    return {
        (layer, tensor): arena.plane(layer, tensor)[slot].tobytes()
        for layer in range(arena.layout.layer_count)
        for tensor in arena.layout.tensors
    }


def seed_of(parent_key: bytes, token_ids: tuple[int, ...]) -> int:
    """The payload of a chunk is a function of the sequence up to its end."""
    return xxhash.xxh3_64_intdigest(parent_key + pack_tokens(token_ids))


def pieces_of(token_ids: Sequence[int], size: int = LAYOUT.chunk_tokens) -> list[tuple[int, ...]]:
    """Return the tokens of each chunk of a sequence."""
    return [tuple(token_ids[i : i + size]) for i in range(0, len(token_ids), size)]


def granted_slots(runs: Iterable[Any]) -> list[tuple[int, int]]:
    """Return each slot with its generation, of the store's runs or of a response's."""
    return places(runs)


def write_chunks(
    arena: Arena,
    granted: Iterable[tuple[int, int]],
    pieces: Sequence[tuple[int, ...]],
    *,
    salt: bytes = b"",
    parent: bytes = b"",
) -> list[WrittenChunk]:
    """Write consecutive chunks into granted slots. Return what seals them."""
    chunks = []
    for piece, (slot, generation) in zip(pieces, granted, strict=True):
        checksum = write_payload(arena, slot, seed_of(parent, piece), len(piece))
        chunks.append(WrittenChunk(slot, generation, parent, piece, checksum))
        parent = chunk_key(arena.layout.layout_hash, salt, parent, piece)
    return chunks


def assert_payloads(
    arena: Arena, slots: Iterable[int], token_ids: Sequence[int], *, salt: bytes = b""
) -> list[bytes]:
    """Check the bytes of the first chunks of a sequence. Return their keys."""
    parent, keys = b"", []
    for slot, piece in zip(slots, pieces_of(token_ids, arena.layout.chunk_tokens), strict=False):
        expected = payload_of(arena.layout, seed_of(parent, piece), len(piece))
        assert read_payload(arena, slot) == expected, f"wrong bytes: {token_ids}"
        parent = chunk_key(arena.layout.layout_hash, salt, parent, piece)
        keys.append(parent)
    return keys


def store_sequence(
    store: KvStore,
    session_id: bytes,
    salt: bytes,
    token_ids: list[int],
    *,
    keep_leased: bool = False,
) -> tuple[list[bytes], int]:
    """Reserve, write and seal a whole sequence. Return (keys, lease id)."""
    pieces = pieces_of(token_ids, store.arena.layout.chunk_tokens)
    granted = granted_slots(store.reserve(session_id, len(pieces), salt))
    chunks = write_chunks(store.arena, granted, pieces, salt=salt)
    damages = store.verify(chunks)
    assert damages == [None] * len(chunks)
    outcome = store.seal(session_id, salt, chunks, damages, keep_leased=keep_leased)
    return [chunk.entry.key for chunk in outcome.chunks], outcome.lease_id


class Bench:
    """A store on a real arena with a manual clock and simulated processes."""

    def __init__(
        self,
        folder: Path,
        slot_count: int,
        *,
        layout: ArenaLayout = LAYOUT,
        lease_seconds: float = 10,
        **options: Any,
    ) -> None:
        self.clock = FakeClock()
        self.presence = FakePresence()
        opened = open_or_create_arena(folder / "store" / "arena", layout, slot_count)
        self.owner, self.arena = opened.owner, opened.arena
        self.lease_seconds = lease_seconds
        self.options = options
        self._serve()
        self._process_id = 100

    def crash(self) -> None:
        """Simulate the store's end by a crash, and another store that adopts its arena."""
        path = self.arena.path
        self.store.pool.close()
        self.arena.close()
        self.owner.leave()
        opened = open_or_create_arena(path, self.arena.layout, self.arena.slot_count)
        assert opened.is_adopted
        self.owner, self.arena = opened.owner, opened.arena
        self._serve()

    def _serve(self) -> None:
        self.store = KvStore(
            self.arena,
            clock=self.clock,
            lease_seconds=self.lease_seconds,
            is_present=self.presence.is_present,
            **self.options,
        )
        self.integrity = IntegrityChecker(self.store.pool, self.store.sessions)

    def attach(self) -> bytes:
        """Open a session of a new process."""
        self._process_id += 1
        return self.store.sessions.attach("test", self.process()).session_id

    def process(self) -> ProcessIdentity:
        """Return the process of the newest session."""
        return ProcessIdentity(self._process_id, 7)

    def states(self) -> tuple[int, int, int, int]:
        """Check every invariant. Return the counts (free, writing, sealed, quarantined)."""
        assert self.integrity.check_integrity() == []
        return tuple(self.store.pool.slots.count(state) for state in SlotState)  # type: ignore[return-value]

    def close(self) -> None:
        self.store.close()
        self.owner.remove()

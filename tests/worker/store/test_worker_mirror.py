"""Damaged chunks of a mirror are not found again. Their slots are freed when unreferenced."""

from __future__ import annotations

from splitpoint.arena.format import Geometry
from splitpoint.shapes import ArenaLayout, DataType
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.mirror_cache import MirrorCache, name_of

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


def filled(mirror: MirrorCache, key: bytes) -> StoredChunk:
    """Return a chunk whose payload repeats its key."""
    [place] = mirror.grant(1)
    for tensor in LAYOUT.tensors:
        for layer in range(LAYOUT.layer_count):
            mirror.arena.plane(layer, tensor)[place[0]] = key[0]
    return mirror.publish(place, name_of(key, mirror.arena.checksum(place[0])), key, 4)


def test_a_damaged_chunk_is_found_no_more() -> None:
    mirror = MirrorCache(LAYOUT, Geometry(LAYOUT, 8).size_bytes)
    first, second = filled(mirror, b"a" * 32), filled(mirror, b"b" * 32)
    assert mirror.damaged([first, second]) == []
    name = name_of(first.key, first.checksum)
    mirror.retain([name])
    mirror.arena.plane(1, "X")[first.slot, 5] ^= 1
    assert mirror.damaged([first, second]) == [first]
    mirror.discard(first)
    mirror.discard(first)
    assert not mirror.has(first)
    assert mirror.has(second)
    assert not mirror.arena.is_current([first.slot], [first.generation])
    # Its reader still holds the slot, and a whole copy takes another one.
    assert mirror.free_count == mirror.slot_count - 1
    again = filled(mirror, b"a" * 32)
    assert again.slot != first.slot
    assert mirror.has(again)
    mirror.release([name])
    assert mirror.free_count == mirror.slot_count
    assert len(mirror.grant(mirror.slot_count)) == mirror.slot_count

"""Pages: their keys and bytes, what writes them into an arena, and calls of a client."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xxhash
from kvstore_client import Service, call
from kvstore_helpers import granted_slots

from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.store import KvStore, MatchedPages
from splitpoint.arena.mapping import Arena
from splitpoint.keys import page_words
from splitpoint.shapes import ArenaLayout
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2

# Of an odd size, as no engine's pages are.
PAGES = ArenaLayout.of_pages(1001)


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def keys_of(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def bytes_of(layout: ArenaLayout, key: bytes, salt: bytes = b"") -> bytes:
    """The payload of a page is a function of its key and salt."""
    generator = np.random.default_rng(xxhash.xxh3_64_intdigest(salt + key))
    content: bytes = generator.bytes(layout.page_bytes)
    return content


def bytes_at(arena: Arena, slot: int) -> bytes:
    return bytes(arena.plane(0, "P")[slot])


def write_pages(
    arena: Arena, granted: Iterable[tuple[int, int]], keys: Sequence[bytes], salt: bytes = b""
) -> list[pb.SealChunk]:
    """Write pages into granted slots. Return what seals them."""
    chunks = []
    for key, (slot, generation) in zip(keys, granted, strict=True):
        arena.plane(0, "P")[slot] = np.frombuffer(bytes_of(arena.layout, key, salt), np.uint8)
        checksum = arena.checksum(slot)
        chunks.append(
            pb.SealChunk(slot=slot, generation=generation, checksum=checksum, page_key=key)
        )
    return chunks


def written_chunks(
    arena: Arena, granted: Iterable[tuple[int, int]], keys: Sequence[bytes], salt: bytes = b""
) -> list[WrittenChunk]:
    """Write pages into granted slots. Return what seals them in the store itself."""
    return [
        WrittenChunk(each.slot, each.generation, b"", page_words(each.page_key), each.checksum)
        for each in write_pages(arena, granted, keys, salt)
    ]


def store_pages(
    store: KvStore, session_id: bytes, keys: Sequence[bytes], salt: bytes = b""
) -> list[int]:
    """Reserve, write and seal pages, in the store itself. Return their slots."""
    granted = granted_slots(store.reserve(session_id, len(keys), salt))
    chunks = written_chunks(store.arena, granted, keys, salt)
    outcome = store.seal(session_id, salt, chunks, store.verify(chunks))
    return [chunk.entry.slot for chunk in outcome.chunks]


def found_pages(
    store: KvStore, session_id: bytes, keys: Sequence[bytes], salt: bytes = b""
) -> list[bool]:
    """Match pages, compare their bytes, and release them. Return which were found."""
    found = matched_pages(store, session_id, keys, salt)
    store.sessions.release(session_id, [found.lease_id], [])
    return [entry is not None for entry in found.entries]


def matched_pages(
    store: KvStore, session_id: bytes, keys: Sequence[bytes], salt: bytes = b""
) -> MatchedPages:
    """Match pages under a lease, and compare their bytes."""
    found = store.match_pages(session_id, store.pool.name_pages(salt, keys))
    for entry, key in zip(found.entries, keys, strict=True):
        if entry is not None:
            assert bytes_at(store.arena, entry.slot) == bytes_of(store.arena.layout, key, salt)
            assert store.arena.is_current([entry.slot], [entry.generation])
    return found


def assert_pages(
    arena: Arena,
    handles: Sequence[types_pb2.SlotHandle],
    keys: Sequence[bytes],
    salt: bytes = b"",
) -> list[bool]:
    """Compare the pages of an answer with what was stored. Return which were found."""
    for handle, key in zip(handles, keys, strict=True):
        if handle.generation:
            content = bytes_at(arena, handle.slot)
            assert content == bytes_of(arena.layout, key, salt)
            assert handle.checksum == xxhash.xxh3_64_intdigest(content)
            assert arena.is_current([handle.slot], [handle.generation])
        else:
            assert handle == types_pb2.SlotHandle()
    return [handle.generation > 0 for handle in handles]


async def match_pages(
    service: Service, keys: Sequence[bytes], **changes: Any
) -> pb.MatchPagesResponse:
    request = pb.MatchPagesRequest(
        session_id=service.session, request_id=service.request_id(), page_keys=keys
    )
    request.MergeFrom(pb.MatchPagesRequest(**changes))
    answer: pb.MatchPagesResponse = await call(service.stub.MatchPages(request, timeout=20))
    return answer


async def seal_pages(service: Service, keys: Sequence[bytes], **changes: Any) -> pb.SealResponse:
    """Reserve, write and seal pages by calls."""
    granted = await service.granted(len(keys))
    return await service.seal(write_pages(service.bench.arena, granted, keys), **changes)

"""Checks the fields of KvStoreService requests, independent of the store's state.

Each violation raises InvalidArgument with the field's path. The store checks what depends on its
state, such as the session that holds a slot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.sessions import ProcessIdentity
from kvstore_service.store import SealOutcome
from splitpoint.arena.format import ID_BYTES
from splitpoint.config import check_address
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.keys import KEY_BYTES, SALT_LIMIT, page_words
from splitpoint.shapes import ArenaLayout
from splitpoint.tiers import ChunkSource, Tier
from splitpoint.transport.convert import (
    from_message,
    plain_converter,
    tier_from_proto,
    to_message,
)
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2

# The handle of an Entry, with the attributes of its fields' names.
handle_of = plain_converter(types_pb2.SlotHandle)


def sealed_chunks(outcome: SealOutcome) -> list[pb.SealedChunk]:
    return [
        to_message(
            pb.SealedChunk,
            chunk,
            handle=handle_of(chunk.entry),
            key=chunk.entry.key,
            duplicate=chunk.is_duplicate,
        )
        for chunk in outcome.chunks
    ]


NAME_LIMIT = 64
REQUEST_ID_LIMIT = 64
# Chunks of one ReadChunks, ReportChunks or FillSlots.
STREAM_CHUNK_LIMIT = 4096
# Keys of one MatchPages.
PAGE_LIMIT = 65_536
_OUTCOME_NAME = re.compile(r"[a-z0-9_]{1,64}")
# Names that one session may count outcomes by.
OUTCOME_LIMIT = 32


def check_attach(request: pb.AttachRequest) -> ProcessIdentity:
    _check_length(request.client_name.encode(), 1, NAME_LIMIT, "client_name")
    if request.is_remote:
        for field in ("process_id", "process_start_ticks"):
            if getattr(request, field):
                raise InvalidArgument(f"{field} of a remote caller is 0", field=field)
    elif request.process_id < 1:
        raise InvalidArgument("process_id must be at least 1", field="process_id")
    if request.process_start_ticks < 0:
        raise InvalidArgument(
            "process_start_ticks must not be negative", field="process_start_ticks"
        )
    _check_not_negative([request.page_bytes], "page_bytes")
    _check_id(request.layout_hash, "layout_hash", may_be_empty=True)
    _check_id(request.previous_session_id, "previous_session_id", may_be_empty=True)
    return ProcessIdentity(request.process_id, request.process_start_ticks)  # or REMOTE


def check_outcomes(outcomes: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of a KeepAlive message."""
    if len(outcomes) > OUTCOME_LIMIT:
        raise InvalidArgument(
            f"{len(outcomes)} outcomes; at most {OUTCOME_LIMIT} are allowed", field="outcomes"
        )
    for name in outcomes:
        if not _OUTCOME_NAME.fullmatch(name):
            raise InvalidArgument(f"{name!r} is not 1 to 64 of [a-z0-9_]", field="outcomes")
    _check_not_negative(outcomes.values(), "outcomes")
    return dict(outcomes)


def check_session(session_id: bytes, request_id: bytes) -> None:
    """Check the ids of a call that changes something."""
    check_session_id(session_id)
    _check_length(request_id, 1, REQUEST_ID_LIMIT, "request_id")


def check_session_id(session_id: bytes) -> None:
    _check_id(session_id, "session_id", may_be_empty=False)


def check_match(request: pb.MatchRequest, capacity_tokens: int) -> Sequence[int]:
    """Return the tokens that an arena of this capacity can hold."""
    _check_length(request.tenant_salt, 0, SALT_LIMIT, "tenant_salt")
    _check_tokens(request.token_ids, "token_ids")
    if request.asks_tiers and request.session_id:
        raise InvalidArgument("only a peek asks the tiers", field="asks_tiers")
    return request.token_ids[:capacity_tokens]


def check_match_pages(request: pb.MatchPagesRequest) -> None:
    check_session(request.session_id, request.request_id)
    _check_length(request.tenant_salt, 0, SALT_LIMIT, "tenant_salt")
    if not 1 <= len(request.page_keys) <= PAGE_LIMIT:
        raise InvalidArgument(
            f"{len(request.page_keys)} pages; 1 to {PAGE_LIMIT} are allowed", field="page_keys"
        )
    for index, key in enumerate(request.page_keys):
        if len(key) != KEY_BYTES:
            raise InvalidArgument(
                f"a key has {KEY_BYTES} bytes, not {len(key)}", field=f"page_keys[{index}]"
            )


def check_load(request: pb.LoadChunksRequest) -> ChunkSource:
    """Return the source: another store, or a tier of the own store."""
    check_session(request.session_id, request.request_id)
    _check_length(request.tenant_salt, 0, SALT_LIMIT, "tenant_salt")
    _check_tokens(request.token_ids, "token_ids")
    if bool(request.tier) == bool(request.source_address):
        raise InvalidArgument("name either a tier or another store", field="tier")
    if request.source_address:
        return ChunkSource(check_address(request.source_address))
    tier = tier_from_proto(request.tier)
    if tier is Tier.ARENA:
        raise InvalidArgument("chunks are loaded from the disk or the pool tier", field="tier")
    return ChunkSource(tier=tier)


def check_reserve(request: pb.ReserveRequest) -> None:
    if request.slot_count < 1:
        raise InvalidArgument("slot_count must be at least 1", field="slot_count")
    _check_length(request.tenant_salt, 0, SALT_LIMIT, "tenant_salt")


def check_seal(request: pb.SealRequest, slot_count: int, layout: ArenaLayout) -> list[WrittenChunk]:
    """Return the chunks of the request. Their slots are in the arena and distinct.

    Raises FailedPrecondition for a page in an arena of tokens, and for the reverse.
    """
    _check_length(request.tenant_salt, 0, SALT_LIMIT, "tenant_salt")
    _check_not_negative([request.lease_id], "lease_id")
    if not request.chunks:
        raise InvalidArgument("there is nothing to seal", field="chunks")
    seen: set[int] = set()
    chunks = []
    for index, chunk in enumerate(request.chunks):
        path = f"chunks[{index}]"
        _check_slot(chunk.slot, chunk.generation, slot_count, path)
        if chunk.slot in seen:
            raise InvalidArgument(f"slot {chunk.slot} is named twice", field=f"{path}.slot")
        seen.add(chunk.slot)
        check_kind(layout, of_pages=bool(chunk.page_key))
        chunks.append(
            _check_page(chunk, path)
            if layout.page_bytes
            else _check_chunk(chunk, layout.chunk_tokens, path)
        )
    return chunks


def check_fill(request: pb.FillSlotsRequest, slot_count: int) -> list[tuple[int, int]]:
    """Return the slots to fill, with their generations. They are distinct."""
    check_session_id(request.session_id)
    if not request.tier:
        raise InvalidArgument("no tier is named", field="tier")
    if not 1 <= len(request.slots) <= STREAM_CHUNK_LIMIT:
        raise InvalidArgument(
            f"{len(request.slots)} slots; 1 to {STREAM_CHUNK_LIMIT} are allowed", field="slots"
        )
    if len({each.slot for each in request.slots}) < len(request.slots):
        raise InvalidArgument("a slot is named twice", field="slots")
    for index, each in enumerate(request.slots):
        path = f"slots[{index}]"
        _check_slot(each.slot, each.generation, slot_count, path)
        if len(each.chunk_key) != KEY_BYTES:
            raise InvalidArgument(f"a key has {KEY_BYTES} bytes", field=f"{path}.chunk_key")
    return [(each.slot, each.generation) for each in request.slots]


def check_read(request: pb.ReadChunksRequest, slot_count: int) -> list[tuple[int, int]]:
    """Return the slots to read, with their generations."""
    check_session_id(request.session_id)
    return check_handles(request.chunks, slot_count)


def check_handles(chunks: Sequence[types_pb2.SlotHandle], slot_count: int) -> list[tuple[int, int]]:
    """Return the slots of the field `chunks`, with their generations."""
    if not 1 <= len(chunks) <= STREAM_CHUNK_LIMIT:
        raise InvalidArgument(
            f"{len(chunks)} chunks; 1 to {STREAM_CHUNK_LIMIT} are allowed", field="chunks"
        )
    for index, handle in enumerate(chunks):
        _check_slot(handle.slot, handle.generation, slot_count, f"chunks[{index}]")
    return [(handle.slot, handle.generation) for handle in chunks]


def check_kind(layout: ArenaLayout, *, of_pages: bool) -> None:
    """Raise FailedPrecondition unless an arena of this layout is one of pages, or of tokens."""
    if bool(layout.page_bytes) != of_pages:
        raise FailedPrecondition(
            "this store holds "
            + (
                "pages, not chunks of tokens"
                if layout.page_bytes
                else "chunks of tokens, not pages"
            ),
            reason="OTHER_ARENA_KIND",
        )


def _check_page(chunk: pb.SealChunk, path: str) -> WrittenChunk:
    _check_length(chunk.page_key, KEY_BYTES, KEY_BYTES, f"{path}.page_key")
    for field in ("parent_key", "token_ids"):
        if getattr(chunk, field):
            raise InvalidArgument(f"a page has no {field}", field=f"{path}.{field}")
    return from_message(WrittenChunk, chunk, token_ids=page_words(chunk.page_key))


def _check_chunk(chunk: pb.SealChunk, chunk_tokens: int, path: str) -> WrittenChunk:
    if len(chunk.parent_key) not in (0, KEY_BYTES):
        raise InvalidArgument(
            f"a key has {KEY_BYTES} bytes, or none for a first chunk",
            field=f"{path}.parent_key",
        )
    written = from_message(WrittenChunk, chunk)
    if (count := len(written.token_ids)) > chunk_tokens:
        raise InvalidArgument(
            f"{count} tokens; a chunk holds {chunk_tokens}", field=f"{path}.token_ids"
        )
    _check_tokens(written.token_ids, f"{path}.token_ids")
    return written


def check_release(
    request: pb.ReleaseRequest, slot_count: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the slots of the request and its used chunks, with their generations."""
    _check_not_negative(request.lease_ids, "lease_ids")
    return (
        _check_handles(request.slots, slot_count, "slots"),
        _check_handles(request.used_chunks, slot_count, "used_chunks"),
    )


def _check_handles(
    handles: Iterable[types_pb2.SlotHandle], slot_count: int, field: str
) -> list[tuple[int, int]]:
    found = []
    for index, handle in enumerate(handles):
        _check_slot(handle.slot, handle.generation, slot_count, f"{field}[{index}]")
        found.append((handle.slot, handle.generation))
    return found


def _check_slot(slot: int, generation: int, slot_count: int, path: str) -> None:
    if not 0 <= slot < slot_count:
        raise InvalidArgument(
            f"slot {slot} lies outside the arena of {slot_count} slots", field=f"{path}.slot"
        )
    if generation < 1:
        raise InvalidArgument("a generation is at least 1", field=f"{path}.generation")


def _check_tokens(token_ids: Sequence[int], field: str) -> None:
    if not token_ids:
        raise InvalidArgument("at least one token is needed", field=field)
    _check_not_negative(token_ids, field)


def _check_not_negative(numbers: Iterable[int], field: str) -> None:
    if min(numbers, default=0) < 0:
        raise InvalidArgument(f"{field} must not be negative", field=field)


def _check_id(value: bytes, field: str, *, may_be_empty: bool) -> None:
    if len(value) != ID_BYTES and not (may_be_empty and not value):
        raise InvalidArgument(f"{field} has {ID_BYTES} bytes, not {len(value)}", field=field)


def _check_length(value: bytes, low: int, high: int, field: str) -> None:
    if not low <= len(value) <= high:
        raise InvalidArgument(
            f"{field} has {len(value)} bytes; {low} to {high} are allowed", field=field
        )

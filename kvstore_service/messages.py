"""Converts chunks of the store to messages."""

from __future__ import annotations

from kvstore_service.pool.prefix_index import Entry
from kvstore_service.store import SealOutcome
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2


def handle_of(entry: Entry) -> types_pb2.SlotHandle:
    return types_pb2.SlotHandle(
        slot=entry.slot,
        generation=entry.generation,
        token_count=entry.token_count,
        checksum=entry.checksum,
    )


def sealed_chunks(outcome: SealOutcome) -> list[pb.SealedChunk]:
    return [
        pb.SealedChunk(
            handle=handle_of(chunk.entry),
            key=chunk.entry.key,
            duplicate=chunk.is_duplicate,
        )
        for chunk in outcome.chunks
    ]

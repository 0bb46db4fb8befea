"""Messages: chunks of the store as messages, and the next message of a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from kvstore_service.pool.prefix_index import Entry
from kvstore_service.store import SealOutcome
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2

Message = TypeVar("Message")


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


async def next_message(
    messages: AsyncIterator[Message], timeout: float, *ends: asyncio.Event
) -> Message | None:
    """Return the next message of a stream. None at the end of the stream.

    Raises TimeoutError if it does not come within `timeout` seconds, or before one of `ends`
    is set.
    """
    message = asyncio.ensure_future(_anext(messages))
    ended = [asyncio.ensure_future(event.wait()) for event in ends]
    try:
        await asyncio.wait({message, *ended}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if message.done():
            return message.result()
        raise TimeoutError
    finally:
        for task in (message, *ended):
            task.cancel()
        # Retrieve its error, too: no other task does.
        await asyncio.gather(message, return_exceptions=True)


async def _anext(messages: AsyncIterator[Message]) -> Message | None:
    return await anext(messages, None)

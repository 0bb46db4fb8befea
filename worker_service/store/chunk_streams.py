"""The client's side of chunk streams: ReadChunks into slots, WriteChunks out of slots.

Copies and hashes run on a lane, a single thread, off the event loop. Callers decide what may be
read, and which slots may be written.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import xxhash

from splitpoint.arena.mapping import Payload, pieces
from splitpoint.errors import DataLoss, Internal, Unavailable
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2

# Time limit between two pieces of a stream.
SILENCE_SECONDS = 10.0
# Bytes per call: enough for a link's full speed, few enough that not all is lost if the
# peer dies.
BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """Where read chunks go.

    Attributes:
        lane: single thread that copies.
        check: raises if the slots may not be written any more. Nothing awaits between a
            check and a copy's place in the lane.
    """

    payload: Payload
    slots: Sequence[int]
    lane: ThreadPoolExecutor
    check: Callable[[], None] = lambda: None


async def read_chunks(
    stub: Any,
    session_id: bytes,
    handles: Sequence[types_pb2.SlotHandle],
    target: ReadTarget,
) -> None:
    """Fill `target.slots[i]` with the chunk of `handles[i]`, and compare its checksum.

    When this returns or raises, the lane may hold one last copy: wait for the lane before you
    give the slots up.

    Raises DataLoss if a payload differs from its handle's checksum, Internal if the store
    sends other pieces, and what the store answers.
    """
    loop = asyncio.get_running_loop()
    payload, slots = target.payload, target.slots
    call = stub.ReadChunks(pb.ReadChunksRequest(session_id=session_id, chunks=handles))
    index = offset = 0
    digest = xxhash.xxh3_64()
    copying: asyncio.Future[None] | None = None

    def copy(slot: int, start: int, data: bytes) -> None:
        digest.update(data)
        payload.scatter(slot, start, data)

    try:
        while True:
            async with asyncio.timeout(SILENCE_SECONDS):
                response = await call.read()
            # One copy at a time, while the next piece arrives.
            if copying is not None:
                await copying
            if offset == payload.size_bytes:
                if digest.intdigest() != handles[index].checksum:
                    raise DataLoss("a chunk came with other bytes than its checksum says")
                index, offset = index + 1, 0
                digest.reset()
            if response is grpc.aio.EOF:
                break
            data = response.data
            end = offset + len(data)
            if (
                index == len(slots)
                or (response.chunk_index, response.offset) != (index, offset)
                or not offset < end <= payload.size_bytes
            ):
                raise Internal("the store sent other pieces than were asked for")
            target.check()
            copying = loop.run_in_executor(target.lane, copy, slots[index], offset, data)
            offset = end
        if index < len(slots):
            raise Unavailable(f"the stream ended in chunk {index} of {len(slots)}")
    except TimeoutError:
        raise Unavailable(f"no piece came for {SILENCE_SECONDS:g} s", reason="STALLED") from None
    except grpc.RpcError as error:
        raise error_of(error) from error
    finally:
        call.cancel()


async def write_chunks(
    stub: Any,
    header: pb.WriteChunksHeader,
    payload: Payload,
    slots: Sequence[int],
    lane: ThreadPoolExecutor,
    timeout: float,
) -> pb.WriteChunksResponse:
    """Send the header's chunks from `slots`. Raises what the store answers."""
    loop = asyncio.get_running_loop()

    async def parts() -> AsyncIterator[pb.WriteChunksRequest]:
        yield pb.WriteChunksRequest(header=header)
        for index, slot in enumerate(slots):
            for offset, size in pieces(payload.size_bytes):
                data = await loop.run_in_executor(lane, payload.gather, slot, offset, size)
                piece = pb.ChunkPiece(chunk_index=index, offset=offset, data=data)
                yield pb.WriteChunksRequest(piece=piece)

    try:
        answer: pb.WriteChunksResponse = await stub.WriteChunks(parts(), timeout=timeout)
    except grpc.RpcError as error:
        raise error_of(error) from error
    return answer

"""ReadChunks as a reader on another host sees it, beside a plain gRPC stream of equal messages.

Both go over TCP on the loopback, one stream each, in turns. The store's side
compares every chunk with its checksum, since no reader may go without; the
plain stream only counts its bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import xxhash

from splitpoint.errors import DataLoss, Internal
from splitpoint.transport.channels import open_channel
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc, types_pb2
from splitpoint_cli.bench.shared import raw_stream
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.store.report import StreamResult

_SECONDS = 60.0


async def measure_remote(
    store: str,
    peer: str,
    salt: bytes,
    sequences: Sequence[Sequence[int]],
    repeats: int,
    progress: Progress,
) -> StreamResult:
    """Read `sequences` from the store at `store`, beside a raw stream of `peer`."""
    async with open_channel(store) as channel, grpc.aio.insecure_channel(peer) as raw_channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        try:
            async with _session(stub) as session_id:
                handles = await _match(stub, session_id, salt, sequences)
                request = pb.ReadChunksRequest(session_id=session_id, chunks=handles)
                sizes = [await read_chunks(stub, request)]  # warm
                piece_bytes, total = max(sizes[0]), sum(sizes[0])
                await _read_raw(raw_channel, piece_bytes, total)
                rates: list[float] = []
                raw_rates: list[float] = []
                for is_raw in progress.rounds("ReadChunks and a stream", (True, False), repeats):
                    began = time.perf_counter()
                    if is_raw:
                        await _read_raw(raw_channel, piece_bytes, total)
                    else:
                        await read_chunks(stub, request)
                    seconds = time.perf_counter() - began
                    (raw_rates if is_raw else rates).append(total / seconds)
        except grpc.RpcError as error:
            raise error_of(error) from error
    return StreamResult(
        "ReadChunks", piece_bytes, tuple(rates), "a plain gRPC stream", tuple(raw_rates)
    )


@asynccontextmanager
async def _session(stub: kvstore_pb2_grpc.KvStoreServiceStub) -> AsyncIterator[bytes]:
    """Keep a session of a client that maps nothing."""
    answer = await stub.Attach(
        pb.AttachRequest(client_name="bench remote", is_remote=True), timeout=_SECONDS
    )
    pause = answer.lease_duration.ToTimedelta().total_seconds() / 3
    over = asyncio.Event()

    async def beats() -> AsyncIterator[pb.KeepAliveRequest]:
        while not over.is_set():
            yield pb.KeepAliveRequest(session_id=answer.session_id)
            try:
                async with asyncio.timeout(pause):
                    await over.wait()
            except TimeoutError:
                continue

    async def hold() -> None:
        async for _ in stub.KeepAlive(beats()):
            pass

    keeper = asyncio.create_task(hold())
    try:
        yield answer.session_id
    finally:
        over.set()
        await keeper


async def _match(
    stub: kvstore_pb2_grpc.KvStoreServiceStub,
    session_id: bytes,
    salt: bytes,
    sequences: Sequence[Sequence[int]],
) -> list[types_pb2.SlotHandle]:
    handles: list[types_pb2.SlotHandle] = []
    for number, tokens in enumerate(sequences):
        found = await stub.Match(
            pb.MatchRequest(
                session_id=session_id,
                request_id=number.to_bytes(4, "little"),
                tenant_salt=salt,
                token_ids=tokens,
            ),
            timeout=_SECONDS,
        )
        if found.cached_tokens != len(tokens):
            raise Internal("a chunk that was sealed for the benchmark is gone")
        handles += found.chunks
    return handles


async def read_chunks(
    stub: kvstore_pb2_grpc.KvStoreServiceStub, request: pb.ReadChunksRequest
) -> list[int]:
    """Read all chunks and compare their checksums; the sizes of the messages."""
    sizes = []
    digests = [xxhash.xxh3_64() for _ in request.chunks]
    async for answer in stub.ReadChunks(request, timeout=_SECONDS):
        data = answer.data
        digests[answer.chunk_index].update(data)
        sizes.append(len(data))
    if [digest.intdigest() for digest in digests] != [chunk.checksum for chunk in request.chunks]:
        raise DataLoss("a chunk came with other bytes than it was sealed with")
    return sizes


async def _read_raw(channel: grpc.aio.Channel, size: int, total: int) -> None:
    call: Any = channel.unary_stream(f"/{raw_stream.SERVICE}/{raw_stream.METHOD}")
    count = total // size
    received = 0
    async for message in call(f"{size} {count}".encode(), timeout=_SECONDS):
        received += len(message)
    if received != count * size:
        raise Internal("the plain stream ended early")

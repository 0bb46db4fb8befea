"""A served bench, and a client with a session; other clients are made from it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
from kvstore_helpers import Bench, granted_slots, write_chunks

from kvstore_service.server import KvStoreServicer
from splitpoint.transport.channels import open_channel
from splitpoint.transport.convert import to_message
from splitpoint.transport.servers import create_server, listen
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc


class Service:
    """A served bench, and a client with one session."""

    def __init__(self, bench: Bench, servicer: KvStoreServicer, channel: grpc.aio.Channel) -> None:
        self.bench = bench
        self.servicer = servicer
        self.channel = channel
        self.stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        self.session = b""
        self._requests = 0

    def request_id(self) -> bytes:
        self._requests += 1
        return b"r%d" % self._requests

    async def attach(self, **changes: Any) -> pb.AttachResponse:
        request = pb.AttachRequest(client_name="test", process_id=55, process_start_ticks=7)
        request.MergeFrom(pb.AttachRequest(**changes))
        answer: pb.AttachResponse = await call(self.stub.Attach(request))
        return answer

    async def reserve(self, count: int, **changes: Any) -> pb.ReserveResponse:
        request = pb.ReserveRequest(
            session_id=self.session, request_id=self.request_id(), slot_count=count
        )
        request.MergeFrom(pb.ReserveRequest(**changes))
        answer: pb.ReserveResponse = await call(self.stub.Reserve(request))
        return answer

    async def granted(self, count: int) -> list[tuple[int, int]]:
        """Reserve slots. Return each with its generation."""
        return granted_slots((await self.reserve(count)).runs)

    def give_back(self, slots: Sequence[tuple[int, int]]) -> None:
        """Free granted slots, in the store itself."""
        self.bench.store.sessions.release(self.session, [], slots)

    async def match(self, tokens: list[int], **changes: Any) -> pb.MatchResponse:
        request = pb.MatchRequest(
            session_id=self.session, request_id=self.request_id(), token_ids=tokens
        )
        request.MergeFrom(pb.MatchRequest(**changes))
        answer: pb.MatchResponse = await call(self.stub.Match(request))
        return answer

    async def written(self, *pieces: tuple[int, ...], parent: bytes = b"") -> list[pb.SealChunk]:
        """Reserve and write consecutive chunks."""
        granted = await self.granted(len(pieces))
        chunks = write_chunks(self.bench.arena, granted, pieces, parent=parent)
        return [to_message(pb.SealChunk, each, page_key=b"") for each in chunks]

    def seal_request(self, chunks: list[pb.SealChunk], **changes: Any) -> pb.SealRequest:
        request = pb.SealRequest(
            session_id=self.session, request_id=self.request_id(), chunks=chunks
        )
        request.MergeFrom(pb.SealRequest(**changes))
        return request

    async def seal(self, chunks: list[pb.SealChunk], **changes: Any) -> pb.SealResponse:
        answer: pb.SealResponse = await call(self.stub.Seal(self.seal_request(chunks, **changes)))
        return answer

    async def release(self, **fields: Any) -> pb.ReleaseResponse:
        request = pb.ReleaseRequest(session_id=self.session, request_id=self.request_id(), **fields)
        answer: pb.ReleaseResponse = await call(self.stub.Release(request))
        return answer

    async def stats(self) -> pb.GetStatsResponse:
        answer: pb.GetStatsResponse
        answer = await call(self.stub.GetStats(pb.GetStatsRequest(check_integrity=True)))
        assert list(answer.integrity_violations) == []
        return answer


async def call(pending: Awaitable[Any]) -> Any:
    try:
        return await pending
    except grpc.RpcError as error:
        raise error_of(error) from error


@asynccontextmanager
async def served(servicer: KvStoreServicer, address: str) -> AsyncIterator[grpc.aio.Channel]:
    """Serve at an address. Return a channel to it."""
    server = create_server()
    kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(servicer, server)
    bound = listen(server, address)
    await server.start()
    try:
        async with open_channel(bound) as channel:
            yield channel
    finally:
        servicer.stop()
        await server.stop(1)
        await servicer.close()


@asynccontextmanager
async def serve(
    bench: Bench, address: str, threads: ThreadPoolExecutor | None = None
) -> AsyncIterator[Service]:
    """Serve a bench, which is closed at the end."""
    # With threads of their own tests want to see them used, however little there is to read.
    servicer = (
        KvStoreServicer(bench.store)
        if threads is None
        else KvStoreServicer(bench.store, threads, read_at_once_bytes=0)
    )
    async with served(servicer, address) as channel:
        service = Service(bench, servicer, channel)
        service.session = (await service.attach()).session_id
        yield service
    bench.close()

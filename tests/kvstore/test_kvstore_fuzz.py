"""Sends random bytes to every method: the server survives with its invariants."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest
from fuzzing import stream_status
from kvstore_client import Service, serve
from kvstore_helpers import SLOTS, Bench
from long_runs import scaled
from page_helpers import PAGES

from kvstore_service.server import SERVICE_NAME
from splitpoint.v1 import kvstore_pb2 as pb

pytestmark = pytest.mark.scaled
ROUNDS = scaled(200, chaos=2000)
SEED = 20260101
UNARY = {
    "Attach": pb.AttachRequest,
    "Match": pb.MatchRequest,
    "Reserve": pb.ReserveRequest,
    "Seal": pb.SealRequest,
    "Release": pb.ReleaseRequest,
    "ReportChunks": pb.ReportChunksRequest,
    "MatchPages": pb.MatchPagesRequest,
    "GetStats": pb.GetStatsRequest,
}
# INTERNAL and UNKNOWN would be bugs of ours.
EXPECTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DATA_LOSS,
}


class Fuzzer:
    """Return noise, damaged messages, or messages with random fields."""

    def __init__(self, session_id: bytes) -> None:
        self.random = random.Random(SEED)
        self._session_id = session_id

    def request(self, kind: type) -> bytes:
        choice = self.random.randrange(3)
        if choice == 0:
            return self.random.randbytes(self.random.randrange(200))
        raw = bytearray(self._message(kind))
        if choice == 1 and raw:
            for _ in range(self.random.randrange(1, 4)):
                raw[self.random.randrange(len(raw))] = self.random.randrange(256)
        return bytes(raw)

    def _message(self, kind: type) -> bytes:
        """Return a message of this type with random field values."""
        message = kind()
        for field in message.DESCRIPTOR.fields:
            if self.random.random() < 0.2:
                continue
            count = self.random.randrange(4) if field.is_repeated else 1
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                key, value = field.message_type.fields
                found = getattr(message, field.name)
                for _ in range(count):
                    found[self._value(key)] = self._value(value)
                continue
            values = [self._value(field) for _ in range(count)]
            if field.message_type is not None:
                target = getattr(message, field.name)
                for value in values:
                    target.add().MergeFrom(value) if field.is_repeated else target.MergeFrom(value)
            elif field.is_repeated:
                getattr(message, field.name).extend(values)
            else:
                setattr(message, field.name, values[0])
        return bytes(message.SerializeToString())

    def _value(self, field: object) -> object:
        kind = field.cpp_type  # type: ignore[attr-defined]
        integer = self.random.choice([0, 1, 2, 3, 7, 8, -1, 2**31 - 1, -(2**31)])
        if field.message_type is not None:  # type: ignore[attr-defined]
            made = field.message_type._concrete_class()  # type: ignore[attr-defined]
            made.MergeFromString(self._message(type(made)))
            return made
        if kind == field.CPPTYPE_STRING:  # type: ignore[attr-defined]
            if field.type == field.TYPE_STRING:  # type: ignore[attr-defined]
                return self.random.choice(["", "name", "ü" * 40])
            return self.random.choice(
                [b"", self._session_id, self._session_id, b"r%d" % self.random.randrange(9),
                 self.random.randbytes(32), self.random.randbytes(130)]
            )  # fmt: skip
        if kind == field.CPPTYPE_BOOL:  # type: ignore[attr-defined]
            return self.random.random() < 0.5
        if kind == field.CPPTYPE_UINT64:  # type: ignore[attr-defined]
            return self.random.getrandbits(64)
        return integer


async def status_of(call: grpc.aio.UnaryUnaryCall[bytes, bytes]) -> grpc.StatusCode:
    return await call.code()


@pytest.mark.parametrize("method", UNARY)
async def test_random_bytes(service: Service, method: str) -> None:
    await check_random_bytes(service, method)


@pytest.mark.parametrize("method", ["Attach", "MatchPages", "Reserve", "Seal", "ReportChunks"])
async def test_random_bytes_to_a_store_of_pages(
    shm_folder: Path, socket_address: str, method: str
) -> None:
    async with serve(Bench(shm_folder, SLOTS, layout=PAGES), socket_address) as service:
        await check_random_bytes(service, method)


async def check_random_bytes(service: Service, method: str) -> None:
    session_id = service.bench.attach()
    service.bench.store.reserve(session_id, 4)
    fuzzer = Fuzzer(session_id)
    send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
    send = service.channel.unary_unary(f"/{SERVICE_NAME}/{method}")
    seen: dict[grpc.StatusCode, int] = {}
    for start in range(0, ROUNDS, 50):
        requests = [fuzzer.request(UNARY[method]) for _ in range(min(50, ROUNDS - start))]
        for code in await asyncio.gather(*(status_of(send(raw)) for raw in requests)):
            seen[code] = seen.get(code, 0) + 1
    assert set(seen) <= EXPECTED, seen
    assert grpc.StatusCode.INVALID_ARGUMENT in seen
    await service.stats()  # with its invariants
    service.bench.states()


async def test_random_streams(service: Service) -> None:
    fuzzer = Fuzzer(service.bench.attach())
    send: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
    send = service.channel.stream_stream(f"/{SERVICE_NAME}/KeepAlive")
    seen: set[grpc.StatusCode] = set()

    async def stream() -> grpc.StatusCode:
        requests = [
            fuzzer.request(pb.KeepAliveRequest) for _ in range(fuzzer.random.randrange(1, 4))
        ]
        return await stream_status(lambda: send(iter(requests)))

    for _ in range(ROUNDS // 20):
        seen.update(await asyncio.gather(*(stream() for _ in range(20))))
    assert seen <= EXPECTED, seen
    assert grpc.StatusCode.INVALID_ARGUMENT in seen
    await service.stats()  # with its invariants
    service.bench.states()

"""What the guard tells of calls that ended, and what becomes of it in the metrics."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.registry import CollectorRegistry
from test_rpc_guard import KINDS, Service, call, handlers, number
from waiting import until

from splitpoint.observe.meters import Meters
from splitpoint.observe.metrics import RPC_CALLS
from splitpoint.observe.metrics import Service as Measured
from splitpoint.transport import channels, guard, servers
from splitpoint.transport.access import Access, Caller, Role
from splitpoint.transport.guard import count_calls
from splitpoint.transport.tls import Identity
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc
from splitpoint_cli.security.token import add_token

Heard = Counter[tuple[str, str]]
STORE = "splitpoint.v1.KvStoreService"


@asynccontextmanager
async def listening(
    register: Callable[[grpc.aio.Server], object],
    on_answer: guard.OnCallEnded,
    access: Access | None = None,
) -> AsyncIterator[str]:
    server = servers.create_server(on_answer=on_answer, access=access)
    register(server)
    bound = servers.listen(server, "127.0.0.1:0")
    await server.start()
    yield bound
    await server.stop(0)


def counting(heard: Heard) -> guard.OnCallEnded:
    def hear(method: str, code: grpc.StatusCode) -> None:
        heard[method.removeprefix("/test.Service/"), code.name] += 1

    return hear


async def check_heard(heard: Heard, expected: Heard) -> None:
    """A client may know the end of its call a moment before the server tells of it."""
    await until(lambda: heard.total() >= expected.total())
    assert heard == expected


async def fails(pending: Coroutine[Any, Any, object]) -> None:
    with pytest.raises(grpc.RpcError):
        await pending


@pytest.mark.parametrize("kind", KINDS)
async def test_every_end_of_every_kind_is_told_once(kind: str) -> None:
    heard: Heard = Counter()
    service = Service()

    def register(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", handlers(service)),)
        )

    async with (
        listening(register, counting(heard)) as address,
        channels.open_channel(address) as channel,
    ):
        assert await call(channel, kind, number(100)) == [number(100)]
        await fails(call(channel, kind, b"\xff\xff\xff"))
        for code in (1, 2, 3):
            await fails(call(channel, kind, number(code)))
        expected = Counter(
            {
                (kind, "OK"): 1,
                (kind, "INVALID_ARGUMENT"): 2,
                (kind, "INTERNAL"): 1,
                (kind, "RESOURCE_EXHAUSTED"): 1,
            }
        )
        await check_heard(heard, expected)
        if kind in ("UnaryUnary", "UnaryStream"):
            pending = asyncio.create_task(call(channel, kind, number(9)))
            await service.started.wait()
            assert heard == expected  # told when they end, not when they begin
            pending.cancel()
            await asyncio.wait([pending])
            await service.cancelled.wait()
            # A deadline may pass before a busy server begins: then there is nothing to tell.
            seconds = 0.5
            while service.waiting_count < 2:
                await fails(call(channel, kind, number(9), timeout=seconds))
                seconds *= 2
            cancelled = Counter({(kind, "CANCELLED"): service.waiting_count})
            await check_heard(heard, expected + cancelled)


class Store(kvstore_pb2_grpc.KvStoreServiceServicer):
    async def GetStats(self, request: object, context: object) -> kvstore_pb2.GetStatsResponse:
        return kvstore_pb2.GetStatsResponse()

    async def Evict(self, request: object, context: Any) -> kvstore_pb2.EvictResponse:
        await context.abort(grpc.StatusCode.NOT_FOUND, "by itself")
        raise AssertionError("abort raises")

    async def Release(self, request: object, context: Any) -> kvstore_pb2.ReleaseResponse:
        context.set_code(grpc.StatusCode.DATA_LOSS)
        return kvstore_pb2.ReleaseResponse()


def samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Calls by method and code."""
    return {
        (sample.labels["method"], sample.labels["code"]): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == RPC_CALLS.name
    }


async def test_methods_are_there_from_the_start_and_strange_ones_are_one() -> None:
    meters = Meters(Measured.KVSTORE)
    on_answer = count_calls(meters, [STORE])
    before = samples(meters.registry)
    assert set(before.values()) == {0.0}
    assert {code for _, code in before} == {"OK"}
    assert {"KvStoreService/Match", "KvStoreService/KeepAlive", "Health/Check"} <= {
        method for method, _ in before
    }

    def register(server: grpc.aio.Server) -> None:
        kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(Store(), server)

    async with listening(register, on_answer) as address, channels.open_channel(address) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        await stub.GetStats(kvstore_pb2.GetStatsRequest())
        for method in ("Evict", "Release"):
            await fails(call_raw(channel, f"/{STORE}/{method}"))
        for strange in ("/canary.Secret/Prompt", f"/{STORE}/Canary", "/x/y"):
            await fails(call_raw(channel, strange))
    after = {key: value for key, value in samples(meters.registry).items() if value}
    assert after == {
        ("KvStoreService/GetStats", "OK"): 1,
        ("KvStoreService/Evict", "NOT_FOUND"): 1,
        ("KvStoreService/Release", "DATA_LOSS"): 1,
        ("unknown", "UNIMPLEMENTED"): 3,
    }


async def test_who_is_not_let_in_is_counted(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    client = add_token(tokens, Caller("alice", Role.CLIENT, "canary-tenant"))
    meters = Meters(Measured.KVSTORE)
    on_answer = count_calls(meters, [STORE])

    def register(server: grpc.aio.Server) -> None:
        kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(Store(), server)

    async with listening(register, on_answer, Access(tokens)) as address:
        for token in ("", client):
            async with channels.open_channel(address, Identity(token=token)) as channel:
                for path in (f"/{STORE}/GetStats", "/canary.Secret/Prompt"):
                    await fails(call_raw(channel, path))
    assert {key: value for key, value in samples(meters.registry).items() if value} == {
        ("KvStoreService/GetStats", "UNAUTHENTICATED"): 1,
        ("KvStoreService/GetStats", "PERMISSION_DENIED"): 1,
        ("unknown", "UNAUTHENTICATED"): 1,
        ("unknown", "PERMISSION_DENIED"): 1,
    }


async def call_raw(channel: grpc.aio.Channel, path: str) -> bytes:
    send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
    return await send(b"", timeout=10)

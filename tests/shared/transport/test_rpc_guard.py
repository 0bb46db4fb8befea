"""The guard, the limits and the errors of splitpoint.transport, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import islice
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from splitpoint import errors
from splitpoint.transport import channels, limits, servers, statuses
from splitpoint.transport.guard import Guard, ignore_call_end
from splitpoint.v1 import types_pb2

SECRET = "the text of an exception that no client may see"
KINDS = ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream", "UnaryWrite")


def raise_for(message: types_pb2.TokenLogprob) -> None:
    """The handlers of the test service misbehave by number."""
    if message.token_id == 1:
        raise ValueError(SECRET)
    if message.token_id == 2:
        raise errors.InvalidArgument("too hot", field="sampling.temperature", limit=3)
    if message.token_id == 3:
        raise errors.ResourceExhausted("queue full", retry_after_seconds=1.5, needed_bytes=7)
    if message.token_id == 4:
        raise errors.Unavailable("draining", metadata="x" * 100_000)


class Service:
    """Answers by number; `waiting_count` calls have begun to wait until they are cancelled."""

    def __init__(self) -> None:
        self.waiting_count = 0
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def unary_unary(self, request: Any, context: Any) -> Any:
        raise_for(request)
        if request.token_id == 9:
            self.started.set()
            self.waiting_count += 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if request.token_id == 10:
            return 17
        return request

    async def unary_stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield request
        raise_for(request)
        if request.token_id == 9:
            self.started.set()
            self.waiting_count += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()

    async def unary_write(self, request: Any, context: Any) -> None:
        await context.write(request)
        raise_for(request)
        if request.token_id == 10:
            await context.write(17)

    async def stream_unary(self, requests: Any, context: Any) -> Any:
        last = None
        async for request in requests:
            raise_for(request)
            last = request
        return last

    async def stream_stream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            raise_for(request)
            yield request


def handlers(service: Service) -> dict[str, Any]:
    codec: Any = {
        "request_deserializer": types_pb2.TokenLogprob.FromString,
        "response_serializer": types_pb2.TokenLogprob.SerializeToString,
    }
    return {
        "UnaryUnary": grpc.unary_unary_rpc_method_handler(service.unary_unary, **codec),
        "UnaryStream": grpc.unary_stream_rpc_method_handler(service.unary_stream, **codec),
        "UnaryWrite": grpc.unary_stream_rpc_method_handler(service.unary_write, **codec),
        "StreamUnary": grpc.stream_unary_rpc_method_handler(service.stream_unary, **codec),
        "StreamStream": grpc.stream_stream_rpc_method_handler(service.stream_stream, **codec),
    }


@pytest.fixture
async def service() -> Service:
    return Service()


@pytest.fixture
async def address(service: Service) -> AsyncIterator[str]:
    server = servers.create_server(max_concurrent_rpcs=8)
    server.add_registered_method_handlers("test.Service", handlers(service))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("test.Service", handlers(service)),)
    )
    bound = servers.listen(server, "127.0.0.1:0")
    await server.start()
    yield bound
    await server.stop(0)


async def call(
    channel: grpc.aio.Channel, kind: str, raw: bytes, metadata: Any = None, timeout: float = 10
) -> list[bytes]:
    """One request of raw bytes, all answers as raw bytes."""
    path = f"/test.Service/{kind}"

    async def requests() -> AsyncIterator[bytes]:
        yield raw

    open_call: Any = {
        "UnaryUnary": channel.unary_unary,
        "StreamUnary": channel.stream_unary,
        "StreamStream": channel.stream_stream,
    }.get(kind, channel.unary_stream)(path)
    argument = requests() if kind.startswith("Stream") else raw
    stream = open_call(argument, metadata=metadata, timeout=timeout)
    if kind in ("UnaryUnary", "StreamUnary"):
        return [await stream]
    try:
        return [answer async for answer in stream]
    finally:
        # Cancelling a task that still sends its request leaves the call running.
        stream.cancel()


def number(token_id: int) -> bytes:
    return types_pb2.TokenLogprob(token_id=token_id).SerializeToString()


async def error_from(address: str, kind: str, raw: bytes, **kwargs: Any) -> errors.SplitpointError:
    async with channels.open_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await call(channel, kind, raw, **kwargs)
        return statuses.error_of(caught.value)


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_answers_and_maps_errors(
    address: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with channels.open_channel(address) as channel:
        assert await call(channel, kind, number(100)) == [number(100)]

    malformed = await error_from(address, kind, b"\xff\xff\xff")
    assert isinstance(malformed, errors.InvalidArgument)
    assert malformed.reason == "MALFORMED_MESSAGE"

    invalid = await error_from(address, kind, number(2))
    assert isinstance(invalid, errors.InvalidArgument)
    assert invalid.field == "sampling.temperature"
    assert invalid.message == "too hot"
    assert invalid.metadata == {"limit": "3"}

    full = await error_from(address, kind, number(3))
    assert isinstance(full, errors.ResourceExhausted)
    assert full.retry_after_seconds == 1.5
    assert full.reason == "RESOURCE_EXHAUSTED"

    with caplog.at_level(logging.ERROR, logger="splitpoint.transport.guard"):
        bug = await error_from(address, kind, number(1))
    assert isinstance(bug, errors.Internal)
    assert SECRET not in bug.message
    assert "ValueError" not in bug.message
    assert SECRET in caplog.text
    assert bug.metadata["incident"] in caplog.text


@pytest.mark.parametrize("kind", ["UnaryUnary", "UnaryWrite"])
async def test_an_unserializable_answer_is_an_incident(address: str, kind: str) -> None:
    error = await error_from(address, kind, number(10))
    assert isinstance(error, errors.Internal)
    assert "incident" in error.message


async def test_details_are_cut_to_fit_the_trailers(address: str) -> None:
    error = await error_from(address, "UnaryUnary", number(4))
    assert isinstance(error, errors.Unavailable)
    assert error.message == "draining"
    assert len(error.metadata["metadata"]) == 200


@pytest.mark.parametrize("kind", KINDS)
async def test_oversized_messages_and_metadata_are_exhausted(address: str, kind: str) -> None:
    too_long = types_pb2.ModelShape(name="x" * limits.MESSAGE_LIMIT_BYTES).SerializeToString()
    async with grpc.aio.insecure_channel(address) as unlimited:
        with pytest.raises(grpc.RpcError) as caught:
            await call(unlimited, kind, too_long)
        assert isinstance(statuses.error_of(caught.value), errors.ResourceExhausted)
        with pytest.raises(grpc.RpcError) as caught:
            await call(unlimited, kind, number(100), metadata=(("x-long", "y" * 9000),))
        assert isinstance(statuses.error_of(caught.value), errors.ResourceExhausted)


@pytest.mark.parametrize("kind", ["UnaryUnary", "UnaryStream"])
async def test_cancellation_reaches_the_handler(
    address: str, service: Service, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with channels.open_channel(address) as channel:
        pending = asyncio.create_task(call(channel, kind, number(9)))
        await service.started.wait()
        pending.cancel()
        await service.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await pending
    assert "incident" not in caplog.text


async def test_too_many_calls_are_exhausted(address: str, service: Service) -> None:
    async with channels.open_channel(address) as channel:
        pending = [asyncio.create_task(call(channel, "UnaryUnary", number(9))) for _ in range(8)]
        await service.started.wait()
        answered = await asyncio.wait(pending, timeout=0.2)
        assert not answered[0]
        with pytest.raises(grpc.RpcError) as caught:
            await call(channel, "UnaryUnary", number(100))
        assert isinstance(statuses.error_of(caught.value), errors.ResourceExhausted)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def test_large_messages_are_handled_one_in_a_turn_of_the_loop() -> None:
    """Twelve that arrive while the loop is busy would otherwise hold it twelve times as long."""
    turn, handled = 0, dict[str, list[int]]()

    async def handle(request: bytes, context: Any) -> bytes:
        handled.setdefault(f"{len(request) >> 10} KiB", []).append(turn)
        return request

    async def found(details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(handle)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    method = SimpleNamespace(method="/test.Service/UnaryUnary", invocation_metadata=())
    guarded = await Guard(None, ignore_call_end).intercept_service(found, method)
    context = SimpleNamespace(code=lambda: None)
    counting = asyncio.create_task(count_turns())
    sizes = [size << 10 for size in (1, 4096) for _ in range(12)]
    answers = await asyncio.gather(*(guarded.unary_unary(bytes(n), context) for n in sizes))
    counting.cancel()
    assert [len(answer) for answer in answers] == sizes
    assert len(set(handled["1 KiB"])) == 1
    assert len(set(handled["4096 KiB"])) == 12


async def test_a_burst_that_meets_a_busy_loop_is_refused_by_the_limit(address: str) -> None:
    """More calls than gRPC lets wait by default, of which it cancels some."""
    count = 2500
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(channels.open_channel(address, is_fresh=True))
            for _ in range(-(-count // servers.STREAMS_PER_CONNECTION))
        ]
        for channel in opened:  # connected before the burst
            await call(channel, "UnaryUnary", number(100))
        sends: list[Any] = [channel.unary_unary("/test.Service/UnaryUnary") for channel in opened]
        pending: list[Any] = [
            sends[index % len(sends)](number(9), timeout=60) for index in range(count)
        ]
        await asyncio.sleep(0)
        time.sleep(0.5)  # noqa: ASYNC251 -- the server's loop takes no call meanwhile
        ended = asyncio.as_completed([asyncio.ensure_future(each.code()) for each in pending])
        # The others are served, and wait.
        codes = Counter([await each for each in islice(ended, count - 8)])
        for each in pending:
            each.cancel()
    assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED: count - 8}


async def test_unknown_methods_deadlines_and_dead_servers(address: str) -> None:
    missing = await error_from(address, "Nothing", number(1))
    assert isinstance(missing, errors.Internal)
    late = await error_from(address, "UnaryUnary", number(9), timeout=0.1)
    assert isinstance(late, errors.DeadlineExceeded)
    gone = await error_from("127.0.0.1:1", "UnaryUnary", number(1))
    assert isinstance(gone, errors.Unavailable)


def test_blocking_channels_carry_the_same_details() -> None:
    loop_errors: list[errors.SplitpointError] = []

    async def main() -> None:
        server = servers.create_server()
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Service", handlers(Service())),)
        )
        bound = servers.listen(server, "127.0.0.1:0")
        await server.start()

        def blocking() -> None:
            with channels.open_sync_channel(bound) as channel:
                send: grpc.UnaryUnaryMultiCallable[bytes, bytes]
                send = channel.unary_unary("/test.Service/UnaryUnary")
                with pytest.raises(grpc.RpcError) as caught:
                    send(number(2), timeout=10)
                loop_errors.append(statuses.error_of(caught.value))

        await asyncio.to_thread(blocking)
        await server.stop(0)

    asyncio.run(main())
    (error,) = loop_errors
    assert isinstance(error, errors.InvalidArgument)
    assert error.field == "sampling.temperature"


async def test_a_second_server_on_the_port_is_refused(address: str) -> None:
    other = servers.create_server()
    with pytest.raises(errors.Unavailable, match="cannot listen"):
        servers.listen(other, address)
    await other.stop(0)


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
async def test_every_error_survives_the_wire(code: int) -> None:
    raised = errors.BY_CODE[code]("what happened", reason="WHY", needed=5)
    server = servers.create_server()

    async def handler(request: bytes, context: Any) -> bytes:
        raise raised

    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "test.Service", {"UnaryUnary": grpc.unary_unary_rpc_method_handler(handler)}
            ),
        )
    )
    bound = servers.listen(server, "127.0.0.1:0")
    await server.start()
    received = await error_from(bound, "UnaryUnary", b"")
    await server.stop(0)
    assert type(received) is type(raised)
    assert (received.message, received.reason, received.metadata) == (
        "what happened",
        "WHY",
        {"needed": "5"},
    )

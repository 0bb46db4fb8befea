"""Random bytes at gRPC methods: past the stubs, straight at the server's deserializers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import grpc

from splitpoint.transport.statuses import error_of


def random_messages(rng: random.Random, count: int) -> Iterator[bytes]:
    """Byte strings of all sorts: noise, and wire-format fields with random content."""
    for _ in range(count):
        if rng.random() < 0.5:
            yield rng.randbytes(rng.randrange(64))
            continue
        message = b""
        for _ in range(rng.randrange(1, 5)):
            number, kind = rng.randrange(1, 16), rng.choice([0, 1, 2, 5])
            message += _varint(number << 3 | kind)
            if kind == 0:
                message += _varint(rng.choice([0, 1, 2, rng.getrandbits(31), rng.getrandbits(64)]))
            elif kind == 2:
                content = rng.randbytes(rng.randrange(24))
                message += _varint(len(content)) + content
            else:
                message += rng.randbytes(8 if kind == 1 else 4)
        yield message


async def call_with_bytes(
    channel: grpc.aio.Channel, path: str, payload: bytes, *, streams: bool = False
) -> grpc.StatusCode:
    """Send raw bytes to a method and return the status; a streaming one is read once."""
    if streams:
        stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
        return await stream_status(lambda: stream(iter([payload]), timeout=20))
    send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
    try:
        await send(payload, timeout=20)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def stream_status(
    open_call: Callable[[], grpc.aio.StreamStreamCall[bytes, bytes]],
) -> grpc.StatusCode:
    """The server's status of a stream that is read to its end.

    Asked again when the client lost it: a message that was still being sent as the
    server ended the call makes grpc.aio put a status of its own over the server's.
    """
    for _ in range(50):
        call = open_call()
        try:
            async for _ in call:
                pass
        except grpc.RpcError as error:
            if error_of(error).reason == "CALL_ENDED":
                continue
        return await call.code()
    raise AssertionError("the client lost the server's status every time")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)

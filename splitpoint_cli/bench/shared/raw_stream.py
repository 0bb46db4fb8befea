"""A server whose only method streams one message over and over: gRPC with nothing around it.

    python -m splitpoint_cli.bench.shared.raw_stream --listen ADDRESS --parent-fd N

The limit that `splitpoint bench store` measures the store's streams against. A
request is two numbers as text, "SIZE COUNT"; messages are plain bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from splitpoint.errors import Unavailable
from splitpoint.options.option import parser_of
from splitpoint.options.service import COMMON
from splitpoint.service import announce_ready, run_service, stop_on_signals, watch_parent

SERVICE = "splitpoint.bench.RawStream"
METHOD = "Read"


async def _read(request: bytes, context: Any) -> AsyncIterator[bytes]:
    size, count = (int(number) for number in request.split())
    message = os.urandom(size)
    for _ in range(count):
        yield message


async def _serve(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    watch_parent(arguments.parent_fd, stop)
    server = grpc.aio.server()
    handler: Any = grpc.unary_stream_rpc_method_handler(_read)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
    )
    try:
        port = server.add_insecure_port(arguments.listen)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {arguments.listen}") from error
    await server.start()
    try:
        announce_ready(f"{arguments.listen.rpartition(':')[0]}:{port}")
        await stop.wait()
    finally:
        await server.stop(None)


def main() -> int:
    arguments = parser_of("raw_stream", __doc__, COMMON).parse_args()
    return run_service("raw stream", _serve, arguments, COMMON)


if __name__ == "__main__":
    sys.exit(main())

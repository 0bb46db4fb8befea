"""Peers that compute, hang or are stopped, with real processes: which of them is given up.

About 8 s.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from splitpoint.transport.channels import open_channel
from splitpoint.transport.limits import WATCH_ANSWER_SECONDS, WATCH_SECONDS
from splitpoint.transport.statuses import NO_ANSWER, error_of

# Longer than a watched peer may stay silent.
BUSY_SECONDS = int(WATCH_SECONDS + WATCH_ANSWER_SECONDS) + 2

SERVER = """
import asyncio, ctypes, sys, time
import grpc
from splitpoint.transport.servers import create_server, listen

class Handler(grpc.GenericRpcHandler):
    def service(self, details):
        async def run(requests, context):
            yield b"began"
            if details.method == "/test/interpreter":
                # PyDLL keeps the interpreter's lock: no Python thread runs meanwhile.
                ctypes.PyDLL(None).sleep(int(sys.argv[2]))
            elif details.method == "/test/loop":
                time.sleep(int(sys.argv[2]))
            else:
                await asyncio.sleep(int(sys.argv[2]))
            yield b"done"
        return grpc.stream_stream_rpc_method_handler(run)

async def main():
    server = create_server()
    server.add_generic_rpc_handlers((Handler(),))
    listen(server, sys.argv[1])
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()

asyncio.run(main())
"""


@asynccontextmanager
async def server_process(address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SERVER, address, str(BUSY_SECONDS)), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60) == b"ready\n"
        yield process
    finally:
        process.kill()
        await process.wait()


async def began_again(channel: grpc.aio.Channel) -> bool:
    """Return True if a new call is answered, False if its connection was given up."""
    call: Any = channel.stream_stream("/test/idle")(wait_for_ready=True)
    try:
        return bool(await call.read() == b"began")
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False
    finally:
        call.cancel()


async def test_a_busy_peer_is_kept_and_a_stopped_one_is_given_up(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    async with (
        server_process(address) as process,
        open_channel(address, is_watched=True) as channel,
    ):
        idle: Any = channel.stream_stream("/test/idle")()
        busy: Any = channel.stream_stream("/test/loop")()
        assert [await idle.read(), await busy.read()] == [b"began", b"began"]
        assert [await idle.read(), await busy.read()] == [b"done", b"done"]
        locked: Any = channel.stream_stream("/test/interpreter")()
        assert await locked.read() == b"began"
        assert await locked.read() == b"done"
        stopped: Any = channel.stream_stream("/test/idle")()
        assert await stopped.read() == b"began"
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stopped.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error_of(caught.value).message == NO_ANSWER
        process.send_signal(signal.SIGCONT)
        # The same channel connects again; on a busy machine not at once.
        async with asyncio.timeout(60):
            while not await began_again(channel):
                await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "text",
    [
        "ping timeout (ping timeout)",
        "Delayed close due to in-progress write (ping timeout) (goaway sent)",
    ],
)
def test_both_texts_of_an_unanswered_ping_say_the_same(text: str) -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, text)
    assert error_of(error).message == NO_ANSWER

"""The scheduler's end of one Run stream: commands out, one message per engine step in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from splitpoint.v1 import worker_pb2, worker_pb2_grpc

# A worker accepts the stream by sending its headers. One that has sent neither headers nor
# an error after this long is treated as if it had accepted.
_ACCEPT_SECONDS = 0.5


class RunStream:
    """An open stream. Its commands are sent in order."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._commands: asyncio.Queue[worker_pb2.RunRequest] = asyncio.Queue()

    def admit(self, command: worker_pb2.AdmitCommand) -> None:
        self._commands.put_nowait(worker_pb2.RunRequest(admit=command))

    def cancel(self, request_id: str, attempt: int) -> None:
        command = worker_pb2.CancelCommand(request_id=request_id, attempt=attempt)
        self._commands.put_nowait(worker_pb2.RunRequest(cancel=command))

    def set_paused(self, request_id: str, paused: bool) -> None:
        if paused:
            request = worker_pb2.RunRequest(pause=worker_pb2.PauseCommand(request_id=request_id))
        else:
            request = worker_pb2.RunRequest(resume=worker_pb2.ResumeCommand(request_id=request_id))
        self._commands.put_nowait(request)

    def responses(self) -> AsyncIterator[worker_pb2.RunResponse]:
        """Iterate until the worker ends the stream. Raises grpc.RpcError if it breaks."""
        responses: AsyncIterator[worker_pb2.RunResponse] = aiter(self._call)
        return responses

    async def wait_accepted(self) -> None:
        """Raises grpc.RpcError if the worker refuses the stream."""
        headers = asyncio.ensure_future(self._call.initial_metadata())
        try:
            await asyncio.wait({headers}, timeout=_ACCEPT_SECONDS)
        finally:
            headers.cancel()
        if self._call.done():
            await self._call.read()  # raises the reason

    async def send_commands(self) -> None:
        """Send until the stream ends.

        gRPC's own sending of an iterator would be left waiting when a call is refused.
        """
        while True:
            command = await self._commands.get()
            try:
                await self._call.write(command)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # reading the stream raises the reason


@asynccontextmanager
async def open_run_stream(stub: worker_pb2_grpc.WorkerServiceStub) -> AsyncIterator[RunStream]:
    """Open a stream for the length of the context. Raises grpc.RpcError if it is refused."""
    call: Any = stub.Run()
    stream = RunStream(call)
    sending = asyncio.create_task(stream.send_commands())
    try:
        await stream.wait_accepted()
        yield stream
    finally:
        call.cancel()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

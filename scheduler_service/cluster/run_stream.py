"""One Run stream: commands up, one message per engine step down.

Also the rule by which step messages are taken: each token exactly once, in
order, from the attempt that counts. Knows no queue and no memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from splitpoint.v1 import worker_pb2, worker_pb2_grpc

# A worker that accepts the stream says so with its headers. One that sends
# nothing until its first step is taken at its silence after this long.
_ACCEPT_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Accepted:
    """The part of the result that is new starts at `offset`."""

    offset: int


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Every token of it was taken before."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Tokens between what was taken and this are missing: the stream lies."""

    expected_index: int
    first_index: int


def take(first_index: int, token_count: int, expected_index: int) -> Accepted | Duplicate | Gap:
    """What of tokens [first_index, first_index + token_count) continues at `expected_index`."""
    if first_index > expected_index:
        return Gap(expected_index, first_index)
    if first_index + token_count <= expected_index:
        return Duplicate()
    return Accepted(expected_index - first_index)


class RunStream:
    """The scheduler's end of a worker's Run stream. Serve it once."""

    def __init__(self, stub: worker_pb2_grpc.WorkerServiceStub) -> None:
        self._stub = stub
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

    async def serve(
        self,
        on_open: Callable[[], None],
        on_step: Callable[[worker_pb2.RunResponse], None],
    ) -> None:
        """Until the worker ends the stream. Raises grpc.RpcError when it breaks."""
        call = self._stub.Run()
        sending = asyncio.create_task(self._send(call))
        try:
            await self._accepted(call)
            on_open()
            async for response in call:
                on_step(response)
        finally:
            call.cancel()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _accepted(self, call: Any) -> None:
        headers = asyncio.ensure_future(call.initial_metadata())
        try:
            await asyncio.wait({headers}, timeout=_ACCEPT_SECONDS)
        finally:
            headers.cancel()
        if call.done():
            # Refused: reading tells why.
            await call.read()

    async def _send(self, call: Any) -> None:
        """Commands in order, for as long as the stream takes them.

        Not through an iterator: gRPC abandons that, still waiting, when a call is refused.
        """
        while True:
            command = await self._commands.get()
            try:
                await call.write(command)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # the stream's end is told to whoever reads it

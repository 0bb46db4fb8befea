"""Has the own store load chunks into its arena: from one of its tiers, or from another store.

The payload passes neither through these calls nor through the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from splitpoint.errors import Unavailable
from splitpoint.tiers import ChunkSource
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from worker_service.store.cleanups import Cleanups
from worker_service.store.client import StoreClient

# Time limit between two messages: each batch is at most 64 MiB.
SILENCE_SECONDS = 30.0


async def load_chunks(
    store: StoreClient,
    cleanups: Cleanups,
    source: ChunkSource,
    salt: bytes,
    tokens: Sequence[int],
    loaded: Callable[[pb.LoadChunksResponse], None],
) -> None:
    """Load what the arena lacks of `tokens`. Calls `loaded` after each batch.

    The leases that protect the chunks meanwhile are released at the end, also if this is
    cancelled. Raises what the store answers, and Unavailable if it is away or silent.
    """
    connection = store.connection
    if connection is None:
        raise Unavailable("the KV store is away", reason="STORE_LOST")
    call = store.load_chunks(connection, salt, tokens, source)

    async def end(*responses: pb.LoadChunksResponse | None) -> None:
        call.cancel()
        leases = [response.lease_id for response in responses if response is not None]
        await store.release(connection, lease_ids=leases)

    # The first message names the lease: a call that is cancelled before it came waits for it.
    response = await cleanups.obtain(_next(call), end)
    leasing = response
    try:
        while response is not None:
            loaded(response)
            leasing = response
            response = await _next(call)
    finally:
        await cleanups.finish(end(leasing))


async def _next(call: Any) -> pb.LoadChunksResponse | None:
    """Return the next message; None at the end. Raises what the store answers."""
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            response = await call.read()
    except TimeoutError:
        raise Unavailable(
            f"the store loaded nothing for {SILENCE_SECONDS:g} s", reason="STALLED"
        ) from None
    except grpc.RpcError as error:
        raise error_of(error) from error
    return None if response is grpc.aio.EOF else response

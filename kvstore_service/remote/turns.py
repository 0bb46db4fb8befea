"""Limits and ends the streams of a store.

Streams copy one piece at a time on the event loop, about 0.3 ms for 1 MiB. Threads, which would
need the interpreter's lock for the encoding anyway, made a stream five times slower. When a
session ends between two pieces, nothing touches its slots, and they are free at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore_service.sessions import Session
from kvstore_service.store import KvStore
from splitpoint.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    ResourceExhausted,
    Unavailable,
)

STREAM_LIMIT = 8
# How long a stream waits for its turn.
TURN_SECONDS = 10.0
# Time limit of a peer for one piece.
PIECE_SECONDS = 30.0


class StreamTurns:
    """All streams of one store. Setting `stopping` ends them."""

    def __init__(self, store: KvStore, stopping: asyncio.Event) -> None:
        self.stopping = stopping
        self._store = store
        self._turns = asyncio.Semaphore(STREAM_LIMIT)

    def remote_session(self, session_id: bytes) -> Session:
        """Return an open remote session. Raises FailedPrecondition for a session that maps."""
        session = self._store.sessions.live(session_id)
        if not session.is_remote:
            raise FailedPrecondition(
                "the session maps the arena: it needs no stream", reason="NOT_REMOTE"
            )
        return session

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, and keep it inside the block. Raises ResourceExhausted."""
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            raise ResourceExhausted(
                f"{STREAM_LIMIT} streams are open already",
                retry_after_seconds=1.0,
                reason="TOO_MANY_STREAMS",
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    def check_stopping(self) -> None:
        """Raise Unavailable if the store is stopping."""
        if self.stopping.is_set():
            raise Unavailable("the store is stopping", reason="STOPPING")


def stalled() -> DeadlineExceeded:
    return DeadlineExceeded(f"no piece moved for {PIECE_SECONDS:g} s", reason="STALLED")

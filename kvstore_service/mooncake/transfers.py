"""Transfers from other stores: leased there by gRPC, read by Mooncake straight into own slots."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvstore_service.mooncake.process import MooncakeProcess, seconds_for
from kvstore_service.tiers.tier import TransferEndpoint, TransferStats
from splitpoint.errors import FailedPrecondition, SplitpointError, Unavailable
from splitpoint.keys import KEY_BYTES
from splitpoint.options.store import ENGINE
from splitpoint.shapes import ArenaLayout
from splitpoint.transport.store_session import RemoteSession, call_once, remote_session
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2

CLIENT_NAME = "store"


class MooncakeTransfer:
    """A ChunkTransfer.

    Args:
        server: lets other stores read this arena.
        reader: reads theirs.
        layout: of the own arena.
        identity: what this store shows to other stores.
    """

    def __init__(
        self,
        server: MooncakeProcess,
        reader: MooncakeProcess,
        layout: ArenaLayout,
        identity: Identity = PLAIN,
    ) -> None:
        self._server = server
        self._reader = reader
        self._layout = layout
        self._identity = identity
        self._stats = TransferStats(server.stats.interface, engine=ENGINE)

    @property
    def stats(self) -> TransferStats:
        """Facts of both processes, and the counts of all reads."""
        server, reader, stats = self._server.stats, self._reader.stats, self._stats
        stats.is_up = server.is_up and reader.is_up
        stats.message = server.message or reader.message
        stats.segment, stats.registered_bytes = server.segment, server.registered_bytes
        stats.restart_count = server.restart_count + reader.restart_count
        return stats

    @property
    def endpoint(self) -> TransferEndpoint | None:
        return self._server.endpoint

    @asynccontextmanager
    async def open(
        self, address: str, salt: bytes, token_ids: Sequence[int]
    ) -> AsyncIterator[RemoteChunks]:
        """Lease a sequence's chunks in the store at an address; release them at the end."""
        reader = self._reader.stats
        if not reader.is_up:
            raise Unavailable(f"Mooncake is away: {reader.message}", reason="MOONCAKE")
        async with remote_session(
            address, CLIENT_NAME, self._layout.layout_hash, self._identity
        ) as session:
            if not session.attached.HasField("transfer"):
                raise FailedPrecondition(
                    f"the store at {address} has no Mooncake transfer, or is not ready for it",
                    reason="NO_TRANSFER",
                )
            found = await session.match(salt, token_ids)
            sequence = _Leased(salt, token_ids, found)
            yield RemoteChunks(self._reader, self._stats, self._layout, session, sequence)

    async def start(self) -> None:
        await self._server.start()
        await self._reader.start()

    async def close(self) -> None:
        await self._reader.close()
        await self._server.close()


@dataclass(frozen=True, slots=True)
class _Leased:
    """A sequence, and what the source leased of it."""

    salt: bytes
    token_ids: Sequence[int]
    found: pb.MatchResponse


class RemoteChunks:
    """A sequence's full chunks in another store, leased there. A ChunkSource."""

    def __init__(
        self,
        reader: MooncakeProcess,
        stats: TransferStats,
        layout: ArenaLayout,
        session: RemoteSession,
        sequence: _Leased,
    ) -> None:
        self._reader = reader
        self._stats = stats
        self._layout = layout
        self._session = session
        self._sequence = sequence
        found = sequence.found
        self._chunks = {
            key: handle
            for key, handle in zip(found.chunk_keys, found.chunks, strict=True)
            if handle.token_count == layout.chunk_tokens and len(key) == KEY_BYTES
        }

    async def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._chunks for key in keys]

    async def read(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[int | None]:
        """Read chunks into own slots.

        Return each checksum that the source committed; None for a chunk that it does not have,
        or whose slot it reused while it was read.
        """
        known = [index for index, key in enumerate(keys) if key in self._chunks]
        handles = [self._chunks[keys[index]] for index in known]
        if handles:
            await self._transfer(handles, [slots[index] for index in known])
        still = await self._still_there() if handles else set()
        checksums: list[int | None] = [None] * len(keys)
        stats = self._stats
        for index, handle in zip(known, handles, strict=True):
            if (keys[index], handle.slot, handle.generation) in still:
                checksums[index] = handle.checksum
                stats.read_chunk_count += 1
                stats.read_bytes += self._layout.chunk_bytes
        return checksums

    async def drop(self, keys: Sequence[bytes]) -> None:
        """Have the source read chunks back: what came over was not what it committed."""
        handles = [self._chunks.pop(key) for key in keys if key in self._chunks]
        if handles:
            self._stats.failed_read_count += 1
            request = pb.ReportChunksRequest(
                session_id=self._session.session_id,
                request_id=handles[0].SerializeToString()[:64],
                chunks=handles,
            )
            try:
                await call_once(self._session.stub.ReportChunks, request)
            except SplitpointError:
                return  # the source finds it by itself

    async def _transfer(
        self, handles: Sequence[types_pb2.SlotHandle], targets: Sequence[int]
    ) -> None:
        attached = self._session.attached
        try:
            await self._reader.call(
                "read",
                seconds_for(len(handles) * self._layout.chunk_bytes),
                segment=attached.transfer.segment,
                address=attached.transfer.arena_address,
                slot_count=attached.slot_count,
                sources=[handle.slot for handle in handles],
                targets=list(targets),
            )
        except (Unavailable, asyncio.CancelledError):
            self._stats.failed_read_count += 1
            raise

    async def _still_there(self) -> set[tuple[bytes, int, int]]:
        """Ask the source which chunks of the sequence it has now: key, slot and generation."""
        now = await self._session.peek(self._sequence.salt, self._sequence.token_ids)
        if now.epoch != self._sequence.found.epoch:
            raise Unavailable("the source restarted while it was read", reason="SOURCE_LOST")
        return {
            (key, handle.slot, handle.generation)
            for key, handle in zip(now.chunk_keys, now.chunks, strict=True)
        }

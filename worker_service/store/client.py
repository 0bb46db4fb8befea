"""The worker's calls of the KV store: match, reserve, seal, release and report chunks.

Chunk bytes do not pass through these calls, but through `ArenaTensors`. All methods run on
the event loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from splitpoint.errors import Unavailable
from splitpoint.keys import chunk_key
from splitpoint.observe import tracing
from splitpoint.shapes import ArenaLayout
from splitpoint.tiers import ChunkSource, Tier
from splitpoint.transport.cleanups import Cleanups
from splitpoint.transport.convert import tier_to_proto
from splitpoint.transport.store_session import (
    GOODBYE_SECONDS,
    StoreSession,
    call_once,
    granted_slots,
)
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2
from worker_service.device.pinning import Pinning
from worker_service.device.populating import Populator
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.session import Connection, MappedArena

# Chunks of one ReportChunks call: a few GiB, which a store reads back within a second.
REPORT_CHUNKS = 256
# How long a request waits for an answer, and how much longer for each token that it names: less
# than computing them takes.
ANSWER_SECONDS = 1.0
ANSWER_SECONDS_PER_TOKEN = 20e-6


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix, leased.

    Attributes:
        cached_tokens: number of matched tokens. The match may end inside the last chunk.
        storable_tokens: number of leading tokens that the store accepts. None: all.
    """

    connection: Connection
    cached_tokens: int
    chunks: tuple[StoredChunk, ...]
    lease_id: int
    storable_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """A slot whose payload is complete, ready to be sealed."""

    slot: int
    generation: int
    parent_key: bytes
    token_ids: tuple[int, ...]
    checksum: int


@dataclass(frozen=True, slots=True)
class Sealed:
    chunks: tuple[StoredChunk, ...]
    lease_id: int


class StoreClient:
    """A client of the store on this host. Begin with `start`, end with `close`.

    Attributes:
        pinning: page-locks every arena that is attached. None if nothing is locked.
    """

    def __init__(
        self,
        address: str,
        client_name: str,
        *,
        identity: Identity = PLAIN,
        pinning: Pinning | None = None,
        populator: Populator | None = None,
    ) -> None:
        """`populator` populates the mapping of every arena that is attached."""
        self.address = address
        self.client_name = client_name
        self.identity = identity
        self.pinning = pinning
        arena = MappedArena(pinning, populator)
        self._session = StoreSession(address, client_name, arena, identity)
        self._request_numbers = itertools.count(1)
        self._cleanups = Cleanups()

    # -- the session ------------------------------------------------------------

    @property
    def connection(self) -> Connection | None:
        """The current session. None while the store is away."""
        return self._session.connection

    @property
    def is_silent(self) -> bool:
        """True while an answer of the store is late. No request should wait for another one."""
        return self._cleanups.has_late

    def on_reattach(
        self, *, quiesce: Callable[[], Awaitable[None]], reattached: Callable[[], None]
    ) -> None:
        """Set the callbacks of a lost session; see `StoreSession`."""
        self._session.quiesce = quiesce
        self._session.reattached = reattached

    async def layout(self, timeout: float = 30.0) -> ArenaLayout:
        """Return the store's layout without attaching. Waits for the store to be there."""
        return await self._session.layout(timeout)

    async def start(self, layout: ArenaLayout) -> None:
        """Attach; see `StoreSession.start`."""
        await self._session.start(layout)

    async def wait_connected(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a session. Return True if there is one."""
        return await self._session.wait_connected(timeout)

    async def attach_now(self) -> None:
        """Without a session, start an attempt to attach at once, and wait for it briefly."""
        await self._session.attach_now()

    async def close(self) -> None:
        """End the session. The store frees what it held."""
        await self._cleanups.wait(GOODBYE_SECONDS)
        await self._session.close()
        if self.pinning is not None:
            await self.pinning.close()

    # -- calls ------------------------------------------------------------------

    async def match(
        self, salt: bytes, token_ids: Sequence[int], *, is_patient: bool = True
    ) -> Match:
        """Lease the longest cached prefix of the tokens.

        `is_patient`: wait for as long as the session lasts. Otherwise raises Unavailable if the
        answer is late, or another one is: computing is faster then.
        """
        connection = self._session.require()
        self._check_answers(is_patient)
        request = pb.MatchRequest(
            session_id=connection.session_id,
            request_id=self._request_id(),
            tenant_salt=salt,
            token_ids=token_ids,
        )
        seconds = ANSWER_SECONDS + len(token_ids) * ANSWER_SECONDS_PER_TOKEN
        answer = await self._cleanups.obtain(
            self._session.call(connection, self._session.stub.Match, request),
            lambda answer: self.release(connection, lease_ids=[answer.lease_id]),
            within=None if is_patient else seconds,
        )
        chunks = tuple(
            StoredChunk.from_proto(handle, key)
            for handle, key in zip(answer.chunks, answer.chunk_keys, strict=True)
        )
        connection.tensors.note_use(chunk.slot for chunk in chunks)
        storable = answer.storable_tokens if answer.HasField("storable_tokens") else None
        return Match(connection, answer.cached_tokens, chunks, answer.lease_id, storable)

    def _check_answers(self, is_patient: bool) -> None:
        """Raise Unavailable if the caller does not wait for a silent store."""
        if self.is_silent and not is_patient:
            raise Unavailable("an answer of the KV store is late", reason="STORE_SILENT")

    def load_chunks(
        self, connection: Connection, salt: bytes, token_ids: Sequence[int], source: ChunkSource
    ) -> Any:
        """Have the store load chunks into its arena. Return the stream of LoadChunksResponse."""
        return self._session.stub.LoadChunks(
            pb.LoadChunksRequest(
                session_id=connection.session_id,
                request_id=self._request_id(),
                tenant_salt=salt,
                token_ids=token_ids,
                tier=types_pb2.TIER_UNSPECIFIED if source.address else tier_to_proto(source.tier),
                source_address=source.address,
            ),
            metadata=tracing.metadata(),
        )

    async def fill(
        self,
        connection: Connection,
        tier: Tier,
        granted: Sequence[tuple[int, int]],
        keys: Sequence[bytes],
    ) -> list[int | None]:
        """Have the store fill granted slots from one of its tiers.

        Return a checksum for each slot, None if the tier lacks its chunk or had it damaged.
        Raises Unavailable if the tier is away: the store may be up.
        """
        answer = await call_once(
            self._session.stub.FillSlots,
            pb.FillSlotsRequest(
                session_id=connection.session_id,
                tier=tier_to_proto(tier),
                slots=[
                    pb.SlotToFill(slot=slot, generation=generation, chunk_key=key)
                    for (slot, generation), key in zip(granted, keys, strict=True)
                ],
            ),
        )
        return [slot.checksum if slot.is_filled else None for slot in answer.slots]

    async def reserve(
        self, connection: Connection, salt: bytes, slot_count: int, *, is_patient: bool = True
    ) -> list[tuple[int, int]]:
        """Reserve slots. Return (slot, generation) pairs, in as few runs as possible.

        `is_patient`: see `match`.
        """
        self._check_answers(is_patient)
        request = pb.ReserveRequest(
            session_id=connection.session_id,
            request_id=self._request_id(),
            slot_count=slot_count,
            tenant_salt=salt,
        )
        answer = await self._cleanups.obtain(
            self._session.call(connection, self._session.stub.Reserve, request),
            lambda answer: self.release(connection, slots=granted_slots(answer)),
            within=None if is_patient else ANSWER_SECONDS,
        )
        return granted_slots(answer)

    async def seal(
        self, connection: Connection, salt: bytes, chunks: Sequence[WrittenChunk], lease_id: int
    ) -> Sealed:
        """Publish written slots. They stay leased until `release`."""
        answer = await self._session.call(
            connection,
            self._session.stub.Seal,
            pb.SealRequest(
                session_id=connection.session_id,
                request_id=self._request_id(),
                tenant_salt=salt,
                chunks=[
                    pb.SealChunk(
                        slot=chunk.slot,
                        generation=chunk.generation,
                        parent_key=chunk.parent_key,
                        token_ids=chunk.token_ids,
                        checksum=chunk.checksum,
                    )
                    for chunk in chunks
                ],
                lease_id=lease_id,
                keep_leased=True,
            ),
        )
        sealed = tuple(StoredChunk.from_proto(each.handle, each.key) for each in answer.chunks)
        return Sealed(sealed, answer.lease_id)

    async def release(
        self,
        connection: Connection,
        *,
        lease_ids: Sequence[int] = (),
        slots: Sequence[tuple[int, int]] = (),
        used: Sequence[StoredChunk] = (),
    ) -> None:
        """Give up leases and unwritten slots of this connection's session.

        `used`: chunks of the leases that were read more often than the others.

        Raises Unavailable if the answer is late. The store is told all the same.
        """
        lease_ids = [lease_id for lease_id in lease_ids if lease_id]
        if not lease_ids and not slots:
            return
        request = pb.ReleaseRequest(
            session_id=connection.session_id,
            request_id=self._request_id(),
            lease_ids=lease_ids,
            slots=[
                types_pb2.SlotHandle(slot=slot, generation=generation) for slot, generation in slots
            ],
            used_chunks=[
                types_pb2.SlotHandle(slot=chunk.slot, generation=chunk.generation) for chunk in used
            ],
        )
        await self._cleanups.obtain(
            self._session.call(connection, self._session.stub.Release, request),
            _nothing_to_give_back,
            within=0.0 if self.is_silent else ANSWER_SECONDS,
        )

    async def report(self, connection: Connection, chunks: Sequence[StoredChunk]) -> int:
        """Have the store read suspect chunks back. Return how many it no longer has."""
        if self.connection is not connection:
            return len(chunks)
        lost = 0
        for start in range(0, len(chunks), REPORT_CHUNKS):
            answer = await self._session.call(
                connection,
                self._session.stub.ReportChunks,
                pb.ReportChunksRequest(
                    session_id=connection.session_id,
                    request_id=self._request_id(),
                    chunks=[
                        types_pb2.SlotHandle(slot=chunk.slot, generation=chunk.generation)
                        for chunk in chunks[start : start + REPORT_CHUNKS]
                    ],
                ),
            )
            lost += answer.lost_chunk_count
        return lost

    def _request_id(self) -> bytes:
        return next(self._request_numbers).to_bytes(8, "little")


def written_chunks(
    layout_hash: bytes,
    salt: bytes,
    parent_key: bytes,
    granted: Sequence[tuple[int, int]],
    token_ids: Sequence[tuple[int, ...]],
    checksums: Sequence[int],
) -> tuple[list[WrittenChunk], bytes]:
    """Name the parent of each written chunk. Return the chunks, and the key of the last one.

    The store computes the keys again and compares them.
    """
    chunks = []
    for (slot, generation), tokens, checksum in zip(granted, token_ids, checksums, strict=True):
        chunks.append(WrittenChunk(slot, generation, parent_key, tokens, checksum))
        parent_key = chunk_key(layout_hash, salt, parent_key, tokens)
    return chunks, parent_key


async def _nothing_to_give_back(_: object) -> None:
    """Do nothing."""

"""Seals written slots: reads payloads back, compares checksums, and publishes the chunks.

Used by Seal and WriteChunks alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from kvstore_service.maintenance import Maintenance
from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.store import KvStore, SealOutcome
from splitpoint.arena.format import ArenaFormatError

# Payload that is read back on the event loop: about 0.1 ms, which is less than a switch to
# another thread takes.
READ_AT_ONCE_BYTES = 256 << 10


class Sealer:
    """Seals the chunks of one store.

    Args:
        threads: read the payloads of calls with more than `read_at_once_bytes`.
    """

    def __init__(
        self,
        store: KvStore,
        maintenance: Maintenance,
        threads: ThreadPoolExecutor,
        read_at_once_bytes: int = READ_AT_ONCE_BYTES,
    ) -> None:
        self._store = store
        self._maintenance = maintenance
        self._threads = threads
        self._read_at_once_bytes = read_at_once_bytes

    async def seal(
        self,
        session_id: bytes,
        salt: bytes,
        chunks: Sequence[WrittenChunk],
        *,
        lease_id: int,
        keep_leased: bool,
    ) -> SealOutcome:
        """Seal each chunk whose payload has its checksum. Raises what `KvStore.seal` raises."""
        unchanged = self._store.pool.grants.checking([chunk.slot for chunk in chunks])
        with self._store.protect_parents(chunks), unchanged:
            await self._maintenance.verify(lambda: self._store.recovered.in_seal(salt, chunks))
            damages = await self.read_back(chunks)
            return self._store.seal(
                session_id, salt, chunks, damages, lease_id=lease_id, keep_leased=keep_leased
            )

    async def read_back(self, chunks: Sequence[WrittenChunk]) -> Sequence[ArenaFormatError | None]:
        """Compare each payload with its checksum. Return None for an intact one."""
        if len(chunks) * self._store.arena.layout.chunk_bytes <= self._read_at_once_bytes:
            return self._store.verify(chunks)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._store.verify, chunks)

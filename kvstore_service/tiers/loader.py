"""Loads chunks from tiers: LoadChunks into the arena, FillSlots into slots granted to a session.

LoadChunks goes batch by batch: reserve slots, read into them, compare each payload with its
checksum, seal and lease. So do the loads of MatchPages, where no page needs another. Loads with the
same first chunk take turns, so that the second finds what the first has loaded. With FillSlots the
session computes the front of a sequence meanwhile, and seals the slots behind it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass
from itertools import compress, islice

from kvstore_service import validation
from kvstore_service.maintenance import Maintenance
from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.pool.prefix_index import PageNames
from kvstore_service.recovery import damage_of
from kvstore_service.slots import Reserver, Sealer, places
from kvstore_service.store import KvStore
from kvstore_service.tiers.manager import TierManager
from kvstore_service.tiers.tier import ChunkSource, ChunkTransfer, leading
from splitpoint.errors import FailedPrecondition, NotFound, ResourceExhausted, Unavailable
from splitpoint.keys import chunk_keys, page_words
from splitpoint.tasks import NamedTurns
from splitpoint.tiers import ChunkSource as Origin
from splitpoint.tiers import Tier
from splitpoint.transport.convert import tier_from_proto
from splitpoint.v1 import kvstore_pb2 as pb

_log = logging.getLogger(__name__)


class SlotFiller:
    """Carries out the FillSlots calls of one store. `threads` compare checksums."""

    def __init__(self, store: KvStore, tiers: TierManager, threads: ThreadPoolExecutor) -> None:
        self._store = store
        self._tiers = tiers
        self._threads = threads

    async def fill(self, request: pb.FillSlotsRequest) -> pb.FillSlotsResponse:
        """Read, compare, answer. See FillSlots in kvstore.proto."""
        granted = validation.check_fill(request, self._store.arena.slot_count)
        name = tier_from_proto(request.tier)
        tier = self._tiers.tier(name)
        self._check_granted(request.session_id, granted)
        keys = [each.chunk_key for each in request.slots]
        slots = [slot for slot, _ in granted]
        # The session may end meanwhile, and its slots must not be reused then. The keys may be
        # those of another tenant's chunks.
        with self._store.pool.grants.filling(slots):
            checksums = await self._tiers.read(name, keys, slots)
            damaged = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._damaged, slots, checksums
            )
        if damaged:
            await tier.drop([keys[index] for index in damaged])
        filled = [
            checksum is not None and index not in damaged
            for index, checksum in enumerate(checksums)
        ]
        writer = self._tiers.writers[name]
        writer.know(list(compress(keys, filled)))
        writer.forget(key for key, is_filled in zip(keys, filled, strict=True) if not is_filled)
        return pb.FillSlotsResponse(
            slots=[
                pb.FilledSlot(is_filled=True, checksum=checksum) if is_filled else pb.FilledSlot()
                for checksum, is_filled in zip(checksums, filled, strict=True)
            ]
        )

    def _check_granted(self, session_id: bytes, granted: Sequence[tuple[int, int]]) -> None:
        """Raise FailedPrecondition unless the session may write into all of these slots.

        No call fills a slot that another one fills or seals: the bytes would change behind its
        comparison of the checksum.
        """
        session = self._store.sessions.arena_user(session_id)
        grants = self._store.pool.grants
        for slot, generation in granted:
            if session.granted.get(slot) != generation:
                raise FailedPrecondition(
                    f"slot {slot} is not granted to this session in generation {generation}",
                    reason="NOT_GRANTED",
                )
            if slot in grants.copied or slot in grants.checked:
                raise FailedPrecondition(
                    f"slot {slot} is being filled or sealed by another call", reason="IN_USE"
                )

    def _damaged(self, slots: Sequence[int], checksums: Sequence[int | None]) -> set[int]:
        """Return the indices of payloads that differ from their checksums. Slow."""
        arena = self._store.arena
        return {
            index
            for index, (slot, checksum) in enumerate(zip(slots, checksums, strict=True))
            if checksum is not None
            and damage_of(arena, slot, arena.layout.chunk_tokens, checksum) is not None
        }


# Most bytes of a batch; a slower source gets smaller ones, so that progress is reported often.
BATCH_BYTES = 64 << 20
BATCH_SECONDS = 0.25


@dataclass(slots=True)
class Load:
    """One call.

    Attributes:
        keys, parents, rows: key, parent key and tokens of each chunk, in order.
        is_sequence: a chunk is of use only after those before it. False: pages.
        tier: None if the source is another store.
        lease_id: lease on the chunks in the arena; 0 until there are any.
        done: number of leading chunks that are in the arena; of pages that were tried.
    """

    session_id: bytes
    salt: bytes
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    rows: Sequence[tuple[int, ...]]
    is_sequence: bool
    tier: Tier | None
    lease_id: int = 0
    done: int = 0
    loaded_bytes: int = 0
    transfer_seconds: float = 0.0


class ChunkLoader:
    """Carries out the LoadChunks calls of one store, and the loads of MatchPages.

    Args:
        transfer: reads other stores' arenas. None: LoadChunks reads from tiers only.
    """

    def __init__(
        self,
        store: KvStore,
        maintenance: Maintenance,
        reserver: Reserver,
        sealer: Sealer,
        tiers: TierManager,
        transfer: ChunkTransfer | None,
    ) -> None:
        self._store = store
        self._maintenance = maintenance
        self._reserver = reserver
        self._sealer = sealer
        self._tiers = tiers
        self._transfer = transfer
        self._turns = NamedTurns()

    async def load(self, request: pb.LoadChunksRequest) -> AsyncGenerator[pb.LoadChunksResponse]:
        """Yield an answer after each batch. See LoadChunks in kvstore.proto."""
        origin = validation.check_load(request)
        arena, salt = self._store.arena, request.tenant_salt
        size = arena.layout.chunk_tokens
        tokens = request.token_ids[: min(len(request.token_ids) // size, arena.slot_count) * size]
        keys = list(chunk_keys(arena.layout.layout_hash, salt, tokens, size))
        self._store.sessions.arena_user(request.session_id)
        opening = self._opening(origin, salt, tokens)
        load = Load(
            session_id=request.session_id,
            salt=salt,
            keys=keys,
            parents=[b"", *keys[:-1]],
            rows=[tuple(tokens[i : i + size]) for i in range(0, len(tokens), size)],
            is_sequence=True,
            tier=None if origin.address else origin.tier,
        )
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._turns.turn(keys[0] if keys else b""))
            is_known = False  # the caller knows the lease
            try:
                await self._lease_cached(load, tokens)
                if load.done == len(keys):
                    yield self._progress(load)
                    is_known = True
                    return
                source = await stack.enter_async_context(opening)
                has_more = True
                while has_more:
                    before = load.done
                    has_more = await self._load_batch(load, source)
                    if load.done > before or not is_known:
                        yield self._progress(load)
                        is_known = True
            finally:
                if not is_known and load.lease_id:
                    self._release(load.session_id, [load.lease_id])

    @asynccontextmanager
    async def pages(self, session_id: bytes, names: PageNames) -> AsyncIterator[None]:
        """Load the pages that only tiers hold, in order and as many as fit.

        Pages in the arena stay there inside the block. A tier that is away holds none. Raises
        NotFound or FailedPrecondition if the session ends meanwhile.
        """
        lease_ids: list[int] = []
        with self._store.pool.guard(names.keys):
            try:
                for tier in self._tiers.tiers:
                    absent = self._absent(names)
                    if absent.keys:
                        lease_ids.append(await self._load_pages(session_id, absent, tier))
                yield
            finally:
                self._release(session_id, lease_ids)

    def _absent(self, names: PageNames) -> PageNames:
        """Return those of the pages that the arena lacks."""
        return names.only(entry is None for entry in self._store.pool.index.pages(names))

    async def _load_pages(self, session_id: bytes, names: PageNames, tier: Tier) -> int:
        """Load what a tier holds of these pages. Return the lease on them; 0 if there is none."""
        source, writer = self._tiers.tier(tier), self._tiers.writers[tier]
        load = Load(session_id, names.salt, (), (), (), is_sequence=False, tier=tier)
        try:
            flags = await source.has(names.keys)
            writer.forget(compress(names.keys, (not is_held for is_held in flags)))
            held = names.only(flags)
            if held.keys:
                async with self._turns.turn(held.keys[0]):
                    held = self._absent(held)  # another call may have loaded some
                    load.keys, load.parents = held.keys, [b""] * len(held.keys)
                    load.rows = [page_words(key) for key in held.page_keys]
                    while await self._load_batch(load, source):
                        pass
        except (ResourceExhausted, Unavailable) as error:
            _log.info("%s tier: pages were not loaded: %s", tier, error.message)
        except BaseException:
            self._release(session_id, [load.lease_id])
            raise
        return load.lease_id

    def _opening(
        self, origin: Origin, salt: bytes, tokens: Sequence[int]
    ) -> AbstractAsyncContextManager[ChunkSource]:
        """Return what opens a source. Raises FailedPrecondition if this store does not have it."""
        if not origin.address:
            return nullcontext(self._tiers.tier(origin.tier))
        if self._transfer is None:
            raise FailedPrecondition("this store has no transfer engine", reason="NO_TRANSFER")
        return self._transfer.open(origin.address, salt, tokens)

    def _progress(self, load: Load) -> pb.LoadChunksResponse:
        return pb.LoadChunksResponse(
            cached_tokens=load.done * self._store.arena.layout.chunk_tokens,
            lease_id=load.lease_id,
            loaded_bytes=load.loaded_bytes,
            transfer_seconds=load.transfer_seconds,
            epoch=self._store.epoch,
        )

    def _release(self, session_id: bytes, lease_ids: Sequence[int]) -> None:
        with suppress(NotFound):  # the session ended, and its leases with it
            self._store.sessions.release(session_id, lease_ids, [])

    # -- what the arena has ----------------------------------------------------------------------

    async def _lease_cached(self, load: Load, tokens: Sequence[int]) -> None:
        """Lease the sequence's full chunks that the arena has already."""
        salt = load.salt
        await self._maintenance.verify(lambda: self._store.recovered.in_match(salt, tokens))
        found = self._store.pool.match(salt, tokens).entries if tokens else ()
        entries = [entry for entry, key in zip(found, load.keys, strict=False) if entry.key == key]
        session = self._store.sessions.arena_user(load.session_id)
        if entries:
            load.lease_id = self._store.sessions.lease(session, entries).lease_id
            load.done = len(entries)

    # -- one batch -------------------------------------------------------------------------------

    async def _load_batch(self, load: Load, source: ChunkSource) -> bool:
        """Load the next chunks. Return False if there are none, or the source lost one."""
        keys = load.keys[load.done : load.done + self._batch_size(load.tier)]
        if keys and load.is_sequence:
            keys = keys[: leading(await source.has(keys))]
        if not keys:
            return False
        granted = await self._reserve(load, len(keys))
        keys = keys[: len(granted)]
        try:
            slots = [slot for slot, _ in granted]
            # The session may end during the read, and its slots must not be reused then.
            with self._store.pool.grants.filling(slots):
                checksums = await self._read(load, source, keys, slots)
                intact, damaged = await self._intact(load, keys, granted, checksums)
                if damaged:
                    await source.drop(damaged)
            if load.tier is not None:
                self._tiers.writers[load.tier].forget(set(keys).difference(intact))
            if intact:
                self._seal(load, list(intact.values()))
            load.done += len(intact) if load.is_sequence else len(keys)
            return len(intact) == len(keys) or not load.is_sequence
        finally:
            self._store.sessions.give_up_writing(load.session_id, granted)

    async def _reserve(self, load: Load, count: int) -> list[tuple[int, int]]:
        """Reserve this many slots, or fewer if a tier that stalls keeps some that were counted on.

        Raises ResourceExhausted if there is none.
        """
        pool = self._store.pool
        try:
            runs = await self._reserver.reserve(load.session_id, count, load.salt)
        except ResourceExhausted:
            fewer = pool.free_count + pool.reclaimable_at_once()
            if not 0 < fewer < count:
                raise
            # Without waiting for the tier again.
            prepared = self._store.prepare(load.session_id, fewer, load.salt)
            runs = await self._reserver.grant(load.session_id, prepared)
        return places(runs)

    def _batch_size(self, tier: Tier | None) -> int:
        """Return the number of chunks to load at once."""
        size = BATCH_BYTES
        if tier is not None:
            rate = self._tiers.rates[tier].bytes_per_second
            limit = self._tiers.limit.bytes_per_second
            rates = [each for each in (rate, limit) if each]
            size = min(size, int(min(rates, default=size / BATCH_SECONDS) * BATCH_SECONDS))
        pool = self._store.pool
        room = pool.soon_free_count + pool.reclaimable_count()
        # At least one: the reservation says what is wrong if there is no room.
        return max(1, min(size // pool.layout.chunk_bytes, room))

    async def _read(
        self, load: Load, source: ChunkSource, keys: Sequence[bytes], slots: Sequence[int]
    ) -> list[int | None]:
        """Read the chunks into slots. Return their recorded checksums."""
        began = time.monotonic()
        if load.tier is None:
            checksums = await source.read(keys, slots)
        else:
            checksums = await self._tiers.read(load.tier, keys, slots)
        load.transfer_seconds += time.monotonic() - began
        return checksums

    async def _intact(
        self,
        load: Load,
        keys: Sequence[bytes],
        granted: Sequence[tuple[int, int]],
        checksums: Sequence[int | None],
    ) -> tuple[dict[bytes, WrittenChunk], list[bytes]]:
        """Return the chunks that came and have their checksum, by key, and the damaged keys.

        Of a sequence only those before the first that did not.
        """
        written: dict[bytes, WrittenChunk] = {}
        for number, (key, (slot, generation), checksum) in enumerate(
            zip(keys, granted, checksums, strict=True), load.done
        ):
            if checksum is not None:
                row, parent = load.rows[number], load.parents[number]
                written[key] = WrittenChunk(slot, generation, parent, row, checksum)
            elif load.is_sequence:
                break
        damages = await self._sealer.read_back(list(written.values()))
        damaged = [key for key, damage in zip(written, damages, strict=True) if damage is not None]
        if damaged and load.is_sequence:
            return dict(islice(written.items(), keys.index(damaged[0]))), damaged
        return {key: chunk for key, chunk in written.items() if key not in damaged}, damaged

    def _seal(self, load: Load, chunks: Sequence[WrittenChunk]) -> None:
        """Seal and lease verified chunks. Another call may have sealed some meanwhile."""
        outcome = self._store.seal(
            load.session_id,
            load.salt,
            chunks,
            [None] * len(chunks),
            lease_id=load.lease_id,
            keep_leased=True,
        )
        load.lease_id = outcome.lease_id
        load.loaded_bytes += len(chunks) * self._store.arena.layout.chunk_bytes
        if load.tier is not None:
            self._tiers.writers[load.tier].know([chunk.entry.key for chunk in outcome.chunks])

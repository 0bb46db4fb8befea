"""FillSlots: reads chunks from a tier into slots that a session was granted.

The session computes the front of a sequence meanwhile, and seals the slots behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress

from kvstore_service.calls import validation
from kvstore_service.recovery.recovered_chunks import damage_of
from kvstore_service.store import KvStore
from kvstore_service.tiers.manager import TierManager
from splitpoint.errors import FailedPrecondition
from splitpoint.transport.convert import tier_from_proto
from splitpoint.v1 import kvstore_pb2 as pb


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

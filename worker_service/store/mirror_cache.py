"""The mirror: a worker's cache of a remote store's chunks, in memory laid out like an arena.

A slot is free, granted (being filled), or holds a chunk. Unreferenced chunks are evicted, least
recently used first, when their slots are needed. Chunks are named by their keys and checksums,
so they outlive the remote store's sessions. The mirror runs on the event loop. Commit words let
the engine's thread check what it reads.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Iterable
from pathlib import Path

from splitpoint.arena.format import (
    ID_BYTES,
    RECORD_BYTES,
    RECORDS_OFFSET,
    Condition,
    Geometry,
    Superblock,
)
from splitpoint.arena.mapping import Arena
from splitpoint.arena.records import SlotState, commit_word
from splitpoint.config import format_size
from splitpoint.errors import FailedPrecondition, ResourceExhausted
from splitpoint.host.memory import memory_facts
from splitpoint.shapes import ArenaLayout
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk

# Retry delay while running sequences use the mirror.
_RETRY_SECONDS = 0.25


def name_of(key: bytes, checksum: int) -> bytes:
    """Return the name of a chunk in a mirror. The checksum tells chunks with equal keys apart."""
    return key + checksum.to_bytes(8, "little")


def checksum_of(name: bytes) -> int:
    return int.from_bytes(name[-8:], "little")


class MirrorCache:
    """All slots. Raises ResourceExhausted if there is not enough memory."""

    def __init__(self, layout: ArenaLayout, size_bytes: int) -> None:
        geometry = Geometry.fitting(layout, size_bytes)
        usable = memory_facts().usable_bytes
        if geometry.size_bytes > usable:
            raise ResourceExhausted(
                f"a mirror of {format_size(geometry.size_bytes)} does not fit: "
                f"{format_size(usable)} of memory are usable",
                reason="MIRROR_DOES_NOT_FIT",
            )
        superblock = Superblock(
            layout=layout,
            slot_count=geometry.slot_count,
            instance_id=bytes(ID_BYTES),
            boot_id=bytes(ID_BYTES),
            epoch=1,
            sequence=1,
            condition=Condition.OPEN,
            process_id=os.getpid(),
        )
        fd = os.memfd_create("splitpoint-mirror", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, geometry.size_bytes)
        except OSError as error:
            os.close(fd)
            raise ResourceExhausted(
                f"a mirror of {format_size(geometry.size_bytes)} cannot be allocated: "
                f"{error.strerror}",
                reason="MIRROR_DOES_NOT_FIT",
            ) from error
        self.arena = Arena(Path("(mirror)"), fd, superblock, write_metadata=True)
        self.tensors = ArenaTensors(self.arena)
        self.slot_count = geometry.slot_count
        self._words = self.arena.metadata.cast("Q")
        self._generations = [0] * self.slot_count
        self._free = list(range(self.slot_count - 1, -1, -1))
        self._granted: dict[int, int] = {}  # slot -> generation
        # Least recently used first.
        self._chunks: OrderedDict[bytes, StoredChunk] = OrderedDict()
        self._references: Counter[bytes] = Counter()
        # Slots of damaged chunks that are still referenced under these names.
        self._quarantined: dict[bytes, list[int]] = {}

    @property
    def free_count(self) -> int:
        """Slots that can be granted, those of unreferenced chunks included."""
        referenced = sum(1 for name in +self._references if name in self._chunks)
        quarantined = sum(len(slots) for slots in self._quarantined.values())
        return self.slot_count - len(self._granted) - referenced - quarantined

    def grant(self, count: int) -> list[tuple[int, int]]:
        """Grant all of `count` slots. Return (slot, generation) pairs. Raises ResourceExhausted."""
        if count > self.free_count:
            raise ResourceExhausted(
                f"{count} slots of the mirror were asked for; {self.free_count} of "
                f"{self.slot_count} are not in use",
                retry_after_seconds=_RETRY_SECONDS if count <= self.slot_count else None,
                reason="MIRROR_FULL",
            )
        while len(self._free) < count:
            name = next(name for name in self._chunks if not self._references[name])
            self._free_slot(self._chunks.pop(name).slot)
        slots = sorted(self._free.pop() for _ in range(count))
        for slot in slots:
            self._generations[slot] += 1
            self._granted[slot] = self._generations[slot]
            self._commit(slot, SlotState.WRITING)
        return [(slot, self._generations[slot]) for slot in slots]

    def give_back(self, slots: Iterable[tuple[int, int]]) -> None:
        """Free granted slots. Slots that are no longer granted are ignored."""
        for slot, generation in slots:
            if self._granted.get(slot) == generation:
                del self._granted[slot]
                self._free_slot(slot)

    def publish(
        self, place: tuple[int, int], name: bytes, key: bytes, token_count: int
    ) -> StoredChunk:
        """Publish a filled slot (slot, generation). Return the existing chunk of this name, if any.

        `name`: see `name_of`. Raises FailedPrecondition if the slot was given back meanwhile.
        """
        slot, generation = place
        if self._granted.get(slot) != generation:
            raise FailedPrecondition(f"slot {slot} of the mirror was given back meanwhile")
        del self._granted[slot]
        existing = self._chunks.get(name)
        if existing is not None:
            self._free_slot(slot)
            return existing
        self._commit(slot, SlotState.SEALED)
        chunk = self._chunks[name] = StoredChunk(
            slot, generation, token_count, key, checksum_of(name)
        )
        return chunk

    def find(self, name: bytes) -> StoredChunk | None:
        return self._chunks.get(name)

    def retain(self, names: Iterable[bytes]) -> None:
        """Protect chunks until they are released as often as they were retained."""
        for name in names:
            self._references[name] += 1
            self._chunks.move_to_end(name)

    def release(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._references[name] -= 1
            if not self._references[name]:
                del self._references[name]
                for slot in self._quarantined.pop(name, ()):
                    self._free_slot(slot)

    def damaged(self, chunks: Iterable[StoredChunk]) -> list[StoredChunk]:
        """Return the chunks whose commit word or payload changed.

        Slow; any thread may call it.
        """
        arena = self.arena
        return [
            chunk
            for chunk in chunks
            if not arena.is_current([chunk.slot], [chunk.generation])
            or arena.checksum(chunk.slot) != chunk.checksum
        ]

    def has(self, chunk: StoredChunk) -> bool:
        """Return True if this chunk can still be found."""
        return self._chunks.get(name_of(chunk.key, chunk.checksum)) == chunk

    def discard(self, chunk: StoredChunk) -> None:
        """Remove a damaged chunk. Its slot is freed when it is no longer referenced."""
        if not self.has(chunk):
            return
        name = name_of(chunk.key, chunk.checksum)
        del self._chunks[name]
        if self._references[name]:
            self._quarantined.setdefault(name, []).append(chunk.slot)
            self._commit(chunk.slot, SlotState.QUARANTINED)
        else:
            self._free_slot(chunk.slot)

    def _free_slot(self, slot: int) -> None:
        self._commit(slot, SlotState.FREE)
        self._free.append(slot)

    def _commit(self, slot: int, state: SlotState) -> None:
        # One aligned 8-byte store: no reader sees half of it.
        word = commit_word(self._generations[slot], state)
        self._words[(RECORDS_OFFSET + slot * RECORD_BYTES) // 8] = word

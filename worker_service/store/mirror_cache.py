"""Private memory laid out like an arena: where a worker keeps chunks of a remote store.

Every slot is free, granted (being filled) or holds a chunk; a chunk stays, also
when nobody holds it, until its slot is needed. Chunks are named by their keys,
which stand for their contents, so they outlive the remote store's sessions. Runs
on the event loop; commit words let the engine's thread check what it reads.
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

# How long a caller should wait for sequences to end.
_RETRY_SECONDS = 0.25


def name_of(key: bytes, checksum: int) -> bytes:
    """What a chunk is called in a mirror: its bytes count, so that two chunks whose
    keys collide are never taken for each other."""
    return key + checksum.to_bytes(8, "little")


def checksum_of(name: bytes) -> int:
    return int.from_bytes(name[-8:], "little")


class MirrorCache:
    """The slots. Raises ResourceExhausted when there is not that much memory."""

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
        self._holders: Counter[bytes] = Counter()
        # Slots of damaged chunks that are held under these names: not to be used again yet.
        self._condemned: dict[bytes, list[int]] = {}

    @property
    def free_count(self) -> int:
        """Slots that a grant could have, those of chunks that nobody holds included."""
        held = sum(1 for name in +self._holders if name in self._chunks)
        condemned = sum(len(slots) for slots in self._condemned.values())
        return self.slot_count - len(self._granted) - held - condemned

    def grant(self, count: int) -> list[tuple[int, int]]:
        """(slot, generation) pairs to fill. All or nothing; raises ResourceExhausted."""
        if count > self.free_count:
            raise ResourceExhausted(
                f"{count} slots of the mirror were asked for; {self.free_count} of "
                f"{self.slot_count} are not in use",
                retry_after_seconds=_RETRY_SECONDS if count <= self.slot_count else None,
                reason="MIRROR_FULL",
            )
        while len(self._free) < count:
            name = next(name for name in self._chunks if not self._holders[name])
            self._forget(self._chunks.pop(name).slot)
        slots = sorted(self._free.pop() for _ in range(count))
        for slot in slots:
            self._generations[slot] += 1
            self._granted[slot] = self._generations[slot]
            self._commit(slot, SlotState.WRITING)
        return [(slot, self._generations[slot]) for slot in slots]

    def give_back(self, slots: Iterable[tuple[int, int]]) -> None:
        """Free granted slots; those that are no longer granted are passed over."""
        for slot, generation in slots:
            if self._granted.get(slot) == generation:
                del self._granted[slot]
                self._forget(slot)

    def publish(
        self, place: tuple[int, int], name: bytes, key: bytes, token_count: int
    ) -> StoredChunk:
        """A granted (slot, generation) is filled. A chunk that is there already counts.

        `name` tells chunks apart here; see `name_of`. Raises FailedPrecondition when the
        slot was given back meanwhile: it may be somebody else's.
        """
        slot, generation = place
        if self._granted.get(slot) != generation:
            raise FailedPrecondition(f"slot {slot} of the mirror was given back meanwhile")
        del self._granted[slot]
        existing = self._chunks.get(name)
        if existing is not None:
            self._forget(slot)
            return existing
        self._commit(slot, SlotState.SEALED)
        chunk = self._chunks[name] = StoredChunk(
            slot, generation, token_count, key, checksum_of(name)
        )
        return chunk

    def find(self, name: bytes) -> StoredChunk | None:
        return self._chunks.get(name)

    def hold(self, names: Iterable[bytes]) -> None:
        """Keep these chunks until they are dropped as often as they were held."""
        for name in names:
            self._holders[name] += 1
            self._chunks.move_to_end(name)

    def drop(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._holders[name] -= 1
            if not self._holders[name]:
                del self._holders[name]
                for slot in self._condemned.pop(name, ()):
                    self._forget(slot)

    def damaged(self, chunks: Iterable[StoredChunk]) -> list[StoredChunk]:
        """Those whose commit word or payload is not what it was. Slow, for any thread."""
        arena = self.arena
        return [
            chunk
            for chunk in chunks
            if not arena.is_current([chunk.slot], [chunk.generation])
            or arena.checksum(chunk.slot) != chunk.checksum
        ]

    def has(self, chunk: StoredChunk) -> bool:
        """Whether this very chunk can be found."""
        return self._chunks.get(name_of(chunk.key, chunk.checksum)) == chunk

    def discard(self, chunk: StoredChunk) -> None:
        """A chunk proved damaged: it is found no more, its slot free once it is not held."""
        if not self.has(chunk):
            return
        name = name_of(chunk.key, chunk.checksum)
        del self._chunks[name]
        if self._holders[name]:
            self._condemned.setdefault(name, []).append(chunk.slot)
            self._commit(chunk.slot, SlotState.QUARANTINED)
        else:
            self._forget(chunk.slot)

    def _forget(self, slot: int) -> None:
        self._commit(slot, SlotState.FREE)
        self._free.append(slot)

    def _commit(self, slot: int, state: SlotState) -> None:
        # One aligned 8-byte store: no reader sees half of it.
        word = commit_word(self._generations[slot], state)
        self._words[(RECORDS_OFFSET + slot * RECORD_BYTES) // 8] = word

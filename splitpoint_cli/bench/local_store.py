"""A real store in this process, for a benchmark of the engine, without gRPC.

Chunks are reserved, copied, verified and sealed on one thread beside the engine, as write-back
does; the engine gets the same commands.
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.sessions import ProcessIdentity
from kvstore_service.slots import places
from kvstore_service.store import KvStore
from splitpoint.arena.owner import open_or_create_arena
from splitpoint.config import remove_tree
from splitpoint.keys import chunk_key
from splitpoint.shapes import ArenaLayout
from splitpoint.transport.local_session import process_start_ticks
from splitpoint_cli.bench.ending import bench_arena_path
from worker_service.device.cache import DeviceCache
from worker_service.device.pinning import CudaRegistrar, LockedRanges, pieces_of
from worker_service.engine.messages import Command, StepOutput
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk
from worker_service.store.client import Match
from worker_service.store.session import Connection
from worker_service.store.write_back import (
    BATCH_CHUNKS,
    ChunksStored,
    Flushed,
    SequenceKey,
    WriteJob,
    copy_chunks,
)

# Nothing keeps the session alive here, and no other session waits for it.
LEASE_SECONDS = 86_400.0
SALT = b""


@dataclass(slots=True)
class _Chain:
    """A sequence's last full chunk in the store, its salt and its leases."""

    salt: bytes
    parent_key: bytes
    lease_ids: list[int]


class LocalStore:
    """One arena, and the engines that use it one after the other, in one thread.

    Attributes:
        connection: what a match belongs to; its tensors are the mapped arena.
        pinning: how the arena is locked for the device, for people.
    """

    def __init__(self, layout: ArenaLayout, slot_count: int, device: torch.device) -> None:
        self.layout = layout
        self._path = bench_arena_path()
        self._opened = open_or_create_arena(self._path, layout, slot_count)
        arena = self._opened.arena
        self._store = KvStore(
            arena,
            clock=time.monotonic,
            lease_seconds=LEASE_SECONDS,
            # The only client is this process, which is there as long as the store is.
            is_present=lambda _: True,
        )
        identity = ProcessIdentity(os.getpid(), process_start_ticks())
        session = self._store.sessions.attach("bench", identity).session_id
        self._session = session
        tensors = ArenaTensors(arena)
        self.connection = Connection(session, self._store.epoch, LEASE_SECONDS, tensors)
        self._chains: dict[SequenceKey, _Chain] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write-back")
        self._pending = 0
        self._done: queue.SimpleQueue[Command | Exception] = queue.SimpleQueue()
        self._registrar = CudaRegistrar(device)
        self._locked = LockedRanges(self._registrar)
        self.pinning = self._lock() if device.type == "cuda" else "not pinned: no GPU"

    def match(self, key: SequenceKey, token_ids: Sequence[int], salt: bytes = SALT) -> Match:
        """Return the longest stored prefix, leased until the sequence is flushed."""
        found = self._store.match(self._session, salt, token_ids)
        chunks = tuple(_stored(entry) for entry in found.entries)
        # The last token is computed whatever is stored; see Engine.
        full = min(found.cached_tokens, len(token_ids) - 1) // self.layout.chunk_tokens
        parent = chunks[full - 1].key if full else b""
        self._chains[key] = _Chain(salt, parent, [found.lease_id])
        return Match(self.connection, found.cached_tokens, chunks, found.lease_id)

    def handle(self, output: StepOutput, cache: DeviceCache) -> None:
        """Begin what a step asks of the store; `answers` yields the results.

        `cache`: of the engine that ran the step.
        """
        if output.lookups:
            raise RuntimeError("a chunk was lost, although nothing else uses this store")
        for key, jobs in output.writes:
            for first in range(0, len(jobs), BATCH_CHUNKS):
                self._begin(self._write, cache, key, jobs[first : first + BATCH_CHUNKS])
        for key in output.flushes:
            self._begin(self._flush, key)

    def answers(self, *, wait: bool) -> Iterable[Command]:
        """Yield finished commands; with `wait`, wait for one. Raises their errors."""
        if wait and not self._pending:
            raise RuntimeError("the engine waits for a store that has nothing to do")
        while self._pending and (wait or not self._done.empty()):
            self._pending -= 1
            wait = False
            answer = self._done.get()
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def all_answers(self) -> Iterable[Command]:
        """Wait for all commands that have begun, and yield them. Raises their errors."""
        while self._pending:
            yield from self.answers(wait=True)

    def close(self) -> None:
        """Give everything back; nothing may read the arena any more."""
        self._writer.shutdown()
        self._locked.release()
        self._store.close()
        self._opened.owner.remove()
        remove_tree(self._path.parent)

    # -- on the writer's thread --------------------------------------------------------

    def _begin(self, function: Callable[..., Command], *arguments: object) -> None:
        self._pending += 1

        def run() -> None:
            try:
                self._done.put(function(*arguments))
            except Exception as error:
                self._done.put(error)

        self._writer.submit(run)

    def _write(self, cache: DeviceCache, key: SequenceKey, jobs: Sequence[WriteJob]) -> Command:
        return ChunksStored(key, jobs[0].chunk_index, self._seal(cache, self._chains[key], jobs))

    def _seal(
        self, cache: DeviceCache, chain: _Chain, jobs: Sequence[WriteJob]
    ) -> tuple[StoredChunk, ...]:
        tensors = self.connection.tensors
        granted = places(self._store.reserve(self._session, len(jobs), chain.salt))
        slots = [slot for slot, _ in granted]
        checksums = copy_chunks(cache, tensors, jobs, slots)
        written, parent = [], chain.parent_key
        for job, (slot, generation), checksum in zip(jobs, granted, checksums, strict=True):
            written.append(WrittenChunk(slot, generation, parent, job.token_ids, checksum))
            parent = chunk_key(self.layout.layout_hash, chain.salt, parent, job.token_ids)
        outcome = self._store.seal(
            self._session,
            chain.salt,
            written,
            self._store.verify(written),
            lease_id=chain.lease_ids[-1],
            keep_leased=True,
        )
        if outcome.lease_id not in chain.lease_ids:
            chain.lease_ids.append(outcome.lease_id)
        if len(jobs[-1].token_ids) == self.layout.chunk_tokens:
            chain.parent_key = outcome.chunks[-1].entry.key
        return tuple(_stored(each.entry) for each in outcome.chunks)

    def _flush(self, key: SequenceKey) -> Command:
        chain = self._chains.pop(key)
        self._store.sessions.release(
            self._session, [lease for lease in chain.lease_ids if lease], []
        )
        return Flushed(key)

    # -- page-locking ------------------------------------------------------------------

    def _lock(self) -> str:
        """Lock all planes before the benchmark begins; return the result for people."""
        arena = self._opened.arena
        geometry = arena.geometry
        faults = []
        for piece in pieces_of(geometry.planes, arena.slot_count, geometry.payload_offset):
            address = arena.payload.ctypes.data + piece.offset
            self._locked.lock(address, piece.size_bytes)
            fault = self._registrar.fault_of(address, piece.size_bytes)
            if fault is not None:
                faults.append(fault)
        return ", but ".join(["pinned", *faults])


def _stored(entry: Entry) -> StoredChunk:
    return StoredChunk(entry.slot, entry.generation, entry.token_count, entry.key, entry.checksum)

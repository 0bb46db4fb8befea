"""The child's client of the pool: chunks as objects of Mooncake's distributed store.

An object is a chunk's payload, its part of every plane in file order, and a trailer. Its name is
the chunk's salted key, so stores of another model, tenant or layout never name it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from kvstore_service.mooncake.engine import Engine
from kvstore_service.mooncake.pieces import slot_parts
from kvstore_service.mooncake.trailer import DAMAGED, TRAILER_BYTES, decode, encode
from splitpoint.arena.mapping import Arena
from splitpoint.errors import Unavailable

# Parts of planes in one call: the engine refuses more than about a thousand at once.
_PARTS_AT_ONCE = 512
# Mooncake's codes of calls that the master did not answer (types.h of its source).
_AWAY = (-900, -901)
# The object has another size than a chunk.
_WRONG_SIZE = -600
# A name that no chunk has.
_PROBE = "splitpoint-probe"

Item = TypeVar("Item")


class PoolClient:
    """One client of a master, which shares the child's engine. Threads may share it.

    Raises Unavailable while the master is away.
    """

    def __init__(
        self, engine: Engine, master: str, memory_bytes: int, replicas: int, arena: Arena
    ) -> None:
        """Connect. Raises Unavailable."""
        self._arena = arena
        self._address = arena.payload.ctypes.data - arena.geometry.payload_offset
        self._size = arena.layout.chunk_bytes
        self._replicas = replicas
        # One attempt; the caller repeats it.
        os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
        self._store: Any = MooncakeDistributedStore()
        code = self._store.setup(
            *(engine.address, "P2PHANDSHAKE", memory_bytes, 0, "tcp", "", master, engine.inner)
        )
        if code != 0:
            raise Unavailable(f"the Mooncake master at {master} does not answer (code {code})")

    def is_up(self) -> bool:
        """Ask the master. A client that gives no memory has no heartbeat that would know."""
        return int(self._store.health_check()) == 0 and int(self._store.is_exist(_PROBE)) >= 0

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the pool has it."""
        found = self._store.batch_is_exist([_name(key) for key in keys])
        if any(code < 0 for code in found):
            raise Unavailable("the Mooncake master does not answer")
        return [code == 1 for code in found]

    def read(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[int | None]:
        """Read chunks into slots. Return their checksums; None: missing.

        DAMAGED: the object was no such chunk, and is removed.
        """
        found: list[int | None] = []
        for batch in self._batches(list(zip(keys, slots, strict=True))):
            trailers = [(ctypes.c_char * TRAILER_BYTES)() for _ in batch]
            codes = self._store.batch_get_into_multi_buffers(*self._named(batch, trailers))
            self._check(codes)
            for (key, _), trailer, code in zip(batch, trailers, codes, strict=True):
                found.append(self._checksum(key, trailer.raw, code))
        # A key that is there is not written again.
        damaged = [key for key, checksum in zip(keys, found, strict=True) if checksum == DAMAGED]
        if damaged:
            self.drop(damaged)
        return found

    def _checksum(self, key: bytes, trailer: bytes, code: int) -> int | None:
        if code < 0 and code != _WRONG_SIZE:
            return None
        checksum = decode(trailer, key, self._size)
        return DAMAGED if checksum is None else checksum

    def write(
        self, keys: Sequence[bytes], slots: Sequence[int], checksums: Sequence[int]
    ) -> list[bool]:
        """Store chunks. Return for each whether the pool has it now."""
        stored: list[bool] = []
        config = ReplicateConfig()
        config.replica_num = self._replicas
        for batch in self._batches(list(zip(keys, slots, checksums, strict=True))):
            trailers = [
                (ctypes.c_char * TRAILER_BYTES).from_buffer_copy(encode(key, checksum, self._size))
                for key, _, checksum in batch
            ]
            named = self._named([(key, slot) for key, slot, _ in batch], trailers)
            codes = self._store.batch_put_from_multi_buffers(*named, config)
            self._check(codes)
            stored += [code == 0 for code in codes]
        return stored

    def drop(self, keys: Sequence[bytes]) -> None:
        self._store.batch_remove([_name(key) for key in keys], True)

    def close(self) -> None:
        """Leave the pool. What this store gave to it is lost to the others."""
        self._store.close()

    def _batches(self, items: Sequence[Item]) -> Iterator[list[Item]]:
        parts = len(self._arena.geometry.planes) + 1
        waiting = iter(items)
        while batch := list(islice(waiting, max(1, _PARTS_AT_ONCE // parts))):
            yield batch

    def _named(
        self, chunks: Sequence[tuple[bytes, int]], trailers: Sequence[Any]
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        """Return the names, addresses and sizes of chunks' parts for a call of many buffers."""
        addresses, sizes = [], []
        for (_, slot), trailer in zip(chunks, trailers, strict=True):
            parts = slot_parts(self._arena.geometry, slot)
            addresses.append(
                [self._address + offset for offset, _ in parts] + [ctypes.addressof(trailer)]
            )
            sizes.append([size for _, size in parts] + [TRAILER_BYTES])
        return [_name(key) for key, _ in chunks], addresses, sizes

    def _check(self, codes: Sequence[int]) -> None:
        """Raise Unavailable if the master did not answer."""
        if codes and all(code in _AWAY for code in codes):
            raise Unavailable(f"Mooncake's pool does not answer (code {codes[0]})")


def _name(key: bytes) -> str:
    return f"splitpoint-{key.hex()}"

"""Service discovery through Redis: entries that expire, and an index of their instances.

The index is a set of instance ids, so that a look-up costs the number of instances. SCAN
would walk a database that others may share, and a list by time would need equal clocks.
An instance is alive while its entry, which Redis expires, exists.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from splitpoint.discovery.entries import (
    LIFETIME_MILLISECONDS,
    StoreEntry,
    WorkerEntry,
    entry_key,
)
from splitpoint.discovery.redis_link import RedisLink

_log = logging.getLogger(__name__)

# Most members that are read; this project never writes as many.
MOST_ENTRIES = 1024
_ID_BYTES = 32  # in hexadecimal

Entry = TypeVar("Entry", StoreEntry, WorkerEntry)


def add_announcement(pipe: Any, index: str, entry: StoreEntry | WorkerEntry) -> None:
    """Queue the writes of one heartbeat on a pipeline; they have three answers."""
    pipe.set(entry_key(index, entry.instance_id), entry.to_json(), px=LIFETIME_MILLISECONDS)
    pipe.sadd(index, entry.instance_id.hex())
    # The index ends after the last of its members.
    pipe.pexpire(index, 10 * LIFETIME_MILLISECONDS)


def add_withdrawal(pipe: Any, index: str, instance_id: bytes) -> None:
    """Queue the writes of a clean stop on a pipeline; they have two answers."""
    pipe.delete(entry_key(index, instance_id))
    pipe.srem(index, instance_id.hex())


async def read_entries(
    link: RedisLink, index: str, parse: Callable[[bytes], Entry | None]
) -> list[Entry]:
    """Return the entries of all live instances, by instance id. Raises Unavailable."""
    entries = []
    for member, value in await _read_index(link, index):
        entry = parse(value) if isinstance(value, bytes) else None
        if entry is not None and entry.instance_id == member:
            entries.append(entry)
    return sorted(entries, key=lambda entry: entry.instance_id)


async def prune(link: RedisLink, index: str) -> None:
    """Remove instances without an entry from the index. Raises Unavailable.

    An instance that is removed by mistake returns with its next heartbeat.
    """
    dead = [member.hex() for member, value in await _read_index(link, index) if value is None]
    if dead:

        async def remove(redis: Redis) -> Any:
            return await redis.srem(index, *dead)

        await link.run(remove, is_heartbeat=True)


async def _read_index(link: RedisLink, index: str) -> list[tuple[bytes, Any]]:
    """Return each member of the index with the value of its key."""
    members = _ids(await link.run(_members(index), is_heartbeat=True))
    values = await link.run(_values(index, members), is_heartbeat=True) if members else []
    return list(zip(members, values, strict=False))


def _members(index: str) -> Callable[[Redis], Any]:
    async def read(redis: Redis) -> Any:
        try:
            return await redis.srandmember(index, MOST_ENTRIES)
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            _log.warning("the key %s is not ours: it is not a set", index)
            return []

    return read


def _values(index: str, members: Iterable[bytes]) -> Callable[[Redis], Any]:
    keys = [entry_key(index, member) for member in members]

    async def read(redis: Redis) -> Any:
        return await redis.mget(keys)  # None for a key of another type

    return read


def _ids(members: Any) -> list[bytes]:
    """Return the members that are instance ids."""
    found = []
    for member in members if isinstance(members, list) else []:
        if isinstance(member, bytes) and len(member) == _ID_BYTES:
            try:
                found.append(bytes.fromhex(member.decode("ascii")))
            except ValueError:
                continue
    return found

"""Who lives, by Redis: entries that expire, and an index to find them by.

The index is a set of instance ids beside the entries: finding the living costs
what there are of them, while SCAN would walk a database that others may share,
and a list by time would need clocks that agree. Whether a member still lives is
told by its entry, which Redis itself lets expire.
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

# Most members that anybody looks at: more than that did not come from us.
MOST_ENTRIES = 1024
_ID_BYTES = 32  # in hexadecimal

Entry = TypeVar("Entry", StoreEntry, WorkerEntry)


def add_announcement(pipe: Any, index: str, entry: StoreEntry | WorkerEntry) -> None:
    """Queue the writes of one heartbeat on a pipeline: three answers."""
    pipe.set(entry_key(index, entry.instance_id), entry.to_json(), px=LIFETIME_MILLISECONDS)
    pipe.sadd(index, entry.instance_id.hex())
    # With the last of its members gone the index goes too.
    pipe.pexpire(index, 10 * LIFETIME_MILLISECONDS)


def add_withdrawal(pipe: Any, index: str, instance_id: bytes) -> None:
    """Queue the writes of a clean stop: two answers."""
    pipe.delete(entry_key(index, instance_id))
    pipe.srem(index, instance_id.hex())


async def read_entries(
    link: RedisLink, index: str, parse: Callable[[bytes], Entry | None]
) -> list[Entry]:
    """Everybody who lives, by instance id; one entry per instance. Raises Unavailable."""
    members = _ids(await link.run(_members(index), is_heartbeat=True))
    if not members:
        return []
    values = await link.run(_values(index, members), is_heartbeat=True)
    entries = []
    for member, value in zip(members, values, strict=False):
        entry = parse(value) if isinstance(value, bytes) else None
        if entry is not None and entry.instance_id == member:
            entries.append(entry)
    return sorted(entries, key=lambda entry: entry.instance_id)


async def prune(link: RedisLink, index: str) -> None:
    """Take the dead out of the index. Who is taken out by mistake comes back with its next
    heartbeat. Raises Unavailable."""
    members = _ids(await link.run(_members(index), is_heartbeat=True))
    if not members:
        return
    values = await link.run(_values(index, members), is_heartbeat=True)
    dead = [m.hex() for m, value in zip(members, values, strict=False) if value is None]
    if dead:

        async def remove(redis: Redis) -> Any:
            return await redis.srem(index, *dead)

        await link.run(remove, is_heartbeat=True)


def _members(index: str) -> Callable[[Redis], Any]:
    async def read(redis: Redis) -> Any:
        try:
            return await redis.srandmember(index, MOST_ENTRIES)
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            _log.warning("the key %s is not ours: it holds no set", index)
            return []

    return read


def _values(index: str, members: Iterable[bytes]) -> Callable[[Redis], Any]:
    keys = [entry_key(index, member) for member in members]

    async def read(redis: Redis) -> Any:
        return await redis.mget(keys)  # of a key with another type: None

    return read


def _ids(members: Any) -> list[bytes]:
    """The members that are instance ids."""
    found = []
    for member in members if isinstance(members, list) else []:
        if isinstance(member, bytes) and len(member) == _ID_BYTES:
            try:
                found.append(bytes.fromhex(member.decode("ascii")))
            except ValueError:
                continue
    return found

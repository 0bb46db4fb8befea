"""Conversations of /v1/responses that clients may go on with, in memory only, by tenant."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

# Bytes of one conversation, besides its content.
_OVERHEAD_BYTES = 512
_MOST_COUNT = 10_000


@dataclass(frozen=True, slots=True)
class _Kept:
    conversation: bytes
    # Forgets it when its time is over.
    timer: asyncio.TimerHandle

    @property
    def size(self) -> int:
        return len(self.conversation) + _OVERHEAD_BYTES


class KeptResponses:
    """Conversations by owner and id. Belongs to one event loop.

    If they take too much memory, the owner that takes most of it loses its oldest ones.

    Args:
        most_bytes: of all together; 0 keeps nothing.
        seconds: after which a conversation is forgotten.

    Attributes:
        used_bytes: of all conversations.
    """

    def __init__(self, most_bytes: int, seconds: float) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._owners: dict[str, OrderedDict[str, _Kept]] = {}
        self._sizes: dict[str, int] = {}
        self._count = 0
        self.used_bytes = 0

    @property
    def keeps(self) -> bool:
        """True if there is room for anything at all."""
        return self._most_bytes > 0

    def put(self, owner: str, response_id: str, conversation: bytes) -> None:
        """Keep a conversation; one that is too large alone is not kept."""
        if len(conversation) + _OVERHEAD_BYTES > self._most_bytes:
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._seconds, self.drop, owner, response_id)
        kept = _Kept(conversation, timer)
        self._owners.setdefault(owner, OrderedDict())[response_id] = kept
        self._sizes[owner] = self._sizes.get(owner, 0) + kept.size
        self._count += 1
        self.used_bytes += kept.size
        while self.used_bytes > self._most_bytes or self._count > _MOST_COUNT:
            largest = max(self._sizes, key=lambda each: self._sizes[each])
            self.drop(largest, next(iter(self._owners[largest])))

    def get(self, owner: str, response_id: str) -> bytes | None:
        """Return a conversation; None if there is none of this owner by this id."""
        mine = self._owners.get(owner)
        kept = None if mine is None else mine.get(response_id)
        return None if kept is None else kept.conversation

    def drop(self, owner: str, response_id: str) -> None:
        """Forget a conversation, if it is there."""
        mine = self._owners.get(owner)
        kept = None if mine is None else mine.pop(response_id, None)
        if kept is None:
            return
        kept.timer.cancel()
        self._count -= 1
        self.used_bytes -= kept.size
        self._sizes[owner] -= kept.size
        if not mine:
            del self._owners[owner], self._sizes[owner]

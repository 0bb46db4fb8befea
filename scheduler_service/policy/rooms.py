"""What one worker has been given and has not computed yet."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler_service.policy.hold import Hold
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.policy.waiting import Need


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Sizes of a worker.

    Attributes:
        memory_bytes: its cache.
        page_bytes: bytes of one page.
        step_tokens: prompt tokens of one step; 0: unknown, so nothing is held back.
    """

    memory_bytes: int
    page_bytes: int
    step_tokens: int = 0


class WorkerRooms:
    """Prefill work and restores that are bound to each worker, by arrival of the request."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings
        self._rooms: dict[str, _Room] = {}
        self._closed: set[str] = set()
        # Where the requests are that have no first token yet.
        self._prefilling: dict[int, str] = {}

    @property
    def open_count(self) -> int:
        """Workers to which requests may be bound."""
        return len(self._rooms) - len(self._closed)

    def __contains__(self, worker_id: str) -> bool:
        """Return True if requests may be bound to this worker."""
        return worker_id in self._rooms and worker_id not in self._closed

    def add(self, worker_id: str, limits: WorkerLimits) -> None:
        """Add a worker, or replace one of this name."""
        self.remove(worker_id)
        self._rooms[worker_id] = _Room(limits)

    def close(self, worker_id: str) -> None:
        """Let nothing more be bound to a worker."""
        if worker_id in self._rooms:
            self._closed.add(worker_id)

    def remove(self, worker_id: str) -> None:
        room = self._rooms.pop(worker_id, None)
        self._closed.discard(worker_id)
        if room is not None:
            for arrival in room.new_tokens:
                del self._prefilling[arrival]

    def limits(self, worker_id: str) -> WorkerLimits:
        return self._rooms[worker_id].limits

    def token_room(self, worker_id: str) -> float:
        """Return the new tokens that may still be bound to a worker: at least 1 if none are."""
        room = self._rooms[worker_id]
        step = room.limits.step_tokens
        if not step:
            return math.inf
        left = self._settings.ahead_steps * step - room.new_token_count
        return left if room.new_tokens else max(1.0, left)

    def bound_tokens(self, worker_id: str) -> int:
        """Return the tokens that are bound to a worker and not prefilled yet."""
        return self._rooms[worker_id].new_token_count

    def link_bytes(self, worker_id: str) -> int:
        """Return the bytes that requests without a first token bring over a worker's link."""
        return self._rooms[worker_id].link_byte_count

    def restoring_bytes(self, worker_id: str) -> int:
        """Return the bytes of link-bound requests without a first token on a worker."""
        return self._rooms[worker_id].restoring_byte_count

    def is_full(self, worker_id: str) -> bool:
        """Return True if enough prefill work is bound to a worker."""
        return self.token_room(worker_id) < 1

    def open(self) -> list[str]:
        """Return the workers to which requests may be bound."""
        return [name for name in self._rooms if name not in self._closed]

    def busy(self) -> list[str]:
        """Return the workers that are full."""
        return [name for name in self.open() if self.is_full(name)]

    def hold(self, worker_id: str, need: Need) -> Hold | None:
        """Return what holds a request back there; None if nothing does.

        One request is always let through, and so is one that is link-bound.
        """
        if self.is_full(worker_id):
            return Hold.PREFILL
        room = self._rooms[worker_id]
        if need.is_link_bound and room.restoring:
            most = self._settings.restoring_share * room.limits.memory_bytes
            if room.restoring_byte_count + need.link_bytes > most:
                return Hold.RESTORES
        return None

    def bind(self, worker_id: str, arrival: int, need: Need) -> None:
        """Add the work of a request that starts on a worker."""
        room = self._rooms[worker_id]
        self._prefilling[arrival] = worker_id
        room.running_count += 1
        room.new_tokens[arrival] = need.new_tokens
        room.new_token_count += need.new_tokens
        room.link_bytes[arrival] = need.link_bytes
        room.link_byte_count += need.link_bytes
        if need.is_link_bound:
            room.restoring.add(arrival)
            room.restoring_byte_count += need.link_bytes

    def computed(self, worker_id: str, token_count: int) -> bool:
        """Note that a step prefilled so many tokens, of the earliest requests first.

        Return True if the worker is no longer full.
        """
        room = self._rooms.get(worker_id)
        if room is None:
            return False
        was_full = self.is_full(worker_id)
        for arrival, tokens in room.new_tokens.items():
            if token_count <= 0:
                break
            # The last one is computed with the first token.
            done = min(tokens - 1, token_count)
            room.new_tokens[arrival] -= done
            room.new_token_count -= done
            token_count -= done
        return was_full and not self.is_full(worker_id)

    def is_prefilling(self, arrival: int) -> bool:
        """Return True if a request was bound and has no first token yet."""
        return arrival in self._prefilling

    def prefilled(self, arrival: int) -> None:
        """Note a request's first token, or its end."""
        worker_id = self._prefilling.pop(arrival, None)
        if worker_id is not None:
            room = self._rooms[worker_id]
            room.new_token_count -= room.new_tokens.pop(arrival)
            size = room.link_bytes.pop(arrival)
            room.link_byte_count -= size
            if arrival in room.restoring:
                room.restoring.discard(arrival)
                room.restoring_byte_count -= size

    def ended(self, worker_id: str, arrival: int) -> None:
        """Note that a request left a worker, with its first token or without."""
        self.prefilled(arrival)
        if worker_id in self._rooms:
            self._rooms[worker_id].running_count -= 1

    def is_idle(self, worker_id: str) -> bool:
        """Return True if no request runs on a worker."""
        return not self._rooms[worker_id].running_count

    def check_integrity(self) -> list[str]:
        """Return one line per violated invariant."""
        problems = []
        for name, room in self._rooms.items():
            if room.new_token_count != sum(room.new_tokens.values()):
                problems.append(f"worker {name}: {room.new_token_count} new ones are miscounted")
            restoring = sum(room.link_bytes[arrival] for arrival in room.restoring)
            if room.link_byte_count != sum(room.link_bytes.values()):
                problems.append(f"worker {name}: {room.link_byte_count} bytes are miscounted")
            if room.restoring_byte_count != restoring:
                problems.append(f"worker {name}: {room.restoring_byte_count} bytes are miscounted")
        bound = {a: name for name, room in self._rooms.items() for a in room.new_tokens}
        if bound != self._prefilling:
            problems.append("requests without a first token are miscounted")
        return problems


class _Room:
    """Work of one worker: tokens to prefill, and bytes of link-bound requests, by arrival."""

    __slots__ = (
        "limits",
        "link_byte_count",
        "link_bytes",
        "new_token_count",
        "new_tokens",
        "restoring",
        "restoring_byte_count",
        "running_count",
    )

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        self.running_count = 0
        self.new_tokens: dict[int, int] = {}
        self.new_token_count = 0
        self.link_bytes: dict[int, int] = {}
        self.link_byte_count = 0
        # Those among them that are link-bound.
        self.restoring: set[int] = set()
        self.restoring_byte_count = 0

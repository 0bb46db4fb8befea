"""All bounds of the scheduler."""

from __future__ import annotations

import os
from dataclasses import dataclass

from splitpoint.options.scheduler import QUEUE_CAPACITY

# Bounds of a request's priority.
LEAST_PRIORITY, MOST_PRIORITY = -10, 10


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts, tokens and seconds. Tests use small values; the defaults are documented."""

    # Requests that may wait for device memory.
    queue_capacity: int = QUEUE_CAPACITY.default
    # Requests of one tenant that may run or wait. None: no such limit.
    tenant_requests: int | None = None
    # Generate calls that may be open at a time, waiting ones included.
    concurrent_calls: int = 1024
    # A reader this many tokens behind pauses its request, which resumes at half of it.
    lag_tokens: int = 1024
    # A call ends if its client does not read a message for this long.
    stall_seconds: float = 30.0
    # How long, and how many, completed requests stay known by their request_id.
    remember_seconds: float = 60.0
    remember_count: int = 1024
    # How long a request waits while no ready worker could run it.
    worker_wait_seconds: float = 10.0
    # A request is not retried after workers refused or ended it this many times.
    refusal_count: int = 2
    # A request is moved to another worker at most this often after attempts that were lost.
    move_count: int = 3
    # A store that does not answer a prefix lookup within this time counts as empty.
    lookup_seconds: float = 0.25
    # A prefix lookup older than this is repeated before a worker is told.
    lookup_lifetime_seconds: float = 1.0
    # Long texts that are tokenized at a time; one tenant gets all of these places but one.
    text_jobs: int = max(2, len(os.sched_getaffinity(0)) // 2)
    # Long texts that may wait for such a place, half of them of one tenant, and how long.
    text_queue: int = 64
    text_wait_seconds: float = 10.0
    # Hint to clients whose request was turned away for lack of room.
    retry_seconds: float = 1.0

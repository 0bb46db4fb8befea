"""The scheduler's bounds in one place. Knows nothing of what they bound."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts, tokens and seconds. Tests make them small; the defaults are the contract's."""

    # Requests that may wait for device memory.
    queue_capacity: int = 256
    # Requests of one tenant that may run or wait. None: as many as fit.
    tenant_requests: int | None = None
    # Generate calls at a time, waiting ones included.
    concurrent_calls: int = 1024
    # A reader this many tokens behind pauses its request; it goes on at half of it.
    lag_tokens: int = 1024
    # A message that a reader does not take for this long ends its call.
    stall_seconds: float = 30.0
    # Completed requests stay known by their request_id this long, and this many of them.
    remember_seconds: float = 60.0
    remember_count: int = 1024
    # A request waits this long for any worker that could run it.
    worker_wait_seconds: float = 10.0
    # Workers lost under a request before it is taken for the cause.
    loss_count: int = 2
    # The store's answer to a peek; without one nothing counts as cached.
    peek_seconds: float = 0.25
    # What was peeked is asked again after a wait in the queue longer than this.
    peek_lifetime_seconds: float = 1.0
    # Long texts that are tokenized at a time, all but one of them of one tenant; those that
    # wait for it beside them, half of them of one tenant, and how long.
    text_jobs: int = max(2, len(os.sched_getaffinity(0)) // 2)
    text_queue: int = 64
    text_wait_seconds: float = 10.0
    # Hint to clients that were turned away for lack of room.
    retry_seconds: float = 1.0

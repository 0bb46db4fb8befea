"""Checks of what a trace file says of a request."""

from __future__ import annotations

import math
from typing import TypeGuard

from scheduler_service.policy.waiting import LEAST_PRIORITY, MOST_PRIORITY
from splitpoint.config import counted
from splitpoint.errors import InvalidArgument
from splitpoint_cli.traces.arrival import BLOCK_TOKENS, Arrival

# No model reads more; a larger number is a column in the wrong place.
MOST_TOKENS = 100_000_000


class BadLine(InvalidArgument):
    """A line of a trace file that is no request; the message begins with its number."""


class BadValue(ValueError):
    """What is wrong with a line."""

    def in_line(self, number: int) -> BadLine:
        """Return the error for a user, which names the line."""
        return BadLine(f"line {number:,}: {self}", field="trace")


def checked(
    seconds: float,
    input_length: object,
    output_length: object,
    hash_ids: object = (),
    tenant: object = "",
    priority: object = 0,
) -> Arrival:
    """Return a request of values from a file. Raises BadValue."""
    if not math.isfinite(seconds) or seconds < 0:
        raise BadValue(f"a request arrives at {seconds:g} s")
    inputs = _tokens("input_length", input_length)
    if not isinstance(hash_ids, list | tuple) or not all(map(_is_whole, hash_ids)):
        raise BadValue(f"hash_ids is a list of whole numbers, not {hash_ids!r:.60}")
    if len(hash_ids) > -(-inputs // BLOCK_TOKENS):
        raise BadValue(
            f"{len(hash_ids):,} hash_ids are more than the blocks of {BLOCK_TOKENS} in "
            f"{counted(inputs, 'token')}"
        )
    if not isinstance(tenant, str):
        raise BadValue(f"tenant is a text, not {tenant!r:.60}")
    if not _is_whole(priority) or not LEAST_PRIORITY <= priority <= MOST_PRIORITY:
        raise BadValue(
            f"priority is a whole number from {LEAST_PRIORITY} to {MOST_PRIORITY}, "
            f"not {priority!r:.60}"
        )
    outputs = _tokens("output_length", output_length)
    return Arrival(seconds, inputs, outputs, tuple(hash_ids), tenant, priority)


def _tokens(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_TOKENS:
        raise BadValue(f"{name} is a whole number from 1 to {MOST_TOKENS:,}, not {value!r:.60}")
    return value


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)

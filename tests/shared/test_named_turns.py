"""Turns of calls that have a name in common, and what is left of them."""

from __future__ import annotations

import asyncio

import pytest
from virtual_time import in_virtual_time

from splitpoint.errors import Unavailable
from splitpoint.tasks import TURN_SECONDS, NamedTurns


@in_virtual_time
async def test_one_name_has_one_turn_at_a_time_and_leaves_nothing() -> None:
    turns, order = NamedTurns(), []

    async def call(number: int, name: bytes) -> None:
        async with turns.turn(name):
            order.append((number, "begins"))
            await asyncio.sleep(1)
            order.append((number, "ends"))

    await asyncio.gather(call(1, b"a"), call(2, b"a"), call(3, b"b"))
    own = [(number, what) for number, what in order if number != 3]
    assert own == [(1, "begins"), (1, "ends"), (2, "begins"), (2, "ends")]
    # Another name does not wait.
    assert order.index((3, "begins")) < order.index((1, "ends"))
    assert turns.name_count == 0


@in_virtual_time
async def test_a_call_that_waits_too_long_or_is_cancelled_leaves_nothing() -> None:
    turns = NamedTurns()
    async with turns.turn(b"a"):
        with pytest.raises(Unavailable, match="took longer than") as late:
            await turns.begin(b"a", TURN_SECONDS)
        assert late.value.reason == "LOAD_STALLED"
        waits = asyncio.create_task(turns.begin(b"a", None))
        await asyncio.sleep(10 * TURN_SECONDS)  # without a limit
        assert not waits.done()
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        assert turns.name_count == 1
    assert turns.name_count == 0
    # The next one need not wait.
    await turns.begin(b"a", 0.1)
    turns.end(b"a")
    assert turns.name_count == 0

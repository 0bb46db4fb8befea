"""Rates of loads, and turns by name."""

from __future__ import annotations

import asyncio

import pytest
from kvstore_helpers import FakeClock

from kvstore_service.tiers.manager import RateLimit, ReadRate
from splitpoint import tasks
from splitpoint.errors import Unavailable
from splitpoint.tasks import NamedTurns


def test_loads_share_one_rate() -> None:
    clock = FakeClock()
    limit = RateLimit(100.0, clock)
    assert limit.begin(50) - clock.now == 0.5
    assert limit.begin(100) - clock.now == 1.5  # after the first
    clock.now += 10
    assert limit.begin(100) - clock.now == 1.0  # an idle time is not saved up
    assert RateLimit(None).begin(1 << 40) == 0.0


async def test_a_load_ends_when_its_bytes_may_arrive() -> None:
    limit = RateLimit(1e6)
    loop = asyncio.get_running_loop()
    began = loop.time()
    dues = [limit.begin(10_000) for _ in range(3)]
    await asyncio.gather(*(limit.end(due) for due in dues))
    assert loop.time() - began >= 0.03


def test_the_average_follows_the_newest_loads() -> None:
    rate = ReadRate()
    rate.measured(0, 1.0)
    rate.measured(10, 0.0)
    assert rate.bytes_per_second == 0
    rate.measured(100, 1.0)
    assert rate.bytes_per_second == 100
    for _ in range(50):
        rate.measured(1000, 2.0)
    assert rate.bytes_per_second == pytest.approx(500, rel=1e-3)


async def test_turns_of_one_name_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = NamedTurns()
    running: list[bytes] = []

    async def work(name: bytes) -> None:
        async with turns.turn(name):
            assert name not in running
            running.append(name)
            await asyncio.sleep(0.005)
            running.remove(name)

    async with asyncio.TaskGroup() as group:
        for name in (b"a", b"b", b"a", b"a", b"b"):
            group.create_task(work(name))
    monkeypatch.setattr(tasks, "TURN_SECONDS", 0.01)
    async with turns.turn(b"a"):
        with pytest.raises(Unavailable):
            await work(b"a")
        await work(b"b")
    await work(b"a")
    assert turns.name_count == 0

"""The bound of a delivery's waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from virtual_time import VirtualLoop

from scheduler_service.api.delivery import StallBound
from splitpoint.errors import Cancelled

Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run it on a loop where only waits take time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def test_a_wait_that_takes_too_long_ends_the_delivery() -> None:
    async def deliver() -> None:
        with StallBound(0.05) as bound:
            for _ in range(3):
                bound.begin()
                await asyncio.sleep(0)
                bound.end()
            bound.begin()
            await asyncio.Event().wait()

    with pytest.raises(Cancelled, match=r"nothing was read for 0\.05 s") as caught:
        run(deliver())
    assert caught.value.reason == "SLOW_READER"


def test_only_waits_between_begin_and_end_count() -> None:
    """Each of these is far shorter than the bound, and all of them together are longer."""

    async def deliver() -> int:
        with StallBound(0.1) as bound:
            for _ in range(20):
                bound.begin()
                await asyncio.sleep(0.01)
                bound.end()
            # Nothing to deliver for longer than the bound.
            await asyncio.sleep(0.25)
            bound.begin()
            await asyncio.sleep(0.001)
            bound.end()
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert run(deliver()) == 0


def test_a_wait_that_begins_after_long_quiet_has_its_whole_time() -> None:
    async def deliver() -> None:
        loop = asyncio.get_running_loop()
        with StallBound(0.08) as bound:
            await asyncio.sleep(0.07)
            bound.begin()
            began = loop.time()
            try:
                await asyncio.Event().wait()
            finally:
                assert loop.time() - began == pytest.approx(0.08)

    with pytest.raises(Cancelled):
        run(deliver())


def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def deliver(has_begun: asyncio.Event) -> None:
        with StallBound(60) as bound:
            bound.begin()
            has_begun.set()
            await asyncio.Event().wait()

    async def cancel() -> None:
        has_begun = asyncio.Event()
        task = asyncio.create_task(deliver(has_begun))
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(cancel())

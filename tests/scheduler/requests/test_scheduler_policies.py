"""Policies and priorities in a real scheduler over worker doubles, and what GetQueue says."""

from __future__ import annotations

import asyncio

import pytest
from scheduler_doubles import (
    CHUNK_TOKENS,
    PAGE_BYTES,
    Stack,
    ids_request,
    paced_worker,
    stack,
)

from scheduler_service.admin import AdminServicer
from scheduler_service.policy.settings import PolicySettings
from splitpoint.options.scheduler import Policy
from splitpoint.v1 import scheduler_pb2, worker_pb2

Tasks = list[asyncio.Task[object]]


async def send(running: Stack, tasks: Tasks, name: str, pages: int, priority: int = 0) -> None:
    """Send a request of this number of pages, and wait until the scheduler has it."""
    request = ids_request([7], pages * CHUNK_TOKENS - 1, request_id=name, priority=priority)
    tasks.append(asyncio.create_task(running.generate(request)))
    manager = running.manager
    await running.until(lambda: len(manager.requests) == len(tasks))
    await running.until(
        lambda: manager.admission.waiting_count + len(manager.attempts) == len(tasks)
    )


async def queue_of(running: Stack) -> list[scheduler_pb2.QueuedRequest]:
    answer = await running.admin.GetQueue(scheduler_pb2.GetQueueRequest())
    return list(answer.requests)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (Policy.FIFO, ["low", "mid", "high"]),
        (Policy.FAIR, ["high", "mid", "low"]),
        (Policy.UTILISATION, ["high", "mid", "low"]),
    ],
)
async def test_priorities_within_a_tenant(policy: Policy, order: list[str]) -> None:
    worker, steps = paced_worker(capacity_pages=4)
    async with stack(worker, policy=PolicySettings(policy)) as running:
        tasks: Tasks = []
        await send(running, tasks, "first", 4)
        for name, priority in (("low", -1), ("mid", 0), ("high", 5)):
            await send(running, tasks, name, 4, priority)
        queue = await queue_of(running)
        assert [entry.request_id for entry in queue] == order
        assert {entry.request_id: entry.priority for entry in queue} == {
            "low": -1,
            "mid": 0,
            "high": 5,
        }
        steps.allow(1000)
        await asyncio.gather(*tasks)
        assert [admit.request_id for admit in worker.admits] == ["first", *order]


async def test_only_what_was_prefilled_of_its_own_requests_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, steps = paced_worker()
    own = [0, 30, 0]

    def piece(response: worker_pb2.RunResponse) -> list[worker_pb2.RunResponse]:
        """Prefill a piece of the request beside 500 tokens of another scheduler's."""
        response.ClearField("tokens")
        response.prefilled_token_count = own.pop(0)
        response.scheduled_token_count = response.prefilled_token_count + 500
        return [response]

    worker.mangle = piece
    async with stack(worker, policy=PolicySettings(Policy.FAIR)) as running:
        task = asyncio.create_task(running.generate(ids_request([7] * 100, 900)))
        await running.until(lambda: worker.admits)
        heard, admission = [], running.manager.admission
        on_step = running.manager.on_step

        def note(*told: object) -> None:
            on_step(*told)
            account = admission.account("0")
            assert account is not None
            heard.append(account.bound_tokens)

        monkeypatch.setattr(running.manager, "on_step", note)
        steps.allow(3)
        await running.until(lambda: len(heard) == 3)
        assert heard == [100, 70, 70]
        task.cancel()


async def test_utilisation_lets_small_requests_by_and_says_what_the_others_wait_for() -> None:
    worker, steps = paced_worker(capacity_pages=4)
    async with stack(worker, policy=PolicySettings(Policy.UTILISATION)) as running:
        tasks: Tasks = []
        await send(running, tasks, "first", 3)
        await send(running, tasks, "large", 2)
        await send(running, tasks, "small", 1)
        await running.until(lambda: len(worker.admits) == 2)
        (large,) = await queue_of(running)
        assert (large.request_id, large.waits_for, large.worker_id) == ("large", "memory", "0")
        assert large.missing_bytes == large.footprint_bytes == 2 * PAGE_BYTES
        assert (large.cached_tokens, large.new_tokens, large.kappa_ratio) == (0, 1, 0.0)
        assert (large.tenant_weight, large.tenant_entitled_share) == (1.0, 1.0)
        assert large.waited_duration.ToNanoseconds() >= large.queued_duration.ToNanoseconds() > 0
        assert [admit.request_id for admit in worker.admits] == ["first", "small"]
        steps.allow(1000)
        await asyncio.gather(*tasks)


async def test_memory_is_reserved_for_a_request_that_small_ones_overtake() -> None:
    worker, steps = paced_worker(capacity_pages=4)
    policy = PolicySettings(Policy.UTILISATION, aging_seconds=0.05)
    async with stack(worker, policy=policy) as running:
        tasks: Tasks = []
        await send(running, tasks, "first", 3)
        await send(running, tasks, "large", 4)
        await asyncio.sleep(0.1)
        await send(running, tasks, "small", 1)
        large, small = await queue_of(running)
        assert (large.request_id, large.waits_for, large.has_reservation) == (
            "large",
            "memory",
            True,
        )
        assert (small.request_id, small.waits_for) == ("small", "reservation")
        steps.allow(1000)
        await asyncio.gather(*tasks)
        assert [admit.request_id for admit in worker.admits] == ["first", "large", "small"]


async def test_the_queue_leaves_out_what_starts_while_it_is_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler_service.admin._EXPLAINED", 1)  # a pause before each entry
    worker, steps = paced_worker(capacity_pages=4)
    async with stack(worker) as running:
        tasks: Tasks = []
        for name in ("first", "second", "third"):
            await send(running, tasks, name, 4)
        admin, call = AdminServicer(running.manager), object()
        listing = asyncio.create_task(admin.GetQueue(scheduler_pb2.GetQueueRequest(), call))  # type: ignore[arg-type]
        tasks[0].cancel()
        running.manager._release(next(iter(running.manager.attempts_on("0"))))
        asyncio.get_running_loop().call_soon(running.manager._start_waiting)
        queue = await listing
        assert [entry.request_id for entry in queue.requests] == ["third"]
        steps.allow(1000)
        await asyncio.gather(*tasks[1:])

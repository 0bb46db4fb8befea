"""Long texts wait for places: the total, each tenant's share and the queue are bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace

import grpc
import pytest
from scheduler_doubles import SHAPE, TOKENIZER, WorkerDouble, answer, ids_request, stack
from waiting import until

from scheduler_service.api.text_jobs import TextJobs
from scheduler_service.limits import Limits
from scheduler_service.options import ServedModel
from splitpoint.errors import InvalidArgument, ResourceExhausted
from splitpoint.transport import statuses
from splitpoint.v1 import scheduler_pb2

LIMITS = Limits(text_jobs=3, text_queue=4, text_wait_seconds=30.0, retry_seconds=0.5)
LONG = 1 << 20


class Gate:
    """Jobs that run until the test releases them."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.running: list[str] = []

    def job(self, name: str) -> str:
        self.running.append(name)
        assert self.open.wait(30)
        return name


class Desk:
    def __init__(self, limits: Limits) -> None:
        self.jobs, self.gate = TextJobs(limits), Gate()
        self.tasks: list[asyncio.Task[str]] = []

    def ask(self, tenant: str, text_bytes: int = LONG) -> asyncio.Task[str]:
        run = self.jobs.run(
            lambda: self.gate.job(tenant),
            tenant=tenant,
            request_bytes=text_bytes,
            text_bytes=text_bytes,
        )
        self.tasks.append(asyncio.create_task(run))
        return self.tasks[-1]

    async def until_running(self, names: list[str]) -> None:
        await until(lambda: sorted(self.gate.running) == sorted(names))


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    made = Desk(LIMITS)
    yield made
    made.gate.open.set()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*made.tasks, return_exceptions=True)
    await made.jobs.close()


async def test_a_tenant_leaves_a_place_for_another(desk: Desk) -> None:
    for _ in range(4):
        desk.ask("a")
    await desk.until_running(["a", "a"])
    desk.ask("b")
    await desk.until_running(["a", "a", "b"])
    desk.gate.open.set()
    assert await asyncio.gather(*desk.tasks) == ["a", "a", "a", "a", "b"]


async def test_more_than_may_wait_are_turned_away_at_once(desk: Desk) -> None:
    for _ in range(4):
        desk.ask("a")
    await desk.until_running(["a", "a"])
    with pytest.raises(ResourceExhausted) as caught:
        await desk.ask("a")
    assert (caught.value.reason, caught.value.retry_after_seconds) == ("TOKENIZER_BUSY", 0.5)


async def test_a_tenant_leaves_half_of_the_queue_to_others(desk: Desk) -> None:
    for _ in range(4):
        desk.ask("a")
    desk.ask("b")
    await desk.until_running(["a", "a", "b"])
    with pytest.raises(ResourceExhausted):
        await desk.ask("a")
    waiting = [desk.ask("b"), desk.ask("b")]
    with pytest.raises(ResourceExhausted):  # nothing is left
        await desk.ask("c")
    desk.gate.open.set()
    assert await asyncio.gather(*waiting) == ["b", "b"]


async def test_closing_leaves_the_loop_to_others() -> None:
    """A job on the event loop would block the loop that has to end it."""
    desk = Desk(LIMITS)
    running = desk.ask("a")
    await desk.until_running(["a"])
    closing = asyncio.create_task(desk.jobs.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    desk.gate.open.set()
    await closing
    assert await running == "a"


async def test_a_wait_has_an_end() -> None:
    desk = Desk(replace(LIMITS, text_wait_seconds=0.05))
    for _ in range(2):
        desk.ask("a")
    await desk.until_running(["a", "a"])
    with pytest.raises(ResourceExhausted):
        await desk.ask("a")
    desk.gate.open.set()
    assert await asyncio.gather(*desk.tasks[:2]) == ["a", "a"]
    await desk.jobs.close()


async def test_a_caller_that_leaves_keeps_its_place_until_its_job_ends(desk: Desk) -> None:
    first, _ = desk.ask("a"), desk.ask("a")
    await desk.until_running(["a", "a"])
    third = desk.ask("a")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.sleep(0.05)
    assert desk.gate.running == ["a", "a"]
    desk.gate.open.set()
    assert await third == "a"


async def test_short_texts_do_not_wait(desk: Desk) -> None:
    for _ in range(3):
        desk.ask("a")
    await desk.until_running(["a", "a"])
    run = desk.jobs.run(lambda: "short", tenant="a", request_bytes=9000, text_bytes=9000)
    assert await run == "short"
    run = desk.jobs.run(lambda: "ids", tenant="a", request_bytes=LONG, text_bytes=0)
    assert await run == "ids"


# -- in a scheduler ---------------------------------------------------------------------


async def test_a_text_beyond_the_context_is_refused_by_its_bytes() -> None:
    text = "x = 1\n" * 600_000
    async with stack() as running:
        error = await running.error(scheduler_pb2.GenerateRequest(text=text))
        assert isinstance(error, InvalidArgument)
        assert (error.reason, error.field) == ("CONTEXT_EXCEEDED", "text")
        assert int(error.metadata["prompt_tokens"]) == TOKENIZER.fewest_tokens(text)
        with pytest.raises(grpc.RpcError) as caught:
            await running.inference.Tokenize(scheduler_pb2.TokenizeRequest(text=text))
        assert statuses.error_of(caught.value).reason == "CONTEXT_EXCEEDED"
        error = await running.error(ids_request([1] * 2_000_000))
        assert isinstance(error, InvalidArgument)
        assert error.metadata["prompt_tokens"] == "2000000"


async def test_long_texts_are_bounded_and_answered_in_turn() -> None:
    model = ServedModel(replace(SHAPE, context_length=1 << 20), TOKENIZER)
    limits = Limits(text_jobs=2, text_queue=1, retry_seconds=0.01)
    text = "x = 1\n" * 40_000
    async with stack(WorkerDouble(shape=model.shape), model=model, limits=limits) as running:
        asked = [
            running.inference.Tokenize(scheduler_pb2.TokenizeRequest(text=text)) for _ in range(6)
        ]
        codes: list[str] = []
        for call in asked:
            try:
                assert list((await call).token_ids) == TOKENIZER.encode(text)
                codes.append("")
            except grpc.RpcError as error:
                found = statuses.error_of(error)
                assert isinstance(found, ResourceExhausted)
                codes.append(found.reason)
        assert sorted(codes) == ["", "", *["TOKENIZER_BUSY"] * 4]
        # Short ones go on, and the places are free again.
        assert (await running.generate(ids_request([5], 3))).token_ids == answer([5], 3)
        again = await running.inference.Tokenize(scheduler_pb2.TokenizeRequest(text=text))
        assert list(again.token_ids) == TOKENIZER.encode(text)

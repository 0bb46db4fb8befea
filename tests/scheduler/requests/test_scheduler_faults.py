"""A real scheduler over worker doubles: failures, and that they affect nothing else."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest
from scheduler_doubles import (
    CHUNK_TOKENS,
    SHAPE,
    FakeClock,
    Stack,
    Steps,
    WorkerDouble,
    answer,
    ids_request,
    moved,
    paced_worker,
    stack,
)

from scheduler_service.cluster.connection import WorkerConnection
from scheduler_service.limits import Limits
from scheduler_service.options import ServedModel
from scheduler_service.placement.account import Need, WorkerAccount
from scheduler_service.placement.demand import Demand
from splitpoint.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    SplitpointError,
    Unavailable,
)
from splitpoint.options.scheduler import AnswerCharge
from splitpoint.shapes import chunks_of
from splitpoint.transport import channels, statuses
from splitpoint.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2, worker_pb2

PROMPT = [5, 6, 7]


async def first_token(call: Any) -> Any:
    return await call.read()


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


def all_is_released(running: Stack) -> bool:
    account = running.manager.admission.account("0")
    return account is not None and account.charged_bytes == 0 and not running.manager.attempts


async def test_a_disconnect_cancels_within_one_step() -> None:
    worker, steps = paced_worker()
    async with stack(worker) as running:
        call = running.inference.Generate(ids_request(PROMPT, 100, request_id="gone"))
        steps.allow(1)
        await first_token(call)
        made = worker.steps
        call.cancel()
        # The cancel reaches the worker although it takes no step at all.
        await running.until(lambda: worker.cancels)
        assert worker.steps == made
        assert worker.cancels[0][0] == "gone"
        steps.allow(1)
        await running.until(lambda: all_is_released(running))
        # An abandoned request is forgotten: a repeated call runs it again.
        steps.allow(200)
        again = await running.generate(ids_request(PROMPT, 8, request_id="gone"))
        assert again.token_ids == answer(PROMPT, 8)


async def test_leaving_the_queue_frees_the_place() -> None:
    worker, steps = paced_worker(capacity_pages=1)
    async with stack(worker) as running:
        running_one = asyncio.create_task(running.generate(ids_request([2], 4)))
        await running.until(lambda: worker.admits)
        waiting = running.inference.Generate(ids_request([3], 4))
        reading = asyncio.create_task(waiting.read())
        await running.until(lambda: running.manager.admission.queue())
        last = asyncio.create_task(running.generate(ids_request([4], 4)))
        await running.until(lambda: len(running.manager.admission.queue()) == 2)
        waiting.cancel()
        await running.until(lambda: len(running.manager.admission.queue()) == 1)
        steps.allow(100)
        assert (await running_one).token_ids == answer([2], 4)
        assert (await last).token_ids == answer([4], 4)
        assert len(worker.admits) == 2
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_a_lost_worker_is_replaced_without_a_gap() -> None:
    async with stack(WorkerDouble("0"), WorkerDouble("1")) as running:
        result, victim, heir = await moved(running, running.generate(ids_request(PROMPT, 40)), 7)
        assert result.token_ids == answer(PROMPT, 40)
        resumed = heir.admits[0]
        assert list(resumed.delivered_token_ids) == answer(PROMPT, 7)
        assert resumed.attempt > victim.admits[0].attempt
        assert resumed.sampling.seed == result.done.seed
        assert result.done.worker_id == heir.worker_id


async def test_prompt_logprobs_come_once_if_a_worker_is_lost() -> None:
    """The first worker dies behind half of the prompt; the other one reports all of it."""
    prompt = list(range(2, 602))
    workers = [WorkerDouble("0"), WorkerDouble("1")]

    def reports(count: int) -> Any:
        def mangle(response: worker_pb2.RunResponse) -> list[worker_pb2.RunResponse]:
            first = next((each for each in response.tokens if not each.first_index), None)
            if first is None:
                return [response] if count == len(prompt) else []
            scores = worker_pb2.PromptLogprobs(
                request_id=first.request_id,
                attempt=first.attempt,
                first_index=1,
                logprobs=[-float(index) for index in range(1, count)],
                ranks=range(1, count),
                top_token_ids=range(2, 2 * count),
                top_logprobs=[0.5] * (2 * count - 2),
            )
            whole = worker_pb2.RunResponse(step=response.step, prompt_logprobs=[scores])
            return [whole, response] if count == len(prompt) else [whole]

        return mangle

    request = ids_request(prompt, 4)
    request.sampling.prompt_logprobs = 2
    async with stack(*workers) as running:
        for worker in workers:
            worker.mangle = reports(300)
        task = asyncio.create_task(running.generate(request))
        await running.until(lambda: workers[0].admits or workers[1].admits)
        first = 0 if workers[0].admits else 1
        known = running.manager.requests.running()[0].output.prompt_logprobs
        await running.until(lambda: len(known) == 300)
        workers[1 - first].mangle = reports(len(prompt))
        await workers[first].kill()
        result = await task
        assert result.token_ids == answer(prompt, 4)
        # Nothing that the first worker may have found cached is used.
        assert not workers[1 - first].admits[0].delivered_token_ids
        found: list[types_pb2.PositionLogprobs] = []
        for chunk in result.chunks:
            assert not chunk.prompt_logprobs or chunk.prompt_index == len(found)
            assert len(chunk.prompt_logprobs) <= 256
            found += chunk.prompt_logprobs
        assert [each.chosen_token_id for each in found] == prompt
        assert [each.chosen_rank for each in found] == list(range(len(prompt)))
        assert [each.chosen_logprob for each in found[1:]] == [-float(i) for i in range(1, 600)]
        assert [[top.token_id for top in each.top] for each in found[1:]] == [
            [2 * index, 2 * index + 1] for index in range(1, 600)
        ]
        assert not found[0].top


async def test_tokens_without_the_prompt_logprobs_fail_the_request() -> None:
    worker = WorkerDouble()
    request = ids_request(PROMPT, 4)
    request.sampling.prompt_logprobs = 0
    async with stack(worker) as running:
        error = await running.error(request)
        assert (type(error), error.reason) == (Internal, "TOKENS_SKIPPED")
        await running.until(lambda: all_is_released(running))
        assert (await running.generate(ids_request(PROMPT, 4))).token_ids == answer(PROMPT, 4)


async def test_many_requests_survive_a_kill_and_a_return() -> None:
    worker, steps = paced_worker(capacity_pages=16)
    async with stack(worker) as running:
        rng = random.Random(3)
        prompts = [[rng.randrange(2, 4000)] for _ in range(24)]
        tasks = [
            asyncio.create_task(running.generate(ids_request(prompt, 60))) for prompt in prompts
        ]
        # A call that comes while no worker is ready is refused.
        await running.until(lambda: len(running.manager.requests.running()) == len(prompts))
        steps.allow(21)
        await running.until(lambda: worker.steps > 20)
        address = worker.address
        await worker.kill()
        await running.until(lambda: not running.scheduler.registry.ready())
        listed = await running.admin.ListWorkers(scheduler_pb2.ListWorkersRequest())
        assert listed.workers[0].message
        await worker.start(address)
        steps.allow(10_000)
        for prompt, task in zip(prompts, tasks, strict=True):
            assert (await task).token_ids == answer(prompt, 60)
        await running.until(lambda: all_is_released(running))


def is_decided(connection: WorkerConnection) -> bool:
    return connection.message != "connecting"


def admitted(worker: WorkerDouble, count: int) -> bool:
    return len(worker.admits) == count


async def test_a_request_that_loses_two_workers_is_not_tried_again() -> None:
    worker = WorkerDouble()
    worker.pace = Steps()
    async with stack(worker) as running:
        task = asyncio.create_task(running.error(ids_request(PROMPT, 40)))
        for attempt in range(2):
            await running.until(partial(admitted, worker, attempt + 1))
            address = worker.address
            await worker.kill()
            if attempt == 0:
                await worker.start(address)
        error = await task
        assert (type(error), error.reason) == (Internal, "REQUEST_QUARANTINED")


def beside_another_scheduler(response: worker_pb2.RunResponse) -> list[worker_pb2.RunResponse]:
    """Say that another scheduler runs a request on the worker."""
    charges = worker_pb2.Charges(cache_bytes=1, request_count=1)
    others = worker_pb2.OtherStreams(stream_count=1, busy_count=1, charges=charges)
    response.others.CopyFrom(others)
    return [response]


async def test_nothing_is_blamed_for_what_another_scheduler_may_have_done() -> None:
    worker = WorkerDouble()
    worker.mangle = beside_another_scheduler
    worker.pace = steps = Steps()
    async with stack(worker) as running:
        task = asyncio.create_task(running.error(ids_request(PROMPT, 900)))
        for attempt in range(4):
            await running.until(partial(admitted, worker, attempt + 1))
            request = running.manager.requests.running()[0]
            assert request.is_suspect == bool(attempt)
            account = running.manager.admission.account("0")
            steps.allow(1)
            await running.until(lambda: account.others.request_count)  # noqa: B023
            address = worker.address
            await worker.kill()
            await worker.start(address)
        error = await task
        assert (type(error), error.reason) == (Unavailable, "TOO_MANY_MOVES")


async def test_a_request_is_moved_three_times_and_then_given_up() -> None:
    worker, steps = paced_worker(capacity_pages=2000)
    async with stack(worker) as running:
        task = asyncio.create_task(running.error(ids_request(PROMPT, 900)))
        # It gets far enough each time that it is no longer suspected of the loss.
        for attempt, tokens in enumerate((0, 20, 100, 700)):
            await running.until(partial(admitted, worker, attempt + 1))
            request = running.manager.requests.running()[0]
            steps.allow(tokens - len(request.output))
            await running.until(lambda: len(request.output) == tokens)  # noqa: B023
            assert not request.is_suspect or not tokens
            assert request.moves == attempt
            address = worker.address
            await worker.kill()
            await worker.start(address)
        error = await task
        assert (type(error), error.reason) == (Unavailable, "TOO_MANY_MOVES")
        assert "after 3 moves" in error.message
        assert [len(admit.delivered_token_ids) for admit in worker.admits] == [0, 0, 20, 100]
        await running.until(lambda: all_is_released(running))


async def test_without_any_worker_it_waits_ten_seconds() -> None:
    clock = FakeClock()
    worker = WorkerDouble()
    worker.pace = Steps()
    async with stack(worker, clock=clock) as running:
        task = asyncio.create_task(running.error(ids_request(PROMPT, 40)))
        await running.until(lambda: worker.admits)
        await worker.kill()
        await running.until(lambda: running.manager.admission.queue())
        request = running.manager.requests.running()[0]
        await running.until(lambda: request.times.unplaceable is not None)
        clock.now += 9.9
        running.manager.tick()
        assert not request.has_ended
        clock.now += 0.2
        error = await task
        assert (type(error), error.reason) == (Unavailable, "NO_WORKER")


async def test_an_end_that_was_lost_is_found_in_the_tokens() -> None:
    """If a worker dies after the last token but before its finish, nothing is generated again."""
    worker, steps = paced_worker()

    def without_finishes(response: worker_pb2.RunResponse) -> list[worker_pb2.RunResponse]:
        del response.finishes[:]
        return [response]

    worker.mangle = without_finishes
    async with stack(worker) as running:
        steps.allow(10)
        task = asyncio.create_task(running.generate(ids_request(PROMPT, 5)))
        await running.until(lambda: running.manager.requests.running())
        request = running.manager.requests.running()[0]
        await running.until(lambda: len(request.output) == 5)
        await worker.kill()
        assert (await task).token_ids == answer(PROMPT, 5)
        assert len(worker.admits) == 1


async def test_late_repeated_and_partly_repeated_messages_are_dropped() -> None:
    worker = WorkerDouble()
    sent: list[worker_pb2.RunResponse] = []

    def noisy(response: worker_pb2.RunResponse) -> list[worker_pb2.RunResponse]:
        sent.append(response)
        messages = [response]
        if len(sent) > 2:
            messages.append(sent[-2])  # an old step again
            joined = worker_pb2.RunResponse()
            joined.CopyFrom(sent[-2])
            for result, newer in zip(joined.tokens, response.tokens, strict=False):
                result.token_ids.extend(newer.token_ids)  # two steps in one
            del joined.finishes[:]
            messages.append(joined)
            stale = worker_pb2.RunResponse()
            stale.tokens.add(request_id="r", attempt=10**6, first_index=0, token_ids=[3])
            messages.append(stale)
        return messages

    worker.mangle = noisy
    async with stack(worker) as running:
        result = await running.generate(ids_request(PROMPT, 30, request_id="r"))
        assert result.token_ids == answer(PROMPT, 30)
        assert running.manager.counters.duplicate_count > 0
        assert running.manager.counters.late_count > 0


async def test_a_gap_is_not_delivered(caplog: pytest.LogCaptureFixture) -> None:
    worker = WorkerDouble()

    def gap(response: worker_pb2.RunResponse) -> list[worker_pb2.RunResponse]:
        for result in response.tokens:
            if result.first_index == 3 and len(worker.admits) == 1:
                result.first_index = 4
        return [response]

    worker.mangle = gap
    async with stack(worker) as running:
        result = await running.generate(ids_request(PROMPT, 10))
        assert result.token_ids == answer(PROMPT, 10)
        assert len(worker.admits) == 2
        assert "skipped tokens" in caplog.text


@pytest.mark.parametrize(
    ("refusal", "kind", "attempts"),
    [
        (ResourceExhausted("this worker has 3 pages"), ResourceExhausted, 1),
        (Unavailable("the KV store went away"), Unavailable, 2),
        (Internal("the model produced NaN"), Internal, 1),
    ],
)
async def test_refusals_reach_the_client(
    refusal: SplitpointError, kind: type[SplitpointError], attempts: int
) -> None:
    worker = WorkerDouble()
    worker.refusal = refusal
    async with stack(worker) as running:
        error = await running.error(ids_request(PROMPT, 10))
        assert isinstance(error, kind)
        assert error.message == refusal.message
        assert len(worker.admits) == attempts
        await running.until(lambda: all_is_released(running))
        worker.refusal = None
        assert (await running.generate(ids_request(PROMPT, 10))).done


async def test_a_token_that_breaks_its_request_breaks_no_other() -> None:
    worker = WorkerDouble()
    worker.token_of = lambda prompt, index: -1 if prompt[0] == 9 else answer(prompt, 8)[index]
    async with stack(worker) as running:
        bad, good = await asyncio.gather(
            running.error(ids_request([9], 8)), running.generate(ids_request([5], 8))
        )
        assert isinstance(bad, Internal)
        assert "incident" in bad.message
        assert good.token_ids == answer([5], 8)
        await running.until(lambda: all_is_released(running))


async def test_a_passed_deadline_ends_the_request() -> None:
    worker, steps = paced_worker()
    async with stack(worker) as running:
        steps.allow(1)
        error = await running.error(ids_request(PROMPT, 40), timeout=0.3)
        assert isinstance(error, DeadlineExceeded)
        await running.until(lambda: worker.cancels)
        steps.allow(1)
        await running.until(lambda: all_is_released(running))
        assert isinstance(
            await running.error(ids_request(PROMPT, 40), timeout=-1), DeadlineExceeded
        )


LONG = ServedModel(replace(SHAPE, context_length=1_000_000), None)


def long_worker() -> WorkerDouble:
    return WorkerDouble(capacity_pages=10**5, shape=LONG.shape)


async def read_to_the_error(call: Any) -> SplitpointError:
    try:
        while await call.read():
            pass
    except grpc.RpcError as error:
        return statuses.error_of(error)
    raise RuntimeError("the call did not fail")


@asynccontextmanager
async def slow_client(running: Stack) -> AsyncIterator[SlowClient]:
    """Give a client whose transport buffers little."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with grpc.aio.insecure_channel(running.address, options=options) as channel:
        yield SlowClient(scheduler_pb2_grpc.InferenceServiceStub(channel))


class SlowClient:
    """Begins requests, and reads no more of them than it is told to."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    async def begin(
        self, prompt: Sequence[int], count: int, request_id: str
    ) -> tuple[Any, list[int]]:
        """Return a call, and the tokens of its first message."""
        request = ids_request(prompt, count, request_id=request_id)
        request.sampling.logprobs = 20  # large messages fill the transport sooner
        call = self._stub.Generate(request)
        return call, list((await call.read()).chunk.token_ids)

    async def read_all(self, call: Any, tokens: list[int]) -> None:
        """Add the tokens of all further messages."""
        while (response := await call.read()).HasField("chunk"):
            tokens += response.chunk.token_ids


@asynccontextmanager
async def cut_off_reader() -> AsyncIterator[Any]:
    """Give the call of a reader that took nothing for too long, and check that others run."""
    worker = long_worker()
    limits = Limits(lag_tokens=64, stall_seconds=0.3)
    async with stack(worker, model=LONG, limits=limits) as running:
        async with slow_client(running) as client:
            stuck, _ = await client.begin(PROMPT, 5_000, "stuck")
            await running.until(lambda: worker.cancels)
            await running.until(lambda: all_is_released(running))
            yield stuck
        assert len((await running.generate(ids_request([8], 50))).token_ids) == 50


async def test_a_slow_reader_pauses_its_request_and_no_other() -> None:
    worker, count = long_worker(), 1_500
    async with (
        stack(worker, model=LONG, limits=Limits(lag_tokens=64)) as running,
        slow_client(running) as client,
    ):
        slow, tokens = await client.begin(PROMPT, count, "slow")
        await running.until(lambda: "slow" in worker.pauses)
        live = running.manager.requests.running()[0]
        await running.until(lambda: live.is_paused)
        produced = len(live.output)
        other = await running.generate(ids_request([8], 500))
        assert len(other.token_ids) == 500
        # Only tokens under way when the worker got the pause still come.
        assert len(live.output) - produced < 500
        await client.read_all(slow, tokens)
        assert len(tokens) == count
        assert tokens[:50] == answer(PROMPT, 50)
        assert "slow" in worker.resumes


@pytest.mark.parametrize("lacking", ["places", "memory"])
async def test_paused_requests_make_room_and_run_on_later(lacking: str) -> None:
    count = 1_200
    worker, prompts = long_worker(), [[5, 6, last] for last in range(2)]
    if lacking == "places":
        worker.max_batch = len(prompts)
    else:
        worker.capacity_pages = len(prompts) * chunks_of(3 + count, CHUNK_TOKENS)
    limits = Limits(lag_tokens=64, stall_seconds=600.0)
    charge = AnswerCharge.WORST_CASE
    async with (
        stack(worker, model=LONG, limits=limits, answer_charge=charge) as running,
        slow_client(running) as client,
    ):
        slow = [
            await client.begin(prompt, count, f"slow {index}")
            for index, prompt in enumerate(prompts)
        ]
        lives = running.manager.requests.running()
        await running.until(lambda: all(live.is_paused for live in lives))
        assert len(worker.running) == len(prompts)
        assert not worker.cancels
        other = asyncio.create_task(
            running.generate(ids_request([8], count, request_id="other"), timeout=60)
        )
        await running.until(lambda: worker.admits[-1].request_id == "other")
        # One made room for it; the others keep what they have.
        assert len(worker.cancels) == 1
        for call, tokens in slow:
            await client.read_all(call, tokens)
        assert [tokens for _, tokens in slow] == [answer(prompt, count) for prompt in prompts]
        # It was never stopped for them.
        assert (await other).token_ids == answer([8], count)
        assert [admit.request_id for admit in worker.admits].count("other") == 1
        assert worker.most_running <= worker.max_batch
        assert worker.most_pages <= worker.capacity_pages
        assert {(live.losses, live.refusals, live.moves) for live in lives} == {(0, 0, 0)}


async def test_a_suspect_that_is_paused_makes_room_and_runs_on_later() -> None:
    worker, count = long_worker(), 1_500
    async with (
        stack(worker, model=LONG, limits=Limits(lag_tokens=64)) as running,
        slow_client(running) as client,
    ):
        slow, tokens = await client.begin(PROMPT, count, "slow")
        live = running.manager.requests.running()[0]
        # As after an engine that failed: a suspect for longer than its reader keeps up.
        live.cleared_at_tokens = count
        await running.until(lambda: live in running.manager.admission.queue())
        assert live.is_paused
        assert len(worker.cancels) == 1
        other = await running.generate(ids_request([8], 500))
        assert len(other.token_ids) == 500
        await client.read_all(slow, tokens)
        assert tokens == answer(PROMPT, count)
        assert (live.losses, live.refusals) == (0, 0)
        assert len(worker.admits) > 2


@pytest.mark.parametrize("is_expected", [True, False])
async def test_a_start_that_fails_after_a_look_up_lets_the_next_one_start(
    monkeypatch: pytest.MonkeyPatch, is_expected: bool
) -> None:
    """By an error of the plan, or by an unexpected one."""
    worker, steps = paced_worker(max_batch=1)
    async with stack(worker, limits=Limits(lookup_lifetime_seconds=-1.0)) as running:
        manager = running.manager
        found, gate = manager._find_prefix, asyncio.Event()

        async def find(salt: bytes, tokens: Any) -> Any:
            if len(tokens) == 2 and manager.attempts:
                await gate.wait()
            return await found(salt, tokens)

        def refuse(attempt: Any) -> None:
            if len(attempt.request.prompt) == 2:
                raise InvalidArgument("no such plan") if is_expected else RuntimeError("broken")
            tell(attempt)

        tell = manager._tell
        monkeypatch.setattr(manager, "_find_prefix", find)
        monkeypatch.setattr(manager, "_tell", refuse)
        bad = asyncio.create_task(running.error(ids_request([9, 9], 4)))
        await running.until(lambda: manager.attempts)
        good = asyncio.create_task(running.generate(ids_request(PROMPT, 4)))
        await running.until(lambda: manager.admission.queue())
        gate.set()
        assert isinstance(await bad, InvalidArgument if is_expected else Internal)
        await running.until(lambda: worker.admits)
        steps.allow(10)
        assert (await good).token_ids == answer(PROMPT, 4)


async def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    async with cut_off_reader() as stuck:
        # What was sent before can still be read; then comes the status.
        error = await read_to_the_error(stuck)
        assert (type(error), error.reason) == (Cancelled, "SLOW_READER")


async def test_a_reader_that_takes_nothing_and_leaves_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its status waited for it behind what it never read."""
    async with cut_off_reader() as stuck:
        stuck.cancel()
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []


async def test_too_many_calls_are_turned_away() -> None:
    worker, steps = paced_worker()
    async with stack(worker, limits=Limits(concurrent_calls=3)) as running:
        tasks = [asyncio.create_task(running.generate(ids_request([n], 4))) for n in (2, 3, 4)]
        await running.until(lambda: len(worker.admits) == 3)
        error = await running.error(ids_request([5], 4))
        assert (type(error), error.reason) == (ResourceExhausted, "TOO_MANY_CALLS")
        steps.allow(100)
        await asyncio.gather(*tasks)
        assert await running.generate(ids_request([5], 4))


async def test_completed_requests_are_forgotten_after_a_minute() -> None:
    clock = FakeClock()
    worker = WorkerDouble()
    async with stack(worker, clock=clock) as running:
        request = ids_request(PROMPT, 4, request_id="once")
        first = await running.generate(request)
        clock.now += 59
        assert (await running.generate(request)).done == first.done
        clock.now += 2
        assert (await running.generate(request)).token_ids == first.token_ids
        assert len(worker.admits) == 2


async def test_a_drained_worker_gets_nothing_new() -> None:
    workers = [WorkerDouble("0"), WorkerDouble("1")]
    async with stack(*workers) as running:
        await workers[0].drain()
        await running.until(lambda: len(running.scheduler.registry.ready()) == 1)
        for _ in range(4):
            assert (await running.generate(ids_request(PROMPT, 4))).done.worker_id == "1"


async def test_a_stop_lets_running_requests_end() -> None:
    worker, steps = paced_worker()
    async with stack(worker) as running:
        task = asyncio.create_task(running.generate(ids_request(PROMPT, 20)))
        await running.until(lambda: worker.admits)
        stopping = asyncio.create_task(running.scheduler.stop(20))
        await running.until(lambda: running.manager.is_draining)
        steps.allow(100)
        assert (await task).token_ids == answer(PROMPT, 20)
        await stopping
        async with channels.open_channel(running.address) as channel:
            send: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
            send = channel.unary_unary("/splitpoint.v1.AdminService/ListWorkers")
            with pytest.raises(grpc.RpcError) as caught:
                await send(b"")
        assert isinstance(statuses.error_of(caught.value), Unavailable)


async def test_foreign_and_doubled_workers_are_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    foreign = WorkerDouble("9", shape=LONG.shape)
    twin = WorkerDouble("0")
    addresses = [await foreign.start(), await twin.start()]
    async with stack(WorkerDouble("0")) as running:
        for address in addresses:
            connection = WorkerConnection(address, SHAPE, running.scheduler._stores)
            task = asyncio.create_task(connection.run(running.scheduler.registry))
            await running.until(partial(is_decided, connection))
            assert connection.ready is None
            assert "another model" in connection.message or "already" in connection.message
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    for double in (foreign, twin):
        await double.kill()


async def test_nothing_private_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    canary = "canary sentence of a prompt"
    with caplog.at_level(logging.DEBUG):
        worker = WorkerDouble()
        async with stack(worker) as running:
            request = scheduler_pb2.GenerateRequest(
                text=canary, cache_salt=b"canary salt", request_id="watched"
            )
            result = await running.generate(request)
            await running.error(scheduler_pb2.GenerateRequest(text=canary, cache_salt=b"c" * 200))
            worker.refusal = Internal("no")
            await running.error(request_with_other_id(request))
    assert "watched" in caplog.text or result.text
    for secret in (canary, "canary salt", result.text[:40]):
        assert secret not in caplog.text


def request_with_other_id(request: scheduler_pb2.GenerateRequest) -> Any:
    other = scheduler_pb2.GenerateRequest()
    other.CopyFrom(request)
    other.request_id = "watched too"
    other.sampling.max_tokens = CHUNK_TOKENS
    return other


async def test_what_outlives_the_grace_period_is_told_so() -> None:
    worker, steps = paced_worker()
    async with stack(worker) as running:
        call = running.inference.Generate(ids_request(PROMPT, 100))
        steps.allow(1)
        await first_token(call)
        stopping = asyncio.create_task(running.scheduler.stop(0.3))
        await running.until(lambda: running.manager.is_draining)
        # It is draining, not dead.
        workers = await running.admin.ListWorkers(scheduler_pb2.ListWorkersRequest())
        assert [worker.running_count for worker in workers.workers] == [1]
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await read_to_the_end(call)
        assert statuses.error_of(ended.value).reason == "STOPPED"
        await stopping
        assert worker.cancels


async def test_a_grant_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(account: WorkerAccount, demand: Demand, need: Need) -> None:
        monkeypatch.undo()
        raise ValueError("the books are wrong")

    async with stack() as running:
        monkeypatch.setattr(WorkerAccount, "start", refuse)
        error = await running.error(ids_request(PROMPT, 4))
        assert isinstance(error, Internal)
        assert "incident" in error.message
        assert (await running.generate(ids_request(PROMPT, 4))).token_ids == answer(PROMPT, 4)
        assert all_is_released(running)


async def test_a_tick_that_fails_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> bool:
        monkeypatch.undo()
        raise ValueError("the books are wrong")

    limits = Limits(worker_wait_seconds=0.0)
    async with stack(limits=limits) as running:
        monkeypatch.setattr(running.manager.sharing, "tick", fail)
        await running.until(lambda: "a tick failed" in caplog.text)
        assert "the books are wrong" in caplog.text
        # Only a tick ends a request that no worker can take.
        running.manager.admission.close_worker("0")
        assert (await running.error(ids_request(PROMPT, 4))).reason == "NO_WORKER"

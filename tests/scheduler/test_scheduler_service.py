"""A real scheduler over worker doubles: requests that succeed."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scheduler_doubles import (
    CHUNK_TOKENS,
    PAGE_BYTES,
    PROFILE,
    SHAPE,
    TOKENIZER,
    Stack,
    Steps,
    StoreDouble,
    WorkerDouble,
    answer,
    ids_request,
    paced_worker,
    reasons_of,
    stack,
)

from scheduler_service.limits import Limits
from splitpoint.config import format_size
from splitpoint.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from splitpoint.keys import chunk_keys, tenant_salt
from splitpoint.options.scheduler import AnswerCharge
from splitpoint.planning.plan import Objective, ReasonKind
from splitpoint.planning.schedule import Schedule
from splitpoint.transport import statuses
from splitpoint.v1 import scheduler_pb2, types_pb2


async def test_tokens_text_and_the_final_message() -> None:
    async with stack() as running:
        prompt = [5, 6, 7]
        result = await running.generate(ids_request(prompt, 20, request_id="one"))
        assert result.token_ids == answer(prompt, 20)
        assert result.text == TOKENIZER.decode(answer(prompt, 20))
        done = result.done
        assert done.finish_reason == types_pb2.FINISH_REASON_LENGTH
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (3, 20)
        assert (done.worker_id, done.request_id) == ("0", "one")
        assert done.plan.residency == types_pb2.RESIDENCY_RESIDENT
        assert done.plan.reason == "nothing is cached: 3 tokens are prefilled"
        assert len(done.plan.reasons) == len(done.plan.reason_details) > 0
        assert done.plan.footprint_bytes == 2 * PAGE_BYTES
        assert 0 <= done.queue_seconds <= done.ttft_seconds <= done.total_seconds
        assert done.restore_seconds == 0.25


async def test_text_prompts_and_what_is_left_open() -> None:
    async with stack() as running:
        request = scheduler_pb2.GenerateRequest(text="def read(path):")
        result = await running.generate(request)
        prompt = TOKENIZER.encode("def read(path):")
        assert result.token_ids == answer(prompt, 128)
        assert result.done.request_id
        assert result.done.seed >= 0
        admit = running.workers[0].admits[0]
        assert admit.sampling.seed == result.done.seed
        assert list(admit.prompt_token_ids) == prompt
        # A prompt near the end of the context gets what is left of it.
        long = [9] * (SHAPE.context_length - 3)
        running.workers[0].capacity_pages = 10**6
    async with stack(WorkerDouble(capacity_pages=1000)) as running:
        result = await running.generate(ids_request(long))
        assert len(result.token_ids) == 3


async def test_salts_are_derived_and_narrow_sharing() -> None:
    async with stack() as running:
        await running.generate(ids_request([5], 1))
        await running.generate(ids_request([5], 1, cache_salt=b"mine"))
        plain, salted = (admit.tenant_salt for admit in running.workers[0].admits)
        assert plain == tenant_salt(b"k" * 32, "", b"")
        assert salted == tenant_salt(b"k" * 32, "", b"mine")


async def test_stop_tokens_are_reported_but_are_no_text() -> None:
    async with stack() as running:
        prompt = [11]
        tokens = answer(prompt, 6)
        request = ids_request(prompt, 50)
        request.sampling.stop_token_ids.append(tokens[5])
        result = await running.generate(request)
        assert result.token_ids == tokens
        assert result.text == TOKENIZER.decode(tokens[:5])
        assert result.done.finish_reason == types_pb2.FINISH_REASON_STOP


async def test_logprobs_come_with_their_tokens() -> None:
    async with stack() as running:
        request = ids_request([3], 9)
        request.sampling.logprobs = 2
        result = await running.generate(request)
        for chunk in result.chunks:
            assert len(chunk.logprobs) == len(chunk.token_ids)
            assert all(len(position.top) == 2 for position in chunk.logprobs)


async def test_fifty_requests_against_memory_for_eight() -> None:
    pages = 2
    worker = WorkerDouble(capacity_pages=8 * pages)
    async with stack(worker) as running:
        rng = random.Random(1)
        prompts = [[rng.randrange(2, 4000) for _ in range(rng.randint(1, 12))] for _ in range(50)]
        requests = [
            ids_request(prompt, pages * CHUNK_TOKENS - len(prompt), request_id=f"r{n}")
            for n, prompt in enumerate(prompts)
        ]
        results = await asyncio.gather(*(running.generate(request) for request in requests))
        for prompt, request, result in zip(prompts, requests, results, strict=True):
            assert result.token_ids == answer(prompt, request.sampling.max_tokens)
        assert worker.most_pages <= 8 * pages
        account = running.manager.admission.account("0")
        await running.until(lambda: account.charged_bytes == 0 and account.running_count == 0)


def has_stepped(worker: WorkerDouble, made: int) -> bool:
    return worker.steps > made


async def fifty_short_answers(answer_charge: AnswerCharge) -> int:
    """Return the most requests at once, of 50 whose answers end after 4 of 20 tokens."""
    pages = 2
    worker, steps = paced_worker(capacity_pages=8 * pages)
    async with stack(worker, answer_charge=answer_charge) as running:
        prompts = [[n + 2] * 12 for n in range(50)]
        requests = [ids_request(prompt, 20) for prompt in prompts]
        for prompt, request in zip(prompts, requests, strict=True):
            request.sampling.stop_token_ids.append(answer(prompt, 4)[-1])
        tasks = [asyncio.create_task(running.generate(request)) for request in requests]
        admission = running.manager.admission
        await running.until(lambda: admission.running_count + len(admission.queue()) == 50)
        while admission.running_count:
            # No step is taken while a request that was granted memory is on its way.
            await running.until(lambda: len(worker.running) == admission.running_count)
            made = worker.steps
            steps.allow(1)
            await running.until(partial(has_stepped, worker, made))
        for prompt, task in zip(prompts, tasks, strict=True):
            assert (await task).token_ids == answer(prompt, 4)
        account = admission.account("0")
        await running.until(lambda: account.charged_bytes == 0 and account.running_count == 0)
    return worker.most_running


async def test_short_answers_run_at_least_half_as_many_again_at_once() -> None:
    worst_case = await fifty_short_answers(AnswerCharge.WORST_CASE)
    expected = await fifty_short_answers(AnswerCharge.EXPECTED)
    assert worst_case == 8
    assert expected >= 1.5 * worst_case


async def test_the_devices_digest_chooses_the_worker() -> None:
    workers = [WorkerDouble("0"), WorkerDouble("1")]
    prompt = list(range(3, 3 + 4 * CHUNK_TOKENS))
    salt = tenant_salt(b"k" * 32, "")
    keys = list(chunk_keys(workers[1].layout.layout_hash, salt, prompt, CHUNK_TOKENS))
    digest = b"".join(key[:8] for key in reversed(keys))
    async with stack(*workers) as running:
        workers[1].report(types_pb2.Telemetry(uptime_seconds=1, device_chunk_marks=digest))
        account = running.manager.admission.account("1")
        await running.until(lambda: account.device_marks)
        workers[1].report(types_pb2.Telemetry(uptime_seconds=2))
        connection = running.manager.registry.connections[1]
        await running.until(lambda: connection.telemetry.uptime_seconds == 2)
        assert len(account.device_marks) == 4  # absent: unchanged
        await running.generate(ids_request([*prompt, 7], 2))
        [command] = workers[1].admits
        assert workers[0].admits == []
        assert command.plan.device_tokens == 4 * CHUNK_TOKENS
        assert reasons_of(command.plan)[ReasonKind.ON_DEVICE] == (64,)
        assert not command.plan.reason, "a worker needs no words"
        listed = await running.admin.ListWorkers(scheduler_pb2.ListWorkersRequest())
        assert not any(w.telemetry.device_chunk_marks for w in listed.workers)
        # Another tenant's chunks are others.
        await running.generate(ids_request([*prompt, 7], 2, cache_salt=b"mine"))
        assert len(workers[0].admits) == 1


async def test_five_hundred_calls_on_one_connection() -> None:
    async with stack(WorkerDouble(capacity_pages=32)) as running:
        requests = [ids_request([n + 2], 2) for n in range(500)]
        limits = running.manager.limits
        assert limits.queue_capacity < len(requests) <= limits.concurrent_calls
        results = await asyncio.gather(
            *(running.generate(request) for request in requests), return_exceptions=True
        )
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, grpc.RpcError):
                # A refusal names its reason and when to come back.
                assert statuses.error_of(result).reason == "QUEUE_FULL"
            else:
                assert not isinstance(result, BaseException)
                assert result.token_ids == answer(request.token_ids.ids, 2)


async def test_first_come_first_served() -> None:
    worker, steps = paced_worker(capacity_pages=4)
    async with stack(worker) as running:
        # A holds three of four pages; B needs two, so C (one page) waits behind B.
        sizes = {"a": 3, "b": 2, "c": 1, "d": 4, "e": 1}
        tasks = []
        for name, pages in sizes.items():
            request = ids_request([7], pages * CHUNK_TOKENS - 1, request_id=name)
            tasks.append(asyncio.create_task(running.generate(request)))
            await running.until(lambda: len(running.manager.requests) == len(tasks))
        await running.until(lambda: len(running.manager.admission.queue()) == 4)
        queue = await running.admin.GetQueue(scheduler_pb2.GetQueueRequest())
        assert [entry.request_id for entry in queue.requests] == ["b", "c", "d", "e"]
        assert [entry.position for entry in queue.requests] == [0, 1, 2, 3]
        assert queue.requests[0].footprint_bytes == 2 * PAGE_BYTES
        assert [entry.waits_for for entry in queue.requests[:2]] == ["memory", "turn"]
        assert queue.capacity == Limits().queue_capacity
        steps.allow(1000)
        await asyncio.gather(*tasks)
        assert [admit.request_id for admit in worker.admits] == ["a", "b", "c", "d", "e"]


async def test_a_full_queue_asks_to_come_again() -> None:
    worker, steps = paced_worker(capacity_pages=1)
    async with stack(worker, limits=Limits(queue_capacity=1)) as running:
        tasks = [asyncio.create_task(running.generate(ids_request([n], 4))) for n in (2, 3)]
        await running.until(lambda: len(running.manager.admission.queue()) == 1)
        error = await running.error(ids_request([4], 4))
        assert isinstance(error, ResourceExhausted)
        assert error.reason == "QUEUE_FULL"
        assert error.retry_after_seconds == 1.0
        steps.allow(100)
        await asyncio.gather(*tasks)


async def test_what_can_never_fit_is_rejected_with_its_numbers() -> None:
    async with stack(WorkerDouble(capacity_pages=4)) as running:
        error = await running.error(ids_request([5], 4 * CHUNK_TOKENS))
        assert isinstance(error, ResourceExhausted)
        assert error.reason == "NEVER_FITS"
        assert error.retry_after_seconds is None
        assert error.metadata == {
            "needed_bytes": str(5 * PAGE_BYTES),
            "capacity_bytes": str(4 * PAGE_BYTES),
            "needed_tokens": str(4 * CHUNK_TOKENS + 1),
            "capacity_tokens": str(4 * CHUNK_TOKENS),
        }
        assert format_size(5 * PAGE_BYTES) in error.message
        assert error.message.count(f"{4 * CHUNK_TOKENS + 1:,} tokens") == 1
        assert "resident residency" not in error.message
        wish = ids_request([5], 4 * CHUNK_TOKENS, restore_method=types_pb2.RESTORE_METHOD_TOKENS)
        refused = await running.error(wish)
        assert "restoring from tokens needs resident residency" in refused.message
        fits = await running.generate(ids_request([5], 4 * CHUNK_TOKENS - 1))
        assert len(fits.token_ids) == 4 * CHUNK_TOKENS - 1


async def test_a_request_that_would_wait_long_is_streamed_at_once_and_its_plan_says_why() -> None:
    store = StoreDouble()
    address = await store.start()
    measured = replace(PROFILE, step_compute_seconds=0.02)
    worker = WorkerDouble(
        capacity_pages=8, streamed_pages=1, kvstore_address=address, profile=measured
    )
    steps = Steps()
    worker.pace = steps
    async with stack(worker, answer_charge=AnswerCharge.WORST_CASE) as running:
        # All but one page, for many steps.
        long = asyncio.create_task(running.generate(ids_request([5] * 10, 100)))
        await running.until(lambda: len(worker.running) == 1)
        short = asyncio.create_task(running.generate(ids_request([6] * 30, 4)))
        await running.until(lambda: len(worker.running) == 2)
        steps.allow(1000)
        plan = (await short).done.plan
        assert plan.residency == types_pb2.RESIDENCY_STREAMED
        assert ReasonKind.STREAM_NOW in reasons_of(plan)
        assert (await long).done.plan.residency == types_pb2.RESIDENCY_RESIDENT
    await store.stop()


async def test_what_exceeds_the_device_is_streamed_if_the_store_can_hold_it() -> None:
    store = StoreDouble(slot_count=8)
    address = await store.start()
    worker = WorkerDouble(capacity_pages=4, streamed_pages=3, kvstore_address=address)
    async with stack(worker) as running:
        result = await running.generate(ids_request([5], 8 * CHUNK_TOKENS - 1))
        assert result.done.plan.residency == types_pb2.RESIDENCY_STREAMED
        assert not result.done.HasField("step_seconds")
        worker.mean_step_seconds = 0.25
        result = await running.generate(ids_request([5], 8 * CHUNK_TOKENS - 1))
        assert result.done.step_seconds == 0.25
        assert result.done.plan.footprint_bytes == 3 * PAGE_BYTES
        assert ReasonKind.EXCEEDS in reasons_of(result.done.plan)
        error = await running.error(ids_request([5], 8 * CHUNK_TOKENS))
        assert isinstance(error, ResourceExhausted)
        assert error.metadata["capacity_tokens"] == str(8 * CHUNK_TOKENS)
        assert "9 slots" in error.message
        wish = ids_request([5], 8, residency=types_pb2.RESIDENCY_STREAMED)
        result = await running.generate(wish)
        assert result.done.plan.residency == types_pb2.RESIDENCY_STREAMED
        wish = ids_request([5], 5 * CHUNK_TOKENS, residency=types_pb2.RESIDENCY_RESIDENT)
        assert isinstance(await running.error(wish), ResourceExhausted)
    await store.stop()


async def test_the_plan_reports_what_really_happened() -> None:
    store = StoreDouble(cached_tokens=32)
    worker = WorkerDouble(kvstore_address=await store.start())
    async with stack(worker) as running:
        prompt = list(range(10, 50))
        expected = await running.generate(ids_request(prompt, 2))
        assert expected.done.usage.cached_tokens == 32
        assert worker.admits[0].plan.cached_tokens == 32
        assert ReasonKind.FOUND_CACHED not in reasons_of(expected.done.plan)
        worker.cached_tokens = 16
        other = await running.generate(ids_request(prompt, 2))
        assert other.done.usage.cached_tokens == 16
        assert other.done.plan.cached_tokens == 16
        assert other.done.plan.new_tokens == 24
        assert reasons_of(other.done.plan)[ReasonKind.FOUND_CACHED] == (16, 32)
        # The last token is always computed.
        worker.cached_tokens, store.cached_tokens = None, 999
        whole = await running.generate(ids_request(prompt, 2))
        assert whole.done.plan.cached_tokens == 39
    await store.stop()


async def test_cached_tokens_of_a_moved_request_are_those_of_its_first_attempt() -> None:
    """A later attempt finds what the first stored: the prompt itself, and what was delivered."""
    store = StoreDouble(cached_tokens=16)
    address = await store.start()
    workers = [WorkerDouble(str(n), kvstore_address=address) for n in range(2)]
    workers[0].pace = workers[1].pace = steps = Steps()
    async with stack(*workers) as running:
        prompt = list(range(10, 50))
        asked = asyncio.create_task(running.generate(ids_request(prompt, 8)))
        steps.allow(3)
        await running.until(lambda: any(len(w.admits) and w.steps >= 2 for w in workers))
        first = next(worker for worker in workers if worker.admits)
        store.cached_tokens = 42
        await first.kill()
        steps.allow(100)
        result = await asked
        assert result.token_ids == answer(prompt, 8)
        assert result.done.usage.cached_tokens == 16
        assert result.done.plan.cached_tokens > 16
        # Of one that comes with the tokens of another scheduler, at most the prompt but its last.
        resumed = ids_request(prompt, 8, request_id="resumed")
        resumed.sampling.seed = 1
        resumed.resume.next_index = 4
        resumed.resume.token_ids.extend(answer(prompt, 4))
        done = [each.complete async for each in running.inference.Generate(resumed)][-1]
        assert done.plan.cached_tokens > 39
        assert done.usage.cached_tokens == 39
    await store.stop()


async def test_forced_splits() -> None:
    store = StoreDouble(cached_tokens=32)
    address = await store.start()
    prompt = list(range(10, 50))
    async with stack(WorkerDouble(kvstore_address=address)) as running:
        result = await running.generate(ids_request(prompt, 2, split_tokens=7))
        assert result.done.plan.split_tokens == 7
        assert result.done.plan.method == types_pb2.RESTORE_METHOD_SPLIT
        assert running.workers[0].admits[0].forced_split_tokens == 7
        capped = await running.generate(ids_request(prompt, 2, split_tokens=99))
        assert capped.done.plan.split_tokens == 32
        assert capped.done.plan.method == types_pb2.RESTORE_METHOD_RECOMPUTE
    without = WorkerDouble(kvstore_address=address, has_activations=False)
    async with stack(without) as running:
        error = await running.error(ids_request(prompt, 2, split_tokens=1))
        assert isinstance(error, InvalidArgument)
        assert error.field == "split_tokens"
        assert "no activations" in error.message
        assert await running.generate(ids_request(prompt, 2, split_tokens=0))
    await store.stop()


# Loading 32 tokens takes milliseconds, computing them next to nothing.
SLOW_LINK = replace(PROFILE, link_bytes_per_second=1e8, prefill_flops_per_second=1e13)


async def test_a_pipelined_worker_recomputes_from_token_ids_and_says_where_they_met() -> None:
    store = StoreDouble(cached_tokens=32)
    address = await store.start()
    prompt = list(range(10, 50))
    pipelined = WorkerDouble(
        kvstore_address=address, schedule=Schedule.PIPELINED, profile=SLOW_LINK
    )
    async with stack(pipelined) as running:
        done = (await running.generate(ids_request(prompt, 2))).done
        command = pipelined.admits[0]
        assert command.plan.method == done.plan.method == types_pb2.RESTORE_METHOD_TOKENS
        assert command.plan.schedule == types_pb2.SCHEDULE_PIPELINED
        assert command.plan.recomputed_tokens == done.plan.recomputed_tokens == 32
        assert reasons_of(done.plan)[ReasonKind.RECOMPUTED] == (32, 32)
        assert ReasonKind.MET not in reasons_of(done.plan)
        pipelined.met_at = 16
        done = (await running.generate(ids_request(prompt, 2))).done
        assert done.plan.recomputed_tokens == 16
        assert reasons_of(done.plan)[ReasonKind.MET] == (16, 32)
    serial = WorkerDouble(kvstore_address=address, profile=SLOW_LINK)
    async with stack(serial) as running:
        done = (await running.generate(ids_request(prompt, 2))).done
        assert done.plan.schedule == types_pb2.SCHEDULE_SERIAL
        assert done.plan.method != types_pb2.RESTORE_METHOD_TOKENS
    await store.stop()


async def test_a_client_chooses_how_its_prefix_comes_back() -> None:
    store = StoreDouble(cached_tokens=32)
    address = await store.start()
    prompt = list(range(10, 50))
    worker = WorkerDouble(kvstore_address=address, schedule=Schedule.PIPELINED, profile=SLOW_LINK)
    async with stack(worker) as running:
        load = ids_request(prompt, 2, restore_method=types_pb2.RESTORE_METHOD_LOAD)
        done = (await running.generate(load)).done
        assert done.plan.method == types_pb2.RESTORE_METHOD_LOAD
        assert worker.admits[0].forced_split_tokens == 0
        assert worker.admits[0].HasField("forced_split_tokens")
        tokens = ids_request(prompt, 2, restore_method=types_pb2.RESTORE_METHOD_TOKENS)
        done = (await running.generate(tokens)).done
        assert done.plan.method == types_pb2.RESTORE_METHOD_TOKENS
        assert not worker.admits[1].HasField("forced_split_tokens")
        assert reasons_of(done.plan)[ReasonKind.ASKED_TOKENS] == ()
    await store.stop()


async def test_the_objective_is_the_schedulers_unless_a_question_names_another() -> None:
    worker = WorkerDouble(schedule=Schedule.PIPELINED)
    async with stack(worker, objective=Objective.THROUGHPUT) as running:
        done = (await running.generate(ids_request([5, 6], 2))).done
        assert done.plan.objective == types_pb2.OBJECTIVE_THROUGHPUT

        async def explained(**fields: Any) -> types_pb2.Plan:
            question = scheduler_pb2.ExplainPlanRequest(cached_tokens=20, new_tokens=4, **fields)
            answer = await running.inference.ExplainPlan(question)
            plan: types_pb2.Plan = answer.plans[0].plan
            return plan

        assert (await explained()).objective == types_pb2.OBJECTIVE_THROUGHPUT
        latency = await explained(objective=types_pb2.OBJECTIVE_LATENCY)
        assert latency.objective == types_pb2.OBJECTIVE_LATENCY


async def test_a_fetch_can_be_explained() -> None:
    store = StoreDouble()
    address = await store.start()
    profile = replace(
        PROFILE, prefill_flops_per_second=1e9, remote_bytes_per_second={"far:1": 1e10}
    )
    async with stack(WorkerDouble(kvstore_address=address, profile=profile)) as running:
        question = scheduler_pb2.ExplainPlanRequest(cached_tokens=4, new_tokens=60)
        alone = (await running.inference.ExplainPlan(question)).plans[0].plan
        question.remote_cached_tokens, question.remote_store_address = 48, "far:1"
        plan = (await running.inference.ExplainPlan(question)).plans[0].plan
        assert (plan.cached_tokens, plan.fetched_tokens) == (48, 48)
        assert plan.predicted_ttft_seconds < alone.predicted_ttft_seconds
        assert reasons_of(plan)[ReasonKind.FETCH][:5] == (48, "far:1", "stream", 1e10, "measured")
        question.tier = types_pb2.TIER_DISK
        with pytest.raises(grpc.RpcError, match="not both"):
            await running.inference.ExplainPlan(question)
        question.remote_store_address = ""
        plan = (await running.inference.ExplainPlan(question)).plans[0].plan
        assert (plan.fetched_tokens, plan.fetch_source) == (48, "disk")
        assert reasons_of(plan)[ReasonKind.FETCH][:5] == (48, "disk", "", 1e9, "assumed")
    await store.stop()


async def test_a_silent_store_counts_as_empty(caplog: pytest.LogCaptureFixture) -> None:
    store = StoreDouble(cached_tokens=32)
    store.stalled = True
    worker = WorkerDouble(kvstore_address=await store.start())
    async with stack(worker, limits=Limits(lookup_seconds=0.05)) as running:
        result = await running.generate(ids_request(list(range(10, 50)), 2))
        assert result.done.usage.cached_tokens == 0
        assert "did not answer" in caplog.text
    await store.stop()


async def test_routing_prefers_the_prefix_then_room_and_obeys_pins() -> None:
    full, empty = StoreDouble(cached_tokens=16), StoreDouble()
    workers = [
        WorkerDouble("0", capacity_pages=99, kvstore_address=await empty.start()),
        WorkerDouble("1", capacity_pages=9, kvstore_address=await full.start()),
    ]
    async with stack(*workers) as running:
        request = ids_request(list(range(10, 40)), 2)
        assert (await running.generate(request)).done.worker_id == "1"
        full.cached_tokens = 0
        assert (await running.generate(request)).done.worker_id == "0"
        pinned = ids_request([5], 2, worker_id="1")
        assert (await running.generate(pinned)).done.worker_id == "1"
        assert isinstance(await running.error(ids_request([5], 2, worker_id="2")), NotFound)
    await full.stop()
    await empty.stop()


async def test_the_same_request_id_attaches_or_is_taken() -> None:
    worker, steps = paced_worker()
    async with stack(worker) as running:
        request = ids_request([5, 6], 10, request_id="same")
        first = asyncio.create_task(running.generate(request))
        await running.until(lambda: worker.admits)
        steps.allow(5)
        second = asyncio.create_task(running.generate(request))
        await running.until(lambda: len(running.manager.requests.running()[0]._readers) == 2)
        other = await running.error(ids_request([5, 6], 11, request_id="same"))
        assert isinstance(other, AlreadyExists)
        steps.allow(50)
        one, two = await asyncio.gather(first, second)
        assert one.token_ids == two.token_ids == answer([5, 6], 10)
        assert one.done == two.done
        # A client may also attach after its end.
        three = await running.generate(request)
        assert (three.token_ids, three.done) == (one.token_ids, one.done)
        assert three.text == one.text
        assert len(worker.admits) == 1


async def test_status_and_models_show_what_the_bits_of_answers_depend_on() -> None:
    """A model's answers are invariant if all its workers compute equal bits."""
    first, second, third = WorkerDouble("0"), WorkerDouble("1"), WorkerDouble("2")
    first.numerics, first.numerics_reason = types_pb2.NUMERICS_INVARIANT, "nothing depends"
    first.numerics_digest = "aa"
    second.numerics_reason = "the product up differs"
    third.numerics, third.numerics_digest = types_pb2.NUMERICS_INVARIANT, "bb"

    async def model_of(running: Stack, ready: int) -> tuple[int, str]:
        await running.until(lambda: len(running.manager.registry.ready()) == ready)
        model = (await running.inference.GetModel(scheduler_pb2.GetModelRequest())).model
        return model.numerics, model.numerics_digest

    async with stack(first, second, third) as running:
        assert await model_of(running, 3) == (types_pb2.NUMERICS_UNSPECIFIED, "")
        listed = await running.admin.ListWorkers(scheduler_pb2.ListWorkersRequest())
        assert {
            each.worker_id: (each.numerics, each.numerics_digest, each.numerics_reason)
            for each in listed.workers
        } == {
            "0": (types_pb2.NUMERICS_INVARIANT, "aa", "nothing depends"),
            "1": (types_pb2.NUMERICS_UNSPECIFIED, "", "the product up differs"),
            "2": (types_pb2.NUMERICS_INVARIANT, "bb", ""),
        }
        await second.kill()
        assert await model_of(running, 2) == (types_pb2.NUMERICS_UNSPECIFIED, "")
        await third.kill()
        assert await model_of(running, 1) == (types_pb2.NUMERICS_INVARIANT, "aa")


async def test_models_tokens_workers_and_plans() -> None:
    store = StoreDouble()
    worker = WorkerDouble(capacity_pages=4, kvstore_address=await store.start())
    async with stack(worker) as running:
        inference = running.inference
        model = (await inference.GetModel(scheduler_pb2.GetModelRequest())).model
        assert (model.name, model.context_length) == ("stdlib-llama", SHAPE.context_length)
        assert (model.ready_worker_count, model.chunk_tokens) == (1, CHUNK_TOKENS)
        assert model.has_tokenizer
        assert model.has_activations
        models = await inference.ListModels(scheduler_pb2.ListModelsRequest())
        assert list(models.models) == [model]

        text = "import os\n"
        tokens = await inference.Tokenize(scheduler_pb2.TokenizeRequest(text=text))
        assert list(tokens.token_ids) == TOKENIZER.encode(text)
        assert len(tokens.tokens) == len(tokens.token_ids)

        plans = await inference.ExplainPlan(
            scheduler_pb2.ExplainPlanRequest(cached_tokens=20, new_tokens=4, max_tokens=8)
        )
        assert plans.plans[0].plan.cached_tokens == 20
        assert plans.plans[0].plan.footprint_bytes == 2 * PAGE_BYTES
        rejected = await inference.ExplainPlan(
            scheduler_pb2.ExplainPlanRequest(
                cached_tokens=0,
                new_tokens=70,
                residency=types_pb2.RESIDENCY_RESIDENT,
            )
        )
        assert not rejected.plans[0].HasField("plan")
        assert "198 tokens" in rejected.plans[0].rejection

        workers = await running.admin.ListWorkers(scheduler_pb2.ListWorkersRequest())
        (status,) = workers.workers
        assert (status.worker_id, status.ready, status.message) == ("0", True, "")
        assert status.cache_capacity_bytes == 4 * PAGE_BYTES
        assert status.profile.description == "a double"
    await store.stop()


async def test_a_model_without_a_tokenizer_takes_token_ids_only() -> None:
    from scheduler_service.options import ServedModel

    async with stack(model=ServedModel(SHAPE, None)) as running:
        result = await running.generate(ids_request([5], 3))
        assert result.token_ids == answer([5], 3)
        assert result.text == ""
        error = await running.error(scheduler_pb2.GenerateRequest(text="x"))
        assert isinstance(error, FailedPrecondition)
        with pytest.raises(grpc.RpcError) as caught:
            await running.inference.Tokenize(scheduler_pb2.TokenizeRequest(text="x"))
        assert isinstance(statuses.error_of(caught.value), FailedPrecondition)


async def test_health_follows_the_workers() -> None:
    statuses = health_pb2.HealthCheckResponse
    async with stack(WorkerDouble("1"), limits=Limits(retry_seconds=0.01)) as running:
        stub: Any = health_pb2_grpc.HealthStub(running.channel)
        request = health_pb2.HealthCheckRequest(service="splitpoint.v1.InferenceService")
        watch = stub.Watch(request)

        async def until(status: int) -> None:
            while (await watch.read()).status != status:
                pass

        await until(statuses.SERVING)
        await running.workers[0].drain()
        await until(statuses.NOT_SERVING)
        watch.cancel()
        for service in ("", "splitpoint.v1.AdminService"):
            answered = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answered.status == statuses.SERVING
        error = await running.error(ids_request([5], 1))
        assert isinstance(error, Unavailable)
        assert error.retry_after_seconds == 0.01
        listed = await running.admin.ListWorkers(scheduler_pb2.ListWorkersRequest())
        assert listed.workers[0].draining
        assert not listed.workers[0].ready


async def test_reflection_lists_the_services() -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with stack() as running:
        channel: Any = running.channel  # the stub is annotated for blocking channels
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        response = await call.read()
        names = {service.name for service in response.list_services_response.service}
        assert "splitpoint.v1.InferenceService" in names
        call.cancel()

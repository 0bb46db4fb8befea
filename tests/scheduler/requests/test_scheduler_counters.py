"""Status and metrics of a scheduler after traffic with a known outcome."""

from __future__ import annotations

import ast
import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from scheduler_doubles import (
    CHUNK_TOKENS,
    PAGE_BYTES,
    PROFILE,
    FakeClock,
    Stack,
    Steps,
    StoreDouble,
    WorkerDouble,
    ids_request,
    paced_worker,
    stack,
)

from scheduler_service import server
from scheduler_service.api import prompts, text_jobs, validation
from scheduler_service.api.request import Times
from scheduler_service.cluster.registry import WorkerLosses
from scheduler_service.limits import Limits
from scheduler_service.placement import planning
from scheduler_service.requests import lifecycle, table
from scheduler_service.requests.counters import OTHER, REJECTIONS, Counters
from splitpoint.chat import renderer
from splitpoint.errors import InvalidArgument, ResourceExhausted, Unavailable
from splitpoint.observe import metrics
from splitpoint.v1 import scheduler_pb2, types_pb2

PROMPT = [5, 6, 7]


def value(running: Stack, metric: metrics.Metric, *labels: str, part: str = "") -> float | None:
    """Return the value of one series, or None. `part`: _count or _sum of a histogram."""
    named = dict(zip(metric.labels, labels, strict=True))
    return running.scheduler.meters.registry.get_sample_value(metric.name + part, named)


async def status_of(running: Stack) -> scheduler_pb2.GetSchedulerStatusResponse:
    answer: scheduler_pb2.GetSchedulerStatusResponse
    answer = await running.admin.GetSchedulerStatus(scheduler_pb2.GetSchedulerStatusRequest())
    return answer


async def workers_of(running: Stack) -> list[scheduler_pb2.WorkerStatus]:
    return list((await running.admin.ListWorkers(scheduler_pb2.ListWorkersRequest())).workers)


# -- a request's times and tokens -----------------------------------------------------------


async def test_tokens_and_times_of_completed_requests() -> None:
    clock = FakeClock()
    store = StoreDouble(cached_tokens=16)
    worker, steps = paced_worker(kvstore_address=await store.start())
    prompt = list(range(10, 30))
    load = types_pb2.RESTORE_METHOD_LOAD
    async with stack(worker, clock=clock) as running:
        for count in (5, 3):  # a token each half second
            request = ids_request(prompt, count, restore_method=load)
            task = asyncio.create_task(running.generate(request))
            await running.until(lambda: worker.running)
            for _ in range(count):
                clock.now += 0.5
                due = running.manager.counters.generated_tokens + 1
                steps.allow(1)

                def is_delivered(due: int = due) -> bool:
                    return bool(running.manager.counters.generated_tokens == due)

                await running.until(is_delivered)
            await task
        clock.now += 10
        status = await status_of(running)
        assert (status.completed_count, status.failed_count, status.rejected_count) == (2, 0, 0)
        assert (status.prompt_token_count, status.cached_token_count) == (40, 32)
        assert status.generated_token_count == 8
        assert (status.ttft_count, status.ttft_seconds_sum) == (2, 1.0)
        assert (status.itl_count, status.itl_seconds_sum) == (4 + 2, 3.0)
        assert status.uptime_seconds == 10 + 8 * 0.5
        assert not status.HasField("redis")
        assert value(running, metrics.TTFT_SECONDS, part="_count") == 2
        assert value(running, metrics.ITL_SECONDS, part="_sum") == 3.0
        assert value(running, metrics.REQUEST_SECONDS, part="_sum") == 2.5 + 1.5
        assert value(running, metrics.QUEUE_SECONDS, "device", part="_sum") == 0
        assert value(running, metrics.QUEUE_SECONDS, "device", part="_count") == 2
        assert (status.device_bound_count, status.link_bound_count) == (2, 0)
        assert value(running, metrics.PREFILL_SECONDS, part="_sum") == 0.5 + 0.5
        assert value(running, metrics.DECODE_SECONDS, part="_sum") == 2.0 + 1.0
        # TPOT has one value per request (its mean), not one per gap.
        assert value(running, metrics.TPOT_SECONDS, part="_count") == 2
        assert value(running, metrics.TPOT_SECONDS, part="_sum") == 0.5 + 0.5
        assert value(running, metrics.REQUEST_PROMPT_TOKENS, part="_sum") == 40
        assert value(running, metrics.REQUEST_GENERATED_TOKENS, part="_sum") == 8
        assert value(running, metrics.MODEL_INFO, "stdlib-llama") == 1
        assert value(running, metrics.GENERATED_TOKENS) == 8
        assert value(running, metrics.REQUESTS_FINISHED, "length") == 2
        # 16 of 20 prompt tokens are cached.
        assert value(running, metrics.KAPPA_RATIO, part="_sum") == 2 * 16 / 4
        assert value(running, metrics.PLANS, "resident", "load") == 2
        assert value(running, metrics.PLANS, "streamed", "none") == 0
    await store.stop()


def test_tokens_that_come_together_are_one_gap_and_a_slow_reader_is_none() -> None:
    seen: list[tuple[metrics.Metric, float]] = []
    counters = Counters(0.0, lambda sample, seconds, *labels: seen.append((sample, seconds)))
    times = Times(arrived=1.0)
    for now, count in ((3.0, 1), (4.0, 4)):
        counters.tokens_came(times, count, now)
        times.tokens_came(now)
    assert seen == [(metrics.TTFT_SECONDS, 2.0), (metrics.ITL_SECONDS, 1.0)]
    times.last_token = None  # its reader fell behind, and it was paused
    counters.tokens_came(times, 1, 60.0)
    times.tokens_came(60.0)
    counters.tokens_came(times, 1, 60.5)
    assert seen[2:] == [(metrics.ITL_SECONDS, 0.5)]
    assert (counters.generated_tokens, counters.itl_count, counters.itl_seconds) == (7, 2, 1.5)


def test_the_phases_of_a_request_add_up_and_one_token_has_no_tpot() -> None:
    seen: dict[metrics.Metric, float] = {}
    counters = Counters(0.0, lambda sample, value, *labels: seen.update({sample: value}))
    message = scheduler_pb2.GenerateComplete(
        queue_seconds=3.0,
        ttft_seconds=5.0,
        total_seconds=9.0,
        usage=scheduler_pb2.Usage(prompt_tokens=70, completion_tokens=1),
    )
    counters.completed(message)
    assert seen == {
        metrics.REQUEST_SECONDS: 9.0,
        metrics.PREFILL_SECONDS: 2.0,
        metrics.DECODE_SECONDS: 4.0,
        metrics.REQUEST_PROMPT_TOKENS: 70,
        metrics.REQUEST_GENERATED_TOKENS: 1,
    }
    message.usage.completion_tokens = 5
    counters.completed(message)
    assert seen[metrics.TPOT_SECONDS] == 1.0


def test_what_a_client_brought_along_makes_no_latency_better() -> None:
    seen: list[tuple[metrics.Metric, float]] = []
    counters = Counters(0.0, lambda sample, value, *labels: seen.append((sample, value)))
    times = Times(arrived=1.0)
    for now in (1.5, 2.0):
        counters.tokens_came(times, 1, now, 990)
        times.tokens_came(now)
    assert (seen, counters.ttft_count, counters.generated_tokens) == (
        [(metrics.ITL_SECONDS, 0.5)],
        0,
        2,
    )
    seen.clear()
    message = scheduler_pb2.GenerateComplete(
        ttft_seconds=0.5,
        total_seconds=5.0,
        usage=scheduler_pb2.Usage(prompt_tokens=70, completion_tokens=1000),
    )
    counters.completed(message, 990)
    lengths = [(metrics.REQUEST_PROMPT_TOKENS, 70), (metrics.REQUEST_GENERATED_TOKENS, 1000)]
    assert seen == [(metrics.TPOT_SECONDS, 0.5), *lengths]
    counters.completed(message, 1000)  # only the last message had been lost
    assert seen[3:] == lengths


def test_requests_of_two_hours_have_a_bucket() -> None:
    assert metrics.REQUEST_SECONDS.buckets[-1] == 7680
    assert metrics.DECODE_SECONDS.buckets[-1] == 7680


async def test_waits_are_told_apart_by_what_limits_the_request() -> None:
    """The first request has a worker for itself, the second one waits for it."""
    clock = FakeClock()
    store = StoreDouble(cached_tokens=16 * CHUNK_TOKENS)
    # kappa_crit is 0.002 with so slow a link.
    slow = replace(PROFILE, link_bytes_per_second=1e4)
    worker, steps = paced_worker(kvstore_address=await store.start(), max_batch=1, profile=slow)
    prompt = list(range(10, 10 + 16 * CHUNK_TOKENS + 4))
    async with stack(worker, clock=clock) as running:
        first = asyncio.create_task(running.generate(ids_request(prompt, 1)))
        await running.until(lambda: worker.admits)
        second = asyncio.create_task(running.generate(ids_request(prompt, 1)))
        await running.until(lambda: running.manager.admission.queue())
        clock.now += 30
        assert (await status_of(running)).oldest_wait_seconds == 30
        assert value(running, metrics.OLDEST_WAIT_SECONDS) == 30
        steps.allow(1)
        await running.until(lambda: len(worker.admits) == 2)
        steps.allow(1)
        await asyncio.gather(first, second)
        status = await status_of(running)
        assert (status.link_bound_count, status.link_bound_wait_seconds_sum) == (2, 30)
        assert status.device_bound_count == 0
        assert status.oldest_wait_seconds == 0
        assert value(running, metrics.QUEUE_SECONDS, "link", part="_sum") == 30
        assert value(running, metrics.WORKER_KAPPA_RATIO, "0") == pytest.approx(64)
        assert (value(running, metrics.KAPPA_CRIT, "0") or 0) < 64
    await store.stop()


async def test_power_is_advised_where_a_card_waits_for_its_link() -> None:
    store = StoreDouble(cached_tokens=16 * CHUNK_TOKENS)
    slow = replace(PROFILE, link_bytes_per_second=1e4)
    worker = WorkerDouble(kvstore_address=await store.start(), profile=slow)
    prompt = list(range(10, 10 + 16 * CHUNK_TOKENS + 4))
    async with stack(worker) as running:
        for _ in range(20):
            await running.generate(ids_request(prompt, 1))
        worker.report(types_pb2.Telemetry(power_watts=180))
        await running.until(lambda: running.manager.registry.connections[0].telemetry)
        [entry] = await workers_of(running)
        assert not entry.HasField("advised_power_watts"), "its limit is not known"
        assert value(running, metrics.WORKER_POWER_ADVISED, "0") is None
        worker.report(types_pb2.Telemetry(power_watts=180, power_default_limit_watts=700))

        async def advised() -> bool:
            [told] = await workers_of(running)
            return told.HasField("advised_power_watts")

        async with asyncio.timeout(60):
            while not await advised():
                await asyncio.sleep(0.005)
        [entry] = await workers_of(running)
        assert entry.advised_power_watts == 200
        assert "the link is the limit" in entry.advised_power_reason
        assert entry.recent_kappa_ratio == pytest.approx(64)
        assert value(running, metrics.WORKER_POWER_ADVISED, "0") == 200
    await store.stop()


# -- those that were turned away, and those that failed ---------------------------------------


async def test_rejections_by_reason() -> None:
    limits = Limits(queue_capacity=1, tenant_requests=3, concurrent_calls=3)
    worker, steps = paced_worker(capacity_pages=2)
    async with stack(worker, limits=limits) as running:
        held = ids_request(PROMPT, 2 * CHUNK_TOKENS - 4)
        tasks = [asyncio.create_task(running.generate(held))]
        await running.until(lambda: worker.admits)
        tasks.append(asyncio.create_task(running.generate(held)))
        await running.until(lambda: running.manager.admission.queue())
        assert value(running, metrics.REQUESTS_RUNNING) == 1
        assert value(running, metrics.REQUESTS_WAITING) == 1
        assert value(running, metrics.QUEUE_CAPACITY) == 1
        assert value(running, metrics.LEDGER_BYTES, "0", "charged") == 2 * PAGE_BYTES
        assert value(running, metrics.LEDGER_BYTES, "0", "capacity") == 2 * PAGE_BYTES
        turned_away = {
            "QUEUE_FULL": held,
            "NEVER_FITS": ids_request(PROMPT, 9 * CHUNK_TOKENS),
            "INVALID_ARGUMENT": ids_request([], 1),
            "CONTEXT_EXCEEDED": ids_request(PROMPT, 10**6),
            "WORKER_NOT_FOUND": ids_request(PROMPT, 1, worker_id="canary"),
            "MODEL_NOT_FOUND": ids_request(PROMPT, 1, model="canary"),
        }
        for reason, request in turned_away.items():
            assert (await running.error(request)).reason == reason
            assert value(running, metrics.REQUESTS_REJECTED, reason) == 1
        status = await status_of(running)
        assert (status.running_count, status.waiting_count) == (1, 1)
        assert status.rejected_count == len(turned_away)
        assert (status.completed_count, status.failed_count) == (0, 0)
        steps.allow(100)
        await asyncio.gather(*tasks)
        assert (await status_of(running)).completed_count == 2
        scraped = generate_latest(running.scheduler.meters.registry).decode()
        assert "canary" not in scraped


async def test_calls_and_quotas_beyond_their_limits_are_rejections() -> None:
    worker, steps = paced_worker()
    limits = Limits(tenant_requests=1, concurrent_calls=2)
    async with stack(worker, limits=limits) as running:
        held = [asyncio.create_task(running.generate(ids_request(PROMPT, 4, request_id="r")))]
        await running.until(lambda: worker.admits)
        assert (await running.error(ids_request(PROMPT, 4))).reason == "TENANT_QUOTA"
        # A repeated request counts once.
        held.append(asyncio.create_task(running.generate(ids_request(PROMPT, 4, request_id="r"))))
        request = running.manager.requests.running()[0]
        await running.until(lambda: len(request._readers) == 2)
        assert (await running.error(ids_request(PROMPT, 4))).reason == "TOO_MANY_CALLS"
        steps.allow(100)
        await asyncio.gather(*held)
        assert value(running, metrics.REQUESTS_REJECTED, "TENANT_QUOTA") == 1
        assert value(running, metrics.REQUESTS_REJECTED, "TOO_MANY_CALLS") == 1
        status = await status_of(running)
        assert (status.completed_count, status.rejected_count) == (1, 2)
        assert status.generated_token_count == 4


async def test_failures_and_readers_that_left() -> None:
    worker = WorkerDouble()
    async with stack(worker) as running:
        worker.refusal = ResourceExhausted("its memory disagrees")
        await running.error(ids_request(PROMPT, 4))
        worker.refusal = None
        worker.pace = steps = Steps()
        call = running.inference.Generate(ids_request(PROMPT, 40))
        steps.allow(1)
        await call.read()
        call.cancel()
        await running.until(lambda: not running.manager.requests.running())
        assert value(running, metrics.REQUESTS_FINISHED, "error") == 1
        assert value(running, metrics.REQUESTS_FINISHED, "abandoned") == 1
        status = await status_of(running)
        assert (status.failed_count, status.cancelled_count) == (1, 1)
        steps.allow(100)


def test_no_text_from_outside_becomes_a_label() -> None:
    counters = Counters(0.0, lambda sample, value, *labels: None)
    counters.rejected(Unavailable("no", reason="UNKNOWN_REASON"))
    counters.rejected(KeyError("a bug"))
    assert counters.rejected_counts[OTHER] == counters.rejected_counts["INTERNAL"] == 1
    assert set(counters.rejected_counts) == {*REJECTIONS, OTHER}


# Reasons of accepted requests that failed, and of calls other than Generate.
NO_REJECTIONS = {
    *("ABANDONED", "MESSAGE_TOO_LARGE", "REQUEST_QUARANTINED", "SLOW_READER", "STOPPED"),
    *("TOKENS_SKIPPED", "WORKER_DRAINED"),
}


def test_every_reason_to_turn_a_request_away_has_its_own_count() -> None:
    """Check the modules that a Generate call passes before it is accepted."""
    reasons = set()
    modules = (lifecycle, planning, table, server, text_jobs, validation, prompts)
    for module in (*modules, renderer):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(node, ast.keyword) and node.arg == "reason":
                reasons |= {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
    names = {name for name in reasons if isinstance(name, str) and name.isupper()}
    assert {"TENANT_QUOTA", "TOKENIZER_BUSY", "WORKER_NOT_FOUND", "CONTEXT_EXCEEDED"} <= names
    assert names - NO_REJECTIONS <= set(REJECTIONS)
    assert InvalidArgument("").reason in REJECTIONS


# -- workers --------------------------------------------------------------------------------


async def test_a_lost_worker_stays_visible_and_its_requests_fail_over() -> None:
    clock = FakeClock()
    first, second = WorkerDouble("0"), WorkerDouble("1")
    first.pace = second.pace = steps = Steps()
    async with stack(first, second, clock=clock) as running:
        first.report(types_pb2.Telemetry(uptime_seconds=3, generated_token_count=1))
        steps.allow(1)
        await running.until(lambda: running.scheduler.registry.connections[0].telemetry)
        task = asyncio.create_task(running.generate(ids_request(PROMPT, 9, worker_id="")))
        await running.until(lambda: first.admits or second.admits)
        at, other = (first, second) if first.admits else (second, first)
        assert value(running, metrics.WORKER_READY, at.worker_id) == 1
        assert value(running, metrics.WORKER_LOSSES, at.worker_id) == 0
        steps.allow(3)
        await at.kill()
        await running.until(lambda: other.admits)
        steps.allow(100)
        await task
        clock.now += 7.5
        assert value(running, metrics.WORKER_READY, at.worker_id) == 0
        assert value(running, metrics.WORKER_LOSSES, at.worker_id) == 1
        assert value(running, metrics.WORKER_LOSSES, other.worker_id) == 0
        assert value(running, metrics.KAPPA_CRIT, at.worker_id) is None
        assert value(running, metrics.FAILOVERS) == 1
        assert (await status_of(running)).failover_count == 1
        workers = {worker.worker_id: worker for worker in await workers_of(running)}
        lost, left = workers[at.worker_id], workers[other.worker_id]
        assert (lost.ready, lost.loss_count, lost.last_lost_seconds_ago) == (False, 1, 7.5)
        assert not lost.HasField("telemetry")
        assert (left.loss_count, left.HasField("last_lost_seconds_ago")) == (0, False)
        assert left.kappa_crit == pytest.approx(value(running, metrics.KAPPA_CRIT, left.worker_id))


def test_names_that_are_long_gone_are_forgotten() -> None:
    clock = FakeClock()
    losses = WorkerLosses(clock)
    for name in ("a-1", "a-2", "static"):
        losses.note(name, known={"static"})
    clock.now += 3000
    losses.note("a-2", known={"static"})
    clock.now += 1000
    assert (losses.count("a-1"), losses.seconds_ago("a-1")) == (1, 4000)
    losses.note("b", known={"static"})
    assert losses.counts() == {"a-2": 2, "static": 1, "b": 1}
    assert (losses.count("a-1"), losses.seconds_ago("a-1")) == (0, None)


async def test_a_worker_that_never_answered_is_known_by_its_address(tmp_path: Path) -> None:
    """Otherwise one of two workers would look like one of one."""
    nowhere = f"unix:{tmp_path}/w"
    async with stack(WorkerDouble("0"), absent=[nowhere]) as running:
        assert value(running, metrics.WORKER_KNOWN, "0") == 1
        assert value(running, metrics.WORKER_READY, "0") == 1
        assert value(running, metrics.WORKER_KNOWN, nowhere) == 1
        assert value(running, metrics.WORKER_READY, nowhere) is None


async def test_a_drain_is_no_loss() -> None:
    worker = WorkerDouble()
    async with stack(worker) as running:
        await worker.drain()
        await running.until(lambda: not running.scheduler.registry.ready())
        assert value(running, metrics.WORKER_READY, "0") == 0
        assert [(w.ready, w.draining) for w in await workers_of(running)] == [(False, True)]
        await worker.kill()
        connection = running.scheduler.registry.connections[0]
        await running.until(lambda: connection.ready is None)
        assert value(running, metrics.WORKER_LOSSES, "0") == 0
        [gone] = await workers_of(running)
        assert (gone.ready, gone.draining, gone.loss_count) == (False, False, 0)


async def test_a_scheduler_that_stops_loses_no_worker() -> None:
    """Its metrics are read until the end, and an alert must not blame a worker."""
    async with stack(WorkerDouble()) as running:
        assert value(running, metrics.WORKER_READY, "0") == 1
    assert value(running, metrics.WORKER_READY, "0") == 0
    assert value(running, metrics.WORKER_LOSSES, "0") == 0


async def test_telemetry_comes_beside_the_tokens_and_alone() -> None:
    worker = WorkerDouble()
    async with stack(worker) as running:
        [before] = await workers_of(running)
        assert not before.HasField("telemetry")
        worker.report(types_pb2.Telemetry(uptime_seconds=1.5, split_tokens=0))
        connection = running.scheduler.registry.connections[0]
        await running.until(lambda: connection.telemetry is not None)
        [alone] = await workers_of(running)
        assert (alone.telemetry.uptime_seconds, alone.telemetry.HasField("split_tokens")) == (
            1.5,
            True,
        )
        worker.report(types_pb2.Telemetry(uptime_seconds=2.5))
        await running.generate(ids_request(PROMPT, 3))
        [beside] = await workers_of(running)
        assert beside.telemetry.uptime_seconds == 2.5
        assert (await status_of(running)).itl_count == 2
        dropped = [
            value(running, metrics.DROPPED_RESULTS, cause) for cause in ("late", "duplicate")
        ]
        assert dropped == [0, 0]


async def test_slots_promised_to_streamed_requests() -> None:
    store = StoreDouble(slot_count=8)
    address = await store.start()
    worker, steps = paced_worker(capacity_pages=4, kvstore_address=address)
    async with stack(worker) as running:
        assert value(running, metrics.LEDGER_SLOTS, address, "charged") == 0
        streamed = ids_request([5], 6 * CHUNK_TOKENS - 1, residency=types_pb2.RESIDENCY_STREAMED)
        task = asyncio.create_task(running.generate(streamed))
        await running.until(lambda: worker.admits)
        assert value(running, metrics.LEDGER_SLOTS, address, "charged") == 6
        assert value(running, metrics.LEDGER_SLOTS, address, "capacity") == 8
        assert value(running, metrics.PLANS, "streamed", "none") == 1
        steps.allow(1000)
        await task
        await running.until(lambda: not running.manager.attempts)
        assert value(running, metrics.LEDGER_SLOTS, address, "charged") == 0
    await store.stop()


async def test_every_metric_of_the_scheduler_has_values() -> None:
    store = StoreDouble()
    worker = WorkerDouble(kvstore_address=await store.start())
    async with stack(worker) as running:
        await running.generate(ids_request(PROMPT, 3))
        text = generate_latest(running.scheduler.meters.registry).decode()
        families = {
            sample.name.removesuffix("_bucket")
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        listed = {
            metric.name
            for metric in metrics.metrics_of(metrics.Service.SCHEDULER)
            if metric.needs is None
        }
        assert listed - families == set()
    await store.stop()


async def test_clients_that_come_back_are_counted() -> None:
    worker = WorkerDouble()
    async with stack(worker) as running:
        whole = await running.generate(ids_request(PROMPT, 6, request_id="r"))
        resume = scheduler_pb2.Resume(next_index=2, token_ids=whole.token_ids[:2])
        rest = ids_request(PROMPT, 6, request_id="r", resume=resume)
        attached = [each async for each in running.inference.Generate(rest)]
        assert attached[0].chunk.index == 2
        assert value(running, metrics.RESUMES, "attached") == 1
        other = ids_request(PROMPT, 6, request_id="other", resume=resume)
        forced = [each async for each in running.inference.Generate(other)]
        assert forced[0].chunk.index == 2
        assert value(running, metrics.RESUMES, "forced") == 1
        assert (await status_of(running)).resumed_count == 2

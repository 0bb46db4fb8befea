"""Test a worker's metrics as Prometheus reads them, and its telemetry on a Run stream."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from admitting import admitting
from engine_runner import admission
from local_stack import (
    StackShape,
    local_stack,
    serving_worker,
    start_service,
    start_store,
    stop_process,
)
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from redis_server import RedisServer
from tiny_models import build_tiny, clear_prompt
from waiting import until

from splitpoint.keys import chunk_keys, numerics_salt
from splitpoint.observe import metrics
from splitpoint.observe.meters import Meters, Reading
from splitpoint.observe.metrics import Kind, Metric, Needs, Service, metrics_of
from splitpoint.planning.plan import RestoreMethod
from splitpoint.transport.channels import open_channel
from splitpoint.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from worker_service.counters import StepKind
from worker_service.engine.messages import Call, RestoreEvent, StepEvent, StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.hardware.monitor import DeviceMonitor
from worker_service.lanes.timeline import StepTimes
from worker_service.metrics import WorkerMetrics
from worker_service.startup.worker import LoadedWorker
from worker_service.store.write_back import WriteResult
from worker_service.telemetry import Telemeter, telemetry_of
from worker_service.wire import response_from

PROMPT, ANSWER = clear_prompt(build_tiny("llama"), 45, 8)
SHAPE = StackShape(workers=1)


@dataclass(frozen=True)
class Scrape:
    """Return one answer of /metrics: values by name and labels."""

    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @classmethod
    def of(cls, text: str) -> Scrape:
        return cls(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    def __getitem__(self, key: tuple[Metric, dict[str, str]] | Metric) -> float:
        metric, labels = key if isinstance(key, tuple) else (key, {})
        suffix = "_count" if metric.kind is Kind.HISTOGRAM else ""
        return self.values[metric.name + suffix, frozenset(labels.items())]

    def __contains__(self, metric: Metric) -> bool:
        name = metric.name + ("_count" if metric.kind is Kind.HISTOGRAM else "")
        return any(name == each for each, _ in self.values)

    def sum_of(self, histogram: Metric) -> float:
        return self.values[f"{histogram.name}_sum", frozenset()]

    def labelled(self, metric: Metric) -> dict[frozenset[str], float]:
        """Return the values by their labels."""
        name = metric.name + ("_count" if metric.kind is Kind.HISTOGRAM else "")
        return {
            frozenset(value for _, value in labels): value
            for (each, labels), value in self.values.items()
            if each == name
        }


def scrape(meters: Meters) -> Scrape:
    return Scrape.of(generate_latest(meters.registry).decode())


# -- metrics --------------------------------------------------------------------------


async def test_a_scrape_tells_what_a_worker_and_its_store_did(folder: Path, tmp_path: Path) -> None:
    async with local_stack(folder, tmp_path, SHAPE) as stack:
        [worker] = stack.workers
        meters = Meters(Service.WORKER)
        WorkerMetrics(meters, worker)
        before = scrape(meters)
        for metric in metrics_of(Service.WORKER):
            if metric.services == (Service.WORKER,) and metric.needs in (None, Needs.STORE):
                assert metric in before, metric.name
            assert metric.needs is not Needs.GPU or metric not in before, metric.name
        # Every counter is there from the start.
        assert before.labelled(metrics.LINK_BYTES) == {
            frozenset(("in", "kv")): 0,
            frozenset(("in", "activations")): 0,
            frozenset(("in", "weights")): 0,
            frozenset(("out", "write_back")): 0,
        }
        assert before.labelled(metrics.RESTORE_SECONDS) == dict.fromkeys(
            (frozenset([name]) for name in ("load", "split", "recompute", "tokens")), 0
        )
        assert before.labelled(metrics.PREDICTION_RATIO) == {
            frozenset(["restore"]): 0,
            frozenset(["step"]): 0,
        }
        assert before[metrics.WORKER_STORE_UP] == 1

        first = await stack.client.generate(PROMPT, max_tokens=8, ignore_eos=True).complete()
        again = await stack.client.generate(
            [*PROMPT, *ANSWER, 5], max_tokens=8, ignore_eos=True, split=16
        ).complete()
        assert list(first.token_ids) == ANSWER
        await stack.assert_clean()
        after, stats = scrape(meters), await stack.store_stats()
        assert after[metrics.WORKER_GENERATED_TOKENS] == 16
        assert after[metrics.WORKER_SCHEDULED_TOKENS, {"phase": "decode"}] == 7 + 7
        # The second prompt's last token is computed like a decode's if it alone is new.
        new_tokens = len(PROMPT) + len(ANSWER) + 1 - again.usage.cached_tokens
        assert after[metrics.WORKER_SCHEDULED_TOKENS, {"phase": "prefill"}] == (
            len(PROMPT) + new_tokens
        )
        written = after[metrics.WORKER_WRITE_BACK_CHUNKS, {"result": "stored"}]
        assert written == stats.sealed_chunk_count + stats.duplicate_chunk_count > 0
        chunk_bytes = worker.engine.cache.layout.chunk_bytes
        labels = {"direction": "out", "method": "write_back"}
        assert after[metrics.LINK_BYTES, labels] == written * chunk_bytes
        assert after[metrics.LINK_BUSY_SECONDS, {"direction": "out"}] > 0
        assert after[metrics.RESTORES, {"method": "split"}] == 1
        assert after[metrics.RESTORE_SECONDS, {"method": "split"}] == 1
        copied = after[metrics.LINK_BUSY_SECONDS, {"direction": "in"}]
        assert copied > 0
        assert after[metrics.RESTORED_LINK_SECONDS] == pytest.approx(copied)
        rebuilt = after[metrics.RESTORED_DEVICE_SECONDS, {"work": "restore"}]
        prefill = after[metrics.RESTORED_DEVICE_SECONDS, {"work": "prefill"}]
        assert rebuilt > 0
        assert rebuilt == pytest.approx(after[metrics.RECOMPUTE_SECONDS, {"method": "activations"}])
        assert after[metrics.RESTORED_FIRST_TOKEN_SECONDS] > rebuilt + prefill > rebuilt
        assert after[metrics.SPLIT_TOKENS] == 1
        labels = {"residency": "resident", "method": "rebuilt"}
        assert after[metrics.CACHE_TOKENS, labels] == 16
        labels = {"residency": "resident", "method": "loaded"}
        assert after[metrics.CACHE_TOKENS, labels] == again.usage.cached_tokens - 16
        steps = sum(after.labelled(metrics.WORKER_STEPS).values())
        assert (
            steps
            == after[metrics.WORKER_STEP_SECONDS]
            == sum(worker.runtime.counters.steps.values())
        )
        assert after[metrics.PREDICTION_RATIO, {"what": "restore"}] == 1
        assert after[metrics.WORKER_RUNNING] == 0
        assert after[metrics.WORKER_CACHE_BYTES, {"kind": "used"}] == 0
        assert after[metrics.WORKER_CACHE_USAGE] == 0
        assert after[metrics.LINK_RATE] == worker.profile.link_bytes_per_second
        assert after[metrics.MODEL_INFO, {"model_name": folder.name}] == 1

        running = stack.client.generate(PROMPT, max_tokens=64, ignore_eos=True)
        await anext(running)
        during = scrape(meters)
        used = during[metrics.WORKER_CACHE_BYTES, {"kind": "used"}]
        capacity = during[metrics.WORKER_CACHE_BYTES, {"kind": "capacity"}]
        assert during[metrics.WORKER_CACHE_USAGE] == used / capacity > 0
        await running.close()

        await stack.kill_store()
        await until(lambda: not scrape(meters)[metrics.WORKER_STORE_UP])


async def test_distributions_see_what_the_account_sees(folder: Path, tmp_path: Path) -> None:
    async with local_stack(folder, tmp_path, SHAPE) as stack:
        [worker] = stack.workers
        meters = Meters(Service.WORKER)
        observed = WorkerMetrics(meters, worker)
        key = ("a", 0, 0)
        restores = [
            RestoreEvent(
                key, 64, 0, RestoreMethod.LOAD, 0.5, predicted_restore_seconds=0.4, loaded_tokens=64
            ),
            RestoreEvent(key, 64, 0, RestoreMethod.TOKENS, 0.5, recomputed_tokens=64),
            # Streamed: no token came.
            RestoreEvent(key, 64, 0, RestoreMethod.LOAD, 0.5),
        ]
        step = StepEvent(StepTimes(0.3, predicted_seconds=0.1), 40, 2)
        capacity = worker.engine.memory_plan.cache_capacity_bytes
        observed.observe(StepOutput(restores=restores, step=step, cache_used_bytes=capacity // 2))
        observed.observe(StepOutput(step=replace(step, times=StepTimes(0.3)), cache_used_bytes=0))
        seen = scrape(meters)
        assert seen[metrics.WORKER_STEP_SECONDS] == 2
        assert seen.sum_of(metrics.WORKER_STEP_TOKENS) == 2 * (40 + 2)
        assert seen.sum_of(metrics.WORKER_STEP_CACHE_USAGE) == pytest.approx(0.5, abs=0.01)
        assert seen.labelled(metrics.RESTORE_SECONDS)[frozenset(["load"])] == 1
        assert seen.labelled(metrics.RESTORE_SECONDS)[frozenset(["tokens"])] == 1
        assert seen[metrics.SPLIT_TOKENS] == 1
        ratios = {
            what: seen.values[metrics.PREDICTION_RATIO.name + "_sum", frozenset([("what", what)])]
            for what in ("restore", "step")
        }
        assert ratios == {"restore": pytest.approx(1.25), "step": pytest.approx(3.0)}


class Monitor(DeviceMonitor):
    """A device that knows its power."""

    def readings(self) -> Iterator[Reading]:
        yield Reading(metrics.GPU_POWER_WATTS, 123.0)

    def fill(self, telemetry: types_pb2.Telemetry) -> None:
        telemetry.power_watts = 123.0


async def test_what_a_process_serves_while_redis_comes_and_goes(
    folder: Path, shm_folder: Path, tmp_path: Path, redis_server: RedisServer, free_port: int
) -> None:
    """The real commands, scraped over HTTP."""
    address = f"unix:{tmp_path}/kv"
    store = await start_store(folder, address, shm_folder / "store" / "arena", SHAPE)
    worker = await start_service(
        *("worker_service", "--model", str(folder), "--device", "cpu", "--threads", "1"),
        *("--listen", "127.0.0.1:0", "--kvstore", address, "--worker-id", "w"),
        *("--device-memory", "96MiB", "--max-batch", "32", "--link-rate", "200MB", "--serial"),
        *("--metrics", f"127.0.0.1:{free_port}", "--redis", redis_server.url),
    )

    def fetch() -> Scrape:
        with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=10) as page:
            return Scrape.of(page.read().decode())

    async def until_redis_is(value: float) -> None:
        async with asyncio.timeout(30):
            while (await asyncio.to_thread(fetch))[metrics.REDIS_UP] != value:
                await asyncio.sleep(0.1)

    try:
        seen = await asyncio.to_thread(fetch)
        assert seen[metrics.LINK_CEILING] == 200e6
        assert seen[metrics.WORKER_STEP_TOKEN_BUDGET] == 32 - 1 + 512
        [info] = [dict(labels) for name, labels in seen.values if name == "splitpoint_worker_info"]
        assert info["worker_id"] == "w"
        assert info["schedule"] == "serial"
        assert info["weights"] == "all on the device"
        assert info["numerics"] in ("invariant", "fast")
        assert info["device"].endswith("link emulated at 200 MB/s")
        await until_redis_is(1)
        redis_server.stop()
        await until_redis_is(0)
        redis_server.start()
        await until_redis_is(1)
    finally:
        await stop_process(worker)
        await stop_process(store)


# -- telemetry ------------------------------------------------------------------------


@asynccontextmanager
async def one_worker(
    folder: Path, sockets: Path, shm: Path, shape: StackShape = SHAPE
) -> AsyncIterator[tuple[LoadedWorker, worker_pb2_grpc.WorkerServiceStub]]:
    store_address, address = f"unix:{sockets}/kv", f"unix:{sockets}/w"
    store = await start_store(folder, store_address, shm / "store" / "arena", shape)
    try:
        async with (
            serving_worker(folder, "w", address, store_address, shape) as (worker, _),
            open_channel(address) as channel,
        ):
            yield worker, worker_pb2_grpc.WorkerServiceStub(channel)
    finally:
        await stop_process(store)


def admit(name: str, max_tokens: int) -> worker_pb2.RunRequest:
    return admitting(name, PROMPT, max_tokens)


async def test_telemetry_comes_from_an_idle_and_from_a_busy_worker(
    folder: Path, tmp_path: Path, shm_folder: Path
) -> None:
    async with one_worker(folder, tmp_path, shm_folder) as (worker, stub):
        runtime = worker.runtime
        # Without a Run stream the work counts all the same.
        unheard = admission("unheard", PROMPT, Sampling(max_tokens=8, ignore_eos=True))
        # What comes by the stream has this salt, and finds its chunks.
        runtime.admit(replace(unheard, salt=numerics_salt(b"", worker.numerics.digest)))
        assert await runtime.wait_idle(30)
        assert runtime.counters.generated_tokens == 8
        assert runtime.counters.steps[StepKind.PREFILL] == 1
        assert runtime.counters.written.chunks[WriteResult.STORED] == 4

        run = stub.Run()
        await run.initial_metadata()
        # The engine is busy with a call.
        go_on = threading.Event()

        def wait_at_most() -> None:
            go_on.wait(30)

        worker.engine.post(Call(wait_at_most))
        heard: list[worker_pb2.RunResponse] = []
        async with asyncio.timeout(60):
            while len(heard) < 2:
                heard.append(await run.read())
        go_on.set()
        first, second = (response.telemetry for response in heard)
        assert [response.step for response in heard] == [1, 2]
        assert all(response.HasField("telemetry") for response in heard)
        assert second.uptime_seconds - first.uptime_seconds > 0.9
        assert first.step_count == second.step_count == 8
        assert first.generated_token_count == 8
        assert first.link_out_bytes == 4 * worker.engine.cache.layout.chunk_bytes
        assert first.store_is_up
        assert not first.HasField("redis_is_up")
        assert not first.HasField("split_tokens")
        assert not first.HasField("link_ceiling_bytes_per_second")
        assert not first.HasField("power_watts")
        assert first.eager_message == "the device is no GPU"

        # Busy: telemetry comes along with the tokens.
        await run.write(admit("long", 400))
        tokens = finishes = 0
        telemetry: list[types_pb2.Telemetry] = []
        async with asyncio.timeout(60):
            while not finishes:
                response = await run.read()
                assert response.step == heard[-1].step + 1
                heard.append(response)
                for result in response.tokens:
                    assert result.first_index == tokens
                    tokens += len(result.token_ids)
                finishes += len(response.finishes)
                if response.HasField("telemetry"):
                    telemetry.append(response.telemetry)
            # Pages may be released after the last token.
            while (
                not telemetry
                or telemetry[-1].generated_token_count < 8 + 400
                or telemetry[-1].cache_used_bytes
            ):
                response = await run.read()
                assert response.step == heard[-1].step + 1
                heard.append(response)
                telemetry.append(response.telemetry)
        assert tokens == 400
        last = telemetry[-1]
        assert last.generated_token_count == 408
        assert last.scheduled_token_count == len(PROMPT) + 7 + 400
        # 44 of its 45 tokens came from the store, so that every step computed one token.
        assert sum(response.scheduled_token_count for response in heard) == 400
        assert not any(response.prefilled_token_count for response in heard)
        # The 45th is no prefill.
        assert last.prefilled_token_count == len(PROMPT)
        assert last.loaded_token_count == len(PROMPT) - 1
        assert last.split_tokens == 0
        assert last.link_in_bytes > 0
        assert last.cache_used_bytes == 0
        assert last.predicted_seconds > 0
        assert last.measured_seconds > 0
        run.cancel()


async def test_a_monitor_adds_what_only_it_knows(
    folder: Path, tmp_path: Path, shm_folder: Path
) -> None:
    async with one_worker(folder, tmp_path, shm_folder) as (worker, _):
        worker.monitor.stop()
        worker.monitor, worker.redis_is_up = Monitor(), lambda: False
        telemetry = telemetry_of(worker)
        assert telemetry.power_watts == 123.0
        assert telemetry.HasField("redis_is_up")
        assert not telemetry.redis_is_up
        meters = Meters(Service.WORKER)
        WorkerMetrics(meters, worker)
        seen = scrape(meters)
        assert seen[metrics.GPU_POWER_WATTS] == 123.0
        assert seen[metrics.REDIS_UP] == 0


async def test_chunks_on_the_device_are_told_when_they_change(
    folder: Path, tmp_path: Path, shm_folder: Path
) -> None:
    """With the store's keys, so that a scheduler can tell prefixes by them."""
    shape = replace(SHAPE, shares_prefixes=True)
    async with one_worker(folder, tmp_path, shm_folder, shape) as (worker, _):
        telemeter, layout = Telemeter(worker), worker.engine.cache.layout
        first = telemeter.message()
        assert first.HasField("device_chunk_marks")
        assert not first.device_chunk_marks
        assert not telemeter.message().HasField("device_chunk_marks")
        worker.runtime.admit(admission("one", PROMPT, Sampling(max_tokens=1, ignore_eos=True)))
        assert await worker.runtime.wait_idle(30)
        keys = list(chunk_keys(layout.layout_hash, b"", PROMPT, layout.chunk_tokens))
        marks = b"".join(key[:8] for key in reversed(keys))
        assert telemeter.message().device_chunk_marks == marks
        assert not telemeter.message().HasField("device_chunk_marks")
        assert Telemeter(worker).message().device_chunk_marks == marks, "another stream"
        meters = Meters(Service.WORKER)
        WorkerMetrics(meters, worker)
        worker.runtime.admit(admission("two", PROMPT, Sampling(max_tokens=1, ignore_eos=True)))
        assert await worker.runtime.wait_idle(30)
        seen = scrape(meters)
        assert seen[metrics.WORKER_DEVICE_CACHED_TOKENS] >= len(keys) * layout.chunk_tokens


def test_telemetry_alone_is_a_message_that_says_nothing_else() -> None:
    output = StepOutput(running_count=2, cache_used_bytes=64)
    response = response_from(output, 7, types_pb2.Telemetry(step_count=3))
    assert response == worker_pb2.RunResponse(
        step=7,
        running_count=2,
        cache_used_bytes=64,
        telemetry=types_pb2.Telemetry(step_count=3),
    )
    assert not response_from(output, 8).HasField("telemetry")

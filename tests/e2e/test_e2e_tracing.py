"""Traces of a real stack of processes, as a collector gets them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import urllib.request
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from forked_service import ForkedService, start_forked
from local_stack import prompt_of, stop_process
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from span_collector import Collector, ReceivedSpan, span_collector
from tiny_models import VOCABULARY, write_tiny
from waiting import until

from splitpoint.client import AsyncClient, Client
from splitpoint.client.requests import generate_request
from splitpoint.planning.plan import Residency, RestoreMethod
from splitpoint.transport import channels
from splitpoint.v1 import scheduler_pb2_grpc

SPLIT = "splitpoint.split_tokens"
PROMPT = prompt_of(100, 1, VOCABULARY)
SALT = b"canarysalt-in-no-span"
# Clocks of one host, read by several processes.
TOLERANCE = 1_000_000


@asynccontextmanager
async def processes(
    tmp_path: Path, arena: Path, *more: str, environment: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[AsyncClient, dict[str, ForkedService]]]:
    """Store, worker and scheduler with these arguments more, each logging into a file."""
    model = write_tiny("opt", tmp_path / "model")
    started: dict[str, ForkedService] = {}

    async with AsyncExitStack() as cleanup:

        async def start(name: str, module: str, *arguments: str) -> str:
            started[name], listening = await start_forked(
                *(module, *arguments, *more),
                errors=tmp_path / f"{name}.log",
                environment={"OTEL_BSP_SCHEDULE_DELAY": "100", **(environment or {})},
            )
            cleanup.push_async_callback(stop_process, started[name])
            return listening

        store = await start(
            *("store", "kvstore_service", "--listen", f"unix:{tmp_path}/kv", "--model", str(model)),
            *("--arena", str(arena), "--host-memory", "48MiB", "--chunk-tokens", "16"),
            *("--dtype", "float32", "--activations", "always"),
        )
        worker = await start(
            *("worker", "worker_service", "--listen", f"unix:{tmp_path}/w0", "--kvstore", store),
            *("--model", str(model), "--device", "cpu", "--dtype", "float32", "--threads", "1"),
            *("--device-memory", "96MiB", "--link-rate", "50MB"),
        )
        scheduler = await start(
            *("scheduler", "scheduler_service", "--listen", "127.0.0.1:0", "--worker", worker),
            *("--model", str(model), "--dtype", "float32", "--grace-seconds", "1"),
        )
        client = await cleanup.enter_async_context(AsyncClient(scheduler))
        await client.wait_ready(30)
        yield client, started


@pytest.fixture
def caller_spans() -> InMemorySpanExporter:
    """This process traces what it does, as a program that calls a stack would."""
    exporter = InMemorySpanExporter()
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


def of_trace(collector: Collector, trace_id: int) -> list[ReceivedSpan]:
    return [span for span in collector.spans if span.trace_id == f"{trace_id:032x}"]


async def test_a_request_is_one_trace_through_all_services(
    tmp_path: Path, shm_folder: Path, caller_spans: InMemorySpanExporter
) -> None:
    async with (
        span_collector() as collector,
        processes(
            *(tmp_path, shm_folder / "store" / "arena", "--otlp-endpoint", collector.address),
            environment={"OTEL_EXPORTER_OTLP_HEADERS": "x-key=of-mine"},
        ) as (client, _),
    ):
        options: Any = {"max_tokens": 40, "cache_salt": SALT, "timeout": 30}
        first = await client.generate(PROMPT, request_id="first", **options).complete()
        restored = await client.generate(
            PROMPT, request_id="second", restore=RestoreMethod.LOAD, **options
        ).complete()
        rebuilt = await client.generate(PROMPT, request_id="third", split=64, **options).complete()
        with Client(client.address) as blocking:
            streamed = await asyncio.to_thread(
                blocking.generate(
                    PROMPT, request_id="fourth", residency=Residency.STREAMED, **options
                ).complete
            )
        assert first.usage.cached_tokens == 0
        assert min(r.usage.cached_tokens for r in (restored, rebuilt, streamed)) >= 96
        # The status of a call that is over arrives in a turn of the loop; no task awaits it.
        await until(lambda: len(caller_spans.get_finished_spans()) == 4)
        await until(lambda: len(collector.named("generate")) == 4)
        await until(lambda: len(collector.named("run")) == 4)
        await until(lambda: len(collector.named("seal")) >= 4)
    if "SPLITPOINT_TRACE_TREE" in os.environ:  # for the picture in docs/monitoring.md
        trees = ["\n".join(collector.tree(root)) for root in collector.named("generate")]
        Path(os.environ["SPLITPOINT_TRACE_TREE"]).write_text("\n\n".join(trees) + "\n")
    for caller in caller_spans.get_finished_spans():
        spans = of_trace(collector, caller.context.trace_id)
        by_id = {span.span_id: span for span in spans}
        [generate] = [span for span in spans if span.name == "generate"]
        assert generate.parent_id == f"{caller.context.span_id:016x}"
        assert caller.start_time is not None
        assert caller.end_time is not None
        assert caller.start_time - TOLERANCE <= generate.start
        assert generate.end <= caller.end_time + TOLERANCE
        for span in spans:
            assert not span.is_error
            if span is not generate:
                parent = by_id[span.parent_id]
                assert parent.start - TOLERANCE <= span.start <= span.end, span
                assert span.end <= parent.end + TOLERANCE, (span, parent)
        assert [c.name for c in collector.children(generate)] == (
            ["validate", "peek", "queue", "plan", "attempt"]
        )
        attempt = collector.children(generate)[-1]
        run = next(span for span in collector.children(attempt) if span.name == "run")
        assert run.service == "splitpoint-worker-0"
        names = [child.name for child in collector.children(run)]
        request_id = generate.attributes["splitpoint.request_id"]
        wanted = {"look up", "prefill", "decode", "write-back"}
        assert set(names) == wanted | (set() if request_id == "first" else {"restore"})
        assert len(names) == len(set(names))
        [look_up] = [child for child in collector.children(run) if child.name == "look up"]
        [match] = collector.children(look_up)
        assert (match.name, match.service) == ("match", "splitpoint-kvstore")
        [peek] = [child for child in collector.children(generate) if child.name == "peek"]
        assert [child.attributes["splitpoint.is_peek"] for child in collector.children(peek)] == (
            [True]
        )
        [writing] = [child for child in collector.children(run) if child.name == "write-back"]
        kinds = {child.name for child in collector.children(writing)}
        assert kinds == {"reserve", "seal", "link out"}
        [decode] = [child for child in collector.children(run) if child.name == "decode"]
        assert decode.attributes["splitpoint.steps"] == 39
        assert generate.attributes["splitpoint.completion_tokens"] == 40
    lanes = {
        generate.attributes["splitpoint.request_id"]: {
            (phase.name, lane.name): lane.attributes
            for phase in collector.spans
            if phase.trace_id == generate.trace_id and phase.name in ("restore", "decode")
            for lane in collector.children(phase)
        }
        for generate in collector.named("generate")
    }
    assert lanes["first"] == {}
    assert set(lanes["second"]) == {("restore", "link in")}
    assert set(lanes["third"]) == {("restore", "link in"), ("restore", "compute")}
    assert ("decode", "link in") in lanes["fourth"]
    # 96 tokens of K and V in 3 layers, and no lane is busier than it is long.
    link = lanes["second"]["restore", "link in"]
    assert link["splitpoint.bytes"] >= 96 * 2 * 64 * 4 * 3
    assert link["splitpoint.busy_seconds"] > 0
    # Others may be planned with the same split.
    [third] = [
        span.trace_id
        for span in collector.named("generate")
        if span.attributes["splitpoint.request_id"] == "third"
    ]
    [restore] = [span for span in collector.named("restore") if span.trace_id == third]
    assert restore.attributes[SPLIT] == 64
    assert restore.attributes["splitpoint.measured_seconds"] > 0
    assert restore.attributes["splitpoint.predicted_seconds"] > 0
    # Counts and names only.
    assert SALT not in collector.raw
    assert not any(isinstance(v, list) for s in collector.spans for v in s.attributes.values())
    assert collector.headers["x-key"] == "of-mine"


async def test_a_collector_that_does_not_answer_costs_one_warning(
    tmp_path: Path, shm_folder: Path
) -> None:
    """Nothing listens there, or something that takes connections and never says a word.

    Both at once: most of it is waiting.
    """
    async with asyncio.TaskGroup() as group:
        for name, is_there in (("absent", False), ("mute", True)):
            (tmp_path / name).mkdir()
            arena = shm_folder / name / "arena"
            group.create_task(warned_once(tmp_path / name, arena, is_there=is_there))


async def warned_once(folder: Path, arena: Path, *, is_there: bool) -> None:
    """Start services whose collector does not answer, and count their warnings."""
    mute = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{mute.getsockname()[1]}"
    if not is_there:
        mute.close()

    def warned(name: str) -> int:
        return (folder / f"{name}.log").read_text().count("does not take traces")

    async with processes(folder, arena, "--otlp-endpoint", address) as (client, started):
        for number in range(3):
            answer = await client.generate([5, number], max_tokens=2, timeout=30).complete()
            assert answer.usage.completion_tokens == 2
        await until(lambda: all(warned(name) == 1 for name in ("scheduler", "worker")))
        await asyncio.sleep(4)  # more exports fail
        await client.generate([7], max_tokens=2, timeout=30).complete()
        await asyncio.sleep(1)
        for name in ("scheduler", "worker", "store"):
            await stop_process(started[name])
            assert started[name].returncode == 0, name
    mute.close()
    for name in ("scheduler", "worker"):
        assert warned(name) == 1
        assert "Traceback" not in (folder / f"{name}.log").read_text()


async def test_a_trace_that_nobody_samples_is_not_sent(tmp_path: Path, shm_folder: Path) -> None:
    arena = shm_folder / "store" / "arena"
    async with (
        span_collector() as collector,
        processes(
            *(tmp_path, arena, "--otlp-endpoint", "env"),
            environment={
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.address}",
                "OTEL_TRACES_SAMPLER": "parentbased_always_off",
                "OTEL_SERVICE_NAME": "mine",
            },
        ) as (client, _),
    ):
        # Not through the client, which traces where another test made this process do so.
        stub = scheduler_pb2_grpc.InferenceServiceStub(channels.open_channel(client.address))
        async for _ in stub.Generate(generate_request(PROMPT, {"max_tokens": 2}), timeout=30):
            pass
        await asyncio.sleep(0.5)
        assert collector.spans == []
        # A caller that samples decides for all services.
        parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
        request = generate_request(PROMPT, {"max_tokens": 2})
        async for _ in stub.Generate(request, metadata=(("traceparent", parent),), timeout=30):
            pass
        await until(lambda: {"generate", "run", "match"} <= {s.name for s in collector.spans})
        assert {span.trace_id for span in collector.spans} == {"ab" * 16}
        assert {span.service for span in collector.spans} == {"mine"}
        # Nonsense begins a trace of its own, which is not sampled.
        before = len(collector.named("generate"))
        for nonsense in ("x" * 4000, "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
            async for _ in stub.Generate(
                request, metadata=(("traceparent", nonsense),), timeout=30
            ):
                pass
        await asyncio.sleep(0.5)
        assert len(collector.named("generate")) == before
        # A client of the gateway names its trace in a header, and a bad one costs it nothing.
        model = (await client.get_model()).name
        async with gateway_process(client.address) as url:
            for nonsense in ("x" * 4000, "00-\u00fc", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"):
                await asyncio.to_thread(complete, url, model, nonsense)
            await asyncio.to_thread(complete, url, model, f"00-{'ef' * 16}-{'cd' * 8}-01")
        await until(lambda: len(collector.named("generate")) == before + 1)
        generate = collector.named("generate")[-1]
        assert (generate.trace_id, generate.parent_id) == ("ef" * 16, "cd" * 8)


@asynccontextmanager
async def gateway_process(scheduler: str) -> AsyncIterator[str]:
    """A gateway in a process that traces nothing, as this one may; its URL."""
    gateway, listening = await start_forked(
        *("gateway_service", "--listen", "127.0.0.1:0", "--scheduler", scheduler)
    )
    try:
        yield f"http://{listening}"
    finally:
        await stop_process(gateway)


def complete(url: str, model: str, parent: str) -> None:
    """Ask for a completion within a trace. Raises HTTPError unless it comes."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 2}
    headers = {"content-type": "application/json", "traceparent": parent}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200

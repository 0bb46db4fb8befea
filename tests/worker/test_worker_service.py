"""Test WorkerService over a socket: info, the Run stream, drain, bad input, random bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from fuzzing import call_with_bytes, random_messages
from tiny_models import VOCABULARY, build_tiny, clear_prompt, write_tiny

from splitpoint.observe import tracing
from splitpoint.shapes import DataType
from splitpoint.transport.channels import open_channel
from splitpoint.transport.servers import create_server
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from worker_service.device.memory import STAGING_PAGES
from worker_service.engine.messages import Call
from worker_service.server import WorkerServicer
from worker_service.startup import WorkerOptions, load_worker

REFERENCE = build_tiny("llama")
PROMPT, ANSWER = clear_prompt(REFERENCE, 20, 12)
SHORT, SHORT_ANSWER = clear_prompt(REFERENCE, 7, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("llama"))


@asynccontextmanager
async def serving(folder: Path, *, load: bool = True) -> AsyncIterator[tuple[WorkerServicer, str]]:
    servicer = WorkerServicer()
    server = create_server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    if load:
        servicer.worker = await load_worker(
            WorkerOptions(
                worker_id="w",
                model_folder=folder,
                device="cpu",
                data_type=DataType.FLOAT32,
                device_memory_bytes=64 << 20,
                max_batch_size=4,
                max_batched_tokens=32,
                chunk_tokens=16,
            )
        )
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        if servicer.worker is not None:
            await servicer.drain(0)
            await servicer.worker.runtime.stop()
            servicer.worker.monitor.stop()
        await server.stop(None)


def admit(name: str, **changes: object) -> worker_pb2.RunRequest:
    fields: dict[str, object] = {
        "request_id": name,
        "prompt_token_ids": PROMPT,
        "sampling": types_pb2.SamplingParams(max_tokens=12, ignore_eos=True),
        "plan": types_pb2.Plan(
            residency=types_pb2.RESIDENCY_RESIDENT, method=types_pb2.RESTORE_METHOD_NONE
        ),
        **changes,
    }
    return worker_pb2.RunRequest(admit=worker_pb2.AdmitCommand(**fields))  # type: ignore[arg-type]


async def next_finish(
    stream: grpc.aio.StreamStreamCall[worker_pb2.RunRequest, worker_pb2.RunResponse],
) -> worker_pb2.RequestFinish:
    while True:
        response = await stream.read()
        assert isinstance(response, worker_pb2.RunResponse), "the stream ended"
        if response.finishes:
            return response.finishes[0]


async def test_unavailable_while_loading_then_info(folder: Path) -> None:
    async with serving(folder, load=False) as (servicer, address), open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetInfo(worker_pb2.GetInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert servicer.worker is None


async def test_info_profile_and_run(folder: Path) -> None:
    async with serving(folder) as (_, address), open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        info = await stub.GetInfo(worker_pb2.GetInfoRequest())
        assert info.worker_id == "w"
        assert info.cache_capacity_bytes % info.page_bytes == 0
        assert info.cache_capacity_bytes + info.weight_bytes < info.device_memory_bytes == 64 << 20
        assert info.schedule == types_pb2.SCHEDULE_PIPELINED
        assert info.staging_tokens == STAGING_PAGES * info.layout.chunk_tokens
        fresh = await stub.Profile(worker_pb2.ProfileRequest(refresh=True))
        assert fresh.profile.link_bytes_per_second > 0
        stream = stub.Run()
        await stream.write(admit("a"))
        await stream.write(admit("b", prompt_token_ids=SHORT))
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        done = 0
        async for response in stream:
            for result in response.tokens:
                assert result.first_index == len(tokens[result.request_id])
                tokens[result.request_id] += result.token_ids
            done += len(response.finishes)
            if done == 2:
                break
        stream.cancel()
        assert tokens == {"a": ANSWER, "b": SHORT_ANSWER}


def tokens_plan(**changes: object) -> types_pb2.Plan:
    fields: dict[str, object] = {
        "residency": types_pb2.RESIDENCY_RESIDENT,
        "method": types_pb2.RESTORE_METHOD_TOKENS,
        **changes,
    }
    return types_pb2.Plan(**fields)  # type: ignore[arg-type]


BAD_ADMISSIONS: dict[str, Callable[[], worker_pb2.RunRequest]] = {
    "empty prompt": lambda: admit("x", prompt_token_ids=[]),
    "token outside the vocabulary": lambda: admit("x", prompt_token_ids=[VOCABULARY]),
    "negative token": lambda: admit("x", prompt_token_ids=[-1]),
    "no request id": lambda: admit(""),
    "beyond the context": lambda: admit("x", sampling=types_pb2.SamplingParams(max_tokens=511)),
    "no residency": lambda: admit("x", plan=types_pb2.Plan()),
    "split without activations": lambda: admit("x", forced_split_tokens=4),
    "streamed from tokens": lambda: admit(
        "x", plan=tokens_plan(residency=types_pb2.RESIDENCY_STREAMED)
    ),
    "a split of tokens": lambda: admit("x", plan=tokens_plan(), forced_split_tokens=0),
    "recomputed below zero": lambda: admit("x", plan=tokens_plan(recomputed_tokens=-1)),
    "no line of splits": lambda: admit("x", plan=tokens_plan(method=1, split_slope=float("nan"))),
    "a line without activations": lambda: admit("x", plan=tokens_plan(method=1, split_cap=64)),
    "resident below zero": lambda: admit("x", plan=tokens_plan(method=1, resident_tokens=-1)),
    "salt too long": lambda: admit("x", tenant_salt=b"s" * 129),
    "everything delivered": lambda: admit("x", delivered_token_ids=list(range(3, 15))),
}


@pytest.mark.parametrize("case", BAD_ADMISSIONS)
async def test_a_bad_admission_fails_alone(folder: Path, case: str) -> None:
    async with serving(folder) as (_, address), open_channel(address) as channel:
        stream = worker_pb2_grpc.WorkerServiceStub(channel).Run()
        await stream.write(BAD_ADMISSIONS[case]())
        await stream.write(admit("good"))
        finishes = {}
        async for response in stream:
            finishes.update({finish.request_id: finish for finish in response.finishes})
            if "good" in finishes:
                break
        stream.cancel()
        (bad,) = [finish for name, finish in finishes.items() if name != "good"]
        assert bad.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert bad.error_message
        assert finishes["good"].reason == types_pb2.FINISH_REASON_LENGTH


async def test_schedulers_that_go_at_any_moment_leave_the_worker_to_the_next(
    folder: Path,
) -> None:
    async with serving(folder) as (_, address), open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        for attempt in range(40):
            stream = stub.Run()
            if attempt % 2:
                # Refused while the worker has not seen the end of the stream before.
                with suppress(grpc.aio.AioRpcError):
                    await stream.write(admit(f"lost {attempt}"))
            await asyncio.sleep(attempt % 8 * 0.001)
            stream.cancel()
        async with asyncio.timeout(20):
            while True:
                stream = stub.Run()
                await stream.write(admit("a"))
                try:
                    response = await stream.read()
                except grpc.aio.AioRpcError as error:
                    if "another Run stream is open" not in str(error.details()):
                        raise
                    await asyncio.sleep(0.05)
                    continue
                assert response is not grpc.aio.EOF
                stream.cancel()
                return


async def test_one_stream_at_a_time_and_its_end_cancels(folder: Path) -> None:
    async with serving(folder) as (servicer, address), open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        stream = stub.Run()
        long = types_pb2.SamplingParams(max_tokens=400, ignore_eos=True)
        await stream.write(admit("long", sampling=long))
        await stream.read()
        second = stub.Run()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second.read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        stream.cancel()
        assert servicer.worker is not None
        assert await servicer.worker.runtime.wait_idle(10)
        assert servicer.worker.engine.cache.pages.used_count == 0


async def test_drain_refuses_new_and_lets_running_end(folder: Path) -> None:
    async with serving(folder) as (_, address), open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        stream = stub.Run()
        await stream.write(admit("running"))
        await stream.read()
        drained = asyncio.ensure_future(stub.Drain(worker_pb2.DrainRequest()))
        first = await next_finish(stream)
        assert (first.request_id, first.reason) == ("running", types_pb2.FINISH_REASON_LENGTH)
        assert (await drained).cancelled_count == 0
        await stream.write(admit("late"))
        refused = await next_finish(stream)
        assert refused.error_code == grpc.StatusCode.UNAVAILABLE.value[0]
        stream.cancel()


@pytest.mark.parametrize("method", ["GetInfo", "Profile", "Run", "Drain"])
async def test_2000_random_byte_strings_crash_nothing(folder: Path, method: str) -> None:
    async with serving(folder) as (servicer, address), open_channel(address) as channel:
        path = f"/splitpoint.v1.WorkerService/{method}"
        seen = set()
        for payload in random_messages(random.Random(method), 2000):
            seen.add(await call_with_bytes(channel, path, payload, streams=method == "Run"))
        assert grpc.StatusCode.INVALID_ARGUMENT in seen
        assert not seen & {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        assert (await stub.GetInfo(worker_pb2.GetInfoRequest())).worker_id == "w"
        assert servicer.worker is not None
        assert not servicer.worker.runtime.failed.is_set()


async def test_an_engine_that_fails_is_a_lost_worker(folder: Path) -> None:
    def fail() -> None:
        raise RuntimeError("the device is broken")

    with tracing.exported("worker", "127.0.0.1:1"):
        async with serving(folder) as (servicer, address), open_channel(address) as channel:
            assert servicer.worker is not None
            runtime = servicer.worker.runtime
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            stream = stub.Run()
            await stream.write(admit("a", sampling=types_pb2.SamplingParams(max_tokens=200)))
            assert (await stream.read()).running_count == 1
            assert runtime._spans
            servicer.worker.engine.post(Call(fail))
            with pytest.raises(grpc.aio.AioRpcError) as broken:
                await next_finish(stream)  # the request goes on elsewhere: there is none
            assert broken.value.code() is grpc.StatusCode.INTERNAL
            assert not runtime._spans, "a trace ends with the failure that it is read for"
            again = stub.Run()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await again.read()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_error_details_survive_the_wire(folder: Path) -> None:
    async with serving(folder) as (_, address), open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        request = worker_pb2.DrainRequest()
        request.grace_duration.seconds = -1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Drain(request)
        assert getattr(error_of(caught.value), "field", None) == "grace_duration"

"""Test WorkerService over a socket: info, the Run stream, drain, bad input, random bytes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from admitting import admitting
from fuzzing import call_with_bytes, random_messages
from long_runs import scaled
from tiny_models import VOCABULARY, build_tiny, clear_prompt
from waiting import until

from splitpoint.observe import tracing
from splitpoint.shapes import DataType
from splitpoint.transport.channels import open_channel
from splitpoint.transport.servers import create_server
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from worker_service.device.memory import STAGING_PAGES
from worker_service.engine.messages import Call
from worker_service.server import WorkerServicer
from worker_service.startup.options import WorkerOptions
from worker_service.startup.worker import load_worker
from worker_service.streams import STREAM_LIMIT

REFERENCE = build_tiny("llama")
PROMPT, ANSWER = clear_prompt(REFERENCE, 20, 12)
SHORT, SHORT_ANSWER = clear_prompt(REFERENCE, 7, 12)


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
    return admitting(name, PROMPT, 12, method=types_pb2.RESTORE_METHOD_NONE, **changes)


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
    "a meeting without a tier": lambda: admit("x", meeting_tokens=16),
    "a meeting with another store": lambda: admit(
        "x", meeting_tokens=16, source_store_address="10.0.0.1:1", source_cached_tokens=16
    ),
    "a meeting below zero": lambda: admit("x", meeting_tokens=-1, source_tier=types_pb2.TIER_DISK),
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
    async with serving(folder) as (servicer, address), open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        for attempt in range(40):
            stream = stub.Run()
            if attempt % 2:
                # Refused if too many streams end at the same time.
                with suppress(grpc.aio.AioRpcError):
                    await stream.write(admit(f"lost {attempt}"))
            await asyncio.sleep(attempt % 8 * 0.001)
            stream.cancel()
        worker = servicer.worker
        assert worker is not None
        await until(lambda: not len(worker.runtime.streams))
        stream = stub.Run()
        await stream.write(admit("a"))
        assert (await next_finish(stream)).reason == types_pb2.FINISH_REASON_LENGTH
        stream.cancel()


async def read_answer(
    stream: grpc.aio.StreamStreamCall[worker_pb2.RunRequest, worker_pb2.RunResponse],
) -> dict[tuple[str, int], list[int]]:
    """Return the tokens by request and attempt, up to the first end of a request.

    Each stream counts its own messages.
    """
    tokens: dict[tuple[str, int], list[int]] = {}
    before = 0
    while True:
        response = await stream.read()
        assert isinstance(response, worker_pb2.RunResponse), "the stream ended"
        assert before in (0, response.step - 1)
        before = response.step
        for result in response.tokens:
            held = tokens.setdefault((result.request_id, result.attempt), [])
            assert result.first_index == len(held)
            held += result.token_ids
        if response.finishes:
            return tokens


async def test_streams_run_equal_ids_beside_each_other_and_end_alone(folder: Path) -> None:
    async with serving(folder) as (servicer, address), open_channel(address) as channel:
        assert servicer.worker is not None
        runtime = servicer.worker.runtime
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        long = types_pb2.SamplingParams(max_tokens=400, ignore_eos=True)
        first = stub.Run()
        await first.write(admit("same", attempt=1, sampling=long))
        await first.read()
        second, third = stub.Run(), stub.Run()
        await second.write(admit("same", attempt=1))
        await third.write(admit("same", attempt=1, prompt_token_ids=SHORT))
        # An unknown request of this stream, which is another stream's.
        await third.write(
            worker_pb2.RunRequest(cancel=worker_pb2.CancelCommand(request_id="other", attempt=1))
        )
        await third.write(worker_pb2.RunRequest(pause=worker_pb2.PauseCommand(request_id="other")))
        one, other = await asyncio.gather(read_answer(second), read_answer(third))
        assert (one, other) == ({("same", 1): ANSWER}, {("same", 1): SHORT_ANSWER})
        # The engine is busy for the first stream all the while.
        assert len(runtime.live) == 1
        await second.write(admit("same", attempt=2))
        first.cancel()
        assert await read_answer(second) == {("same", 2): ANSWER}
        assert await runtime.wait_idle(10)
        assert servicer.worker.engine.cache.pages.used_count == 0
        second.cancel()
        third.cancel()


async def test_each_stream_hears_what_was_prefilled_of_its_own_requests(folder: Path) -> None:
    async with serving(folder) as (_, address), open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        prompts = [[7 + n] * (20 + 9 * n) for n in range(3)]
        streams = [stub.Run() for _ in prompts]
        long = types_pb2.SamplingParams(max_tokens=40, ignore_eos=True)
        for stream, prompt in zip(streams, prompts, strict=True):
            await stream.write(admit("same", prompt_token_ids=prompt, sampling=long))
        prefilled, scheduled = [0] * len(prompts), 0
        for number, stream in enumerate(streams):
            while True:
                response = await stream.read()
                prefilled[number] += response.prefilled_token_count
                scheduled += response.scheduled_token_count
                if response.finishes:
                    break
            stream.cancel()
        assert prefilled == [len(prompt) for prompt in prompts]
        # The steps' own totals are of all streams.
        assert scheduled > sum(prefilled) + 3 * 40


async def test_pause_and_cancel_reach_only_the_streams_own_request(folder: Path) -> None:
    async with serving(folder) as (servicer, address), open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        first, second = stub.Run(), stub.Run()
        long = types_pb2.SamplingParams(max_tokens=200, ignore_eos=True)
        await first.write(admit("same", sampling=long))
        await second.write(admit("same", sampling=long))
        await first.read()
        await first.write(worker_pb2.RunRequest(pause=worker_pb2.PauseCommand(request_id="same")))
        ((_, tokens),) = (await read_answer(second)).items()
        assert len(tokens) == 200
        assert servicer.worker is not None
        assert [key[0] for key in servicer.worker.runtime.live] == ["same"]
        await second.write(
            worker_pb2.RunRequest(cancel=worker_pb2.CancelCommand(request_id="same"))
        )
        await first.write(worker_pb2.RunRequest(resume=worker_pb2.ResumeCommand(request_id="same")))
        finish = await next_finish(first)
        assert finish.reason == types_pb2.FINISH_REASON_LENGTH
        first.cancel()
        second.cancel()


async def test_more_streams_than_the_limit_are_refused(folder: Path) -> None:
    async with serving(folder) as (_, address), open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        streams = [stub.Run() for _ in range(STREAM_LIMIT)]
        for stream in streams:
            await stream.initial_metadata()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Run().read()
        error = error_of(caught.value)
        assert (error.reason, caught.value.code()) == (
            "STREAM_LIMIT",
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
        assert "8 schedulers have a Run stream" in error.message
        for stream in streams:
            stream.cancel()


async def test_streams_hear_what_the_others_charge_and_want(folder: Path) -> None:
    async with serving(folder) as (_, address), open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        first, second = stub.Run(), stub.Run()
        for stream in (first, second):
            others = await others_of(stream, lambda others: others.stream_count == 1)
            assert others.charges == worker_pb2.Charges()
        charges = worker_pb2.Charges(
            cache_bytes=5000, request_count=2, slot_count=7, wanted_bytes=900, waited_seconds=3.0
        )
        await first.write(worker_pb2.RunRequest(charge=worker_pb2.ChargeCommand(charges=charges)))
        heard = await others_of(second, lambda others: others.busy_count == 1)
        assert heard.charges.waited_seconds >= 3.0
        heard.charges.waited_seconds = 3.0
        assert heard.charges == charges
        first.cancel()
        gone = await others_of(second, lambda others: others.stream_count == 0)
        assert gone.charges == worker_pb2.Charges()
        second.cancel()


async def others_of(
    stream: grpc.aio.StreamStreamCall[worker_pb2.RunRequest, worker_pb2.RunResponse],
    is_it: Callable[[worker_pb2.OtherStreams], bool],
) -> worker_pb2.OtherStreams:
    """Read until a message about the other streams says so."""
    while True:
        response = await stream.read()
        assert isinstance(response, worker_pb2.RunResponse), "the stream ended"
        if response.HasField("others") and is_it(response.others):
            return response.others


async def test_a_charge_that_cannot_be_ends_the_stream(folder: Path) -> None:
    async with serving(folder) as (_, address), open_channel(address) as channel:
        stream = worker_pb2_grpc.WorkerServiceStub(channel).Run()
        charges = worker_pb2.Charges(cache_bytes=-1)
        await stream.write(worker_pb2.RunRequest(charge=worker_pb2.ChargeCommand(charges=charges)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_end_of_a_stream_cancels_its_requests(folder: Path) -> None:
    async with serving(folder) as (servicer, address), open_channel(address) as channel:
        stream = worker_pb2_grpc.WorkerServiceStub(channel).Run()
        long = types_pb2.SamplingParams(max_tokens=400, ignore_eos=True)
        await stream.write(admit("long", sampling=long))
        await stream.read()
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


@pytest.mark.scaled
@pytest.mark.parametrize("method", ["GetInfo", "Profile", "Run", "Drain"])
async def test_random_byte_strings_crash_nothing(folder: Path, method: str) -> None:
    async with serving(folder) as (servicer, address), open_channel(address) as channel:
        path = f"/splitpoint.v1.WorkerService/{method}"
        seen = set()
        for payload in random_messages(random.Random(method), scaled(200, chaos=2000)):
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

"""A client goes on with an answer that it has in part, at schedulers that know it or do not."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from scheduler_doubles import (
    TOKENIZER,
    Answer,
    Stack,
    Steps,
    WorkerDouble,
    answer,
    ids_request,
    moved,
    stack,
)

from splitpoint.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    OutOfRange,
    SplitpointError,
)
from splitpoint.transport import statuses
from splitpoint.v1 import scheduler_pb2, types_pb2, worker_pb2

PROMPT = [5, 6, 7]


def resumed(
    request: scheduler_pb2.GenerateRequest, token_ids: list[int], next_index: int | None = None
) -> scheduler_pb2.GenerateRequest:
    again = scheduler_pb2.GenerateRequest()
    again.CopyFrom(request)
    again.resume.next_index = len(token_ids) if next_index is None else next_index
    again.resume.token_ids.extend(token_ids)
    return again


async def read(running: Stack, request: scheduler_pb2.GenerateRequest) -> Answer:
    """Return what follows the tokens that the request brings along."""
    result = Answer()
    async for response in running.inference.Generate(request, timeout=30):
        if response.HasField("complete"):
            result.complete = response.complete
            result.text += response.complete.text
            continue
        due = request.resume.next_index + len(result.token_ids)
        assert response.chunk.index == due
        result.chunks.append(response.chunk)
        result.token_ids += response.chunk.token_ids
        result.text += response.chunk.text
    return result


async def refusal(running: Stack, request: scheduler_pb2.GenerateRequest) -> SplitpointError:
    with pytest.raises(grpc.RpcError) as caught:
        await read(running, request)
    return statuses.error_of(caught.value)


def text_of(chunks: list[scheduler_pb2.GenerateChunk], count: int) -> str:
    """The text that came with the first `count` tokens, of chunks with one token each."""
    assert all(len(chunk.token_ids) == 1 for chunk in chunks)
    return "".join(chunk.text for chunk in chunks[:count])


def paced(worker: WorkerDouble) -> Steps:
    worker.pace = steps = Steps()
    return steps


async def one_by_one(running: Stack, steps: Steps, request: Any) -> Answer:
    """Read an answer whose worker takes a step only when its last token was read."""
    result = Answer()
    steps.allow(1)
    async for response in running.inference.Generate(request, timeout=30):
        if response.HasField("complete"):
            result.complete = response.complete
            continue
        result.chunks.append(response.chunk)
        result.token_ids += response.chunk.token_ids
        result.text += response.chunk.text
        steps.allow(1)
    result.text += result.done.text
    return result


async def test_tokens_and_text_go_on_where_they_ended() -> None:
    """At every place: no text is lost or repeated, though it lags behind the tokens."""
    ids = TOKENIZER.encode('def f(x):\n    """Größe → 20 °C."""\n    return g()\n')
    worker = WorkerDouble()
    worker.token_of = lambda _, index: ids[index]
    steps = paced(worker)
    request = ids_request(PROMPT, len(ids), request_id="r")
    async with stack(worker) as first:
        whole = await one_by_one(first, steps, request)
    assert whole.text == TOKENIZER.decode(ids)
    worker = WorkerDouble()
    worker.token_of = lambda _, index: ids[index]
    async with stack(worker) as second:
        for count in range(1, len(whole.token_ids) + 1):
            request.request_id = f"r{count}"
            rest = await read(second, resumed(request, whole.token_ids[:count]))
            assert rest.token_ids == whole.token_ids[count:]
            assert text_of(whole.chunks, count) + rest.text == whole.text
            assert rest.done.finish_reason == types_pb2.FINISH_REASON_LENGTH
            assert rest.done.usage.completion_tokens == len(whole.token_ids)
        ran = worker.admits
    # The last of them had the whole answer: no worker ran it.
    assert len(ran) == len(whole.token_ids) - 1
    assert [len(each.delivered_token_ids) for each in ran] == list(range(1, len(whole.token_ids)))
    assert not rest.done.worker_id
    assert not rest.done.HasField("plan")


async def test_tokens_that_end_the_answer_complete_it_at_once() -> None:
    ids = TOKENIZER.encode("return g()\n")
    end = next(count for count in range(len(ids)) if "()" in TOKENIZER.decode(ids[:count]))
    worker = WorkerDouble()
    async with stack(worker) as running:
        request = ids_request(PROMPT, 50, request_id="string")
        request.sampling.stop.append("()")
        rest = await read(running, resumed(request, ids[:end]))
        assert (rest.token_ids, rest.done.matched_stop) == ([], "()")
        assert rest.done.finish_reason == types_pb2.FINISH_REASON_STOP
        request.request_id = "beyond"
        error = await refusal(running, resumed(request, [*ids[:end], 5]))
        assert isinstance(error, InvalidArgument)
        assert error.field == f"resume.token_ids[{end}]"
        request = ids_request(PROMPT, 50, request_id="token")
        request.sampling.stop_token_ids.append(ids[2])
        rest = await read(running, resumed(request, ids[:3]))
        assert rest.done.finish_reason == types_pb2.FINISH_REASON_STOP
        assert (rest.text, rest.done.usage.completion_tokens) == ("", 3)
        assert not worker.admits


async def test_the_worker_repeats_the_tokens_and_computes_what_follows() -> None:
    worker = WorkerDouble()
    async with stack(worker) as running:
        request = ids_request(PROMPT, 12, request_id="r")
        request.sampling.min_tokens = 10
        rest = await read(running, resumed(request, answer(PROMPT, 7)))
        [admit] = worker.admits
    assert rest.token_ids == answer(PROMPT, 12)[7:]
    assert list(admit.delivered_token_ids) == answer(PROMPT, 7)
    assert (admit.sampling.max_tokens, admit.sampling.min_tokens) == (12, 10)


async def test_a_known_request_is_read_from_the_next_index_on() -> None:
    worker = WorkerDouble()
    steps = paced(worker)
    async with stack(worker) as running:
        request = ids_request(PROMPT, 12, request_id="r")
        first = asyncio.create_task(running.generate(request))
        steps.allow(5)
        await running.until(lambda: worker.steps == 5)
        second = asyncio.create_task(read(running, resumed(request, answer(PROMPT, 3))))
        without_tokens = asyncio.create_task(read(running, resumed(request, [], 2)))
        steps.allow(100)
        assert (await first).token_ids == answer(PROMPT, 12)
        assert (await second).token_ids == answer(PROMPT, 12)[3:]
        assert (await without_tokens).token_ids == answer(PROMPT, 12)[2:]
        # It has completed, and is still known.
        late = await read(running, resumed(request, answer(PROMPT, 12)))
        assert (late.token_ids, late.done.usage.completion_tokens) == ([], 12)
        assert late.done.worker_id == "0"
        assert len(worker.admits) == 1


async def test_a_client_may_be_ahead_of_a_known_request() -> None:
    """Its tokens came from another scheduler, since this one had lost sight of it."""
    worker = WorkerDouble()
    steps = paced(worker)
    async with stack(worker) as running:
        request = ids_request(PROMPT, 12, request_id="r")
        first = asyncio.create_task(running.generate(request))
        steps.allow(2)
        await running.until(lambda: worker.steps == 2)
        ahead = asyncio.create_task(read(running, resumed(request, answer(PROMPT, 6))))
        other = [*answer(PROMPT, 5), 9]
        differs = asyncio.create_task(refusal(running, resumed(request, other)))
        request_here = running.manager.requests.running()[0]
        await running.until(lambda: len(request_here._readers) == 3)
        beyond = await refusal(running, resumed(request, [], 6))
        assert isinstance(beyond, OutOfRange)
        steps.allow(100)
        assert (await first).token_ids == answer(PROMPT, 12)
        assert (await ahead).token_ids == answer(PROMPT, 12)[6:]
        assert (await differs).reason == "RESUME_MISMATCH"


async def test_what_does_not_fit_together_is_refused() -> None:
    async with stack(WorkerDouble()) as running:
        request = ids_request(PROMPT, 8, request_id="r")
        tokens = answer(PROMPT, 8)
        assert (await running.generate(request)).token_ids == tokens
        mismatch = await refusal(running, resumed(request, [*tokens[:2], 9]))
        assert (type(mismatch), mismatch.reason) == (FailedPrecondition, "RESUME_MISMATCH")
        request.sampling.max_tokens = 9
        assert isinstance(await refusal(running, resumed(request, tokens)), AlreadyExists)
        request.request_id = "unknown"
        unknown = await refusal(running, resumed(request, [], 3))
        assert (type(unknown), unknown.reason) == (FailedPrecondition, "RESUME_UNKNOWN")
        assert "send resume.token_ids" in unknown.message
        fresh = await read(running, resumed(request, []))
        assert fresh.token_ids == answer(PROMPT, 9)


@pytest.mark.parametrize(
    ("tokens", "index", "field"),
    [
        ([], -1, "resume.next_index"),
        ([], 9, "resume.next_index"),
        ([4] * 9, 9, "resume.next_index"),
        ([4, 4], 3, "resume.token_ids"),
        ([4, 4], 1, "resume.token_ids"),
        ([4, -1], 2, "resume.token_ids[1]"),
        ([4, 1 << 20], 2, "resume.token_ids[1]"),
        ([4, 1, 5], 3, "resume.token_ids[2]"),
    ],
)
async def test_bad_ranges_name_their_field(tokens: list[int], index: int, field: str) -> None:
    worker = WorkerDouble()
    async with stack(worker) as running:
        # 1 is the model's end of a sequence.
        request = resumed(ids_request(PROMPT, 8, request_id="r"), tokens, index)
        error = await refusal(running, request)
        assert isinstance(error, InvalidArgument)
        assert error.field == field
        request = resumed(ids_request(PROMPT, 8), [4])
        error = await refusal(running, request)
        assert isinstance(error, InvalidArgument)
        assert error.field == "request_id"
        assert not worker.admits
        assert not len(running.manager.requests)


async def test_schedulers_of_one_key_draw_with_one_seed() -> None:
    async def seed_of(key: bytes, request_id: str) -> int:
        async with stack(WorkerDouble(), server_key=key) as running:
            request = resumed(ids_request(PROMPT, 4, request_id=request_id), answer(PROMPT, 2))
            return (await read(running, request)).done.seed

    seeds = [
        await seed_of(key, name)
        for key, name in ((b"k" * 32, "r"), (b"k" * 32, "r"), (b"K" * 32, "r"), (b"k" * 32, "s"))
    ]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 3


async def test_later_tokens_have_their_log_probabilities() -> None:
    worker = WorkerDouble()

    def with_logprobs(response: worker_pb2.RunResponse) -> list[worker_pb2.RunResponse]:
        for result in response.tokens:
            result.logprobs[0].chosen_logprob = -0.5 - result.first_index
        return [response]

    worker.mangle = with_logprobs
    async with stack(worker) as running:
        request = ids_request(PROMPT, 8, request_id="r")
        request.sampling.logprobs = 0
        rest = await read(running, resumed(request, answer(PROMPT, 3)))
        logprobs = [each.chosen_logprob for chunk in rest.chunks for each in chunk.logprobs]
        assert logprobs == [-0.5 - index for index in range(3, 8)]
        again = await read(running, resumed(request, answer(PROMPT, 5)))
        logprobs = [each.chosen_logprob for chunk in again.chunks for each in chunk.logprobs]
        assert logprobs == [-0.5 - index for index in range(5, 8)]
        error = await refusal(running, request)
        assert error.reason == "RESUME_LOGPROBS"


async def test_a_resumed_request_survives_its_worker() -> None:
    async with stack(WorkerDouble("0"), WorkerDouble("1")) as running:
        request = resumed(ids_request(PROMPT, 20, request_id="r"), answer(PROMPT, 6))
        rest, _, heir = await moved(running, read(running, request), 4)
        assert rest.token_ids == answer(PROMPT, 20)[6:]
        assert list(heir.admits[0].delivered_token_ids) == answer(PROMPT, 10)


async def test_a_drained_scheduler_sends_its_clients_on() -> None:
    """Two schedulers: what the first delivered before it stopped, the second goes on with."""
    slow = WorkerDouble("0")
    steps = paced(slow)
    async with stack(slow) as first, stack(WorkerDouble("1")) as second:
        request = ids_request(PROMPT, 30, request_id="r")
        call = first.inference.Generate(request)
        steps.allow(9)
        got: list[int] = []
        while len(got) < 9:
            got += (await call.read()).chunk.token_ids
        stopping = asyncio.create_task(first.scheduler.stop(0.05))
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        assert statuses.error_of(caught.value).reason == "STOPPED"
        rest = await read(second, resumed(request, got))
        assert got + rest.token_ids == answer(PROMPT, 30)
        await stopping

"""Structured output through the scheduler: checked, and sent to workers that follow it. 5 s."""

from __future__ import annotations

import asyncio

import pytest
from scheduler_doubles import WorkerDouble, answer, ids_request, stack

from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.v1 import scheduler_pb2, types_pb2

PROMPT = [5, 6, 7]


def structured_worker(worker_id: str) -> WorkerDouble:
    worker = WorkerDouble(worker_id)
    worker.has_structured_output = True
    return worker


def asking(output: types_pb2.StructuredOutput, count: int = 4) -> scheduler_pb2.GenerateRequest:
    request = ids_request(PROMPT, count)
    request.sampling.structured_output.CopyFrom(output)
    return request


REGEX = types_pb2.StructuredOutput(regex="[a-z]+")


async def test_the_grammar_reaches_the_worker() -> None:
    worker = structured_worker("0")
    async with stack(worker) as running:
        await running.generate(asking(REGEX))
        assert worker.admits[0].sampling.structured_output == REGEX


async def test_only_workers_that_can_follow_it_get_it() -> None:
    plain, able = WorkerDouble("0"), structured_worker("1")
    async with stack(plain, able) as running:
        await asyncio.gather(*(running.generate(asking(REGEX)) for _ in range(12)))
        assert len(able.admits) == 12
        assert plain.admits == []
        await asyncio.gather(*(running.generate(ids_request(PROMPT, 4)) for _ in range(12)))
        assert plain.admits


async def test_it_waits_for_its_worker_and_not_for_any() -> None:
    """The one that can follow it has room for one at a time; the others stay idle."""
    plain, able = WorkerDouble("0"), structured_worker("1")
    able.max_batch = 1
    async with stack(plain, able) as running:
        answers = await asyncio.gather(*(running.generate(asking(REGEX, 9)) for _ in range(4)))
        assert [each.token_ids for each in answers] == [answer(PROMPT, 9)] * 4
        assert able.most_running == 1
        assert plain.admits == []


async def test_without_such_a_worker_it_is_refused() -> None:
    async with stack(WorkerDouble("0"), structured_worker("1")) as running:
        pinned = asking(REGEX)
        pinned.worker_id = "0"
        error = await running.error(pinned)
        assert (type(error), error.reason) == (FailedPrecondition, "STRUCTURED_OUTPUT_UNAVAILABLE")
        assert "splitpoint[structured]" in error.message
    async with stack(WorkerDouble("0")) as running:
        assert isinstance(await running.error(asking(REGEX)), FailedPrecondition)


@pytest.mark.parametrize(
    ("output", "field"),
    [
        (types_pb2.StructuredOutput(regex="a("), "regex"),
        (types_pb2.StructuredOutput(json_schema='{"type": "objct"}'), "json_schema"),
        (types_pb2.StructuredOutput(grammar="start: x"), "grammar"),
        (types_pb2.StructuredOutput(choice=types_pb2.Choices()), "choice.texts"),
    ],
)
async def test_a_bad_grammar_never_reaches_a_worker(
    output: types_pb2.StructuredOutput, field: str
) -> None:
    worker = structured_worker("0")
    async with stack(worker) as running:
        error = await running.error(asking(output))
        assert isinstance(error, InvalidArgument)
        assert error.field == f"sampling.structured_output.{field}"
        assert worker.admits == []


async def test_the_model_says_whether_it_can() -> None:
    for worker, can in ((WorkerDouble("0"), False), (structured_worker("0"), True)):
        async with stack(worker) as running:
            model = await running.inference.GetModel(scheduler_pb2.GetModelRequest())
            assert model.model.has_structured_output is can

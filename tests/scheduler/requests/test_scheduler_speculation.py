"""Speculation through the scheduler: params in, counts and reasons out. About 3 s."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_doubles import (
    WorkerDouble,
    answer,
    ids_request,
    moved,
    reasons_of,
    stack,
)

from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import ReasonKind
from splitpoint.speculation import PLAIN, DraftMethod
from splitpoint.transport.convert import (
    draft_method_to_proto,
    speculation_from_proto,
    speculation_to_proto,
)
from splitpoint.v1 import scheduler_pb2, types_pb2, worker_pb2

PROMPT = [5, 6, 7]
SUFFIX = types_pb2.DRAFT_METHOD_SUFFIX
MODEL = types_pb2.DRAFT_METHOD_MODEL


def drafting_worker(*methods: DraftMethod, worker_id: str = "0") -> WorkerDouble:
    """Return a worker that has these methods and uses the first one where none is asked for."""
    worker = WorkerDouble(worker_id)
    numbers = [draft_method_to_proto(method) for method in methods]
    worker.speculation = types_pb2.Speculation(
        defaults=types_pb2.SpeculativeParams(method=numbers[0]), methods=numbers, draft_model="tiny"
    )
    worker.mangle = drafts_of_three
    return worker


def drafts_of_three(response: worker_pb2.RunResponse) -> list[worker_pb2.RunResponse]:
    """Claim that each step verified three tokens of `suffix` and accepted two of them."""
    for result in response.tokens:
        result.draft_method = SUFFIX
        result.draft_token_count, result.accepted_token_count = 3, 2
    return [response]


def asking(count: int, **values: Any) -> scheduler_pb2.GenerateRequest:
    return ids_request(PROMPT, count, speculation=types_pb2.SpeculativeParams(**values))


async def test_params_reach_the_worker_and_counts_come_back() -> None:
    worker = drafting_worker(DraftMethod.SUFFIX)
    async with stack(worker) as running:
        asked = asking(4, method=SUFFIX, num_speculative_tokens=0, prompt_lookup_min=5)
        done = (await running.generate(asked)).done
        assert worker.admits[0].speculation == asked.speculation
        assert worker.admits[0].speculation.HasField("num_speculative_tokens")
        assert done.usage.speculation == types_pb2.SpeculationUsage(
            method=SUFFIX, draft_count=4, draft_token_count=12, accepted_token_count=8
        )
        assert reasons_of(done.plan)[ReasonKind.DRAFTED] == ("suffix", 12, 4, 8)
        # Nothing asked for: what the worker is configured to do.
        assert (await running.generate(ids_request(PROMPT, 2))).done.usage.speculation.draft_count
        assert worker.speculation is not None
        drafts = speculation_from_proto(worker.speculation.defaults).over(PLAIN)
        assert worker.admits[1].speculation == speculation_to_proto(drafts)


async def test_why_nothing_was_drafted_is_said() -> None:
    methods = (DraftMethod.SELF, DraftMethod.SUFFIX)
    worker, other = drafting_worker(*methods), WorkerDouble("1")
    worker.mangle = lambda response: [response]
    async with stack(worker, other) as running:
        for asked, worker_id, kind, method in (
            (types_pb2.DRAFT_METHOD_SELF, "0", ReasonKind.DRAFTS_ARE_FOR_STREAMS, "self"),
            (types_pb2.DRAFT_METHOD_AUTO, "0", ReasonKind.NO_DRAFTS, "auto"),
            (types_pb2.DRAFT_METHOD_UNSPECIFIED, "0", ReasonKind.DRAFTS_ARE_FOR_STREAMS, "self"),
            (types_pb2.DRAFT_METHOD_AUTO, "1", ReasonKind.NO_DRAFTER, "auto"),
        ):
            request = asking(2, method=asked)
            request.worker_id = worker_id
            done = (await running.generate(request)).done
            assert reasons_of(done.plan)[kind] == (method,)
            assert done.usage.speculation.method == types_pb2.DRAFT_METHOD_OFF
        for request in (asking(2, method=types_pb2.DRAFT_METHOD_OFF), ids_request(PROMPT, 2)):
            request.worker_id = "1"
            done = (await running.generate(request)).done
            assert ReasonKind.NO_DRAFTER not in reasons_of(done.plan)


async def test_a_method_that_no_worker_has_is_refused() -> None:
    worker, other = drafting_worker(DraftMethod.SUFFIX), WorkerDouble("1")
    async with stack(worker, other) as running:
        error = await running.error(asking(2, method=MODEL))
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.reason) == ("speculation.method", "NO_DRAFTER")
        assert "--draft-model" in error.message
        # Such a worker may have a store: it has no window for self drafts by its own choice.
        error = await running.error(asking(2, method=types_pb2.DRAFT_METHOD_SELF))
        assert "KV store and --speculative-config" in error.message
        request = asking(2, method=SUFFIX)
        request.worker_id = "1"
        error = await running.error(request)
        assert isinstance(error, InvalidArgument), "the only worker that may run it lacks it"
        assert "--speculative-config" in error.message
        # The drafts of another worker would not change the text.
        assert (await running.generate(asking(2, method=SUFFIX))).done


async def test_a_request_keeps_its_params_and_counts_through_the_death_of_its_worker() -> None:
    workers = [drafting_worker(DraftMethod.SUFFIX, worker_id=name) for name in "01"]
    async with stack(*workers) as running:
        asked = asking(40, method=SUFFIX, num_speculative_tokens=3)
        result, victim, heir = await moved(running, running.generate(asked), 7)
        assert result.token_ids == answer(PROMPT, 40)
        sent = heir.admits[0].speculation
        assert sent == victim.admits[0].speculation
        assert (sent.method, sent.num_speculative_tokens) == (SUFFIX, 3)
        assert list(heir.admits[0].delivered_token_ids) == answer(PROMPT, 7)
        assert result.done.usage.speculation.draft_count == 40, "of both workers"


async def test_status_and_models_show_what_a_worker_can_draft_by() -> None:
    worker, other = drafting_worker(DraftMethod.SUFFIX, DraftMethod.MODEL), WorkerDouble("1")
    async with stack(worker, other) as running:
        model = (await running.inference.GetModel(scheduler_pb2.GetModelRequest())).model
        assert set(model.draft_methods) == {SUFFIX, MODEL}
        listed = await running.admin.ListWorkers(scheduler_pb2.ListWorkersRequest())
        shown = {status.worker_id: status for status in listed.workers}
        assert shown["0"].speculation == worker.speculation
        assert not shown["1"].HasField("speculation")


@pytest.mark.parametrize("method", [SUFFIX, MODEL])
async def test_the_body_of_a_request_includes_its_speculation(method: int) -> None:
    worker = drafting_worker(DraftMethod.SUFFIX, DraftMethod.MODEL)
    async with stack(worker) as running:
        asked = asking(2, method=method)
        asked.request_id = "same"
        await running.generate(asked)
        asked.speculation.num_speculative_tokens = 1
        error = await running.error(asked)
        assert error.reason == "REQUEST_ID_TAKEN"

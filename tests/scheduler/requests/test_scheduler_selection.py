"""Selections through the scheduler: settings in, counts and reasons out. About 3 s."""

from __future__ import annotations

from dataclasses import replace

from scheduler_doubles import (
    StoreDouble,
    WorkerDouble,
    answer,
    ids_request,
    moved,
    reasons_of,
    stack,
)

from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.planning.plan import ReasonKind
from splitpoint.selection import Selection, SelectionMethod
from splitpoint.speculation import DraftMethod
from splitpoint.transport.convert import (
    draft_method_to_proto,
    selection_method_fields,
    selection_to_proto,
)
from splitpoint.v1 import scheduler_pb2, types_pb2, worker_pb2

PROMPT = [5, 6, 7]
STEP = types_pb2.SelectionUsage(
    step_count=1,
    visible_token_count=100,
    read_token_count=10,
    fetched_row_count=30,
    reused_row_count=10,
    link_bytes=30 * 128,
)


def selecting_worker(*methods: SelectionMethod, worker_id: str = "0") -> WorkerDouble:
    """Return a worker that serves these methods and reads each step by selection if asked to."""
    worker = WorkerDouble(worker_id)
    worker.selections = [
        types_pb2.SelectionSupport(**selection_method_fields(method)) for method in methods
    ]

    def selected(response: worker_pb2.RunResponse) -> list[worker_pb2.RunResponse]:
        for result in response.tokens:
            if result.request_id in selecting(worker):
                result.selection.CopyFrom(STEP)
        return [response]

    worker.mangle = selected
    return worker


def selecting(worker: WorkerDouble) -> set[str]:
    """Return the requests of which the worker was told to select."""
    return {command.request_id for command in worker.admits if command.HasField("selection")}


def asking(count: int, text: str) -> scheduler_pb2.GenerateRequest:
    return ids_request(PROMPT, count, selection=selection_to_proto(Selection.parsed(text)))


async def test_settings_reach_the_worker_and_counts_come_back() -> None:
    worker = selecting_worker(SelectionMethod.COLUMNS)
    async with stack(worker) as running:
        asked = asking(4, "columns:0.1,int8,sinks=0")
        done = (await running.generate(asked)).done
        assert worker.admits[0].selection == asked.selection
        assert done.usage.selection == types_pb2.SelectionUsage(
            step_count=4,
            visible_token_count=400,
            read_token_count=40,
            fetched_row_count=120,
            reused_row_count=40,
            link_bytes=120 * 128,
            is_approximate=True,
        )
        said = reasons_of(done.plan)[ReasonKind.SELECTED]
        assert said == ("columns:0.1,int8,sinks=0", 0.1, 4, "steps", 120, 160)
        plain = (await running.generate(ids_request(PROMPT, 2))).done
        assert not worker.admits[1].HasField("selection")
        assert plain.usage.selection == types_pb2.SelectionUsage()


async def test_what_was_not_selected_says_why() -> None:
    worker, other = selecting_worker(SelectionMethod.COLUMNS), WorkerDouble("1")

    def unused(response: worker_pb2.RunResponse) -> list[worker_pb2.RunResponse]:
        for finish in response.finishes:
            if finish.request_id in selecting(worker):
                finish.selection_off_reason = "the cache is resident"
        return [response]

    worker.mangle = unused
    async with stack(worker, other) as running:
        for worker_id, text, why in (
            ("0", "columns:0.1", "the cache is resident"),
            ("0", "columns:1", "columns:1.0 reads every token"),
        ):
            request = asking(2, text)
            request.worker_id = worker_id
            done = (await running.generate(request)).done
            assert why in done.usage.selection.off_reason
            assert not done.usage.selection.is_approximate
            said = reasons_of(done.plan)[ReasonKind.NOT_SELECTED]
            assert said == (str(Selection.parsed(text)), done.usage.selection.off_reason)
        assert not worker.admits[1].HasField("selection"), "what reads everything selects nothing"


async def test_a_method_without_artefacts_is_refused() -> None:
    worker, other = selecting_worker(SelectionMethod.COLUMNS), WorkerDouble("1")
    async with stack(worker, other) as running:
        error = await running.error(asking(2, "infinigen:0.1"))
        assert (type(error), error.reason) == (FailedPrecondition, "NO_ARTIFACTS")
        assert "splitpoint calibrate MODEL --screen infinigen" in error.message
        request = asking(2, "columns:0.1")
        request.worker_id = "1"
        error = await running.error(request)
        assert isinstance(error, FailedPrecondition), "the only worker that may run it cannot"
        assert error.reason == "NO_SELECTION"
        error = await running.error(asking(2, "columns:0.1,verify"))
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.reason) == ("selection.verify", "NO_DRAFTER")


async def test_keys_made_of_layer_inputs_need_a_store_that_keeps_them() -> None:
    worker = selecting_worker(SelectionMethod.MAPLE)
    worker.layout = replace(worker.layout, has_activations=False)
    async with stack(worker) as running:
        error = await running.error(asking(2, "maple:0.1"))
        assert (type(error), error.reason) == (FailedPrecondition, "NO_ACTIVATIONS")
        assert "--activations always" in error.message


async def test_trained_artefacts_decide_the_columns() -> None:
    store = StoreDouble()
    worker = selecting_worker(SelectionMethod.MAPLE)
    worker.kvstore_address = await store.start()
    worker.selections[0].columns = 28
    async with stack(worker) as running:
        for text in ("maple:0.1", "maple:0.1,columns=28"):
            await running.generate(asking(2, text))
            assert worker.admits[-1].selection.columns == 28
        error = await running.error(asking(2, "maple:0.1,columns=16"))
        assert isinstance(error, InvalidArgument)
        assert error.field == "selection.columns"
        assert "trained for 28" in error.message
    await store.stop()


async def test_a_verified_selection_is_exact() -> None:
    worker = selecting_worker(SelectionMethod.WINDOW)
    by_self = draft_method_to_proto(DraftMethod.SELF)
    worker.speculation = types_pb2.Speculation(
        defaults=types_pb2.SpeculativeParams(method=by_self), methods=[by_self]
    )
    async with stack(worker) as running:
        done = (await running.generate(asking(2, "window:0.1,verify"))).done
        assert worker.admits[0].selection.verify
        assert done.usage.selection.step_count == 2
        assert not done.usage.selection.is_approximate
        why = reasons_of(done.plan)
        assert why[ReasonKind.SELECTED][2:4] == (2, "drafted tokens")
        assert ReasonKind.DRAFTS_OFF not in why
        # Those that are made by default would be verified by something else.
        done = (await running.generate(asking(2, "window:0.1"))).done
        assert ReasonKind.DRAFTS_OFF in reasons_of(done.plan)


async def test_a_request_keeps_its_selection_and_counts_through_the_death_of_its_worker() -> None:
    workers = [selecting_worker(SelectionMethod.COLUMNS, worker_id=name) for name in "01"]
    async with stack(*workers) as running:
        asked = asking(40, "columns:0.1")
        result, victim, heir = await moved(running, running.generate(asked), 7)
        assert result.token_ids == answer(PROMPT, 40)
        assert heir.admits[0].selection == victim.admits[0].selection == asked.selection
        assert result.done.usage.selection.step_count == 40, "of both workers"


async def test_after_its_worker_a_request_may_go_on_exactly_and_says_so() -> None:
    first, second = selecting_worker(SelectionMethod.COLUMNS), WorkerDouble("1")
    async with stack(first, second) as running:
        asked = running.generate(asking(9, "columns:0.1"))
        result, victim, _ = await moved(running, asked, 3)
        usage = result.done.usage.selection
        assert usage.step_count == (3 if victim is first else 6)
        assert usage.is_approximate
        assert usage.off_reason == "worker 1 cannot select by columns"
        assert not second.admits[0].HasField("selection")


async def test_models_and_status_show_what_a_worker_selects_by() -> None:
    worker, other = selecting_worker(SelectionMethod.COLUMNS), WorkerDouble("1")
    async with stack(worker, other) as running:
        model = (await running.inference.GetModel(scheduler_pb2.GetModelRequest())).model
        assert list(model.selection_methods) == [types_pb2.SELECTION_METHOD_COLUMNS]
        listed = await running.admin.ListWorkers(scheduler_pb2.ListWorkersRequest())
        shown = {status.worker_id: list(status.selection_methods) for status in listed.workers}
        assert shown == {"0": [types_pb2.SELECTION_METHOD_COLUMNS], "1": []}


async def test_a_worker_with_methods_of_a_newer_version_serves_those_that_are_known() -> None:
    worker = selecting_worker(SelectionMethod.COLUMNS)
    worker.selections.append(types_pb2.SelectionSupport(method_name="newest", columns=3))
    async with stack(worker) as running:
        model = (await running.inference.GetModel(scheduler_pb2.GetModelRequest())).model
        assert list(model.selection_method_names) == ["columns"]
        done = (await running.generate(asking(2, "columns:0.1"))).done
        assert done.usage.selection.step_count == 2

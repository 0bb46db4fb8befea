"""Waiting for memory or streaming at once, as the scheduler asks it. Quick: below a second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scheduler_doubles import admit_all, queued_request

from scheduler_service.api.request import Request
from scheduler_service.placement.footprint import Fits, Grant, footprint_of
from scheduler_service.placement.residency import (
    Running,
    RunningRequest,
    WaitOrStream,
    reason_to_stream,
    streamed_instead,
    wait_or_stream,
)
from scheduler_service.requests.admission import AdmissionQueue
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.planning.plan import Objective, ReasonKind, Residency
from splitpoint.planning.schedule import Schedule
from splitpoint.residency.seconds import DeviceRoom, RequestLoad
from splitpoint.selection import Selection, SelectionMethod
from splitpoint.shapes import BUILT_IN_SHAPES, Encoding

SHAPE = BUILT_IN_SHAPES["opt-6.7b"]
WORKER = WorkerFacts(
    worker_id="0",
    address="127.0.0.1:1",
    shape=SHAPE,
    profile=BUILT_IN_PROFILES["a100-80"],
    chunk_tokens=64,
    has_activations=True,
    cache_capacity_bytes=40 * SHAPE.page_bytes(64),
    page_bytes=SHAPE.page_bytes(64),
    streamed_page_count=1,
    max_batch_size=32,
    kvstore_address="unix:/store",
    schedule=Schedule.PIPELINED,
    staging_tokens=1024,
    max_batched_tokens=512,
)
# Each with the pages that it lacks.
SHORT = RequestLoad(prompt_tokens=129, cached_tokens=64, answer_tokens=8), 3
LONG = RequestLoad(prompt_tokens=1088, cached_tokens=1024, answer_tokens=200), 18


def running(steps_left: int, pages: int = 18) -> RunningRequest:
    return RunningRequest(1000, steps_left, pages, is_streamed=False)


def test_a_short_answer_is_streamed_past_a_long_wait() -> None:
    reason = reason_to_stream(WORKER, *SHORT, [running(2000), running(2000)], Objective.LATENCY)
    assert reason is not None
    kind, (stream, wait, objective) = reason
    assert (kind, objective) == (ReasonKind.STREAM_NOW, "latency")
    assert isinstance(wait, float)
    assert isinstance(stream, float)
    assert stream < wait


def test_for_throughput_it_waits_since_all_end_as_late_either_way() -> None:
    requests = [running(2000), running(2000)]
    assert reason_to_stream(WORKER, *SHORT, requests, Objective.THROUGHPUT) is None
    # Side by side instead of one after the other: half of the steps, each with a small pull.
    even = replace(SHORT[0], answer_tokens=30), SHORT[1]
    assert reason_to_stream(WORKER, *even, [running(30)], Objective.THROUGHPUT) is not None


@pytest.mark.parametrize("objective", Objective)
def test_a_long_answer_waits_for_memory_that_is_free_soon(objective: Objective) -> None:
    assert reason_to_stream(WORKER, *LONG, [running(5), running(2000)], objective) is None


def test_the_wait_ends_when_enough_pages_are_free() -> None:
    """The first of two requests frees two pages soon, the other one twenty much later."""
    soon, late = running(10, pages=2), running(2000, pages=20)
    few = SHORT[0], 2
    assert reason_to_stream(WORKER, *few, [late, soon], Objective.LATENCY) is None
    more = SHORT[0], 3
    assert reason_to_stream(WORKER, *more, [late, soon], Objective.LATENCY) is not None


def test_without_a_measured_step_a_request_waits() -> None:
    unknown = replace(WORKER.profile, memory_seconds_per_byte=0.0, step_compute_seconds=0.0)
    worker = replace(WORKER, profile=unknown)
    assert reason_to_stream(worker, *SHORT, [running(2000)], Objective.LATENCY) is None


def test_an_idle_worker_is_not_waited_for() -> None:
    assert reason_to_stream(WORKER, *SHORT, [], Objective.LATENCY) is None


# -- the two answers -------------------------------------------------------------------

ROOM = DeviceRoom(has_activations=True, staging_tokens=1024, prefill_tokens=512)
ONE = RequestLoad(1088, 1024, 64)


def ask(running: Running, load: RequestLoad = ONE, **changes: object) -> WaitOrStream:
    room = replace(ROOM, **changes)  # type: ignore[arg-type]
    return wait_or_stream(SHAPE, WORKER.profile, load, room, running)


@pytest.mark.parametrize("objective", Objective)
def test_a_short_wait_is_better_than_a_pull_per_step(objective: Objective) -> None:
    answer = ask(Running(8, 1000, steps_left=4), objective=objective)
    assert answer.wait_score < answer.stream_score


@pytest.mark.parametrize("objective", Objective)
def test_a_long_wait_for_a_short_answer_is_not(objective: Objective) -> None:
    load = replace(ONE, prompt_tokens=129, cached_tokens=64, answer_tokens=8)
    answer = ask(Running(1, 1000, steps_left=2000), load, objective=objective)
    assert answer.stream_score < answer.wait_score
    assert answer.stream_seconds < answer.wait_seconds


def test_the_wait_grows_with_the_steps_and_streaming_does_not() -> None:
    short, long = (ask(Running(4, 1000, steps_left=steps)) for steps in (10, 400))
    assert long.wait_seconds > short.wait_seconds
    assert long.stream_seconds == short.stream_seconds


def test_others_that_are_streamed_share_the_link() -> None:
    alone = ask(Running(4, 1000, steps_left=100))
    shared = ask(Running(4, 1000, steps_left=100, streamed_lengths=(1100, 1100)))
    assert shared.stream_seconds > 1.5 * alone.stream_seconds


def test_more_running_requests_weigh_against_streaming() -> None:
    """Latency counts the delay of every request that decodes beside the pull."""
    load = replace(ONE, answer_tokens=200)
    few = ask(Running(1, 1000, steps_left=3000), load)
    many = ask(Running(60, 1000, steps_left=3000), load)
    assert few.stream_score / few.wait_score < many.stream_score / many.wait_score


# -- for throughput, while weights cross the link ---------------------------------------

HOST_WEIGHTS = replace(
    WORKER,
    profile=replace(WORKER.profile, host_weight_bytes=SHAPE.weight_bytes),
    max_batch_size=16,
)


def started(
    worker: WorkerFacts, objective: Objective, count: int = 40, workers: int = 1, pinned: int = 0
) -> list[Grant]:
    """Return what requests of 9 pages get of 40, as many as can start.

    `workers`: of a store that they share. `pinned`: further requests, for a worker that is away.
    """
    admission = AdmissionQueue(100, objective=objective)
    for index in range(workers):
        admission.add_worker(replace(worker, worker_id=str(index)))
    for arrival in range(count + pinned):
        request = request_of(arrival, 500, 60, worker_id="" if arrival >= pinned else "away")
        admission.submit(request)
    grants = [admitted.grant for admitted in admit_all(admission)]
    assert admission.check_integrity() == []
    return grants


def kinds_of(grants: list[Grant]) -> tuple[int, int]:
    """Return how many are resident, and how many are streamed."""
    streamed = sum(grant.residency is Residency.STREAMED for grant in grants)
    return len(grants) - streamed, streamed


def test_weights_cross_the_link_for_a_full_batch() -> None:
    """Three residents leave 13 of the 40 pages for the 13 other places."""
    grants = started(HOST_WEIGHTS, Objective.THROUGHPUT)
    assert kinds_of(grants) == (3, 13)
    last = grants[-1]
    assert last.size_bytes == WORKER.page_bytes
    assert last.spare_bytes == 0
    count, streamed, rate, residents = dict(last.reasons)[ReasonKind.FULL_BATCH]
    assert (count, streamed) == (16, 13)
    assert isinstance(rate, float)
    assert isinstance(residents, float)
    assert rate > 1.3 * residents


def test_otherwise_as_many_as_fit_are_resident() -> None:
    """For latency, with all weights on the device, or without an exact store."""
    on_device = replace(WORKER, max_batch_size=16)
    lossy = replace(HOST_WEIGHTS, encoding=Encoding.INT8)
    for worker, objective in (
        (HOST_WEIGHTS, Objective.LATENCY),
        (on_device, Objective.THROUGHPUT),
        (lossy, Objective.THROUGHPUT),
    ):
        grants = started(worker, objective)
        assert kinds_of(grants)[0] == 4
        assert all(ReasonKind.FULL_BATCH not in dict(grant.reasons) for grant in grants)


def test_no_pages_are_left_for_requests_that_do_not_wait() -> None:
    """Four requests fit as they are; of eight the other four are streamed beside them."""
    assert kinds_of(started(HOST_WEIGHTS, Objective.THROUGHPUT, count=4)) == (4, 0)
    assert kinds_of(started(HOST_WEIGHTS, Objective.THROUGHPUT, count=8)) == (4, 4)
    assert kinds_of(started(HOST_WEIGHTS, Objective.THROUGHPUT, count=12)) == (3, 9)


def test_requests_for_other_workers_are_not_waited_for() -> None:
    grants = started(HOST_WEIGHTS, Objective.THROUGHPUT, count=4, pinned=8)
    assert kinds_of(grants) == (4, 0)
    grants = started(HOST_WEIGHTS, Objective.THROUGHPUT, count=8, workers=2)
    assert kinds_of(grants) == (8, 0)


def test_caches_that_take_the_link_longer_than_the_weights_stay_resident() -> None:
    """A hundredth of the weights is on the host: a full batch would wait for its caches."""
    light = replace(WORKER.profile, host_weight_bytes=SHAPE.weight_bytes // 100)
    grants = started(replace(HOST_WEIGHTS, profile=light), Objective.THROUGHPUT)
    assert kinds_of(grants)[0] == 4


def test_a_store_of_few_slots_is_not_counted_on() -> None:
    """Streamed requests hold the slots of all their chunks; two of them fit."""
    grants = started(replace(HOST_WEIGHTS, store_slot_count=20), Objective.THROUGHPUT)
    assert kinds_of(grants)[0] == 4


def test_a_request_with_memory_does_not_wait_for_slots() -> None:
    """The streams of one worker took all slots of the store that a second worker shares."""
    worker = replace(HOST_WEIGHTS, store_slot_count=12 * 9)
    admission = AdmissionQueue(100, objective=Objective.THROUGHPUT)
    for arrival in range(40):
        admission.submit(request_of(arrival, 500, 60))
    found = []
    for worker_id in ("0", "1"):
        admission.add_worker(replace(worker, worker_id=worker_id))
        found.append(kinds_of([admitted.grant for admitted in admit_all(admission)]))
    assert found == [(3, 12), (4, 0)]
    assert admission.check_integrity() == []


# -- the admission queue asks it ------------------------------------------------------


def request_of(
    arrival: int,
    prompt: int,
    answer: int,
    residency: Residency | None = None,
    worker_id: str = "",
) -> Request:
    request = queued_request(
        arrival, prompt + 1, residency, worker_id, cached={"0": prompt - 1, "1": prompt - 1}
    )
    request.sampling.max_tokens = answer
    return request


def queue_with(first: Request) -> AdmissionQueue:
    """Return a queue whose only worker runs one request."""
    admission = AdmissionQueue(10)
    admission.add_worker(WORKER)
    admission.submit(first)
    admitted = admission.admit()
    assert admitted is not None
    assert admitted.grant.residency is Residency.RESIDENT
    return admission


def test_a_request_without_room_is_streamed_if_that_is_better() -> None:
    admission = queue_with(request_of(1, 1000, 1000))
    admission.submit(request_of(2, 640, 8))
    admitted = admission.admit()
    assert admitted is not None
    assert admitted.grant.residency is Residency.STREAMED
    assert ReasonKind.STREAM_NOW in dict(admitted.grant.reasons)
    assert admission.check_integrity() == []
    admission.release(admitted.request)
    assert admission.check_integrity() == []


@pytest.mark.parametrize("residency", [None, Residency.RESIDENT])
def test_a_request_waits_if_that_is_better_or_asked_for(residency: Residency | None) -> None:
    # The running one ends soon, or the client wants memory.
    answer = 8 if residency is None else 1000
    first = request_of(1, 2040 - answer, answer)
    admission = queue_with(first)
    admission.submit(request_of(2, 1200 if residency is None else 640, 500, residency))
    assert admission.admit() is None
    assert len(admission.queue()) == 1


def test_a_store_that_is_not_exact_is_no_place_to_stream_from() -> None:
    admission = AdmissionQueue(10)
    admission.add_worker(replace(WORKER, encoding=Encoding.INT8))
    for request in (request_of(1, 1000, 1000), request_of(2, 640, 8)):
        admission.submit(request)
    assert admission.admit() is not None
    assert admission.admit() is None


def test_a_request_with_room_is_resident() -> None:
    admission = queue_with(request_of(1, 640, 64))
    admission.submit(request_of(2, 640, 8))
    admitted = admission.admit()
    assert admitted is not None
    assert admitted.grant.residency is Residency.RESIDENT


def test_a_lost_worker_takes_its_requests_along() -> None:
    admission = queue_with(request_of(1, 640, 64))
    admission.remove_worker("0")
    assert admission.check_integrity() == []


def test_each_worker_is_compared_once_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each waiting request compared, the work would grow with their number, squared."""
    admission = AdmissionQueue(100)
    for worker_id in ("0", "1"):
        admission.add_worker(replace(WORKER, worker_id=worker_id))
    for arrival, pin in enumerate(("0", "1")):
        running = request_of(arrival, 2400, 8)
        running.worker_id = pin
        admission.submit(running)
        assert admission.admit() is not None
    for arrival in range(2, 60):
        # All but the last may run on a worker only that the first one claims.
        waiting = request_of(arrival, 1200, 500)
        waiting.worker_id = "0" if arrival < 59 else ""
        admission.submit(waiting)
    compared: list[str] = []

    def counting(request: Request, account: Any, *rest: Any) -> Any:
        compared.append(account.facts.worker_id)
        return streamed_instead(request, account, *rest)

    monkeypatch.setattr("scheduler_service.policy.workers.streamed_instead", counting)
    assert admission.admit() is None
    assert compared == ["0", "1"]


def test_a_streamed_request_is_charged_for_what_its_selection_keeps() -> None:
    able = replace(WORKER, selections={SelectionMethod.COLUMNS: 0})
    selection = Selection.parsed("columns:0.1,int8,columns=16")
    plain = footprint_of(2000, Residency.STREAMED, able)
    selecting = footprint_of(2000, Residency.STREAMED, able, selection)
    assert isinstance(plain, Fits)
    assert isinstance(selecting, Fits)
    # 199 rows of 31 chunks are 4 pages. A page has two planes of 64 rows in each layer, 256 bytes
    # for each head; screens keep 18 bytes of a row and head: 2 x 910 tokens in a page.
    assert selecting.size_bytes - plain.size_bytes == (4 + 2) * WORKER.page_bytes
    assert dict(selecting.reasons)[ReasonKind.CHARGED] == (selecting.size_bytes, 6, str(selection))
    resident = footprint_of(2000, Residency.RESIDENT, able, selection)
    assert resident == footprint_of(2000, Residency.RESIDENT, able)
    for useless in (
        footprint_of(128, Residency.STREAMED, able, Selection.parsed("columns:0.1")),
        footprint_of(2000, Residency.STREAMED, able, Selection.parsed("columns:0.99")),
        footprint_of(
            2000,
            Residency.STREAMED,
            replace(able, cache_capacity_bytes=6 * WORKER.page_bytes),
            selection,
        ),
    ):
        assert isinstance(useless, Fits)
        assert useless.size_bytes == WORKER.page_bytes, "such a worker reads everything"


def test_admission_charges_only_workers_that_can_select() -> None:
    selection = Selection.parsed("columns:0.1,int8,columns=16")
    for facts, pages in ((WORKER, 1), (replace(WORKER, selections={selection.method: 0}), 7)):
        queue = AdmissionQueue(8)
        queue.add_worker(facts)
        request = queued_request(1, 2000, residency=Residency.STREAMED, selection=selection)
        queue.submit(request)
        admitted = queue.admit()
        assert admitted is not None
        assert admitted.grant.size_bytes == pages * facts.page_bytes

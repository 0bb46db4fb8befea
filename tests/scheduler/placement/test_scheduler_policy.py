"""The pure policy: footprint, admission, plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_doubles import (
    CHUNK_TOKENS,
    PAGE_BYTES,
    admit_all,
    queued_request,
    started,
    worker_facts,
)

from scheduler_service.api.request import Request
from scheduler_service.placement.account import WorkerAccount
from scheduler_service.placement.footprint import Fits, Grant, NeverFits, footprint_of, grant_of
from scheduler_service.placement.plan_report import actual_plan
from scheduler_service.placement.planning import PlanOptions, explain, plan_attempt
from scheduler_service.placement.waiting import Cause
from scheduler_service.requests.admission import AdmissionQueue, Queued, Rejected
from scheduler_service.requests.attempt import Attempt
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.planning.plan import (
    RECOMPUTED,
    ForcedRestore,
    Plan,
    Reason,
    ReasonKind,
    Residency,
    RestoreMethod,
)
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import BUILT_IN_SHAPES, Encoding, Numerics
from splitpoint.transport.convert import method_to_proto
from splitpoint.v1 import types_pb2, worker_pb2

FACTS = worker_facts(
    10, 8, kvstore_address="unix:/store", store_slot_count=20, slot_bytes=2 * PAGE_BYTES
)
NO_STORE = replace(FACTS, kvstore_address="", store_slot_count=None)


def tokens(pages: int) -> int:
    return pages * CHUNK_TOKENS


# -- footprint -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "wish", "facts", "residency", "charged"),
    [
        (1, None, FACTS, Residency.RESIDENT, 1),
        (10, None, FACTS, Residency.RESIDENT, 10),
        (11, None, FACTS, Residency.STREAMED, 3),
        (20, None, FACTS, Residency.STREAMED, 3),
        (2, Residency.STREAMED, FACTS, Residency.STREAMED, 2),
        (9, Residency.STREAMED, FACTS, Residency.STREAMED, 3),
        (10, Residency.RESIDENT, NO_STORE, Residency.RESIDENT, 10),
        (99, None, replace(FACTS, store_slot_count=None), Residency.STREAMED, 3),
    ],
)
def test_what_fits(
    pages: int, wish: Residency | None, facts: WorkerFacts, residency: Residency, charged: int
) -> None:
    verdict = footprint_of(tokens(pages), wish, facts)
    assert isinstance(verdict, Fits)
    assert (verdict.residency, verdict.size_bytes) == (residency, charged * PAGE_BYTES)
    streams = {ReasonKind.EXCEEDS, ReasonKind.ASKED_STREAMED}
    assert (verdict.reasons[0].kind in streams) == (residency is Residency.STREAMED)


@pytest.mark.parametrize(
    ("pages", "wish", "facts", "needed", "capacity", "word"),
    [
        (11, Residency.RESIDENT, FACTS, 11 * PAGE_BYTES, 10 * PAGE_BYTES, "device cache"),
        (11, None, NO_STORE, 11 * PAGE_BYTES, 10 * PAGE_BYTES, "device cache"),
        (21, None, FACTS, 42 * PAGE_BYTES, 40 * PAGE_BYTES, "slots"),
        (1, Residency.STREAMED, NO_STORE, PAGE_BYTES, 0, "no KV store"),
        (5, Residency.STREAMED, replace(FACTS, cache_capacity_bytes=2 * PAGE_BYTES),
         3 * PAGE_BYTES, 2 * PAGE_BYTES, "streaming needs"),
    ],
)  # fmt: skip
def test_what_never_fits(
    pages: int, wish: Residency | None, facts: WorkerFacts, needed: int, capacity: int, word: str
) -> None:
    verdict = footprint_of(tokens(pages), wish, facts)
    assert isinstance(verdict, NeverFits)
    assert (verdict.needed_bytes, verdict.capacity_bytes) == (needed, capacity)
    assert verdict.needed_tokens == tokens(pages)
    assert word in verdict.reason


@given(
    count=st.integers(1, 4000),
    capacity=st.integers(0, 30),
    slots=st.none() | st.integers(0, 60),
    wish=st.sampled_from([None, *Residency]),
    store=st.booleans(),
)
def test_what_fits_is_within_the_capacity(
    count: int, capacity: int, slots: int | None, wish: Residency | None, store: bool
) -> None:
    facts = replace(
        FACTS if store else NO_STORE,
        cache_capacity_bytes=capacity * PAGE_BYTES,
        store_slot_count=slots,
    )
    verdict = footprint_of(count, wish, facts)
    if isinstance(verdict, Fits):
        assert 0 < verdict.size_bytes <= facts.cache_capacity_bytes
        assert wish in (None, verdict.residency)
        assert verdict.residency is Residency.RESIDENT or store
        whole = -(-count // CHUNK_TOKENS) * PAGE_BYTES
        if verdict.residency is Residency.RESIDENT:
            assert verdict.size_bytes == whole
        elif wish is None:
            assert whole > facts.cache_capacity_bytes  # resident would not have fitted
    else:
        assert verdict.needed_bytes > verdict.capacity_bytes


# -- admission ---------------------------------------------------------------------------


def request(arrival: int, pages: int, worker_id: str = "", **cached: int) -> Request:
    return queued_request(arrival, tokens(pages), Residency.RESIDENT, worker_id, cached)


def test_batch_places_count_too() -> None:
    admission = AdmissionQueue(10)
    admission.add_worker(replace(FACTS, max_batch_size=2))
    for arrival in range(3):
        admission.submit(request(arrival, 1))
    assert len(admit_all(admission)) == 2
    assert admission.explain(request(9, 1)).cause is Cause.BATCH


def test_a_smaller_worker_gets_its_part() -> None:
    admission = AdmissionQueue(10)
    admission.add_worker(replace(FACTS, cache_capacity_bytes=40 * PAGE_BYTES))
    admission.add_worker(replace(FACTS, worker_id="1", cache_capacity_bytes=20 * PAGE_BYTES))
    placed = []
    for arrival in range(3):
        admission.submit(request(arrival, 3))
        admitted_one = admission.admit()
        assert admitted_one is not None
        placed.append(admitted_one.worker_id)
    assert placed == ["0", "1", "0"]


def test_a_full_queue_still_takes_what_may_start_at_once() -> None:
    admission = AdmissionQueue(1)
    admission.add_worker(FACTS)
    admission.add_worker(replace(FACTS, worker_id="1"))
    admission.submit(request(0, 10, worker_id="0"))
    admit_all(admission)
    admission.submit(request(1, 10, worker_id="0"))
    refused = admission.submit(request(2, 1, worker_id="0"))
    assert isinstance(refused, Rejected)
    assert refused.numbers is None
    assert isinstance(admission.submit(request(3, 1, worker_id="1")), Queued)
    assert [one.request.arrival for one in admit_all(admission)] == [3]


def test_a_rejection_names_the_largest_worker() -> None:
    admission = AdmissionQueue(1)
    admission.add_worker(FACTS)
    admission.add_worker(replace(FACTS, worker_id="1", cache_capacity_bytes=12 * PAGE_BYTES))
    refused = admission.submit(request(0, 13))
    assert isinstance(refused, Rejected)
    assert refused.numbers is not None
    assert refused.numbers.capacity_bytes == 12 * PAGE_BYTES
    assert isinstance(admission.submit(request(0, 11)), Queued)


def test_a_request_placed_again_keeps_its_place() -> None:
    admission = AdmissionQueue(0)
    assert admission.resubmit(request(5, 1)).position == 0
    assert admission.resubmit(request(2, 1)).position == 0
    assert admission.resubmit(request(4, 1)).position == 1
    assert not admission.is_placeable(request(5, 1))
    assert admission.explain(request(5, 1)).cause is Cause.WORKER
    admission.add_worker(FACTS)
    assert [one.request.arrival for one in admit_all(admission)] == [2, 4, 5]


def test_a_draining_worker_keeps_what_it_has() -> None:
    admission = AdmissionQueue(5)
    admission.add_worker(FACTS)
    admission.submit(request(0, 4))
    running = admit_all(admission)
    admission.close_worker("0")
    admission.submit(request(1, 1))
    assert admission.admit() is None
    account = admission.account("0")
    assert account is not None
    assert account.charged_bytes == 4 * PAGE_BYTES
    admission.release(running[0].request)
    assert account.charged_bytes == 0


def test_an_account_refuses_what_would_break_it() -> None:
    account = WorkerAccount(FACTS)
    started(account, 1, 10)
    with pytest.raises(ValueError, match="already"):
        started(account, 1, 1)
    with pytest.raises(ValueError, match="exceed"):
        started(account, 2, 1)
    account.end(1)
    account.end(1)
    assert account.free_bytes == 10 * PAGE_BYTES


class AdmissionMachine(RuleBasedStateMachine):
    """Random traffic over three workers that come and go: no request is lost or overtaken."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = AdmissionQueue(4)
        self.next_arrival = 0
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Attempt] = {}
        self.workers: dict[str, WorkerFacts] = {}

    @rule(
        worker_id=st.sampled_from(["0", "1", "2"]),
        pages=st.integers(3, 12),
        batch=st.integers(1, 4),
    )
    def worker_comes(self, worker_id: str, pages: int, batch: int) -> None:
        if worker_id not in self.workers:
            facts = replace(
                FACTS,
                worker_id=worker_id,
                cache_capacity_bytes=pages * PAGE_BYTES,
                max_batch_size=batch,
            )
            self.workers[worker_id] = facts
            self.admission.add_worker(facts)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_goes(self, data: st.DataObject) -> None:
        worker_id = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[worker_id]
        self.admission.remove_worker(worker_id)
        for arrival, lost in list(self.running.items()):
            if lost.worker_id == worker_id:
                del self.running[arrival]
                self.admission.resubmit(lost.request)
                self.waiting[arrival] = lost.request

    @rule(
        pages=st.integers(1, 13),
        pin=st.sampled_from(["", "", "", "0", "1"]),
        wish=st.sampled_from([None, *Residency]),
    )
    def request_comes(self, pages: int, pin: str, wish: Residency | None) -> None:
        one = queued_request(self.next_arrival, tokens(pages), wish, pin)
        self.next_arrival += 1
        verdict = self.admission.submit(one)
        if isinstance(verdict, Queued):
            self.waiting[one.arrival] = one
        elif verdict.numbers is None:
            assert len(self.waiting) >= 4
        else:
            assert not self.admission.is_placeable(one)
        self.place()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def request_ends(self, data: st.DataObject) -> None:
        arrival = data.draw(st.sampled_from(sorted(self.running)))
        self.admission.release(self.running.pop(arrival).request)
        self.place()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def request_leaves(self, data: st.DataObject) -> None:
        arrival = data.draw(st.sampled_from(sorted(self.waiting)))
        self.admission.withdraw(self.waiting.pop(arrival))

    @rule()
    def place(self) -> None:
        while (one := self.admission.admit()) is not None:
            earlier = [r for a, r in self.waiting.items() if a < one.request.arrival]
            for other in earlier:  # a request is overtaken only if it could not use this worker
                worker = self.workers[one.worker_id]
                verdict = footprint_of(other.token_count, other.residency, worker)
                assert isinstance(verdict, NeverFits) or other.worker_id not in (
                    "",
                    one.worker_id,
                )
            self.running[one.request.arrival] = one
            assert self.waiting.pop(one.request.arrival) is one.request

    @invariant()
    def books_are_straight(self) -> None:
        assert self.admission.check_integrity() == []
        assert [waiting.arrival for waiting in self.admission.queue()] == sorted(self.waiting)
        for worker_id in self.workers:
            account = self.admission.account(worker_id)
            assert account is not None
            here = [one for one in self.running.values() if one.worker_id == worker_id]
            assert account.running_count == len(here)


AdmissionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAdmissionMachine = AdmissionMachine.TestCase


# -- what stays on the device of a streamed request ---------------------------------------


ROOMY_STORE = replace(FACTS, store_slot_count=None)


def long_request(arrival: int) -> Request:
    """A request of 14 pages, four more than a worker has."""
    return queued_request(arrival, tokens(14))


def test_a_streamed_request_keeps_half_of_what_is_free_when_nothing_waits() -> None:
    admission = AdmissionQueue(10)
    admission.add_worker(ROOMY_STORE)
    placed = []
    for arrival in (0, 1):
        admission.submit(long_request(arrival))
        admitted = admission.admit()
        assert admitted is not None
        placed.append(admitted)
        grant = admitted.grant
        # 3 of 10 pages are charged and 3 of the other 7 stay; of the 4 left it is only 3.
        share = (3 if arrival == 0 else 0) * PAGE_BYTES
        assert (grant.spare_bytes, grant.size_bytes) == (share, 3 * PAGE_BYTES + share)
        assert dict(grant.reasons).get(ReasonKind.SPARE) == ((share,) if share else None)
    assert admission.check_integrity() == []
    admission.release(placed[0].request)
    account = admission.account("0")
    assert account is not None
    assert account.free_bytes == 7 * PAGE_BYTES


def test_waiting_requests_come_before_spare_memory() -> None:
    admission = AdmissionQueue(10)
    admission.add_worker(ROOMY_STORE)
    for arrival in (0, 1):
        admission.submit(long_request(arrival))
    spare = [one.grant.spare_bytes for one in admit_all(admission)]
    assert spare == [0, 2 * PAGE_BYTES]


def test_a_request_that_asks_for_streaming_leaves_the_memory_alone() -> None:
    for wish, spare in ((Residency.STREAMED, 0), (None, 11 * PAGE_BYTES)):
        fits = footprint_of(tokens(14), wish, FACTS)
        assert isinstance(fits, Fits)
        assert fits.spare_bytes == spare
        # Whole pages, never more than is free or of use.
        assert grant_of(fits, 3 * PAGE_BYTES, PAGE_BYTES).spare_bytes == 0
        assert grant_of(fits, 99 * PAGE_BYTES, PAGE_BYTES).spare_bytes == spare


# -- plans ---------------------------------------------------------------------------------


FITS = Reason(ReasonKind.FITS, (2 * PAGE_BYTES, 10 * PAGE_BYTES))
GRANT = Grant(Residency.RESIDENT, 2 * PAGE_BYTES, (FITS,))


def planned(worker: WorkerFacts = FACTS, *, token_count: int = 32, cached_tokens: int = 16) -> Plan:
    plan, _ = plan_attempt(worker, GRANT, token_count=token_count, cached_tokens=cached_tokens)
    return plan


def test_plans_leave_the_last_token_to_compute() -> None:
    plan = planned(cached_tokens=32)
    assert (plan.cached_tokens, plan.new_tokens) == (31, 1)
    assert plan.footprint_bytes == 2 * PAGE_BYTES
    assert FITS in plan.reasons


def test_tokens_on_the_device_take_no_restore() -> None:
    def with_device(device_tokens: int, cached_tokens: int, worker: WorkerFacts = FACTS) -> Plan:
        grant = replace(GRANT, device_tokens=device_tokens)
        plan, _ = plan_attempt(
            worker, grant, token_count=10 * CHUNK_TOKENS, cached_tokens=cached_tokens
        )
        return plan

    cached = 9 * CHUNK_TOKENS
    none, part, whole = (with_device(count * CHUNK_TOKENS, cached) for count in (0, 6, 9))
    assert (none.device_tokens, part.device_tokens, whole.device_tokens) == (0, 96, 144)
    assert none.predicted_restore_seconds > part.predicted_restore_seconds > 0
    assert whole.predicted_restore_seconds == whole.predicted_load_seconds == 0
    for plan in (part, whole):
        assert plan.cached_tokens == cached
        saved = none.predicted_restore_seconds - plan.predicted_restore_seconds
        assert plan.predicted_ttft_seconds == pytest.approx(none.predicted_ttft_seconds - saved)
    assert dict(part.reasons)[ReasonKind.ON_DEVICE] == (96,)
    # Beyond the store's tokens they count only if no layer inputs have to be stored with them.
    assert with_device(cached, 16).cached_tokens == 16
    bare = with_device(cached, 16, replace(FACTS, has_activations=False))
    assert (bare.cached_tokens, bare.predicted_restore_seconds) == (cached, 0)
    # The last token is computed all the same.
    assert with_device(160, 160).device_tokens == cached


def test_a_forced_split_restores_also_what_is_on_the_device() -> None:
    """As the worker does: a plan that expects it there would contradict the answer."""
    grant = replace(GRANT, device_tokens=6 * CHUNK_TOKENS)
    lengths: Any = {"token_count": 10 * CHUNK_TOKENS, "cached_tokens": 9 * CHUNK_TOKENS}
    forced = PlanOptions(ForcedRestore(split_tokens=32))
    plan, _ = plan_attempt(FACTS, grant, options=forced, **lengths)
    bare, _ = plan_attempt(FACTS, GRANT, options=forced, **lengths)
    assert (plan.device_tokens, plan.split_tokens) == (0, 32)
    assert ReasonKind.ON_DEVICE not in dict(plan.reasons)
    assert plan.predicted_restore_seconds == bare.predicted_restore_seconds > 0
    by_tokens, _ = plan_attempt(FACTS, grant, options=PlanOptions(RECOMPUTED), **lengths)
    assert by_tokens.device_tokens == 6 * CHUNK_TOKENS


def test_explained_plans_and_rejections() -> None:
    plan = explain(FACTS, cached_tokens=40, new_tokens=8, max_tokens=16, residency=None)
    assert isinstance(plan, Plan)
    assert plan.footprint_bytes == 4 * PAGE_BYTES
    streamed = explain(FACTS, cached_tokens=160, new_tokens=8, max_tokens=16, residency=None)
    assert isinstance(streamed, Plan)
    assert streamed.footprint_bytes == (3 + 3) * PAGE_BYTES
    assert streamed.resident_tokens == 3 * CHUNK_TOKENS
    never = explain(NO_STORE, cached_tokens=0, new_tokens=161, max_tokens=1, residency=None)
    assert isinstance(never, NeverFits)


def test_reports_correct_the_plan() -> None:
    plan = planned()
    same = worker_pb2.RestoreReport(
        cached_tokens=16,
        split_tokens=plan.split_tokens,
        method=types_pb2.RESTORE_METHOD_LOAD
        if plan.split_tokens == 0
        else types_pb2.RESTORE_METHOD_RECOMPUTE,
    )
    assert actual_plan(plan, None) is plan
    assert actual_plan(plan, same) is plan
    nothing = worker_pb2.RestoreReport(method=types_pb2.RESTORE_METHOD_NONE)
    happened = actual_plan(plan, nothing)
    assert (happened.cached_tokens, happened.new_tokens) == (0, 32)
    assert happened.method is RestoreMethod.NONE
    differs = (Reason(ReasonKind.FOUND_CACHED, (0, 16)), Reason(ReasonKind.USED, ("none", 0)))
    assert happened.reasons == (*plan.reasons, *differs)


def test_a_report_says_what_was_on_the_device() -> None:
    grant = replace(GRANT, device_tokens=16)
    plan, _ = plan_attempt(FACTS, grant, token_count=32, cached_tokens=16)
    report = worker_pb2.RestoreReport(
        cached_tokens=16, device_tokens=16, method=types_pb2.RESTORE_METHOD_NONE
    )
    happened = actual_plan(plan, report)
    assert (happened.method, happened.device_tokens) == (RestoreMethod.NONE, 16)
    assert happened.reasons == plan.reasons
    surprised = actual_plan(planned(), report)
    assert (surprised.cached_tokens, surprised.device_tokens) == (16, 16)
    assert surprised.reasons == (*planned().reasons, (ReasonKind.FOUND_ON_DEVICE, (16, 0)))
    report.device_tokens = report.cached_tokens = 0
    evicted = actual_plan(plan, report)
    assert dict(evicted.reasons)[ReasonKind.FOUND_ON_DEVICE] == (0, 16)
    assert dict(evicted.reasons)[ReasonKind.FOUND_CACHED] == (0, 16)


def test_a_report_brings_the_workers_own_prediction() -> None:
    plan = planned()
    report = worker_pb2.RestoreReport(
        cached_tokens=16,
        split_tokens=plan.split_tokens,
        method=method_to_proto(plan.method),
        predicted_restore_seconds=0.5,
    )
    happened = actual_plan(plan, report)
    assert happened.predicted_restore_seconds == 0.5
    rest = plan.predicted_ttft_seconds - plan.predicted_restore_seconds
    assert happened.predicted_ttft_seconds == pytest.approx(0.5 + rest)
    assert happened.reasons == plan.reasons


@pytest.mark.parametrize(
    ("restored", "device", "link"),
    [(0.36, 0.34, 0.06), (1.2, 0.1, 1.1), (0.06, 0.02, 0.058)],
)
def test_a_restore_unlike_its_prediction_says_what_limited_it(
    restored: float, device: float, link: float
) -> None:
    plan = planned()
    report = worker_pb2.RestoreReport(
        cached_tokens=16,
        split_tokens=plan.split_tokens,
        method=method_to_proto(plan.method),
        restore_seconds=restored,
        predicted_restore_seconds=0.0811,
        link_busy_seconds=link,
        compute_busy_seconds=device,
    )
    happened = actual_plan(plan, report)
    differs = Reason(ReasonKind.RESTORED, (restored, 0.0811, device, link))
    assert happened.reasons == (*plan.reasons, differs)
    report.first_use_bytes = 24 << 20
    first = actual_plan(plan, report).reasons
    assert first == (*happened.reasons, (ReasonKind.FIRST_USE, (24 << 20,)))
    # Near the prediction, or without one, the reason stays as it is.
    report.predicted_restore_seconds = restored / 1.2
    assert actual_plan(plan, report).reasons == plan.reasons
    report.predicted_restore_seconds = 0
    assert actual_plan(plan, report).reasons == plan.reasons
    # Five times the prediction, and yet a matter of milliseconds.
    report.restore_seconds, report.predicted_restore_seconds = 0.01, 0.002
    assert actual_plan(plan, report).reasons == plan.reasons


def test_both_ends_that_meet_elsewhere_say_where_it_was_expected() -> None:
    plan = replace(explained_tokens(), cached_tokens=2000, recomputed_tokens=1472, split_tokens=0)
    report = worker_pb2.RestoreReport(
        cached_tokens=2000, method=types_pb2.RESTORE_METHOD_TOKENS, recomputed_tokens=896
    )
    happened = actual_plan(plan, report)
    assert happened.recomputed_tokens == 896
    assert happened.reasons == (*plan.reasons, (ReasonKind.MET, (896, 1472)))
    report.recomputed_tokens = 1472
    assert actual_plan(plan, report).reasons == plan.reasons


def explained_tokens() -> Plan:
    """Return a plan that recomputes tokens from the front while loading from the back."""
    return replace(planned(), method=RestoreMethod.TOKENS)


def test_plans_follow_the_workers_schedule_staging_and_encoding() -> None:
    facts = replace(
        FACTS,
        shape=BUILT_IN_SHAPES["opt-6.7b"],
        profile=BUILT_IN_PROFILES["a100-80"],
        chunk_tokens=64,
        schedule=Schedule.PIPELINED,
        staging_tokens=1024,
        max_batched_tokens=256,
    )
    plan = planned(facts, token_count=2000, cached_tokens=1900)
    serial_worker = replace(facts, schedule=Schedule.SERIAL)
    serial = planned(serial_worker, token_count=2000, cached_tokens=1900)
    assert (plan.schedule, serial.schedule) == (Schedule.PIPELINED, Schedule.SERIAL)
    assert plan.split_tokens % 64 == 0 or plan.split_tokens == 1900
    assert 0 < plan.tile_tokens <= 512
    assert plan.predicted_restore_seconds < 0.6 * serial.predicted_restore_seconds
    assert dict(plan.reasons)[ReasonKind.NUMERICS] == ("fast",)
    invariant = replace(facts, numerics=Numerics.INVARIANT)
    exact = planned(invariant, token_count=2000, cached_tokens=1900)
    assert dict(exact.reasons)[ReasonKind.NUMERICS] == ("invariant",)
    assert exact.split_tokens == plan.split_tokens > 0
    int8_worker = replace(facts, encoding=Encoding.INT8)
    int8 = planned(int8_worker, token_count=2000, cached_tokens=1900)
    assert int8.predicted_load_seconds < 0.53 * plan.predicted_load_seconds
    assert dict(int8.reasons)[ReasonKind.LOSSY_CACHE] == ("int8",)
    # A resident request reads the store only at its start, and nothing is cached.
    cold = planned(int8_worker, token_count=2000, cached_tokens=0)
    assert not {ReasonKind.LOSSY_CACHE, ReasonKind.NUMERICS} & dict(cold.reasons).keys()
    # Four pieces of prefill have four overheads.
    long = replace(facts, max_batched_tokens=25)
    pieces = planned(long, token_count=2000, cached_tokens=1900)
    overhead = facts.profile.prefill_overhead_seconds
    assert pieces.predicted_ttft_seconds == pytest.approx(
        plan.predicted_ttft_seconds + 3 * overhead
    )

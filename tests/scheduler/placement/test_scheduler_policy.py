"""Footprint, routing, admission and the token rule: pure, against brute force and invariants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_doubles import CHUNK_TOKENS, PAGE_BYTES, PROFILE, SHAPE

from scheduler_service.cluster.run_stream import Accepted, Duplicate, Gap, take
from scheduler_service.placement.admission import (
    Admission,
    Admitted,
    Ledger,
    Queued,
    Rejected,
    Ticket,
)
from scheduler_service.placement.footprint import (
    Demand,
    Fits,
    NeverFits,
    WorkerFacts,
    footprint_of,
    resident_share,
)
from scheduler_service.placement.planning import as_it_happened, check_split, explain, plan_attempt
from scheduler_service.placement.routing import Candidate, choose_worker
from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.errors import InvalidArgument
from splitpoint.planning.planner import Plan, Residency, RestoreMethod
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import BUILT_IN_SHAPES, Encoding
from splitpoint.transport.convert import method_to_proto
from splitpoint.v1 import types_pb2, worker_pb2

FACTS = WorkerFacts(
    worker_id="0",
    shape=SHAPE,
    profile=PROFILE,
    chunk_tokens=CHUNK_TOKENS,
    has_activations=True,
    cache_capacity_bytes=10 * PAGE_BYTES,
    page_bytes=PAGE_BYTES,
    streamed_page_count=3,
    max_batch_size=8,
    kvstore_address="unix:/store",
    store_slot_count=20,
    slot_bytes=2 * PAGE_BYTES,
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
    verdict = footprint_of(Demand(tokens(pages), wish), facts)
    assert isinstance(verdict, Fits)
    assert (verdict.residency, verdict.size_bytes) == (residency, charged * PAGE_BYTES)
    assert residency.value in verdict.reason


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
    verdict = footprint_of(Demand(tokens(pages), wish), facts)
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
    verdict = footprint_of(Demand(count, wish), facts)
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


# -- routing ---------------------------------------------------------------------------


@given(
    st.lists(
        st.builds(
            Candidate,
            worker_id=st.text("0123", min_size=1, max_size=2),
            cached_tokens=st.integers(0, 2),
            free_share=st.sampled_from((0.0, 0.5, 1.0)),
            running_count=st.integers(0, 2),
        ),
        min_size=1,
    )
)
def test_no_candidate_is_better_than_the_chosen_one(candidates: list[Candidate]) -> None:
    chosen = choose_worker(candidates)
    for other in candidates:
        assert other.cached_tokens <= chosen.cached_tokens
        if other.cached_tokens == chosen.cached_tokens:
            assert other.free_share <= chosen.free_share
            if other.free_share == chosen.free_share:
                assert other.running_count >= chosen.running_count


# -- admission ---------------------------------------------------------------------------


def ticket(arrival: int, pages: int, worker_id: str = "", **cached: int) -> Ticket:
    return Ticket(
        arrival, Demand(tokens(pages), Residency.RESIDENT), worker_id, cached_tokens=cached
    )


def admit_all(admission: Admission) -> list[Admitted]:
    admitted = []
    while (one := admission.admit()) is not None:
        admitted.append(one)
    return admitted


def test_first_come_first_served_on_one_worker() -> None:
    admission = Admission(10)
    admission.add_worker(FACTS)
    for arrival, pages in enumerate((6, 6, 1)):
        assert admission.submit(ticket(arrival, pages)) == Queued(
            arrival, admission.reason_to_wait(ticket(arrival, pages))
        )
    assert [one.ticket.arrival for one in admit_all(admission)] == [0]
    admission.release("0", 0)
    assert [one.ticket.arrival for one in admit_all(admission)] == [1, 2]


def test_a_pinned_request_holds_up_its_worker_only() -> None:
    admission = Admission(10)
    admission.add_worker(FACTS)
    admission.add_worker(replace(FACTS, worker_id="1"))
    admission.submit(ticket(0, 10, worker_id="0"))
    admission.submit(ticket(1, 10, worker_id="0"))
    admission.submit(ticket(2, 5))
    admission.submit(ticket(3, 1, worker_id="0"))
    placed = [(one.ticket.arrival, one.worker_id) for one in admit_all(admission)]
    assert placed == [(0, "0"), (2, "1")]


def test_batch_places_count_too() -> None:
    admission = Admission(10)
    admission.add_worker(replace(FACTS, max_batch_size=2))
    for arrival in range(3):
        admission.submit(ticket(arrival, 1))
    assert len(admit_all(admission)) == 2
    assert "its most" in admission.reason_to_wait(ticket(9, 1))


def test_a_smaller_worker_gets_its_part() -> None:
    admission = Admission(10)
    admission.add_worker(replace(FACTS, cache_capacity_bytes=40 * PAGE_BYTES))
    admission.add_worker(replace(FACTS, worker_id="1", cache_capacity_bytes=20 * PAGE_BYTES))
    placed = []
    for arrival in range(3):
        admission.submit(ticket(arrival, 3))
        admitted_one = admission.admit()
        assert admitted_one is not None
        placed.append(admitted_one.worker_id)
    assert placed == ["0", "1", "0"]


def test_a_full_queue_still_takes_what_may_start_at_once() -> None:
    admission = Admission(1)
    admission.add_worker(FACTS)
    admission.add_worker(replace(FACTS, worker_id="1"))
    admission.submit(ticket(0, 10, worker_id="0"))
    admit_all(admission)
    admission.submit(ticket(1, 10, worker_id="0"))
    refused = admission.submit(ticket(2, 1, worker_id="0"))
    assert isinstance(refused, Rejected)
    assert refused.numbers is None
    assert isinstance(admission.submit(ticket(3, 1, worker_id="1")), Queued)
    assert [one.ticket.arrival for one in admit_all(admission)] == [3]


def test_a_rejection_names_the_largest_worker() -> None:
    admission = Admission(1)
    admission.add_worker(FACTS)
    admission.add_worker(replace(FACTS, worker_id="1", cache_capacity_bytes=12 * PAGE_BYTES))
    refused = admission.submit(ticket(0, 13))
    assert isinstance(refused, Rejected)
    assert refused.numbers is not None
    assert refused.numbers.capacity_bytes == 12 * PAGE_BYTES
    assert isinstance(admission.submit(ticket(0, 11)), Queued)


def test_a_request_placed_again_keeps_its_place() -> None:
    admission = Admission(0)
    assert admission.resubmit(ticket(5, 1)).position == 0
    assert admission.resubmit(ticket(2, 1)).position == 0
    assert admission.resubmit(ticket(4, 1)).position == 1
    assert not admission.is_placeable(ticket(5, 1))
    assert admission.reason_to_wait(ticket(5, 1)) == "no worker that could run it is ready"
    admission.add_worker(FACTS)
    assert [one.ticket.arrival for one in admit_all(admission)] == [2, 4, 5]


def test_a_draining_worker_keeps_what_it_has() -> None:
    admission = Admission(5)
    admission.add_worker(FACTS)
    admission.submit(ticket(0, 4))
    admit_all(admission)
    admission.close_worker("0")
    admission.submit(ticket(1, 1))
    assert admission.admit() is None
    ledger = admission.ledger("0")
    assert ledger is not None
    assert ledger.charged_bytes == 4 * PAGE_BYTES
    admission.release("0", 0)
    assert ledger.charged_bytes == 0


def test_a_ledger_refuses_what_would_break_it() -> None:
    ledger = Ledger(FACTS)
    ledger.grant(1, 10 * PAGE_BYTES)
    with pytest.raises(ValueError, match="already"):
        ledger.grant(1, 1)
    with pytest.raises(ValueError, match="exceed"):
        ledger.grant(2, 1)
    ledger.release(1)
    ledger.release(1)
    assert ledger.free_bytes == 10 * PAGE_BYTES


class AdmissionMachine(RuleBasedStateMachine):
    """Random traffic over three workers that come and go: nothing lost, nobody overtaken."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(4)
        self.next_arrival = 0
        self.waiting: dict[int, Ticket] = {}
        self.running: dict[int, tuple[str, Ticket]] = {}
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
        for arrival, (where, lost) in list(self.running.items()):
            if where == worker_id:
                del self.running[arrival]
                self.admission.resubmit(lost)
                self.waiting[arrival] = lost

    @rule(
        pages=st.integers(1, 13),
        pin=st.sampled_from(["", "", "", "0", "1"]),
        wish=st.sampled_from([None, *Residency]),
    )
    def request_comes(self, pages: int, pin: str, wish: Residency | None) -> None:
        one = Ticket(self.next_arrival, Demand(tokens(pages), wish), pin)
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
        worker_id, _ = self.running.pop(arrival)
        self.admission.release(worker_id, arrival)
        self.place()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def request_leaves(self, data: st.DataObject) -> None:
        arrival = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[arrival]
        self.admission.withdraw(arrival)

    @rule()
    def place(self) -> None:
        while (one := self.admission.admit()) is not None:
            earlier = [t for a, t in self.waiting.items() if a < one.ticket.arrival]
            for other in earlier:  # whoever is passed could not use this worker at all
                verdict = footprint_of(other.demand, self.workers[one.worker_id])
                assert isinstance(verdict, NeverFits) or other.worker_id not in (
                    "",
                    one.worker_id,
                )
            self.running[one.ticket.arrival] = (one.worker_id, self.waiting.pop(one.ticket.arrival))

    @invariant()
    def books_are_straight(self) -> None:
        assert self.admission.check_integrity() == []
        assert [t.arrival for t in self.admission.queue()] == sorted(self.waiting)
        for worker_id in self.workers:
            ledger = self.admission.ledger(worker_id)
            assert ledger is not None
            here = [a for a, (where, _) in self.running.items() if where == worker_id]
            assert ledger.running_count == len(here)


AdmissionMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestAdmissionMachine = AdmissionMachine.TestCase


# -- the token rule ---------------------------------------------------------------------------


@given(
    count=st.integers(1, 30),
    deliveries=st.lists(st.tuples(st.integers(0, 29), st.integers(1, 6)), max_size=60),
)
def test_any_order_of_messages_gives_each_token_once(
    count: int, deliveries: Sequence[tuple[int, int]]
) -> None:
    """Duplicates, late and reordered pieces of one sequence, then the whole sequence again."""
    source = list(range(count))
    taken: list[int] = []
    for first, size in (*deliveries, *((index, 1) for index in range(count))):
        piece = source[first : first + size]
        match take(first, len(piece), len(taken)):
            case Accepted(offset):
                taken += piece[offset:]
            case Duplicate():
                assert first + len(piece) <= len(taken)
            case Gap(expected, given_first):
                assert given_first == first > expected == len(taken)
        assert taken == source[: len(taken)]
    assert taken == source


# -- what stays on the device of a streamed request ---------------------------------------


ROOMY_STORE = replace(FACTS, store_slot_count=None)


def long_ticket(arrival: int) -> Ticket:
    """Of 14 pages, four more than a worker has."""
    return Ticket(arrival, Demand(tokens(14)))


def test_a_streamed_request_keeps_half_of_what_is_free_when_nobody_waits() -> None:
    admission = Admission(10)
    admission.add_worker(ROOMY_STORE)
    for arrival in (0, 1):
        admission.submit(long_ticket(arrival))
        placed = admission.admit()
        assert placed is not None
        # Of 10 pages 3 are charged and 3 of the other 7 stay; of the 4 left it is only 3.
        share = (3 if arrival == 0 else 0) * PAGE_BYTES
        assert (placed.spare_bytes, placed.size_bytes) == (share, 3 * PAGE_BYTES + share)
        assert ("stays on the device" in placed.reason) == bool(share)
    assert admission.check_integrity() == []
    admission.release("0", 0)
    ledger = admission.ledger("0")
    assert ledger is not None
    assert ledger.free_bytes == 7 * PAGE_BYTES


def test_who_waits_comes_before_what_could_stay() -> None:
    admission = Admission(10)
    admission.add_worker(ROOMY_STORE)
    for arrival in (0, 1):
        admission.submit(long_ticket(arrival))
    first, second = admission.admit(), admission.admit()
    assert first is not None
    assert second is not None
    assert (first.spare_bytes, second.spare_bytes) == (0, 2 * PAGE_BYTES)


def test_who_asks_for_streaming_leaves_the_memory_alone() -> None:
    for wish, spare in ((Residency.STREAMED, 0), (None, 11 * PAGE_BYTES)):
        fits = footprint_of(Demand(tokens(14), wish), FACTS)
        assert isinstance(fits, Fits)
        assert fits.spare_bytes == spare
        # Whole pages, never more than is free or of use.
        assert resident_share(fits, 3 * PAGE_BYTES, PAGE_BYTES) == 0
        assert resident_share(fits, 99 * PAGE_BYTES, PAGE_BYTES) == spare


# -- plans ---------------------------------------------------------------------------------


def admitted(residency: Residency = Residency.RESIDENT) -> Admitted:
    return Admitted(ticket(0, 2), "0", residency, 2 * PAGE_BYTES, "resident: it fits")


def test_plans_leave_the_last_token_to_compute() -> None:
    plan = plan_attempt(FACTS, admitted(), token_count=32, cached_tokens=32)
    assert isinstance(plan, Plan)
    assert (plan.cached_tokens, plan.new_tokens) == (31, 1)
    assert plan.footprint_bytes == 2 * PAGE_BYTES
    assert "resident: it fits" in plan.reason


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


def test_a_forced_split_needs_activations_somewhere() -> None:
    bare = replace(FACTS, has_activations=False)
    check_split(5, [bare, FACTS])
    check_split(0, [bare])
    check_split(None, [bare])
    with pytest.raises(InvalidArgument, match="no activations"):
        check_split(5, [bare])


def test_reports_correct_the_plan() -> None:
    plan = plan_attempt(FACTS, admitted(), token_count=32, cached_tokens=16)
    assert isinstance(plan, Plan)
    same = worker_pb2.RestoreReport(
        cached_tokens=16,
        split_tokens=plan.split_tokens,
        method=types_pb2.RESTORE_METHOD_LOAD
        if plan.split_tokens == 0
        else types_pb2.RESTORE_METHOD_RECOMPUTE,
    )
    assert as_it_happened(plan, None) is plan
    assert as_it_happened(plan, same) is plan
    nothing = worker_pb2.RestoreReport(method=types_pb2.RESTORE_METHOD_NONE)
    happened = as_it_happened(plan, nothing)
    assert (happened.cached_tokens, happened.new_tokens) == (0, 32)
    assert happened.method is RestoreMethod.NONE
    assert happened.reason.startswith(plan.reason)
    assert "0 tokens cached instead of 16" in happened.reason


def test_a_report_brings_the_workers_own_prediction() -> None:
    plan = plan_attempt(FACTS, admitted(), token_count=32, cached_tokens=16)
    assert isinstance(plan, Plan)
    report = worker_pb2.RestoreReport(
        cached_tokens=16,
        split_tokens=plan.split_tokens,
        method=method_to_proto(plan.method),
        predicted_restore_seconds=0.5,
    )
    happened = as_it_happened(plan, report)
    assert happened.predicted_restore_seconds == 0.5
    rest = plan.predicted_ttft_seconds - plan.predicted_restore_seconds
    assert happened.predicted_ttft_seconds == pytest.approx(0.5 + rest)
    assert happened.reason == plan.reason


@pytest.mark.parametrize(
    ("restored", "device", "link", "words"),
    [
        (0.36, 0.34, 0.06, "360 ms, 4.4 x the prediction: the device was busy 340 ms, the link 60"),
        (1.2, 0.1, 1.1, "1.2 s, 15 x the prediction: the link was busy 1.1 s, the device 100 ms"),
        (0.5, 0.2, 0.1, "the device was busy 200 ms, the link 100 ms, neither of them most of"),
        (0.06, 0.02, 0.058, "60 ms, 0.74 x the prediction: the link was busy 58 ms, the device"),
    ],
)
def test_a_restore_unlike_its_prediction_says_what_limited_it(
    restored: float, device: float, link: float, words: str
) -> None:
    plan = plan_attempt(FACTS, admitted(), token_count=32, cached_tokens=16)
    assert isinstance(plan, Plan)
    report = worker_pb2.RestoreReport(
        cached_tokens=16,
        split_tokens=plan.split_tokens,
        method=method_to_proto(plan.method),
        restore_seconds=restored,
        predicted_restore_seconds=0.0811,
        link_busy_seconds=link,
        compute_busy_seconds=device,
    )
    happened = as_it_happened(plan, report)
    assert happened.reason.startswith(f"{plan.reason}; restored in ")
    assert words in happened.reason
    assert ("neither" in happened.reason) == (max(device, link) < restored / 2)
    # Near the prediction, or without one, there is nothing to say.
    report.predicted_restore_seconds = restored / 1.2
    assert as_it_happened(plan, report).reason == plan.reason
    report.predicted_restore_seconds = 0
    assert as_it_happened(plan, report).reason == plan.reason
    # Five times the prediction, and yet a matter of milliseconds.
    report.restore_seconds, report.predicted_restore_seconds = 0.01, 0.002
    assert as_it_happened(plan, report).reason == plan.reason


def test_both_ends_that_meet_elsewhere_say_where_it_was_expected() -> None:
    plan = replace(explained_tokens(), cached_tokens=2000, recomputed_tokens=1472, split_tokens=0)
    report = worker_pb2.RestoreReport(
        cached_tokens=2000, method=types_pb2.RESTORE_METHOD_TOKENS, recomputed_tokens=896
    )
    happened = as_it_happened(plan, report)
    assert happened.recomputed_tokens == 896
    assert happened.reason == f"{plan.reason}; they met at 896 where 1,472 was expected"
    report.recomputed_tokens = 1472
    assert as_it_happened(plan, report).reason == plan.reason


def explained_tokens() -> Plan:
    """A plan from both ends."""
    plan = plan_attempt(FACTS, admitted(), token_count=32, cached_tokens=16)
    assert isinstance(plan, Plan)
    return replace(plan, method=RestoreMethod.TOKENS)


def test_plans_follow_the_workers_schedule_staging_and_encoding() -> None:
    facts = replace(
        FACTS,
        shape=BUILT_IN_SHAPES["opt-6.7b"],
        profile=BUILT_IN_PROFILES["a100-pcie4"],
        chunk_tokens=64,
        schedule=Schedule.PIPELINED,
        staging_tokens=1024,
        max_batched_tokens=256,
    )
    plan = plan_attempt(facts, admitted(), token_count=2000, cached_tokens=1900)
    serial = plan_attempt(
        replace(facts, schedule=Schedule.SERIAL),
        admitted(),
        token_count=2000,
        cached_tokens=1900,
    )
    assert isinstance(plan, Plan)
    assert isinstance(serial, Plan)
    assert (plan.schedule, serial.schedule) == (Schedule.PIPELINED, Schedule.SERIAL)
    assert plan.split_tokens % 64 == 0 or plan.split_tokens == 1900
    assert 0 < plan.tile_tokens <= 512
    assert plan.predicted_restore_seconds < 0.6 * serial.predicted_restore_seconds
    int8 = plan_attempt(
        replace(facts, encoding=Encoding.INT8),
        admitted(),
        token_count=2000,
        cached_tokens=1900,
    )
    assert isinstance(int8, Plan)
    assert int8.predicted_load_seconds < 0.53 * plan.predicted_load_seconds
    assert "cached tokens are approximate" in int8.reason
    # Nothing comes from the store, and nothing will: a resident request reads it once.
    cold = plan_attempt(
        replace(facts, encoding=Encoding.INT8), admitted(), token_count=2000, cached_tokens=0
    )
    assert isinstance(cold, Plan)
    assert "approximate" not in cold.reason
    # Four pieces of prefill have four overheads.
    long = replace(facts, max_batched_tokens=25)
    pieces = plan_attempt(long, admitted(), token_count=2000, cached_tokens=1900)
    assert isinstance(pieces, Plan)
    overhead = facts.profile.prefill_overhead_seconds
    assert pieces.predicted_ttft_seconds == pytest.approx(
        plan.predicted_ttft_seconds + 3 * overhead
    )

"""Test the choice among workers that can start a request now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_doubles import CHUNK_TOKENS, PAGE_BYTES, PROFILE, queued_request, worker_facts

from scheduler_service.api.request import Request
from scheduler_service.placement.account import WorkerAccount
from scheduler_service.placement.footprint import Fits
from scheduler_service.placement.routing import Candidate, candidate_of, choose_worker
from scheduler_service.policy.workers import need_of
from scheduler_service.prefixes.lookup import CachedPrefix, ChunkMarks, FetchSource
from scheduler_service.requests.admission import AdmissionQueue
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.costs.first_token import IDLE, Backlog
from splitpoint.planning.plan import Residency
from splitpoint.selection import Selection, SelectionMethod
from splitpoint.shapes import Numerics
from splitpoint.speculation import AskedSpeculation, DraftMethod

PAGES = 400
FACTS = worker_facts(
    PAGES, 32, kvstore_address="unix:/store", store_slot_count=900, slot_bytes=2 * PAGE_BYTES
)
FITS = Fits(Residency.RESIDENT, 100 * PAGE_BYTES)
SECONDS = st.floats(0.0, 2.0)


def named(worker_id: str, facts: WorkerFacts = FACTS, **costs: Any) -> WorkerFacts:
    """Return a worker of this name whose profile has other costs."""
    return replace(facts, worker_id=worker_id, profile=replace(facts.profile, **costs))


def request(token_count: int, **cached: int) -> Request:
    return queued_request(0, token_count, cached=cached)


def candidate(
    asked: Request, facts: WorkerFacts, backlog: Backlog = IDLE, marks: Sequence[bytes] = ()
) -> Candidate:
    """Return a worker where nothing runs as a candidate. `marks`: on its device."""
    account = WorkerAccount(facts)
    account.bound_tokens, account.link_bytes = int(backlog.new_tokens), int(backlog.link_bytes)
    account.device_marks = frozenset(marks)
    return candidate_of(asked, account, need_of(account, asked, FITS, 1))


def chosen(
    asked: Request, *workers: WorkerFacts, backlogs: dict[str, Backlog] | None = None
) -> str:
    """Return the worker of those idle ones that gets a request."""
    candidates = [
        candidate(asked, facts, (backlogs or {}).get(facts.worker_id, IDLE)) for facts in workers
    ]
    return choose_worker(candidates).worker_id


# -- the choice --------------------------------------------------------------------------


@given(
    st.lists(
        st.builds(
            Candidate,
            worker_id=st.text("0123", min_size=1, max_size=2),
            seconds=SECONDS,
            seconds_off_device=SECONDS,
            free_share=st.sampled_from((0.0, 0.5, 1.0)),
            running_count=st.integers(0, 2),
            is_alike=st.booleans(),
            can_serve=st.booleans(),
        ).map(lambda c: replace(c, seconds_off_device=max(c.seconds, c.seconds_off_device))),
        min_size=1,
    )
)
def test_no_candidate_is_better_than_the_chosen_one(candidates: list[Candidate]) -> None:
    best = choose_worker(candidates)

    def can(worker: Candidate) -> tuple[bool, bool]:
        return worker.is_alike, worker.can_serve

    assert can(best) == max(map(can, candidates))
    rivals = [worker for worker in candidates if can(worker) == can(best)]
    freest = max(worker.free_share for worker in rivals)

    def seconds(worker: Candidate) -> float:
        is_loaded = worker.free_share < freest / 2
        return worker.seconds_off_device if is_loaded else worker.seconds

    least = min(map(seconds, rivals))
    assert seconds(best) <= 1.1 * least + 2e-3
    for other in rivals:
        if other.free_share > best.free_share:
            assert seconds(other) > 1.1 * least + 2e-3, "it was not about as early"
    # The order in which workers are listed does not matter.
    assert choose_worker(reversed(candidates)).worker_id == best.worker_id


@given(
    seconds=st.lists(SECONDS, min_size=2, max_size=6),
    shares=st.lists(st.sampled_from((0.2, 0.5, 0.9)), min_size=6, max_size=6),
    factor=st.floats(0.0, 1.0),
)
def test_a_worker_that_becomes_faster_stays_chosen(
    seconds: list[float], shares: list[float], factor: float
) -> None:
    workers = [
        Candidate(str(n), each, each, share, 0)
        for n, (each, share) in enumerate(zip(seconds, shares, strict=False))
    ]
    best = choose_worker(workers)
    faster = best.seconds * factor
    others = [worker for worker in workers if worker is not best]
    better = replace(best, seconds=faster, seconds_off_device=faster)
    assert choose_worker([*others, better]).worker_id == best.worker_id


def test_what_the_device_holds_counts_unless_its_worker_is_loaded() -> None:
    idle = Candidate("idle", 0.2, 0.2, 1.0, 0)
    holder = Candidate("holder", 0.1, 0.2, 0.5, 7)
    assert choose_worker([idle, holder]) is holder
    assert choose_worker([idle, replace(holder, free_share=0.49)]) is idle


def test_equal_first_tokens_go_where_most_is_free() -> None:
    one, two = Candidate("1", 0.1, 0.1, 0.5, 3), Candidate("2", 0.101, 0.101, 0.6, 9)
    assert choose_worker([one, two]) is two
    assert choose_worker([one, replace(two, free_share=0.5)]) is one, "fewest running requests"
    full = replace(one, running_count=9)
    assert choose_worker([full, replace(two, free_share=0.5)]) is full, "the name decides"


# -- unlike workers -----------------------------------------------------------------------


def test_a_high_kappa_follows_the_link_and_a_low_one_the_device() -> None:
    slow = replace(PROFILE, link_bytes_per_second=2e7)
    facts = replace(FACTS, has_activations=False, profile=slow)
    link = named("link", facts, link_bytes_per_second=8e7)
    device = named("device", facts, prefill_flops_per_second=4e10)
    assert chosen(request(4000, link=3900, device=3900), link, device) == "link"
    assert chosen(request(4000, link=1000, device=1000), link, device) == "device"
    assert chosen(request(4000), link, device) == "device"


@given(
    total=st.integers(2, 6000),
    cached=st.integers(0, 6000),
    factor=st.floats(1.2, 20.0),
    name=st.sampled_from(["link_bytes_per_second", "prefill_flops_per_second"]),
)
def test_of_two_workers_the_faster_one_is_never_worse(
    total: int, cached: int, factor: float, name: str
) -> None:
    slow, fast = named("slow"), named("fast", **{name: getattr(PROFILE, name) * factor})
    asked = request(total, slow=min(cached, total), fast=min(cached, total))
    first, second = (candidate(asked, facts) for facts in (fast, slow))
    assert first.seconds <= second.seconds * (1 + 1e-9)


def test_a_holder_wins_by_what_it_saves() -> None:
    holder, other = named("holder"), named("other")
    asked = request(3000, holder=2000)
    assert chosen(asked, holder, other) == "holder"
    # Enough is queued there that computing everything elsewhere is faster.
    queue = {"holder": Backlog(new_tokens=9000)}
    assert chosen(asked, holder, other, backlogs=queue) == "other"
    # So it is on a device that computes faster than this link loads.
    quick = named("quick", prefill_flops_per_second=1e13)
    slow = named("holder", link_bytes_per_second=1e7)
    assert chosen(asked, slow, quick) == "quick"


def test_a_queue_of_bytes_delays_what_must_be_loaded_only() -> None:
    busy, idle = named("busy"), named("idle", link_bytes_per_second=0.9e9)
    queue = {"busy": Backlog(link_bytes=10**9)}
    assert chosen(request(3000, busy=2900, idle=2900), busy, idle, backlogs=queue) == "idle"
    busy_is_faster = named("busy", prefill_flops_per_second=2e10)
    assert chosen(request(3000), busy_is_faster, idle, backlogs=queue) == "busy"


def test_a_prefix_in_another_store_counts_as_far_as_fetching_pays() -> None:
    near, far = named("near"), named("far")
    asked = request(3000)
    rates = {"store": 1e10}
    fast = replace(far, profile=replace(far.profile, remote_bytes_per_second=rates))
    source = {"far": (FetchSource("store", 2900),)}
    asked.cached = CachedPrefix({}, source)
    with_fetch, without = (candidate(asked, facts) for facts in (fast, near))
    assert with_fetch.seconds < 0.5 * without.seconds
    slow = replace(far, profile=replace(far.profile, remote_bytes_per_second={"store": 1e5}))
    assert candidate(asked, slow).seconds == pytest.approx(without.seconds)


def test_chunks_on_the_device_need_no_restore() -> None:
    marks = [bytes([n]) * 8 for n in range(100)]
    facts = replace(FACTS, shares_pages=True)
    asked = request(100 * CHUNK_TOKENS + 5)
    asked.cached = CachedPrefix({"0": 1600}, {}, {facts.key_space: ChunkMarks(b"".join(marks))})
    before = candidate(asked, facts)
    assert before.seconds == before.seconds_off_device
    after = candidate(asked, facts, marks=marks[:50])
    assert after.seconds < after.seconds_off_device == before.seconds


def test_costs_that_a_worker_measures_anew_count_at_once() -> None:
    admission = AdmissionQueue(10)
    for name in ("a", "b"):
        admission.add_worker(named(name))
    admission.set_facts(named("b", prefill_flops_per_second=5e10))
    admission.submit(queued_request(0, 1000))
    admitted = admission.admit()
    assert admitted is not None
    assert admitted.worker_id == "b"
    admission.set_facts(named("gone"))  # a worker that was lost meanwhile


# -- what a worker can do -------------------------------------------------------------------


def test_a_worker_that_can_draft_as_asked_comes_first() -> None:
    quick = named("quick", prefill_flops_per_second=1e12)
    drafter = replace(named("drafter"), draft_methods=frozenset({DraftMethod.MODEL}))
    asked = request(2000)
    assert chosen(asked, quick, drafter) == "quick"
    asked.speculation = AskedSpeculation(DraftMethod.MODEL)
    assert chosen(asked, quick, drafter) == "drafter"
    asked.speculation = AskedSpeculation(DraftMethod.AUTO)
    assert chosen(asked, quick, drafter) == "quick"


def test_a_worker_that_can_select_as_asked_comes_first() -> None:
    quick = named("quick", prefill_flops_per_second=1e12)
    selects = replace(named("selects"), selections={SelectionMethod.MAPLE: 0})
    asked = queued_request(0, 2000, selection=Selection(method=SelectionMethod.MAPLE, ratio=0.25))
    assert chosen(asked, quick, selects) == "selects"
    # Its keys are made of layer inputs, which this one's store does not keep.
    assert chosen(asked, quick, replace(selects, has_activations=False)) == "quick"


def test_a_worker_that_computes_the_same_bits_comes_first_of_all() -> None:
    quick = named("quick", prefill_flops_per_second=1e12)
    alike = replace(named("alike"), numerics=Numerics.INVARIANT, numerics_digest="d")
    asked = request(2000)
    asked.numerics_digest = "d"
    assert chosen(asked, quick, alike) == "alike"


# -- in the queue ---------------------------------------------------------------------------


def test_a_pinned_request_goes_to_its_worker_however_slow() -> None:
    admission = AdmissionQueue(10)
    admission.add_worker(named("slow", link_bytes_per_second=1e6, prefill_flops_per_second=1e8))
    admission.add_worker(named("quick"))
    admission.submit(queued_request(0, 2000, worker_id="slow", cached={"quick": 1900}))
    admitted = admission.admit()
    assert admitted is not None
    assert admitted.worker_id == "slow"


@given(
    pages=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    held=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    rates=st.tuples(st.floats(0.01, 100.0), st.floats(0.01, 100.0)),
)
def test_no_worker_idles_while_a_request_that_it_could_run_waits(
    pages: list[int], held: tuple[int, int], rates: tuple[float, float]
) -> None:
    """Requests are bound to a worker as late as they start: stealing needs no moving."""
    admission = AdmissionQueue(100)
    for name, used, rate in zip("ab", held, rates, strict=True):
        facts = worker_facts(12, 4, worker_id=name)
        admission.add_worker(named(name, facts, prefill_flops_per_second=1e10 * rate))
        if used:
            arrival = 100 + ord(name)
            admission.submit(queued_request(arrival, used * CHUNK_TOKENS, worker_id=name))
            assert admission.admit() is not None
    for arrival, count in enumerate(pages):
        admission.submit(queued_request(arrival, count * CHUNK_TOKENS))
    while admission.admit() is not None:
        pass
    for waiting in admission.queue()[:1]:
        for account in admission.accounts():
            is_full = account.running_count == account.facts.max_batch_size
            assert is_full or account.free_pages * CHUNK_TOKENS < waiting.token_count

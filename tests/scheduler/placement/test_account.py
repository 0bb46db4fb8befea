"""Charges of shared prefixes and expected answers against a naive count. About 3 s."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain

import pytest
from scheduler_doubles import CHUNK_TOKENS, LAYOUT, PAGE_BYTES, admit_all, worker_facts

from scheduler_service.api.output import Output
from scheduler_service.api.request import Request
from scheduler_service.placement.account import WorkerAccount
from scheduler_service.placement.answer_lengths import LEAST_SAMPLES, AnswerLengths
from scheduler_service.prefixes.lookup import CachedPrefix, ChunkMarks, LayoutName, keys_by_layout
from scheduler_service.requests.admission import AdmissionQueue, Queued
from scheduler_service.requests.attempt import Attempt
from splitpoint.keys import MARK_BYTES, chunk_keys
from splitpoint.planning.plan import ReasonKind, Residency
from splitpoint.shapes import chunks_of
from splitpoint.v1 import types_pb2

NAME = LayoutName(LAYOUT.layout_hash, CHUNK_TOKENS)
FACTS = worker_facts(
    40,
    16,
    kvstore_address="unix:/store",
    layout_hash=LAYOUT.layout_hash,
    store_slot_count=1000,
    shares_pages=True,
)


def sequence(
    arrival: int,
    prompt: list[int],
    max_tokens: int,
    *,
    salt: bytes = b"s",
    residency: Residency | None = None,
) -> Request:
    request = Request(
        client_request_id=str(arrival),
        tenant="",
        body_digest=b"",
        prompt=tuple(prompt),
        sampling=types_pb2.SamplingParams(max_tokens=max_tokens),
        residency=residency,
        arrival=arrival,
    )
    request.output = Output(request.sampling, None, frozenset())
    request.tenant_salt = salt
    look_up(request)
    return request


def look_up(request: Request) -> None:
    tokens = [*request.prompt, *request.output.token_ids]
    keys = keys_by_layout([NAME], request.tenant_salt, tokens)
    marks = {(layout, ""): ChunkMarks.of(found) for layout, found in keys.items()}
    request.cached = CachedPrefix(marks=marks)


def account_of(admission: AdmissionQueue, worker_id: str = "0") -> WorkerAccount:
    account = admission.account(worker_id)
    assert account is not None
    return account


def taught(length: int) -> AnswerLengths:
    lengths = AnswerLengths()
    for _ in range(LEAST_SAMPLES):
        lengths.note("", length)
    return lengths


def test_marks_are_the_beginnings_of_the_keys() -> None:
    tokens = list(range(3, 3 + 5 * CHUNK_TOKENS + 7))
    keys = list(chunk_keys(NAME.layout_hash, b"s", tokens, CHUNK_TOKENS))
    marks = ChunkMarks.of(keys)
    assert len(marks) == len(keys) == 5
    assert list(marks) == [marks[n] for n in range(5)] == [key[:MARK_BYTES] for key in keys]
    assert list(marks[1:3]) == list(marks)[1:3]
    with pytest.raises(IndexError):
        marks[5]


def test_a_common_prefix_is_charged_once() -> None:
    """16 requests of 1,000 common and 64 own tokens: the prefix once, the own parts 16 times."""
    admission = AdmissionQueue(100, taught(8))
    admission.add_worker(replace(FACTS, cache_capacity_bytes=1000 * PAGE_BYTES))
    common = [3 + n % 900 for n in range(1000)]
    for arrival in range(16):
        own = [5 + (arrival * 67 + n) % 800 for n in range(64)]
        admission.submit(sequence(arrival, common + own, 32))
    admitted = admit_all(admission)
    assert len(admitted) == 16
    prefix = 1000 // CHUNK_TOKENS
    own_pages = chunks_of(1000 + 64 + 8, CHUNK_TOKENS) - prefix
    account = account_of(admission)
    assert account.charged_pages == prefix + 16 * own_pages
    assert admitted[0].grant.size_bytes == (prefix + own_pages) * PAGE_BYTES
    assert admitted[1].grant.size_bytes == own_pages * PAGE_BYTES
    assert dict(admitted[1].grant.reasons)[ReasonKind.SHARED_PAGES] == (62,)
    for one in admitted[:-1]:
        admission.release(one.request)
    assert account.charged_pages == prefix + own_pages
    admission.release(admitted[-1].request)
    assert account.charged_pages == 0


def test_a_worker_that_shares_no_pages_is_charged_for_each() -> None:
    admission = AdmissionQueue(100)
    admission.add_worker(replace(FACTS, shares_pages=False))
    prompt = list(range(3, 3 + 2 * CHUNK_TOKENS))
    for arrival in range(2):
        admission.submit(sequence(arrival, prompt, CHUNK_TOKENS))
    admitted = admit_all(admission)
    assert account_of(admission).charged_pages == 2 * 3
    assert [one.grant.device_tokens for one in admitted] == [0, 0]


def test_another_salt_shares_nothing() -> None:
    admission = AdmissionQueue(100)
    admission.add_worker(FACTS)
    prompt = list(range(3, 3 + 2 * CHUNK_TOKENS))
    for arrival, salt in enumerate((b"a", b"b", b"a")):
        admission.submit(sequence(arrival, prompt, CHUNK_TOKENS, salt=salt))
    admit_all(admission)
    assert account_of(admission).charged_pages == 3 + 3 + 1


def test_an_answer_grows_beyond_its_charge_and_then_nothing_starts() -> None:
    admission = AdmissionQueue(100, taught(CHUNK_TOKENS))
    admission.add_worker(replace(FACTS, cache_capacity_bytes=4 * PAGE_BYTES))
    for arrival in range(3):
        admission.submit(sequence(arrival, [5 + arrival] * CHUNK_TOKENS, 3 * CHUNK_TOKENS))
    first, second = admit_all(admission)
    assert dict(first.grant.reasons)[ReasonKind.EXPECTED_ANSWER] == (16, 48)
    account = account_of(admission)
    assert account.free_pages == 0
    for one in (first, second):
        one.request.output.append([5] * (CHUNK_TOKENS + 1), [])
        admission.tokens_came(one.request)
    assert account.free_pages == -2
    assert admission.admit() is None
    assert "is overcommitted by" in admission.explain(admission.queue()[0]).reason
    # Shorter answers are expected now than the first one became; its pages come back.
    admission.release(first.request)
    assert account.free_pages == 1
    assert admission.admit() is None
    admission.release(second.request)
    assert [one.request.arrival for one in admit_all(admission)] == [2]


def test_what_runs_to_its_limit_is_charged_for_it() -> None:
    admission = AdmissionQueue(100, taught(1))
    admission.add_worker(FACTS)
    limits = (
        types_pb2.SamplingParams(ignore_eos=True),
        types_pb2.SamplingParams(min_tokens=31),
        types_pb2.SamplingParams(),
    )
    for arrival, limited in enumerate(limits):
        request = sequence(arrival, [5] * 2, 62)
        request.sampling.MergeFrom(limited)
        admission.submit(request)
    sizes = [one.grant.size_bytes // PAGE_BYTES for one in admit_all(admission)]
    assert sizes == [4, 3, 1]
    # Its length says nothing of answers that end by themselves.
    forced = sequence(9, [5], 60)
    forced.sampling.ignore_eos = True
    forced.output.append([5] * 60, [])
    for _ in range(100):
        admission.completed(forced)
    admission.submit(sequence(10, [5] * 2, 62))
    assert [one.grant.size_bytes for one in admit_all(admission)] == [PAGE_BYTES]


def test_a_request_goes_where_its_beginning_is_on_the_device() -> None:
    admission = AdmissionQueue(100)
    for worker_id in ("0", "1"):
        admission.add_worker(replace(FACTS, worker_id=worker_id))
    prompt = list(range(3, 3 + 5 * CHUNK_TOKENS))
    first = sequence(0, prompt, 1)
    marks = first.cached.marks[NAME.layout_hash, ""]
    # The digest of worker 1 has the first three chunks, and a later one that is of no use.
    admission.set_device_marks("1", [*marks[:3], marks[4]])
    admission.set_device_marks("no worker", marks)
    admission.submit(first)
    [one] = admit_all(admission)
    assert (one.worker_id, one.grant.device_tokens) == ("1", 3 * CHUNK_TOKENS)
    # What a request that runs there has counts before the worker reports it.
    admission.submit(sequence(1, [*prompt, 9], 1))
    [two] = admit_all(admission)
    assert (two.worker_id, two.grant.device_tokens) == ("1", 5 * CHUNK_TOKENS)
    admission.set_device_marks("1", [])
    for held in (one, two):
        admission.release(held.request)
    streamed = sequence(2, prompt, 1, residency=Residency.STREAMED)
    admission.set_device_marks("1", marks)
    admission.submit(streamed)
    assert [a.grant.device_tokens for a in admit_all(admission)] == [0]


class Model:
    """Random traffic, with every charge counted again from the running requests."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.policy = rng.choice((None, AnswerLengths()))
        self.admission = AdmissionQueue(8, self.policy)
        self.running: dict[int, Attempt] = {}
        # Pages that each running request was charged, shared ones included.
        self.pages: dict[int, int] = {}
        self.marks: dict[int, list[bytes]] = {}
        self.arrivals = 0
        for worker_id in ("0", "1"):
            self.add_worker(worker_id)

    def add_worker(self, worker_id: str) -> None:
        self.admission.add_worker(
            replace(
                FACTS,
                worker_id=worker_id,
                cache_capacity_bytes=self.rng.randint(12, 30) * PAGE_BYTES,
                max_batch_size=self.rng.randint(2, 8),
            )
        )

    def submit(self) -> None:
        # Prompts of a few common beginnings, of which tenants share nothing.
        chunks = [[3 + self.rng.randrange(2)] * CHUNK_TOKENS for _ in range(self.rng.randrange(6))]
        tail = [self.rng.randrange(3, 900) for _ in range(self.rng.randint(1, CHUNK_TOKENS))]
        request = sequence(
            self.arrivals,
            [*chain.from_iterable(chunks), *tail],
            self.rng.randint(1, 5 * CHUNK_TOKENS),
            salt=self.rng.choice((b"a", b"b")),
            residency=self.rng.choice((None, None, *Residency)),
        )
        self.arrivals += 1
        self.admission.submit(request)

    def admit(self) -> None:
        for one in admit_all(self.admission):
            request, arrival = one.request, one.request.arrival
            account = account_of(self.admission, one.worker_id)
            self.running[arrival] = one
            charge = account.running[arrival].charge
            self.marks[arrival] = list(charge.marks)
            self.pages[arrival] = len(charge.marks) + charge.own_pages
            worst = chunks_of(request.token_count, CHUNK_TOKENS)
            if one.grant.residency is Residency.RESIDENT:
                known = chunks_of(request.known_count, CHUNK_TOKENS)
                assert known <= self.pages[arrival] <= worst
                if self.policy is None:
                    assert self.pages[arrival] == worst
            assert account.free_pages >= 0

    def grow(self, one: Attempt) -> None:
        request = one.request
        count = self.rng.randint(1, CHUNK_TOKENS)
        count = min(count, request.sampling.max_tokens - len(request.output))
        request.output.append([5] * count, [])
        self.admission.tokens_came(one.request)
        if one.grant.residency is Residency.RESIDENT:
            needed = chunks_of(request.known_count, CHUNK_TOKENS)
            arrival = request.arrival
            self.pages[arrival] = max(self.pages[arrival], needed)
        if len(request.output) == request.sampling.max_tokens or self.rng.random() < 0.2:
            self.admission.completed(request)
            self.leave(one)

    def leave(self, one: Attempt) -> None:
        self.admission.release(one.request)
        for held in (self.running, self.pages, self.marks):
            held.pop(one.request.arrival, None)

    def lose(self, worker_id: str) -> None:
        self.admission.remove_worker(worker_id)
        for one in list(self.running.values()):
            if one.worker_id == worker_id:
                self.leave(one)
                look_up(one.request)
                assert isinstance(self.admission.resubmit(one.request), Queued)
        self.add_worker(worker_id)

    def step(self) -> None:
        actions = self.rng.choices(["submit", "grow", "cancel", "lose"], [4, 8, 1, 0.2])
        action = actions[0]
        running = list(self.running.values())
        if action == "submit":
            self.submit()
        elif action == "lose":
            self.lose(self.rng.choice(("0", "1")))
        elif running and action == "grow":
            self.grow(self.rng.choice(running))
        elif running:
            self.leave(self.rng.choice(running))
        self.admit()

    def check(self) -> None:
        assert self.admission.check_integrity() == []
        for worker_id in ("0", "1"):
            here = [a for a, one in self.running.items() if one.worker_id == worker_id]
            shared = {mark for arrival in here for mark in self.marks[arrival]}
            own = sum(self.pages[a] - len(self.marks[a]) for a in here)
            account = account_of(self.admission, worker_id)
            assert account.charged_pages == len(shared) + own
            if self.policy is None:  # the worst case never grows beyond what there is
                assert account.free_pages >= 0


@pytest.mark.parametrize("seed", range(30))
def test_charges_agree_with_a_naive_count_after_each_step(seed: int) -> None:
    model = Model(seed)
    for _ in range(150):
        model.step()
        model.check()
    # Nothing waits for ever: what runs ends, then all that waits starts.
    for _ in range(10_000):
        if not model.running:
            break
        model.leave(next(iter(model.running.values())))
        model.admit()
    assert model.admission.queue() == []
    assert all(account.charged_pages == 0 for account in model.admission.accounts())

"""What the status and the metrics tell of tenants: names for admins, pseudonyms for scrapers."""

from __future__ import annotations

import re

from scheduler_doubles import CHUNK_TOKENS, PAGE_BYTES, queued_request, worker_facts

from scheduler_service.api.request import Request
from scheduler_service.requests.admission import AdmissionQueue
from scheduler_service.requests.tenants import OTHERS, UNNAMED, TenantLabels, tenants_of
from splitpoint.keys import tenant_pseudonym, tenant_salt

KEY = b"k" * 32


def request(arrival: int, tenant: str, pages: int) -> Request:
    asked = queued_request(arrival, pages * CHUNK_TOKENS)
    asked.tenant = tenant
    return asked


def test_labels_tell_no_name_and_stay() -> None:
    labels = TenantLabels(KEY)
    label = labels.label("acme")
    assert re.fullmatch("[0-9a-f]{8}", label)
    assert labels.label("acme") == label == TenantLabels(KEY).label("acme")
    assert TenantLabels(b"x" * 32).label("acme") != label
    assert labels.label("") == UNNAMED
    assert tenant_salt(KEY, "acme").hex()[:8] != tenant_pseudonym(KEY, "acme")


def test_labels_are_bounded_and_do_not_move() -> None:
    labels = TenantLabels(KEY)
    named = {name: labels.label(name) for name in map(str, range(20))}
    assert len(set(named.values())) == 20
    assert {labels.label(name) for name in map(str, range(20, 500))} == {OTHERS}
    assert {name: labels.label(name) for name in named} == named


def test_what_a_tenant_has_and_waits_for() -> None:
    now = 100.0
    admission = AdmissionQueue(100, clock=lambda: now)
    admission.add_worker(worker_facts(10, 8))
    for arrival, (tenant, pages, since) in enumerate(
        [("a", 6, 100.0), ("b", 3, 100.0), ("b", 9, 60.0), ("b", 9, 90.0), ("c", 9, 95.0)]
    ):
        now = since
        admission.submit(request(arrival, tenant, pages))
    now = 100.0
    while admission.admit() is not None:
        pass
    now = 110.0
    facts = {each.tenant: each for each in tenants_of(admission, now)}
    assert list(facts) == ["a", "b", "c"], "most service first"
    assert (facts["a"].running_count, facts["a"].waiting_count) == (1, 0)
    assert facts["a"].service == 10 * 6 * PAGE_BYTES
    assert (facts["b"].running_count, facts["b"].waiting_count) == (1, 2)
    assert facts["b"].oldest_wait_seconds == 50
    assert facts["b"].service == 10 * 3 * PAGE_BYTES
    assert (facts["c"].service, facts["c"].oldest_wait_seconds) == (0, 15)
    assert facts["a"].oldest_wait_seconds == 0
    both = facts["c"].joined(facts["b"])
    assert (both.tenant, both.waiting_count, both.oldest_wait_seconds) == ("c", 3, 50)
    # One whose reader is behind waits for that, and for a worker from then on.
    (oldest, *_) = admission.queue()
    for oldest.is_paused, waited in ((True, 20), (False, 20)):
        admission.resumed(oldest)
        (b,) = [each for each in tenants_of(admission, now) if each.tenant == "b"]
        assert (b.waiting_count, b.oldest_wait_seconds) == (2, waited)


def test_an_idle_tenant_keeps_its_weight() -> None:
    admission = AdmissionQueue(100, clock=lambda: 0.0)
    admission.add_worker(worker_facts(10, 8))
    heavy = request(0, "a", 6)
    heavy.weight = 2.0
    admission.submit(heavy)
    admitted = admission.admit()
    assert admitted is not None
    admission.release(admitted.request)
    (facts,) = tenants_of(admission, 0.0)
    assert (facts.tenant, facts.weight, facts.running_count) == ("a", 2.0, 0)

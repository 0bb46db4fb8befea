"""What tenants are charged: in the end bytes times seconds, however long requests ran."""

from __future__ import annotations

import random

import pytest

from scheduler_service.policy.tenants import TenantShares, Usage


@pytest.mark.parametrize("seed", range(20))
def test_charges_are_what_was_held(seed: int) -> None:
    rng = random.Random(seed)
    shares = TenantShares()
    usage = Usage(shares)
    for tenant in "abc":  # a tenant that is idle is forgotten
        shares.waits(tenant, rng.choice([0.5, 1.0, 3.0]))
    held: dict[int, tuple[str, int]] = {}
    used: dict[str, float] = dict.fromkeys("abc", 0.0)
    now = 0.0
    for arrival in range(300):
        if not held or rng.random() < 0.4:
            tenant, size = rng.choice("abc"), rng.randint(0, 9)
            usage.start(arrival, tenant, "0", size, now)
            held[arrival] = tenant, size
        else:
            chosen = rng.choice(list(held))
            tenant, size = held[chosen]
            if rng.random() < 0.5:
                more = rng.choice([0, 0, 3])
                usage.runs(chosen, more, now)
                held[chosen] = tenant, size + more
            else:
                assert usage.end(chosen, now) == "0"
                assert usage.end(chosen, now) is None
                del held[chosen]
        seconds = rng.choice([0.0, 0.1, 2.0, 30.0])
        for tenant, size in held.values():
            used[tenant] += size * seconds
        now += seconds
        assert shares.check_integrity() == []
    for arrival in list(held):
        usage.end(arrival, now)
    for tenant in "abc":
        assert shares.charged(tenant) == pytest.approx(used[tenant], abs=1e-6)
    assert sum(map(shares.share, "abc")) == pytest.approx(1.0)


def test_a_request_that_runs_longer_than_estimated_is_charged_before_it_ends() -> None:
    shares = TenantShares()
    usage = Usage(shares)
    shares.waits("a", 1.0)
    usage.start(0, "a", "0", 10, 0.0)
    estimated = shares.charged("a")
    usage.runs(0, 0, 100.0)
    assert shares.charged("a") >= 1000.0 > estimated


def test_tenants_with_nothing_to_do_are_forgotten() -> None:
    shares = TenantShares()
    usage = Usage(shares)
    shares.waits("busy", 1.0)
    for n in range(1000):
        shares.waits(f"t{n}", 1.0)
        usage.start(n, f"t{n}", "0", 5, float(n))
        shares.waits_no_more(f"t{n}")
        usage.end(n, n + 0.5)
        shares.charge("busy", 10.0)
        assert shares.check_integrity() == []
    assert len(shares.known()) < 300
    shares.waits_no_more("busy")
    assert shares.known() == []

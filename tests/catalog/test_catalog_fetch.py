"""To fetch or to recompute, and who may fetch from where: pure policy."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from scheduler_doubles import (
    LAYOUT,
    PAGE_BYTES,
    PROFILE,
    TOKENIZER,
    worker_facts,
)

from scheduler_service.placement.footprint import Grant
from scheduler_service.placement.plan_report import actual_plan
from scheduler_service.placement.planning import plan_attempt
from scheduler_service.prefixes.lookup import FetchSource, StoreTokens, by_worker
from scheduler_service.prefixes.redis import leading_counts
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.config import is_local_address
from splitpoint.costs.fetching import (
    ASSUMED_BYTES_PER_SECOND,
    MEETING_SECONDS,
    ROUND_TRIP_SECONDS,
    TierEnds,
    known_rates,
    rate_of,
)
from splitpoint.costs.profile import Profile
from splitpoint.discovery.entries import StoreEntry
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Plan, ReasonKind, Residency, RestoreMethod
from splitpoint.planning.words import in_words
from splitpoint.tiers import ChunkSource, Tier, Transfer
from splitpoint.transport.convert import (
    plan_from_proto,
    plan_to_proto,
    profile_from_proto,
    profile_to_proto,
)
from splitpoint.v1 import types_pb2, worker_pb2

assert TOKENIZER is not None
A, B = "10.0.0.1:1", "10.0.0.2:1"
FACTS = worker_facts(
    100,
    8,
    has_activations=False,
    kvstore_address=A,
    layout_hash=LAYOUT.layout_hash,
    store_instance_id=b"a" * 16,
    store_slot_count=100,
    slot_bytes=LAYOUT.chunk_bytes,
)
DISK = FetchSource("", 768, Tier.DISK)
# A worker that computes 768 tokens in about half a second.
SHARING = replace(
    FACTS,
    shares_pages=True,
    max_batched_tokens=64,
    profile=replace(PROFILE, prefill_flops_per_second=2 * FACTS.shape.prefill_flops(768)),
)
GRANT = Grant(Residency.RESIDENT, PAGE_BYTES)


def attempt(
    *sources: FetchSource, own: int = 0, tokens: int = 160, profile: Profile = PROFILE
) -> tuple[Plan, FetchSource | None]:
    return plan_attempt(
        replace(FACTS, profile=profile),
        GRANT,
        token_count=tokens,
        cached_tokens=own,
        sources=sources,
    )


def rate_said(plan: Plan) -> tuple[int | float | str, ...]:
    """Return the transfer, the rate and its basis that a fetch was chosen by."""
    return dict(plan.reasons)[ReasonKind.FETCH][2:5]


def test_a_fast_way_is_taken_and_counted() -> None:
    profile = replace(PROFILE, remote_bytes_per_second={B: 1e12})
    alone, _ = attempt(own=20)
    plan, source = attempt(FetchSource(B, 100), own=20, profile=profile)
    # Six full chunks there, one full chunk and a tail of four tokens here.
    assert source == FetchSource(B, 96)
    assert (plan.cached_tokens, plan.fetched_tokens) == (96, 80)
    assert plan.new_tokens == 64
    expected = ROUND_TRIP_SECONDS + 5 * LAYOUT.chunk_bytes / 1e12
    assert plan.predicted_fetch_seconds == pytest.approx(expected)
    without, _ = plan_attempt(FACTS, GRANT, token_count=160, cached_tokens=96)
    assert plan.predicted_ttft_seconds == pytest.approx(without.predicted_ttft_seconds + expected)
    assert plan.predicted_ttft_seconds < alone.predicted_ttft_seconds
    assert dict(plan.reasons)[ReasonKind.FETCH][:5] == (80, B, "stream", 1e12, "measured")
    assert plan_from_proto(plan_to_proto(in_words(plan))) == in_words(plan)


def test_a_slow_way_is_not_taken() -> None:
    slow = replace(PROFILE, remote_bytes_per_second={B: 1e4})
    plan, _ = attempt(FetchSource(B, 100), profile=slow)
    assert plan.fetched_tokens == plan.cached_tokens == 0
    assert dict(plan.reasons)[ReasonKind.NO_FETCH][:4] == (96, B, "stream", 1e4)


def test_an_unmeasured_way_is_assumed_and_said_so() -> None:
    slow = replace(PROFILE, prefill_flops_per_second=1e6)
    plan, _ = attempt(FetchSource(B, 100), profile=slow)
    assert rate_said(plan) == ("stream", 1e9, "assumed")


def test_a_rate_that_has_aged_back_is_assumed_again() -> None:
    key = ChunkSource(B).rate_key(Transfer.DIRECT)
    rates = {key: ASSUMED_BYTES_PER_SECOND}
    slow = replace(PROFILE, prefill_flops_per_second=1e6, remote_bytes_per_second=rates)
    plan, _ = attempt(FetchSource(B, 100), profile=slow)
    assert rate_said(plan) == ("direct", 1e9, "assumed")
    measured = replace(slow, remote_bytes_per_second={key: 1.001e9})
    plan, _ = attempt(FetchSource(B, 100), profile=measured)
    assert rate_said(plan) == ("direct", 1.001e9, "measured")
    # On its way back it is neither.
    aged = replace(slow, remote_bytes_per_second={key: 8e8}, aged_sources=(key,))
    plan, _ = attempt(FetchSource(B, 100), profile=aged)
    assert rate_said(plan) == ("direct", 8e8, "aged")


def test_rates_in_words() -> None:
    rates = {"disk": 8e8, "pool": 1e9, "a:1": 2e9, "a:1 direct": 3e9}
    profile = replace(PROFILE, remote_bytes_per_second=rates, aged_sources=("disk", "pool"))
    assert [f"{name} at {rate}" for name, rate in known_rates(profile)] == [
        "a:1 at 2 GB/s",
        "a:1 by direct reads at 3 GB/s",
        "the disk tier at 0.8 GB/s (aged)",
        "the pool tier at 1 GB/s (assumed)",
    ]


def test_the_faster_of_two_sources() -> None:
    profile = replace(PROFILE, remote_bytes_per_second={A: 1e9, B: 1e11})
    slow = replace(profile, prefill_flops_per_second=1e6)
    _, source = attempt(FetchSource(A, 96), FetchSource(B, 96), profile=slow)
    assert source is not None
    assert source.address == B


def test_the_last_token_is_computed_and_partial_tails_do_not_travel() -> None:
    slow = replace(PROFILE, prefill_flops_per_second=1e6)
    whole, source = attempt(FetchSource(B, 160), own=0, profile=slow)
    assert source == FetchSource(B, 160)
    assert (whole.cached_tokens, whole.fetched_tokens) == (159, 159)
    for tokens, own in ((15, 0), (40, 32), (40, 39)):
        nothing, source = attempt(FetchSource(B, tokens), own=own, profile=slow)
        assert not {ReasonKind.FETCH, ReasonKind.NO_FETCH} & dict(nothing.reasons).keys()


def test_what_was_fetched_corrects_the_plan() -> None:
    slow = replace(PROFILE, prefill_flops_per_second=1e6)
    plan, _ = attempt(FetchSource(B, 100), profile=slow)
    report = worker_pb2.RestoreReport(
        cached_tokens=96,
        method=types_pb2.RESTORE_METHOD_LOAD,
        fetched_tokens=96,
        fetch_seconds=0.31,
    )
    happened = actual_plan(plan, report)
    assert (happened.cached_tokens, happened.fetched_tokens) == (96, 96)
    assert happened.reasons[-1] == (ReasonKind.FETCHED, (96, "", 0.31))
    # By whatever it was planned.
    fast = replace(slow, remote_bytes_per_second={f"{B} direct": 2e9})
    planned, _ = attempt(FetchSource(B, 100), profile=fast)
    assert (plan.fetch_transfer, planned.fetch_transfer) == ("stream", "direct")
    for told in ("direct", "stream", "direct, stream"):
        report.fetch_transfer = told
        happened = actual_plan(planned, report)
        assert (happened.fetch_transfer, happened.fetch_source) == (told, B)
        assert happened.reasons[-1] == (ReasonKind.FETCHED, (96, told, 0.31))
    report.cached_tokens = report.fetched_tokens = 0
    report.method = types_pb2.RESTORE_METHOD_NONE
    nothing = actual_plan(plan, report)
    assert (nothing.cached_tokens, nothing.fetched_tokens, nothing.new_tokens) == (0, 0, 160)
    assert (happened.fetch_source, nothing.fetch_source) == (B, "")
    assert nothing.fetch_transfer == ""
    assert dict(nothing.reasons)[ReasonKind.FETCHED][0] == 0


def test_remote_rates_travel_and_are_checked() -> None:
    profile = replace(PROFILE, remote_bytes_per_second={B: 9e8})
    assert profile_from_proto(profile_to_proto(profile)) == profile
    assert Profile.from_json(profile.to_json()) == profile
    for rate in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidArgument):
            replace(PROFILE, remote_bytes_per_second={B: rate})
    with pytest.raises(InvalidArgument):
        Profile.from_json(PROFILE.to_json().replace("{}", "[1]"))


# -- tiers --------------------------------------------------------------------------------


def on_disk(tokens: int) -> FetchSource:
    return FetchSource("", tokens, Tier.DISK)


def test_a_tier_continues_what_the_arena_holds() -> None:
    profile = replace(PROFILE, prefill_flops_per_second=1e6, remote_bytes_per_second={"disk": 8e8})
    plan, source = attempt(on_disk(100), own=20, profile=profile)
    assert source == on_disk(96)
    assert (plan.fetched_tokens, plan.fetch_source) == (80, "disk")
    assert plan.fetch_transfer == ""
    seconds = ROUND_TRIP_SECONDS + 5 * LAYOUT.chunk_bytes / 8e8
    assert plan.predicted_fetch_seconds == pytest.approx(seconds)
    assert dict(plan.reasons)[ReasonKind.FETCH][:4] == (80, "disk", "", 8e8)
    slow = replace(PROFILE, remote_bytes_per_second={"disk": 1e4})
    nothing, source = attempt(on_disk(100), own=20, profile=slow)
    assert source is None
    assert dict(nothing.reasons)[ReasonKind.NO_FETCH][:4] == (80, "disk", "", 1e4)


def test_what_is_loaded_back_may_be_on_the_device_already() -> None:
    """With X: the device holds no X, so those tokens are of use once the store has them again."""
    profile = replace(PROFILE, prefill_flops_per_second=1e6)
    plan, source = plan_attempt(
        replace(FACTS, profile=profile, has_activations=True),
        replace(GRANT, device_tokens=96),
        token_count=160,
        cached_tokens=20,
        sources=[on_disk(96)],
    )
    assert source == on_disk(96)
    assert (plan.cached_tokens, plan.device_tokens) == (96, 96)
    assert plan.predicted_restore_seconds == 0
    assert dict(plan.reasons)[ReasonKind.ON_DEVICE] == (96,)


def test_what_only_the_device_holds_comes_too_and_is_counted() -> None:
    """The arena takes a chunk only behind its parent."""
    grant = replace(GRANT, device_tokens=320)

    def at(rate: float, tokens: int) -> tuple[Plan, FetchSource | None]:
        profile = replace(
            PROFILE, prefill_flops_per_second=1e6, remote_bytes_per_second={"disk": rate}
        )
        return plan_attempt(
            replace(FACTS, profile=profile),
            grant,
            token_count=600,
            cached_tokens=0,
            sources=[on_disk(tokens)] if tokens else (),
        )

    (alone, _), (fast, _) = at(1e12, 0), at(1e12, 512)
    assert (alone.cached_tokens, alone.device_tokens) == (320, 320)
    assert (fast.cached_tokens, fast.device_tokens, fast.fetched_tokens) == (512, 320, 512)
    expected = ROUND_TRIP_SECONDS + 32 * LAYOUT.chunk_bytes / 1e12
    assert fast.predicted_fetch_seconds == pytest.approx(expected)
    assert dict(fast.reasons)[ReasonKind.FETCH][-1] == 192
    # Twelve chunks would pay at this rate; thirty-two do not.
    saved = alone.predicted_ttft_seconds - fast.predicted_ttft_seconds
    nothing, source = at(20 * LAYOUT.chunk_bytes / saved, 512)
    assert (source, nothing.fetched_tokens) == (None, 0)
    # All of it is on the device.
    assert at(1e12, 320) == (alone, None)


def test_the_best_of_all_sources_and_transfers() -> None:
    slow = replace(PROFILE, prefill_flops_per_second=1e6)
    sources = (FetchSource(B, 96), on_disk(96), FetchSource("", 96, Tier.POOL))
    rates = {B: 1e9, f"{B} direct": 3e9, "disk": 2e9, "pool": 1e9}
    plan, source = attempt(*sources, profile=replace(slow, remote_bytes_per_second=rates))
    assert source == sources[0]
    assert rate_said(plan) == ("direct", 3e9, "measured")
    # Without the rate of direct reads its gRPC stream counts, which the disk beats.
    del rates[f"{B} direct"]
    plan, source = attempt(*sources, profile=replace(slow, remote_bytes_per_second=rates))
    assert source == sources[1]


@pytest.mark.parametrize("seed", range(40))
def test_no_length_of_no_source_is_much_better(seed: int) -> None:
    """Compared with every length of every source, one by one."""
    rng = random.Random(seed)

    def rate(low: float, high: float) -> float:
        return low * math.exp(rng.random() * math.log(high / low))

    profile = replace(
        PROFILE,
        link_bytes_per_second=rate(1e6, 1e10),
        prefill_flops_per_second=rate(1e7, 1e11),
        prefill_overhead_seconds=rate(1e-5, 1e-1),
        remote_bytes_per_second={"disk": rate(1e5, 1e9), "pool": rate(1e5, 1e9)},
    )
    worker = replace(FACTS, profile=profile, max_batched_tokens=rng.choice((32, 64, 256)))
    total, own = rng.randrange(64, 400), rng.randrange(0, 40)
    tiers = (Tier.DISK, Tier.POOL)
    sources = [FetchSource("", rng.randrange(0, total), tier) for tier in tiers]

    def seconds(cached: int) -> float:
        plan, _ = plan_attempt(worker, GRANT, token_count=total, cached_tokens=cached)
        return plan.predicted_ttft_seconds

    size, best = LAYOUT.chunk_tokens, seconds(own)
    for source in sources:
        for chunks in range(own // size + 1, source.cached_tokens // size + 1):
            copied = (chunks - own // size) * LAYOUT.chunk_bytes
            copying = rate_of(profile, source.place).seconds(copied)
            best = min(best, copying + seconds(chunks * size))
    found, _ = plan_attempt(worker, GRANT, token_count=total, cached_tokens=own, sources=sources)
    assert found.predicted_ttft_seconds <= 1.05 * best


# -- both ends ------------------------------------------------------------------------------


def meeting(
    rate: float, *, own: int = 0, source: FetchSource = DISK, worker: WorkerFacts = SHARING
) -> tuple[Plan, FetchSource | None]:
    profile = replace(worker.profile, remote_bytes_per_second={"disk": rate, B: rate})
    return plan_attempt(
        replace(worker, profile=profile),
        GRANT,
        token_count=800,
        cached_tokens=own,
        sources=[source],
    )


def meets(rate: float, *, source: FetchSource = DISK, worker: WorkerFacts = SHARING) -> bool:
    """Return True if what is fetched meets what is computed."""
    _, fetched = meeting(rate, source=source, worker=worker)
    return fetched is not None and fetched.meeting_tokens > 0


def test_what_a_tier_brings_meets_what_is_computed_meanwhile() -> None:
    # Loading 768 tokens takes as long as computing about as many.
    plan, source = meeting(48 * LAYOUT.chunk_bytes / 0.5)
    assert source == replace(DISK, meeting_tokens=plan.recomputed_tokens)
    assert 0 < plan.recomputed_tokens < 768
    assert plan.method is RestoreMethod.TOKENS
    assert (plan.cached_tokens, plan.fetched_tokens) == (768, 768 - plan.recomputed_tokens)
    said = dict(plan.reasons)[ReasonKind.MEETING]
    assert said[:3] == (plan.fetched_tokens, plan.recomputed_tokens, "disk")
    assert plan_from_proto(plan_to_proto(in_words(plan))) == in_words(plan)


@pytest.mark.parametrize("rate", [1e4, 1e12])
def test_a_tier_that_is_far_from_the_balance_meets_nothing(rate: float) -> None:
    assert not meets(rate)


def test_who_meets_nothing() -> None:
    rate = 48 * LAYOUT.chunk_bytes / 0.5
    assert not meets(rate, worker=replace(SHARING, shares_pages=False))
    assert not meets(rate, source=FetchSource(B, 768))


@pytest.mark.parametrize("seed", range(40))
def test_the_meeting_point_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    own = rng.randrange(0, 40)
    ends = TierEnds(
        FACTS.shape,
        replace(
            PROFILE,
            prefill_flops_per_second=10 ** rng.uniform(7, 11),
            prefill_overhead_seconds=10 ** rng.uniform(-5, -2),
        ),
        own,
        own + rng.randrange(1, 60),
        LAYOUT.chunk_tokens,
        LAYOUT.chunk_bytes,
        10 ** rng.uniform(5, 9),
        rng.choice((0, 64, 256)),
    )
    missing = ends.chunk_count - own
    every = {
        own + count: max(ends.compute_seconds(count), ends.load_seconds(missing - count))
        for count in range(1, missing)
    }
    point = ends.meeting_point()
    one_side = min(ends.load_seconds(missing), ends.compute_seconds(missing))
    if point is None:
        assert min(every.values(), default=one_side) >= 0.99 * one_side
        return
    assert point.seconds - ROUND_TRIP_SECONDS - MEETING_SECONDS == pytest.approx(
        min(every.values())
    )
    assert every[point.tokens // LAYOUT.chunk_tokens] == pytest.approx(min(every.values()))


# -- whose store, which sources -----------------------------------------------------------


def worker(name: str, store: str, address: str, instance: bytes = b"") -> WorkerFacts:
    return replace(
        FACTS,
        worker_id=name,
        address=address,
        kvstore_address=store,
        store_instance_id=instance,
    )


def entry(address: str, instance: bytes, layout_hash: bytes = LAYOUT.layout_hash) -> StoreEntry:
    return StoreEntry(instance, 1, address, layout_hash, 10)


def test_each_worker_has_its_own_store_and_the_others_as_sources() -> None:
    workers = [worker("0", A, "10.0.0.1:5"), worker("1", B, "10.0.0.2:5")]
    found = by_worker({A: StoreTokens(48), B: StoreTokens(64)}, workers, [], workers)
    assert found.own == {"0": 48, "1": 64}
    assert found.sources == {"0": (FetchSource(B, 64),), "1": (FetchSource(A, 48),)}


def test_one_store_under_two_addresses_is_one() -> None:
    here = worker("0", "unix:/kv", "10.0.0.1:5", b"a" * 16)
    found = by_worker({A: StoreTokens(64)}, [here], [entry(A, b"a" * 16)], [here])
    assert found.own == {"0": 64}
    assert found.sources == {"0": ()}


def test_other_layouts_and_other_hosts_sockets_are_no_sources() -> None:
    here, there = worker("0", "unix:/a", "unix:/w"), worker("1", B, "10.0.0.2:5")
    tokens = {"unix:/a": 16, B: 32, "10.0.0.3:1": 64, "10.0.0.4:1": 0}
    counts = {address: StoreTokens(count) for address, count in tokens.items()}
    others = [entry("10.0.0.3:1", b"c" * 16, b"x" * 16), entry("10.0.0.4:1", b"d" * 16)]
    found = by_worker(counts, [here, there], others, [here, there])
    assert found.sources == {"0": (FetchSource(B, 32),), "1": ()}


def test_tiers_are_sources_of_their_own_stores_workers() -> None:
    workers = [worker("0", A, "10.0.0.1:5", b"a" * 16), worker("1", B, "10.0.0.2:5")]
    found = by_worker(
        {
            A: StoreTokens(16, {Tier.DISK: 64, Tier.POOL: 16}),
            B: StoreTokens(48, {Tier.DISK: 48}),
        },
        workers,
        [],
        workers,
    )
    assert found.own == {"0": 16, "1": 48}
    # The pool holds no more than the arena, and another store's disk is out of reach.
    assert found.sources == {"0": (on_disk(64), FetchSource(B, 48)), "1": (FetchSource(A, 16),)}


def test_a_pool_is_that_of_all_its_stores() -> None:
    """The worker's store is known from Redis alone; another one of the pool answered."""
    here, there = worker("0", "unix:/a", "10.0.0.1:5", b"a" * 16), worker("1", B, "10.0.0.2:5")
    pooled = replace(entry(A, b"a" * 16), tiers=("disk", "pool"))
    counts = {
        A: StoreTokens(16, {Tier.DISK: 32}),
        B: StoreTokens(0, {Tier.POOL: 96}),
    }
    found = by_worker(counts, [here, there], [pooled], [here, there])
    pool = FetchSource("", 96, Tier.POOL)
    assert found.sources == {"0": (on_disk(32), pool), "1": (pool, FetchSource(A, 16))}
    # A store without the pool does not get there.
    alone = by_worker(counts, [here], [replace(pooled, tiers=("disk",))], [here, there])
    assert alone.sources["0"] == (on_disk(32),)


@pytest.mark.parametrize(
    ("values", "arena", "disk"),
    [
        ([b"3", b"17", None], 2, 2),
        ([b"3d", b"17d", b"0d", b"0d", None], 2, 4),
        ([b"0d", b"4", b"0"], 0, 2),
        ([b"5", b"d", b"5"], 1, 1),
        ([b"5", b"5dd", b"5"], 1, 1),
        ([b"5", b"1" * 21], 1, 1),
        ([b"5", "5"], 1, 1),
        ([], 0, 0),
        ("wrong type", 0, 0),
    ],
)
def test_values_of_the_catalog(values: object, arena: int, disk: int) -> None:
    assert leading_counts(values) == (arena, disk)


def test_local_addresses() -> None:
    local = ("unix:/s", "127.0.0.1:1", "localhost:1", "[::1]:1", "127.8.0.1:1")
    reachable = ("10.0.0.1:1", "host:1", "[2001:db8::1]:1", "0.0.0.0:1")
    assert all(map(is_local_address, local))
    assert not any(map(is_local_address, reachable))

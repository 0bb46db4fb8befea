"""The four ways: predictions against a simulation of each request, bounds, and the choice.

Quick: about two seconds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from splitpoint.costs.profile import BUILT_IN_PROFILES, Profile
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Objective
from splitpoint.residency.load import DeviceRoom, RequestLoad
from splitpoint.residency.seconds import PieceSeconds
from splitpoint.residency.ways import Comparison, Forecast, Impossible, Way, compare_ways
from splitpoint.shapes import BUILT_IN_SHAPES, ModelShape

OPT, LLAMA = BUILT_IN_SHAPES["opt-6.7b"], BUILT_IN_SHAPES["llama-3-8b"]
A100 = BUILT_IN_PROFILES["a100-pcie4"]
GIB = 1 << 30


def room_of(resident: int, shape: ModelShape, load: RequestLoad, **changes: object) -> DeviceRoom:
    """Return a device whose cache holds so many of the load's requests."""
    pages = -(-load.token_count // 64)
    room = DeviceRoom(
        cache_bytes=resident * pages * shape.page_bytes(64),
        streamed_pages=3,
        max_batch=64,
        has_activations=shape.activations_can_pay,
        staging_tokens=1024,
        prefill_tokens=512,
    )
    return replace(room, **changes)  # type: ignore[arg-type]


def possible(comparison: Comparison, way: Way) -> Forecast:
    found = comparison.forecast(way)
    assert found is not None, comparison
    return found


def random_case(rng: random.Random) -> tuple[ModelShape, Profile, RequestLoad, DeviceRoom]:
    shape = rng.choice((OPT, LLAMA))
    cached = rng.randrange(0, 1200)
    load = RequestLoad(
        request_count=rng.randint(1, 40),
        prompt_tokens=cached + rng.randint(1, 100),
        cached_tokens=cached,
        answer_tokens=rng.randint(1, 200),
        shared_tokens=rng.choice((0, cached // 2)),
    )
    profile = replace(A100, link_bytes_per_second=10 ** rng.uniform(9, 11))
    room = room_of(rng.randint(1, 12), shape, load, slice_tokens=rng.randint(16, 64))
    return shape, profile, load, room


# -- the oracle: every request by itself ------------------------------------------------


def simulated_ends(
    count: int,
    at_once: int,
    steps: int,
    slice_steps: int,
    begin: Callable[[int], float],
    step: Callable[[int, int], float],
    back: Callable[[int], float],
) -> list[float]:
    """Simulate a queue of requests step by step; return when each has finished.

    The first `at_once` of the queue are on the device. After `slice_steps` steps they go to
    its end, from where each of them comes back in `back(steps done)` seconds.
    """
    now, done, ends = 0.0, [-1] * count, [0.0] * count
    queue = list(range(count))
    while queue:
        # Those that have come equally far go together.
        group = [each for each in queue[:at_once] if done[each] == done[queue[0]]]
        queue = queue[len(group) :]
        if done[group[0]] < 0:
            now += begin(len(group))
            for each in group:
                done[each] = 0
        else:
            for each in group:
                now += back(done[each])
        reached = done[group[0]]
        for _ in range(min(slice_steps, steps - reached)):
            now += step(len(group), reached)
            for each in group:
                done[each] += 1
        for each in group:
            if done[each] == steps:
                ends[each] = now
            else:
                queue.append(each)
    return ends


@pytest.mark.parametrize("seed", range(60))
def test_waves_and_slices_are_what_a_simulation_of_each_request_says(seed: int) -> None:
    shape, profile, load, room = random_case(random.Random(seed))
    pieces = PieceSeconds(shape, profile, room)
    comparison = compare_ways(shape, profile, load, room)
    at_once = room.resident_at_once(shape, load)
    assert at_once >= 1
    for way in (Way.RESIDENT, Way.WAVES, Way.SLICES):
        predicted = comparison.forecast(way)
        if predicted is None:
            continue
        is_sliced = way is Way.SLICES
        lengths = {
            reached: load.prompt_tokens + 1 + reached if is_sliced else load.mean_length
            for reached in range(load.answer_tokens)
        }
        ends = simulated_ends(
            load.request_count,
            at_once,
            load.step_count,
            room.slice_tokens if is_sliced else max(load.step_count, 1),
            begin=lambda group: pieces.start(load, group),
            step=lambda group, reached, lengths=lengths: pieces.step(group, lengths[reached]),  # type: ignore[misc]
            back=lambda reached, lengths=lengths: pieces.restore(lengths[reached]),  # type: ignore[misc]
        )
        assert predicted.last_seconds == pytest.approx(max(ends), rel=1e-9)
        assert predicted.mean_seconds == pytest.approx(sum(ends) / len(ends), rel=1e-9)
        tokens = load.request_count * load.answer_tokens
        assert predicted.tokens_per_second == pytest.approx(tokens / max(ends), rel=1e-9)


# -- bounds ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_streaming_everything_stays_below_what_the_link_carries(seed: int) -> None:
    shape, profile, load, room = random_case(random.Random(seed))
    pages = min(room.streamed_pages, -(-load.token_count // 64))
    # Nothing is rebuilt, and no memory is left in which anything could stay.
    room = replace(
        room, has_activations=False, cache_bytes=load.request_count * pages * shape.page_bytes(64)
    )
    comparison = compare_ways(shape, profile, load, room)
    streamed = possible(comparison, Way.STREAMED)
    assert streamed.at_once / streamed.step_seconds <= comparison.link_bound * (1 + 1e-9)


def test_the_bound_of_the_written_example() -> None:
    """OPT-6.7B, 1,152 tokens, 20 GB/s: 35 tokens/s (algorithms, section 7)."""
    load = RequestLoad(8, 1088, 1024, 128)
    profile = replace(A100, link_bytes_per_second=20e9)
    shape = OPT
    comparison = compare_ways(shape, profile, load, room_of(4, shape, load))
    assert comparison.link_bound == pytest.approx(33.1, abs=0.1)
    four_resident = possible(comparison, Way.WAVES)
    streamed = possible(comparison, Way.STREAMED)
    assert four_resident.at_once / four_resident.step_seconds > 100
    # Rebuilding nearly doubles what the link alone would allow; a part stays on the device.
    assert comparison.link_bound < streamed.at_once / streamed.step_seconds < 120
    assert comparison.best is four_resident


@pytest.mark.parametrize("seed", range(40))
def test_a_faster_link_makes_nothing_slower(seed: int) -> None:
    shape, profile, load, room = random_case(random.Random(seed))
    faster = replace(profile, link_bytes_per_second=1.3 * profile.link_bytes_per_second)
    slow = compare_ways(shape, profile, load, room)
    fast = compare_ways(shape, faster, load, room)
    for way in Way:
        before, after = slow.forecast(way), fast.forecast(way)
        if before is not None and after is not None:
            # A split is a whole number of chunks and a way must save 2 %.
            assert after.last_seconds <= before.last_seconds * 1.03
            assert after.mean_seconds <= before.mean_seconds * 1.03


@pytest.mark.parametrize("seed", range(40))
def test_slices_never_end_before_waves(seed: int) -> None:
    """Each slice computes the same steps and brings sequences back besides."""
    shape, profile, load, room = random_case(random.Random(seed))
    # The same length in each step, so that the two differ in nothing else.
    profile = replace(profile, memory_seconds_per_byte=0.0, step_compute_seconds=0.01)
    comparison = compare_ways(shape, profile, load, room)
    waves, slices = comparison.forecast(Way.WAVES), comparison.forecast(Way.SLICES)
    if waves is None or slices is None:
        assert waves is None
        assert slices is None
        return
    assert waves.last_seconds <= slices.last_seconds * (1 + 1e-9)
    assert waves.mean_seconds <= slices.mean_seconds * (1 + 1e-9)


# -- the choice -----------------------------------------------------------------------


@pytest.mark.parametrize("objective", Objective)
@pytest.mark.parametrize("seed", range(25))
def test_the_best_way_has_the_least_score(seed: int, objective: Objective) -> None:
    shape, profile, load, room = random_case(random.Random(seed))
    comparison = compare_ways(shape, profile, load, replace(room, objective=objective))
    best = comparison.best
    assert best is not None
    assert [each.way for each in comparison.ways] == list(Way)
    assert best.way.value in comparison.reason
    if comparison.forecast(Way.RESIDENT) is not None:
        assert best.way is Way.RESIDENT
        return
    assert best.way is not Way.SLICES
    for way in (Way.WAVES, Way.STREAMED):
        other = comparison.forecast(way)
        assert other is None or best.score(objective) <= other.score(objective)


def test_one_request_that_fits_is_resident_and_one_that_never_does_is_streamed() -> None:
    load = RequestLoad(1, 1088, 1024, 64)
    fits = compare_ways(OPT, A100, load, room_of(1, OPT, load))
    assert fits.best is not None
    assert fits.best.way is Way.RESIDENT
    pages = DeviceRoom(8 * OPT.page_bytes(64), 3, 64, has_activations=True)
    beyond = compare_ways(OPT, A100, load, pages)
    assert beyond.best is not None
    assert beyond.best.way is Way.STREAMED
    resident = beyond.ways[0]
    assert isinstance(resident, Impossible)
    assert "one request needs 576 MiB of device cache, which has 256 MiB" in resident.reason


def test_streaming_wins_where_steps_read_weights_and_the_link_is_fast() -> None:
    """Short prompts, one resident at a time: each wave reads all weights for one sequence."""
    load = RequestLoad(32, 64, 63, 64)
    fast = replace(A100, link_bytes_per_second=4e11, link_overhead_seconds=1e-6)
    room = room_of(1, OPT, load, streamed_pages=1)
    room = replace(room, cache_bytes=32 * OPT.page_bytes(64))
    # 16 requests of two pages fit; 32 can be streamed from one page each.
    comparison = compare_ways(OPT, fast, load, room)
    assert possible(comparison, Way.WAVES).at_once == 16
    assert possible(comparison, Way.STREAMED).at_once == 32
    assert comparison.best is comparison.forecast(Way.STREAMED)
    slow = compare_ways(OPT, replace(A100, link_bytes_per_second=2e9), load, room)
    assert slow.best is slow.forecast(Way.WAVES)


def test_a_shared_prefix_is_charged_and_sent_once() -> None:
    apart = RequestLoad(8, 1152, 1088, 64)
    together = replace(apart, shared_tokens=1024)
    room = room_of(2, OPT, apart)
    assert room.resident_at_once(OPT, apart) == 2
    # 38 pages: 16 shared ones, and 3 for each request.
    assert room.resident_at_once(OPT, together) == 7
    pieces = PieceSeconds(OPT, A100, room)
    assert pieces.start(together, 4) < 0.6 * pieces.start(apart, 4)
    assert pieces.start(together, 1) == pieces.start(apart, 1)


def test_without_a_store_nothing_is_streamed_or_comes_back() -> None:
    load = RequestLoad(8, 1088, 0, 64)
    comparison = compare_ways(OPT, A100, load, room_of(2, OPT, load, has_store=False))
    assert comparison.best is comparison.forecast(Way.WAVES)
    reasons = [each.reason for each in comparison.ways if isinstance(each, Impossible)]
    assert reasons == [
        "2 of 8 fit at once",
        "there is no KV store from which a sequence could come back",
        "there is no KV store to stream from",
    ]


def test_a_device_too_small_for_anything_says_why() -> None:
    load = RequestLoad(2, 1088, 1024, 64)
    comparison = compare_ways(OPT, A100, load, DeviceRoom(0, 3, 8, has_activations=True))
    assert comparison.best is None
    assert comparison.reason.startswith("streamed: even a streamed request needs 96 MiB")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("request_count", (0, 10, 5, 1)),
        ("cached_tokens", (1, 10, 10, 1)),
        ("answer_tokens", (1, 10, 5, 0)),
        ("shared_tokens", (1, 10, 5, 1, 6)),
    ],
)
def test_counts_that_cannot_be_are_refused(field: str, values: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        RequestLoad(*values)
    assert caught.value.field == field

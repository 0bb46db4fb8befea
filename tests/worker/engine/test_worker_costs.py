"""Costs while they are used: refitted from spans, told when they moved, followed by splits.

By the spans' own clock: an emulated link takes as long as it says, however busy the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runner import CPU, Transcript, admission, make_engine, run_all
from store_runner import StoreRunner, store_runner, streamed
from tiny_models import VOCABULARY, write_tiny

from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import RestoreMethod, SplitLine
from splitpoint.planning.schedule import Lane
from splitpoint.shapes import ArenaLayout
from worker_service.engine.engine import Engine
from worker_service.engine.messages import RestoreEvent
from worker_service.engine.sampling import Sampling
from worker_service.lanes.cost_watch import CostWatch, StepTraffic
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.lanes import EmulatedLink
from worker_service.lanes.timeline import FETCHING_ROWS, Span, StepTimes
from worker_service.model.decoder import Decoder

CHUNK = 16
FAST, SLOW = 8e6, 1e6
# The first profile: a link so fast that nothing needs to be rebuilt.
PROFILE = Profile(
    link_bytes_per_second=1e12,
    link_overhead_seconds=0.0,
    rebuild_flops_per_second=1e11,
    rebuild_overhead_seconds=0.0,
    prefill_flops_per_second=1e11,
)
PROMPT = torch.randint(3, VOCABULARY, (130,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """Multi-head attention: rebuilding can pay."""
    folder = write_tiny("llama", tmp_path_factory.mktemp("model"))
    return Decoder.load(folder, CPU, torch.float32)


@pytest.fixture
def runner(model: Decoder, tmp_path: Path) -> Iterator[StoreRunner]:
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=True)
    with store_runner(layout, tmp_path, 64) as opened:
        yield opened


@pytest.fixture
def engine(model: Decoder) -> Iterator[Engine]:
    lanes = ThreadLanes(CPU, EmulatedLink(FAST))
    made = make_engine(
        model, has_activations=True, lanes=lanes, staging_pages=48, shares_prefixes=False
    )
    made.tile_pages = 4
    made.watch_costs(PROFILE)
    yield made
    lanes.close()


def link_of(engine: Engine) -> EmulatedLink:
    assert engine.lanes.link is not None
    return engine.lanes.link


def test_a_link_that_changes_is_told_and_followed_within_twenty_steps(
    engine: Engine, runner: StoreRunner
) -> None:
    told: list[Profile] = []
    splits: list[int] = []

    def step(count: int) -> None:
        for _ in range(count):
            output = runner.step(engine)
            if output.profile is not None:
                told.append(output.profile)
            if engine.last_step is not None:
                splits.append(engine.last_step.rebuilt_tokens)

    runner.admit(
        engine,
        streamed(
            "line",
            PROMPT,
            Sampling(max_tokens=60, ignore_eos=True),
            split=SplitLine(0.0, 0.0, 0),
        ),
    )
    step(12)
    assert told[-1].link_bytes_per_second == pytest.approx(FAST, rel=0.15)
    link_of(engine).bytes_per_second = SLOW
    step(20)
    assert told[-1].link_bytes_per_second == pytest.approx(SLOW, rel=0.15)
    # By the first profile nothing was rebuilt; now X crosses the link instead of K and V.
    assert splits[0] == 0
    assert splits[-1] > 0
    # Costs that were not measured do not change.
    assert told[-1].prefill_flops_per_second == PROFILE.prefill_flops_per_second


def test_a_split_that_was_asked_for_is_kept_whatever_the_link_does(
    engine: Engine, runner: StoreRunner
) -> None:
    sampling = Sampling(max_tokens=16, ignore_eos=True)
    runner.admit(engine, streamed("forced", PROMPT, sampling, split=2 * CHUNK))
    rebuilt = set()
    for number in range(16):
        link_of(engine).bytes_per_second = FAST if number < 8 else SLOW
        runner.step(engine)
        if engine.last_step is not None and engine.last_step.link_bytes:
            rebuilt.add(engine.last_step.rebuilt_tokens)
    layers = engine.model.shape.layer_count
    assert rebuilt == {2 * CHUNK * layers}


def test_steps_are_predicted_from_the_second_on_and_never_below_the_link(
    engine: Engine, runner: StoreRunner
) -> None:
    predicted: list[float | None] = []
    floors: list[float] = []
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    runner.admit(engine, streamed("0", PROMPT, sampling, split=CHUNK))
    while not (engine.is_idle and predicted):
        runner.step(engine)
        times = engine.last_step
        if times is not None and times.link_bytes:
            predicted.append(times.predicted_seconds)
            floors.append(times.link_bytes / FAST)
    # Only the first decode shows the time of a decode step.
    known = [each for each in predicted if each is not None]
    assert len(known) >= len(predicted) - 3
    for said, floor in list(zip(predicted, floors, strict=True))[4:]:
        assert said is not None
        assert said >= 0.85 * floor


@pytest.mark.parametrize("split", [0, 64, 129])
def test_a_restore_reports_what_was_predicted_and_what_it_moved(
    engine: Engine, runner: StoreRunner, split: int
) -> None:
    few = Sampling(max_tokens=2, ignore_eos=True)
    runner.run(engine, [admission("cold", PROMPT, few)])
    # The link is known by now; the profile is reported only if it changed.
    reports: list[RestoreEvent] = []
    runner.after_step = lambda output: reports.extend(output.restores)
    for name in ("warm", "again"):
        asked = replace(admission(name, PROMPT, few), split_tokens=split)
        transcript: Transcript = runner.run(engine, [asked])
        assert len(transcript.tokens[name]) == 2
    report = reports[-1]
    assert report.cached_tokens == 129
    assert report.method is RestoreMethod.of(split, 129)
    shape, layers = engine.model.shape, engine.model.shape.layer_count
    # Whole chunks: of the last one, and of the one in which the split lies.
    chunks = -(-129 // CHUNK)
    loaded = (chunks - split // CHUNK) * CHUNK if split < 129 else 0
    sent = -(-split // CHUNK) * CHUNK
    tail = CHUNK * shape.activation_bytes_per_token_layer * layers
    assert report.link_bytes == tail + (
        loaded * shape.kv_bytes_per_token_layer * layers
        + sent * shape.activation_bytes_per_token_layer * (layers - 1)
    )
    assert report.link_busy_seconds >= report.link_bytes / FAST * (1 - 1e-6)
    # By the refitted link, not by the terabyte a second of the first profile. How much more a
    # prediction says depends on overheads that were measured on this machine.
    assert report.predicted_restore_seconds > 0.7 * (report.link_bytes - tail) / FAST


def test_copies_into_fresh_memory_do_not_show_the_link(model: Decoder, runner: StoreRunner) -> None:
    """They wait for the kernel; the next restore uses the same pages."""
    lanes = ThreadLanes(CPU, EmulatedLink(FAST))
    # Planes of several huge pages, which the kernel gives when they are first used.
    engine = make_engine(
        model, has_activations=True, lanes=lanes, cache_pages=4096, shares_prefixes=False
    )
    writer = make_engine(model, has_activations=True)
    few = Sampling(max_tokens=2, ignore_eos=True)
    runner.run(writer, [admission("cold", PROMPT, few)])
    reports: list[RestoreEvent] = []
    runner.after_step = lambda output: reports.extend(output.restores)
    rates = []
    try:
        engine.watch_costs(PROFILE)
        for name in ("first", "second"):
            runner.run(engine, [admission(name, PROMPT, few)])
            rates.append(engine.profile.link_bytes_per_second)
    finally:
        lanes.close()
    first, second = reports[-2:]
    chunks = -(-first.cached_tokens // CHUNK)
    assert first.first_use_bytes == chunks * engine.memory_plan.page_bytes
    assert second.first_use_bytes == 0
    assert rates[0] == PROFILE.link_bytes_per_second
    assert rates[1] == pytest.approx(FAST, rel=0.15)


@pytest.mark.parametrize("host_bytes", [0, 1000])
def test_a_prefill_that_waited_for_weights_says_nothing_of_the_device(host_bytes: int) -> None:
    watch = CostWatch(replace(PROFILE, host_weight_bytes=host_bytes))
    slow = PROFILE.prefill_flops_per_second / 100
    watch.restored([Span(Lane.COMPUTE, "prefill", 0.0, 1.0, tokens=64, amount=slow)])
    told = watch.changed_profile()
    if host_bytes:
        assert told is None
    else:
        assert told is not None
        assert told.prefill_flops_per_second < PROFILE.prefill_flops_per_second / 10


@pytest.mark.parametrize("tokens", [127, 128])
def test_a_long_prefill_step_shows_the_device_and_a_short_one_does_not(tokens: int) -> None:
    watch = CostWatch(PROFILE)
    slow = PROFILE.prefill_flops_per_second / 4
    watch.computed([Span(Lane.COMPUTE, "prefill step", 0.0, 1.0, tokens=tokens, amount=slow)])
    told = watch.changed_profile()
    if tokens < 128:
        assert told is None
    else:
        assert told is not None
        assert told.prefill_seconds(slow) == pytest.approx(1.0)


@pytest.mark.parametrize("max_batched_tokens", [64, 256])
def test_ordinary_prefills_refit_the_costs(model: Decoder, max_batched_tokens: int) -> None:
    engine = make_engine(model, max_batched_tokens=max_batched_tokens)
    engine.watch_costs(PROFILE)
    run_all(engine, [admission("0", PROMPT, Sampling(max_tokens=1, ignore_eos=True))])
    # 130 tokens in steps of 64 are too few each.
    is_learned = engine.profile.prefill_flops_per_second != PROFILE.prefill_flops_per_second
    assert is_learned == (max_batched_tokens == 256)


def test_drafts_do_not_count_as_the_step_that_verifies_them() -> None:
    """Neither the seconds in which they were made, nor those of the rows fetched for them."""
    watch = CostWatch(PROFILE)
    spans = [
        Span(Lane.LINK_IN, FETCHING_ROWS, 0.0, 0.5, amount=1.0),
        Span(Lane.COMPUTE, "attend", 0.6, 0.8),
    ]
    watch.stepped(StepTimes.of(0.9, spans), spans, only_decodes=True, drafting_seconds=0.6)
    assert watch.step_seconds(StepTraffic((), ())) == pytest.approx(0.3)


def test_sequences_that_share_steps_are_planned_together(
    engine: Engine, runner: StoreRunner
) -> None:
    """On a fast link one sequence needs no rebuilding beside the step; three of them do."""
    engine.watch_costs(replace(PROFILE, link_bytes_per_second=FAST, step_compute_seconds=0.05))
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    start = SplitLine(0.0, 0.0, 0)

    def lines() -> list[SplitLine | None]:
        return [each.split_line for each in engine.queues.running]

    runner.admit(engine, streamed("0", PROMPT, sampling, split=start))
    runner.step(engine)
    assert lines() == [start], "the scheduler's plan holds while one sequence streams"
    for name in ("1", "2"):
        runner.admit(engine, streamed(name, PROMPT, sampling, split=start, salt=name.encode()))
    runner.step(engine)
    joined = lines()
    assert len(joined) == 3
    assert joined[0] is not None
    assert joined[0] != start
    assert all(line == joined[0] for line in joined)

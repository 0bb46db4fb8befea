"""The runs of `splitpoint bench restore`: one prefix, brought back by every method.

All methods take turns in one process, with the same weights, arena and pages. A time counts only
after the restored pages were compared with what was stored.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from splitpoint.costs.profile import Profile
from splitpoint.costs.tracker import CostTracker, Observation
from splitpoint.planning.schedule import Lane, Schedule
from splitpoint.planning.split_costs import PipelineOptions, SplitCosts
from splitpoint.planning.split_search import best_pipeline_options, best_split
from splitpoint.planning.token_recompute import RecomputeEstimate, TokenRecompute
from splitpoint.shapes import chunks_of
from splitpoint_cli.bench.engine import make_model, use_worker_kernels
from splitpoint_cli.bench.harness import CHUNK_TOKENS, MAX_BATCHED_TOKENS, Progress
from splitpoint_cli.bench.restore_report import (
    ACTIVATIONS,
    BOTH_ENDS,
    COLUMN,
    LOAD,
    PIPELINED,
    SERIAL,
    TOKENS,
    TOLERANCES,
    RestoreResults,
    RestoreWorkload,
    Result,
    SweepPoint,
    Timing,
)
from splitpoint_cli.bench.stored_prefixes import Stored, stored_prefixes
from worker_service.device.choice import choose_device, describe_device
from worker_service.device.memory import STAGING_PAGES
from worker_service.lanes.lanes import EmulatedLink, Lanes
from worker_service.lanes.select import lanes_of
from worker_service.lanes.timeline import Span, Trace
from worker_service.pipeline.executor import restore
from worker_service.pipeline.front import restore_from_both_ends
from worker_service.pipeline.gather import gatherer_of
from worker_service.pipeline.staging import Staging
from worker_service.pipeline.transfer import CacheTransfer
from worker_service.profiling.profiler import measure

# Without a sweep the best split is looked for about where it was predicted.
NEARBY = (0.8, 0.9, 1.0, 1.1, 1.2)
SEARCH_RUNS = 3


# One way to restore all sequences: it returns what ran when.
Run = Callable[[], list[Span]]
# Each contender, by its result, which is filled by its runs.
Contenders = Sequence[tuple[Result, Run]]


class Restorer:
    """The methods to restore what is stored, on two sets of lanes."""

    def __init__(self, stored: Stored, workload: RestoreWorkload) -> None:
        self.stored = stored
        self.workload = workload
        self.lanes = _lanes(stored.device, workload, overlapped=True)
        self.serial_lanes = _lanes(stored.device, workload, overlapped=False)
        gatherer = gatherer_of(stored.device)

        def transfer(pages: int) -> CacheTransfer:
            staging = Staging(stored.tensors.layout, pages, stored.device)
            return CacheTransfer(stored.model, stored.tensors, staging, gatherer)

        # A worker's staging memory; and as KVPR wants it, room for X of everything.
        self._transfer = transfer(STAGING_PAGES)
        self._whole_transfer = transfer(
            max(STAGING_PAGES, chunks_of(workload.prompt, CHUNK_TOKENS))
        )

    def close(self) -> None:
        self.lanes.close()
        self.serial_lanes.close()

    @torch.inference_mode()
    def split(
        self, split: int, schedule: Schedule, tile_tokens: int, *, serial: bool = False
    ) -> list[Span]:
        """Restore by activations and loads. Sequential splits send X in one piece."""
        transfer = self._whole_transfer if schedule is Schedule.COLUMN else self._transfer
        spans: list[Span] = []
        for sequence in self.stored.sequences:
            spans += restore(
                transfer,
                self.serial_lanes if serial else self.lanes,
                sequence.prefix(split),
                self.stored.pages.keys,
                self.stored.pages.values,
                schedule=schedule,
                tile_tokens=tile_tokens,
            )
        return spans

    def both_ends(self, expected_tokens: int) -> list[Span]:
        """Restore by token ids and loads."""
        return self._from_both_ends(self.lanes, expected_tokens)

    def prefill(self) -> list[Span]:
        """Restore by token ids alone, without reading the arena."""
        return self._from_both_ends(self.serial_lanes, self.workload.prompt)

    @torch.inference_mode()
    def _from_both_ends(self, lanes: Lanes, expected_tokens: int) -> list[Span]:
        spans: list[Span] = []
        for sequence in self.stored.sequences:
            spans += restore_from_both_ends(
                self._transfer,
                lanes,
                sequence.prefix(0),
                self.stored.pages.keys,
                self.stored.pages.values,
                block_tokens=MAX_BATCHED_TOKENS,
                expected_tokens=expected_tokens,
            )
        return spans


@dataclass(frozen=True, slots=True)
class Planned:
    """The planner's choices, from the measured profile."""

    workload: RestoreWorkload
    costs: SplitCosts
    column: PipelineOptions
    pipelined: PipelineOptions
    column_split: int
    pipelined_split: int
    meeting: RecomputeEstimate

    @classmethod
    def of(cls, workload: RestoreWorkload, profile: Profile) -> Planned:
        shape, cached = workload.model_shape, workload.prompt
        costs = SplitCosts.of(shape, profile)
        column = PipelineOptions(Schedule.COLUMN)
        staging = STAGING_PAGES * CHUNK_TOKENS
        pipelined = best_pipeline_options(
            costs, cached, Schedule.PIPELINED, chunk_tokens=CHUNK_TOKENS, staging_tokens=staging
        )
        if workload.tile:
            tile = min(workload.tile, staging // 2)
            pipelined = PipelineOptions(Schedule.PIPELINED, tile, staging // tile)
        tokens = TokenRecompute(shape, profile, costs, cached, CHUNK_TOKENS, MAX_BATCHED_TOKENS)

        def best(options: PipelineOptions) -> int:
            return best_split(costs, cached, options, quantum=CHUNK_TOKENS)

        splits = best(column), best(pipelined)
        return cls(workload, costs, column, pipelined, *splits, tokens.estimate())

    def seconds(self, split: int, options: PipelineOptions) -> float:
        """Return the predicted seconds of all sequences at this split."""
        cached = self.workload.prompt
        return self.workload.batch * self.costs.seconds(split, cached, options)


def run_all(
    workload: RestoreWorkload, progress: Progress, trace: Trace | None = None
) -> RestoreResults:
    """Measure all methods in turns. Raises Internal if a restored page is wrong.

    `trace` gets one run of the pipelined split, or, where there is none, of loading.
    """
    device = choose_device(workload.device)
    if device.type == "cpu":
        torch.set_num_threads(workload.threads)
    kernels = use_worker_kernels(device, workload.data_type, [workload.model_shape.head_dim])
    progress.say(f"{workload.model_shape.name}: random weights")
    model = make_model(workload.model_shape, workload.seed, device)
    progress.say(f"computing and storing {workload.batch} x {workload.prompt} tokens")
    with stored_prefixes(workload, model, device) as stored:
        if workload.balance:
            progress.say("measuring how long recomputing everything takes")
            workload = _balanced(workload, stored)
        restorer = Restorer(stored, workload)
        try:
            return replace(_measure(workload, restorer, progress, trace), kernels=kernels)
        finally:
            restorer.close()


def _balanced(workload: RestoreWorkload, stored: Stored) -> RestoreWorkload:
    """Return the workload with a link that loads everything as fast as recomputing it."""
    workload = replace(workload, balance=False)
    restorer = Restorer(stored, workload)
    seconds = []
    try:
        for _ in range(1 + SEARCH_RUNS):
            started = time.perf_counter()
            restorer.prefill()
            seconds.append(time.perf_counter() - started)
    finally:
        restorer.close()
    layout = stored.tensors.layout
    chunks = sum(len(sequence.chunks) for sequence in stored.sequences)
    size = 2 * layout.layer_count * chunks * layout.kv_slot_bytes
    # The first run warmed up.
    return replace(workload, link_rate=round(size / statistics.median(seconds[1:])))


def _measure(
    workload: RestoreWorkload, restorer: Restorer, progress: Progress, trace: Trace | None
) -> RestoreResults:
    progress.say("measuring link and device alone")
    stored = restorer.stored
    description = describe_device(stored.device)
    at_start = measure(stored.model, stored.device, description, lanes=restorer.lanes)
    profile = _refitted(at_start, workload, restorer)
    planned = Planned.of(workload, profile)
    tile = planned.pipelined.tile_tokens
    contenders: list[tuple[Result, Run]] = [
        (
            Result(LOAD, split=0, predicted_seconds=planned.seconds(0, planned.pipelined)),
            lambda: restorer.split(0, Schedule.PIPELINED, tile),
        ),
        (Result(TOKENS), restorer.prefill),
        (
            Result(BOTH_ENDS, predicted_seconds=workload.batch * planned.meeting.seconds),
            lambda: restorer.both_ends(planned.meeting.recomputed),
        ),
    ]
    sweep: list[SweepPoint] = []
    skipped: list[str] = []
    if stored.tensors.inputs:
        sweep = _sweep(restorer, planned, progress)
        contenders += _split_contenders(restorer, planned, sweep)
    else:
        rho = stored.model.shape.rho
        skipped.append(f"splits: rho is {rho:g}, so activations are not stored and cannot pay")
    run_rounds(contenders, restorer.stored, workload.repeats, progress, trace)
    return RestoreResults(
        profile=profile,
        profile_at_start=at_start,
        memory=stored.memory,
        results=tuple(result for result, _ in contenders),
        sweep=tuple(sweep),
        skipped=tuple(skipped),
        tolerance=TOLERANCES[workload.data_type],
        link_rate=workload.link_rate,
    )


def _refitted(profile: Profile, workload: RestoreWorkload, restorer: Restorer) -> Profile:
    """Return the profile as a worker refits it by its own restores.

    They read and write memory that no processor cache holds, unlike the first measurement.
    """
    planned = Planned.of(workload, profile)
    tile, split = planned.pipelined.tile_tokens, planned.column_split
    ways: list[Run] = [
        lambda: restorer.split(0, Schedule.PIPELINED, tile),
        restorer.prefill,
    ]
    if restorer.stored.tensors.inputs:
        ways += [
            lambda: restorer.split(workload.prompt, Schedule.PIPELINED, tile),
            lambda: restorer.split(split, Schedule.COLUMN, _whole(split)),
        ]
    tracker = CostTracker(profile)
    for way in ways:
        way()  # warms up
        spans = way()
        tracker.link.observe(_observed(spans, "send X", "load K,V"))
        tracker.rebuild.observe(_observed(spans, "rebuild"))
        tracker.prefill.observe(_observed(spans, "prefill"))
    return tracker.fits


def _observed(spans: Iterable[Span], *names: str) -> list[Observation]:
    return [
        Observation(span.amount, span.seconds)
        for span in spans
        if span.name in names and span.amount
    ]


def _split_contenders(
    restorer: Restorer, planned: Planned, sweep: Sequence[SweepPoint]
) -> Contenders:
    """Return each schedule at the split that was best in the sweep."""
    tile = planned.pipelined.tile_tokens
    column, pipelined = (_best(sweep, kind) for kind in (Schedule.COLUMN, Schedule.PIPELINED))

    def contender(
        name: str, split: int, size: int, options: PipelineOptions, *, serial: bool = False
    ) -> tuple[Result, Run]:
        seconds = planned.seconds(split, options)
        run = partial(restorer.split, split, options.schedule, size, serial=serial)
        return Result(name, split=split, tile=size, predicted_seconds=seconds), run

    in_turn = PipelineOptions(Schedule.SERIAL, tile)
    return [
        contender(ACTIVATIONS, planned.workload.prompt, tile, planned.pipelined),
        contender(COLUMN, column, _whole(column), planned.column),
        contender(SERIAL, pipelined, tile, in_turn, serial=True),
        contender(PIPELINED, pipelined, tile, planned.pipelined),
    ]


def _sweep(restorer: Restorer, planned: Planned, progress: Progress) -> list[SweepPoint]:
    """Measure time over the split for both schedules; without a sweep only near the best."""
    workload = planned.workload
    points: list[tuple[int, PipelineOptions]] = []
    contenders: list[tuple[Result, Run]] = []
    for options, best in (
        (planned.column, planned.column_split),
        (planned.pipelined, planned.pipelined_split),
    ):
        for split in _splits(workload, best):
            points.append((split, options))
            whole = options is planned.column
            tile = _whole(split) if whole else planned.pipelined.tile_tokens
            name = f"{options.schedule.value}, split {split:,}"
            contenders.append(
                (Result(name), partial(restorer.split, split, options.schedule, tile))
            )
    rounds = workload.repeats if workload.sweep_points else SEARCH_RUNS
    progress.say(f"sweep: {len(points)} splits and schedules")
    run_rounds(contenders, restorer.stored, rounds, progress)
    return [
        SweepPoint(options.schedule.value, split, result.seconds, planned.seconds(split, options))
        for (split, options), (result, _) in zip(points, contenders, strict=True)
    ]


def _splits(workload: RestoreWorkload, best: int) -> list[int]:
    """Return the splits to measure: whole chunks, or all."""
    cached = workload.prompt
    wanted: Iterable[float] = (best * factor for factor in NEARBY)
    if workload.sweep_points:
        steps = workload.sweep_points
        wanted = [*(cached * step / steps for step in range(steps + 1)), best]
    rounded = {min(round(split / CHUNK_TOKENS) * CHUNK_TOKENS, cached) for split in wanted}
    return sorted({cached if cached - split < CHUNK_TOKENS else split for split in rounded})


def _best(sweep: Sequence[SweepPoint], schedule: Schedule) -> int:
    points = [point for point in sweep if point.schedule == schedule.value]
    return min(points, key=lambda point: point.seconds).split


def _whole(split: int) -> int:
    """Return the size of one tile for the whole split."""
    return max(1, chunks_of(split, CHUNK_TOKENS)) * CHUNK_TOKENS


def run_rounds(
    contenders: Contenders,
    stored: Stored,
    rounds: int,
    progress: Progress,
    trace: Trace | None = None,
) -> None:
    """Run each to warm up, then in timed rounds. `trace` gets the first run of the last one."""
    for _, run in progress.track("warming up", contenders):
        run()
    for result, run in progress.rounds("timed runs", contenders, rounds):
        stored.pages.poison()
        started = time.perf_counter()
        spans = run()
        seconds = time.perf_counter() - started
        result.timings.append(_timing(seconds, spans))
        if trace is not None and result is contenders[-1][0] and len(result.timings) == 1:
            trace.extend(spans)
        # Outside of the time: every run counts only if it is right.
        result.largest_difference = max(result.largest_difference, stored.check(result.name))


def _timing(seconds: float, spans: Sequence[Span]) -> Timing:
    link = [span for span in spans if span.lane is Lane.LINK_IN]
    compute = [span for span in spans if span.lane is Lane.COMPUTE]
    return Timing(
        seconds,
        link_busy=sum(span.seconds for span in link),
        compute_busy=sum(span.seconds for span in compute),
        link_bytes=int(sum(span.amount for span in link)),
    )


def _lanes(device: torch.device, workload: RestoreWorkload, *, overlapped: bool) -> Lanes:
    link = None if workload.link_rate is None else EmulatedLink(workload.link_rate)
    return lanes_of(device, overlapped=overlapped, link=link)

"""What `bench growth` runs: the constants of its model, then every cache at every size."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch

from splitpoint.costs.page_choice import BucketCosts, PageCosts, Rows
from splitpoint.costs.profile import fit_line
from splitpoint.errors import Internal
from splitpoint.shapes import DataType, ModelShape
from splitpoint_cli.bench.growth.caches import CPU, BucketCache, Cache, Clock, Drawn, PagedCache
from splitpoint_cli.bench.growth.report import Growth, PointResult, Run
from splitpoint_cli.bench.growth.workload import GrowthWorkload, Point
from splitpoint_cli.bench.shared.kernels import use_worker_kernels
from splitpoint_cli.bench.shared.progress import Progress
from worker_service.profiling.page_costs import PAGE_SIZES, fit_costs, measure_page_costs

# Constants come from generations that grow so many times, and from attention over pages of so
# many tokens at these shares of the new tokens.
_BUCKET_SHARES = (4, 16)
_SHARES = (0.25, 0.5, 0.75, 1.0)
_COST_ROUNDS = 5
# Attention may differ by this share of the largest value: sums in another order.
TOLERANCES = {DataType.FLOAT32: 1e-5, DataType.BFLOAT16: 5e-2, DataType.FLOAT16: 5e-3}


@dataclass(slots=True)
class Contender:
    """One kind of growth with one size, its runs so far and its last results."""

    growth: Growth
    size: int
    make: Callable[[], Cache]
    steps: list[list[float]] = field(default_factory=list)
    growths: int = 0

    @property
    def name(self) -> str:
        return f"{self.growth.value}, {self.size:,} rows"


@torch.inference_mode()
def run_all(workload: GrowthWorkload, progress: Progress) -> tuple[list[PointResult], str]:
    """Return the results of all points, in their order, and the kernels that attend pages.

    Raises Internal if a cache is wrong.
    """
    torch.set_num_threads(workload.threads)
    shape = workload.model_shape
    kernels = use_worker_kernels(CPU, shape.data_type, [shape.head_dim])
    return [_run_point(workload, point, progress) for point in workload.points], kernels


def clock_of(threads: int) -> Clock:
    """Return CPU time for one thread: its waiting for a core is no cost of a cache. Several threads
    wait for each other, so wall-clock time counts."""
    return time.thread_time if threads == 1 else time.perf_counter


def _run_point(workload: GrowthWorkload, point: Point, progress: Progress) -> PointResult:
    shape = workload.model_shape
    drawn = Drawn.of(
        shape, batch=point.batch, prompt=workload.prompt, new=point.new, seed=workload.seed
    )
    rows = workload.rows(point)
    progress.say(f"{point}: measuring the model's constants")
    clock = clock_of(workload.threads)
    buckets = bucket_costs(shape, drawn, clock)
    pages = _page_costs(shape, point, rows, clock)
    contenders = [*_contenders(workload, point, drawn)]
    tolerance = TOLERANCES[shape.data_type]
    measure = partial(_generate, drawn=drawn, clock=clock)
    time_rounds(contenders, measure, str(point), workload.repeats, tolerance, progress)
    runs = [Run.of_steps(each.growth, each.size, each.growths, each.steps) for each in contenders]
    return PointResult(point, rows, buckets, pages, tuple(runs))


def time_rounds(
    contenders: Sequence[Contender],
    measure: Callable[[Contender], tuple[torch.Tensor, list[float]]],
    where: str,
    rounds: int,
    tolerance: float,
    progress: Progress,
) -> None:
    """Run each contender in every round, and compare its last step with the first contender's.

    Raises Internal if they differ by more than `tolerance`, a share of the largest value.
    """
    wanted, _ = measure(contenders[0])  # also warms up
    largest = wanted.abs().max().item()
    for contender in progress.rounds(f"{where}: timed runs", contenders, rounds):
        attended, seconds = measure(contender)
        contender.steps.append(seconds)
        difference = (attended - wanted).abs().max().item() / largest
        if not difference <= tolerance:
            raise Internal(f"{where}: {contender.name}: attention differs by {difference:g}")


def _contenders(workload: GrowthWorkload, point: Point, drawn: Drawn) -> Iterator[Contender]:
    shape = workload.model_shape
    sliced = workload.rows(point).bucket_sizes[::-3]
    for size in workload.rows(point).bucket_sizes:
        # A slice reads no spare row, and what remains is copies: a few sizes show it.
        for growth in (Growth.MASKED, Growth.SLICED)[: 2 if size in sliced else 1]:

            def make(size: int = size, masks: bool = growth is Growth.MASKED) -> Cache:
                return BucketCache(shape, drawn, size, masks=masks)

            yield Contender(growth, size, make)
    for size in workload.page_sizes(point):

        def make_pages(size: int = size) -> Cache:
            return PagedCache(shape, drawn, size)

        yield Contender(Growth.PAGES, size, make_pages)


def _generate(contender: Contender, drawn: Drawn, clock: Clock) -> tuple[torch.Tensor, list[float]]:
    """Return the last step's result, as fp32 `[B, n_q, d]`, and the seconds of each step."""
    cache = contender.make()
    attended = drawn.queries[0]
    ends = [clock()]
    for queries, keys, values in zip(drawn.queries, drawn.keys, drawn.values, strict=True):
        attended = cache.step(queries, keys, values)
        ends.append(clock())
    contender.growths = cache.growths
    return attended.to(torch.float32), [end - start for start, end in pairwise(ends)]


# -- constants ----------------------------------------------------------------------------


def bucket_costs(shape: ModelShape, drawn: Drawn, clock: Clock) -> BucketCosts:
    """Measure growths, attention and the rest of a step along whole generations.

    Two sizes of buckets tell what a row costs that is copied, and one that is cleared.
    """
    read: dict[int, list[float]] = defaultdict(list)
    grown: dict[tuple[int, int], list[float]] = defaultdict(list)
    rest: list[float] = []
    for number in range(_COST_ROUNDS + 1):
        for share in _BUCKET_SHARES:
            bucket = max(1, drawn.steps // share)
            cache = BucketCache(shape, drawn, bucket, masks=True)
            for row in zip(drawn.queries, drawn.keys, drawn.values, strict=True):
                times = cache.timed_step(*row, clock)
                if not number:  # the first round warms up
                    continue
                read[cache.capacity].append(times.attention)
                rest.append(times.writing)
                if times.growth is not None:
                    grown[cache.length - 1, bucket].append(times.growth)
    attention = fit_line([*read], [*map(statistics.median, read.values())])
    growth, copied, cleared = fit_costs(
        [(1, rows, bucket) for rows, bucket in grown], [*map(statistics.median, grown.values())]
    )
    return BucketCosts(
        step_seconds=attention.overhead + statistics.median(rest),
        row_seconds=1 / attention.rate,
        growth_seconds=growth,
        copy_seconds=copied,
        spare_seconds=cleared,
    )


def _page_costs(shape: ModelShape, point: Point, rows: Rows, clock: Clock) -> PageCosts:
    """Measure a plan and attention; writing a row is part of every step and of no page."""
    return measure_page_costs(
        shape,
        batch=point.batch,
        lengths=[rows.prompt + round(rows.new * share) for share in _SHARES],
        page_sizes=PAGE_SIZES,
        device=CPU,
        clock=clock,
    )

"""Measure how much a cache should grow at once, beside BMC's model.

Buckets of 1 (row by row), 2, 4, ... and all new tokens (all at once) are contiguous, and their
spare rows are attended to behind a mask, as in the paper. A point BxN generates N tokens for each
of B sequences; one BxN@K:M verifies K drafts a step, in the spare rows, and keeps M tokens (Eq. 9).
All caches get the same rows, and each result is compared. The model predicts the best size from
constants that are measured in the same run. CPU only. A result is a generation in which each step
takes its median over the rounds, with a 95 % interval (bootstrap over rounds). Rounds are repeated
until no size that may be the best has an interval wider than --interval.

    python -m benchmarks.growth [--points BxN,BxN@K:M,...] [--layers N] [--threads N]
        [--repeats N] [--most-repeats N] [--interval SHARE] [--json] [--output FILE]
"""

from __future__ import annotations

import argparse
import math
import re
import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from benchmarks.harness import finish, parser_of
from splitpoint.costs.page_choice import BucketCosts, Rows, grown_rows, nearest_power
from splitpoint.costs.profile import fit_line
from splitpoint.errors import Internal, InvalidArgument
from splitpoint.shapes import DataType, ModelShape
from splitpoint_cli.bench.ending import ended_by_signals
from splitpoint_cli.bench.harness import Progress, built_in_shape, thread_count
from worker_service.device.cache import TORCH_TYPES
from worker_service.profiling.page_costs import fit_costs

POINTS = "4x64,4x256,1x256,1x1024,4x256@7:2,4x256@7:4,1x256@7:4,1x1024@7:2,1x1024@7:4,1x1024@15:8"
LEAST_NEW = 16
# The constants come from generations that grow this many times.
BUCKET_SHARES = (4, 16)
COST_ROUNDS = 5
# Generations of the bootstrap.
_DRAWS = 200
# Attention may differ by this share of the largest value: sums in another order.
TOLERANCES = {DataType.FLOAT32: 1e-5, DataType.BFLOAT16: 5e-2, DataType.FLOAT16: 5e-3}

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Point:
    """`new` tokens are generated for each of `batch` sequences.

    A step verifies `drafts` tokens and yields `step_tokens`.
    """

    batch: int
    new: int
    drafts: int = 0
    step_tokens: int = 1

    def __str__(self) -> str:
        drafts = f"@{self.drafts}:{self.step_tokens}" if self.drafts else ""
        return f"{self.batch}x{self.new}{drafts}"

    def rows(self, prompt: int) -> Rows:
        return Rows(prompt, self.new, self.drafts, self.step_tokens)


def read_points(text: str) -> tuple[Point, ...]:
    """Return the points of a text such as "8x64,8x256@7:4". Raises InvalidArgument."""
    points = []
    for word in text.split(","):
        size = r"([1-9]\d{0,3})x([1-9]\d{0,4})(?:@([1-9]\d?):([1-9]\d?))?"
        found = re.fullmatch(rf"\s*{size}\s*", word)
        point = None if found is None else Point(*(int(each) for each in found.groups() if each))
        if point is None or point.new < LEAST_NEW or point.step_tokens > 1 + point.drafts:
            raise InvalidArgument(
                f"{word!r} is no point: 8x256 means 256 new tokens of each of 8 sequences, at "
                f"least {LEAST_NEW}; 8x256@7:4 means 7 drafts a step, which yields 4 tokens",
                field="points",
            )
        points.append(point)
    return tuple(points)


# -- caches -----------------------------------------------------------------------------

# Queries, keys and values of a step's rows, and how many of them are kept.
Step = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What all caches are given, in every layer alike.

    Attributes:
        prompt_keys, prompt_values: `[B, n_kv, s, d]`.
        keys, values: `[N, B, n_kv, d]`, one row of each sequence for each token.
        queries: `[N, B, n_q, d]`.
    """

    prompt_keys: torch.Tensor
    prompt_values: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor

    @classmethod
    def of(cls, shape: ModelShape, *, batch: int, prompt: int, new: int, seed: int) -> Drawn:
        generator = torch.Generator().manual_seed(seed)
        kept = (batch, shape.kv_head_count)

        def draw(*size: int) -> torch.Tensor:
            drawn = torch.randn(*size, shape.head_dim, generator=generator)
            return drawn.to(TORCH_TYPES[shape.data_type])

        return cls(
            prompt_keys=draw(*kept, prompt),
            prompt_values=draw(*kept, prompt),
            keys=draw(new, *kept),
            values=draw(new, *kept),
            queries=draw(new, batch, shape.query_head_count),
        )

    def steps(self, rows: Rows) -> Iterator[Step]:
        """Yield the arguments of the cache's step for each step of a generation."""
        for length, count in rows.steps:
            first = length - rows.prompt
            span = slice(first, first + count)
            kept = min(rows.step_tokens, count)
            yield self.queries[span], self.keys[span], self.values[span], kept


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of the parts of one step; growth is None in a step that did not grow."""

    growth: float | None
    writing: float
    attention: float


class BucketCache:
    """Contiguous K and V of a batch, `[B, n_kv, capacity, d]` per layer, that grow by a bucket.

    To grow is to allocate larger buffers, to copy all rows and to clear the spare ones, which one
    additive mask hides.
    """

    def __init__(self, shape: ModelShape, drawn: Drawn, bucket: int, *, spare: float = 0.0) -> None:
        """`spare`: what spare rows hold. Only tests want something else than zeros."""
        self._bucket = bucket
        self._spare = spare
        self._group = shape.query_head_count // shape.kv_head_count
        self.length = drawn.prompt_keys.shape[2]
        self.growths = 0
        self._written = self.length
        self._mask = drawn.prompt_keys.new_zeros(self.length)
        # The least finite number: -1e9 is minus infinity in half precision.
        self._least = torch.finfo(self._mask.dtype).min
        self._keys = [drawn.prompt_keys.clone() for _ in range(shape.layer_count)]
        self._values = [drawn.prompt_values.clone() for _ in range(shape.layer_count)]

    @property
    def capacity(self) -> int:
        """Rows that the buffers have, spare ones included."""
        return len(self._mask)

    def step(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kept: int
    ) -> torch.Tensor:
        """Add q rows `[q, B, n_kv, d]` of K and V to each layer, of which the first `kept` stay.

        Attend with `[q, B, n_q, d]`, each query to all rows up to its own; return the last layer's
        result, `[q, B, n_q, d]`.
        """
        self._grow_for(len(keys))
        self._write(keys, values)
        attended = self._attend(queries)
        self.length += kept
        return attended

    def timed_step(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kept: int,
        clock: Clock,
    ) -> StepTimes:
        """Do as `step`, and return the seconds of its parts."""
        started, before = clock(), self.growths
        self._grow_for(len(keys))
        grown = clock()
        self._write(keys, values)
        written = clock()
        self._attend(queries)
        ended = clock()
        self.length += kept
        growth = grown - started if self.growths > before else None
        return StepTimes(growth, written - grown, ended - written)

    def _write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        first, end = self.length, self.length + len(keys)
        self._mask[first:end] = 0
        if self._written > end:  # rejected drafts; there are fewer near the end of a generation
            self._mask[end : self._written] = self._least
        self._written = end
        for planes, rows in ((self._keys, keys), (self._values, values)):
            for plane in planes:
                plane[:, :, first:end] = rows.permute(1, 2, 0, 3)

    def _grow_for(self, count: int) -> None:
        added = grown_rows(self.capacity, self.length + count, self._bucket)
        if not added:
            return
        self.growths += 1
        for planes in (self._keys, self._values):
            for layer, plane in enumerate(planes):
                planes[layer] = self._grown(plane, added)
        grown = self._mask.new_full((len(self._mask) + added,), self._least)
        grown[: self.length] = 0
        self._mask = grown

    def _grown(self, plane: torch.Tensor, added: int) -> torch.Tensor:
        batch, heads, rows, width = plane.shape
        grown = plane.new_empty((batch, heads, rows + added, width))
        grown[:, :, :rows] = plane
        # Not left as they were found: 0 * NaN is NaN.
        grown[:, :, rows:] = self._spare
        return grown

    def _attend(self, queries: torch.Tensor) -> torch.Tensor:
        count, batch, heads, width = queries.shape
        groups = heads // self._group
        by_head = (queries / math.sqrt(width)).view(count, batch, groups, self._group, width)
        # The queries of a KV head are the rows of one product.
        folded = by_head.permute(1, 2, 0, 3, 4).reshape(batch, groups, -1, width)
        mask, attended = self._mask_of(count), folded
        for keys, values in zip(self._keys, self._values, strict=True):
            scores = folded @ keys.transpose(2, 3) + mask
            attended = scores.softmax(-1) @ values
        by_query = attended.view(batch, groups, count, self._group, width)
        return by_query.permute(2, 0, 1, 3, 4).reshape(count, batch, heads, width)

    def _mask_of(self, count: int) -> torch.Tensor:
        """Return the mask of a step's queries, for all layers: `[capacity]` for one query."""
        if count == 1:
            return self._mask
        mask = self._mask.repeat(count, 1)
        later = torch.ones(count, count, dtype=torch.bool).triu_(1)
        mask[:, self.length : self.length + count].masked_fill_(later, self._least)
        return mask.repeat_interleave(self._group, 0)


# -- the model's constants --------------------------------------------------------------


def bucket_costs(shape: ModelShape, drawn: Drawn, rows: Rows, clock: Clock) -> BucketCosts:
    """Measure growths, attention and the rest of a step along whole generations.

    Two sizes of buckets tell what a row costs that is copied, and one that is cleared.
    """
    read: dict[int, list[float]] = defaultdict(list)
    grown: dict[tuple[int, int], list[float]] = defaultdict(list)
    rest: list[float] = []
    for number in range(COST_ROUNDS + 1):
        for share in BUCKET_SHARES:
            bucket = max(1 + rows.drafts, rows.new // share)
            cache = BucketCache(shape, drawn, bucket)
            for step in drawn.steps(rows):
                length = cache.length
                times = cache.timed_step(*step, clock)
                if not number:  # the first round warms up
                    continue
                read[cache.capacity].append(times.attention)
                rest.append(times.writing)
                if times.growth is not None:
                    grown[length, bucket].append(times.growth)
    attention = fit_line([*read], [*map(statistics.median, read.values())])
    growth, copied, cleared = fit_costs(
        [(1, copied, bucket) for copied, bucket in grown],
        [*map(statistics.median, grown.values())],
    )
    return BucketCosts(
        step_seconds=attention.overhead + statistics.median(rest),
        row_seconds=1 / attention.rate,
        growth_seconds=growth,
        copy_seconds=copied,
        spare_seconds=cleared,
    )


# -- runs -------------------------------------------------------------------------------


@dataclass(slots=True)
class Contender:
    """Buckets of one size, and the runs so far.

    Attributes:
        steps: of each round, the seconds of each step.
        faults: of each round, the minor page faults of the process.
    """

    size: int
    make: Callable[[], BucketCache]
    predicted_seconds: float
    steps: list[list[float]] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    growths: int = 0

    @property
    def typical(self) -> float:
        """Seconds of a generation in which each step takes its median over the rounds.

        A disturbance of the machine hits other steps in each round, so it does not count.
        """
        return float(sum(statistics.median(step) for step in zip(*self.steps, strict=True)))

    @property
    def interval(self) -> tuple[float, float]:
        """Where `typical` is with 95 %: rounds are drawn anew, with replacement."""
        steps = np.array(self.steps)
        draws = np.random.default_rng(0).integers(len(steps), size=(_DRAWS, len(steps)))
        typical = [float(np.median(steps[draw], axis=0).sum()) for draw in draws]
        low, high = np.quantile(typical, (0.025, 0.975)).tolist()
        return low, high

    def report(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "growths": self.growths,
            "seconds": round(self.typical, 6),
            "interval": [round(bound, 6) for bound in self.interval],
            "minor_faults": statistics.median(self.faults) if self.faults else None,
            "runs": [round(sum(each), 6) for each in self.steps],
            "predicted_seconds": round(self.predicted_seconds, 6),
        }


@dataclass(frozen=True, slots=True)
class Generation:
    """One run: the last step's result as fp32, the seconds of each step, minor page faults."""

    attended: torch.Tensor
    seconds: list[float]
    faults: int


def generate(contender: Contender, drawn: Drawn, rows: Rows, clock: Clock) -> Generation:
    cache = contender.make()
    attended = drawn.queries
    faults = _faults()
    ends = [clock()]
    for step in drawn.steps(rows):
        attended = cache.step(*step)
        ends.append(clock())
    contender.growths = cache.growths
    seconds = [end - start for start, end in pairwise(ends)]
    return Generation(attended.to(torch.float32), seconds, _faults() - faults)


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def time_rounds(
    contenders: Sequence[Contender],
    measure: Callable[[Contender], Generation],
    where: str,
    rounds: int,
    tolerance: float,
    progress: Progress,
) -> None:
    """Run each contender in every round, and compare its last step with the first contender's.

    Raises Internal if they differ by more than `tolerance`, a share of the largest value.
    """
    wanted = measure(contenders[0]).attended  # also warms up
    largest = wanted.abs().max().item()
    for contender in progress.rounds(f"{where}: timed runs", contenders, rounds):
        run = measure(contender)
        contender.steps.append(run.seconds)
        contender.faults.append(run.faults)
        difference = (run.attended - wanted).abs().max().item() / largest
        if not difference <= tolerance:
            raise Internal(f"{where}: {contender.size:,} rows: attention differs by {difference:g}")


def best_of(contenders: Sequence[Contender]) -> tuple[Contender, list[Contender]]:
    """Return the fastest contender, and all that may be the fastest by their intervals."""
    best = min(contenders, key=lambda each: each.typical)
    high = best.interval[1]
    return best, [each for each in contenders if each.interval[0] <= high]


def is_settled(contenders: Sequence[Contender], width: float) -> bool:
    """Return True if no interval of what may be the fastest is wider than this share."""
    return all(
        each.interval[1] - each.interval[0] <= width * each.typical
        for each in best_of(contenders)[1]
    )


def measure_point(
    shape: ModelShape, point: Point, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    drawn = Drawn.of(
        shape, batch=point.batch, prompt=arguments.prompt, new=point.new, seed=arguments.seed
    )
    rows = point.rows(arguments.prompt)
    # CPU time of one thread: its waiting for a core is no cost of a cache. Several threads wait
    # for each other, so wall-clock time counts.
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    progress.say(f"{point}: measuring the model's constants")
    costs = bucket_costs(shape, drawn, rows, clock)
    contenders = [
        Contender(
            size,
            partial(BucketCache, shape, drawn, size),
            costs.seconds(rows, size),
        )
        for size in rows.bucket_sizes
    ]
    measure = partial(generate, drawn=drawn, rows=rows, clock=clock)
    tolerance = TOLERANCES[shape.data_type]
    time_rounds(contenders, measure, str(point), arguments.repeats, tolerance, progress)
    while not is_settled(contenders, arguments.interval):
        left = arguments.most_repeats - len(contenders[0].steps)
        if left <= 0:
            break
        more = min(left, arguments.repeats)
        time_rounds(contenders, measure, str(point), more, tolerance, progress)
    (best, may_be_best), model = best_of(contenders), costs.best_bucket(rows)
    chosen = nearest_power(model, most=rows.new)
    at_chosen = next(each for each in contenders if each.size == chosen)
    return {
        "point": str(point),
        **asdict(point),
        "bucket_costs": asdict(costs),
        "copy_to_attend": round(costs.ratio, 3),
        "rounds": len(best.steps),
        "is_settled": is_settled(contenders, arguments.interval),
        "best": best.size,
        "best_seconds": round(best.typical, 6),
        "may_be_best": [each.size for each in may_be_best],
        "model": round(model, 2),
        "chosen": chosen,
        "chosen_to_best": round(at_chosen.typical / best.typical, 3),
        "sizes": [each.report() for each in contenders],
    }


@torch.inference_mode()
def measure(
    arguments: argparse.Namespace, points: Sequence[Point], progress: Progress
) -> dict[str, Any]:
    """Measure all points. Raises Internal if a cache is wrong, so that each result is verified."""
    torch.set_num_threads(arguments.threads)
    shape = replace(
        built_in_shape(arguments.shape.lower()),
        data_type=DataType(arguments.dtype),
        layer_count=arguments.layers,
        # Longer than the shape's own: positions cost attention nothing.
        context_length=arguments.prompt + max(point.new for point in points),
    )
    return {
        "benchmark": "growth",
        "shape": arguments.shape.lower(),
        **{
            name: getattr(arguments, name)
            for name in ("dtype", "layers", "prompt", "threads", "interval", "seed")
        },
        "clock": "processor" if arguments.threads == 1 else "wall-clock",
        "points": [measure_point(shape, point, arguments, progress) for point in points],
    }


def show(result: Mapping[str, Any]) -> None:
    for point in result["points"]:
        sizes = point["sizes"]
        print(
            f"{point['point']}: r = 1 {1e3 * sizes[0]['seconds']:.1f} ms, upfront "
            f"{1e3 * sizes[-1]['seconds']:.1f} ms, best r {point['best']}: "
            f"{1e3 * point['best_seconds']:.1f} ms (may be best: {point['may_be_best']}); model "
            f"{point['model']:.0f}: {point['chosen_to_best']:.3f} of the best at "
            f"{point['chosen']}; copy/attend {point['copy_to_attend']}; {point['rounds']} rounds, "
            f"{result['clock']} time; minor page faults "
            f"{sizes[0]['minor_faults']:.0f} (r = 1), {sizes[-1]['minor_faults']:.0f} (upfront)"
        )


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--shape", default="opt-125m", help="a built-in shape")
    add("--dtype", default="float32", choices=[each.value for each in DataType])
    add("--points", default=POINTS, help="batch x new tokens @ drafts : tokens a step, with commas")
    add("--layers", type=int, default=2, help="layers whose attention runs in a step")
    add("--prompt", type=int, default=16, help="rows in the cache before the first step")
    add("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    add("--repeats", type=int, default=6, help="timed generations of each size, at least")
    add("--most-repeats", type=int, default=48, help="timed generations of each size, at most")
    add("--interval", type=float, default=0.03, help="widest interval, as a share of the time")
    add("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    arguments.threads = thread_count(arguments.threads)
    points = read_points(arguments.points)
    with ended_by_signals():
        finish(arguments, measure(arguments, points, Progress()), show)
    return 0


if __name__ == "__main__":
    sys.exit(main())

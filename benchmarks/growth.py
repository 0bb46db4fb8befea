"""Measure how much a cache should grow at once, beside BMC's model.

Buckets of 1 (row by row), 2, 4, ... and all new tokens (all at once) are contiguous, and their
spare rows are attended to behind a mask, as in the paper. All caches get the same rows, and each
result is compared. The model predicts the best size from constants that are measured in the same
run. CPU only. A result is a generation in which each step takes its median over the rounds.

    python -m benchmarks.growth [--points BxN,...] [--layers N] [--threads N] [--repeats N]
        [--json] [--output FILE]
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from benchmarks.harness import finish, parser_of
from splitpoint.costs.page_choice import BucketCosts, Rows
from splitpoint.costs.profile import fit_line
from splitpoint.errors import Internal, InvalidArgument
from splitpoint.shapes import DataType, ModelShape
from splitpoint_cli.bench.ending import ended_by_signals
from splitpoint_cli.bench.harness import Progress, built_in_shape, thread_count
from worker_service.device.cache import TORCH_TYPES
from worker_service.profiling.page_costs import fit_costs

LEAST_NEW = 16
# The constants come from generations that grow this many times.
BUCKET_SHARES = (4, 16)
COST_ROUNDS = 5
# Attention may differ by this share of the largest value: sums in another order.
TOLERANCES = {DataType.FLOAT32: 1e-5, DataType.BFLOAT16: 5e-2, DataType.FLOAT16: 5e-3}

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Point:
    """`new` tokens are generated for each of `batch` sequences."""

    batch: int
    new: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.new}"


def read_points(text: str) -> tuple[Point, ...]:
    """Return the points of a text such as "8x64,8x256". Raises InvalidArgument."""
    points = []
    for word in text.split(","):
        found = re.fullmatch(r"\s*([1-9]\d{0,3})x([1-9]\d{0,4})\s*", word)
        if found is None or int(found[2]) < LEAST_NEW:
            raise InvalidArgument(
                f"{word!r} is no point: 8x256 means 256 new tokens of each of 8 sequences, "
                f"and at least {LEAST_NEW} tokens",
                field="points",
            )
        points.append(Point(int(found[1]), int(found[2])))
    return tuple(points)


# -- caches -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Drawn:
    """What all caches are given, in every layer alike.

    Attributes:
        prompt_keys, prompt_values: `[B, n_kv, s, d]`.
        keys, values: `[N, B, n_kv, d]`, one row of each sequence a step.
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

    @property
    def steps(self) -> int:
        return len(self.queries)


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
        self._mask = drawn.prompt_keys.new_zeros(self.length)
        self._keys = [drawn.prompt_keys.clone() for _ in range(shape.layer_count)]
        self._values = [drawn.prompt_values.clone() for _ in range(shape.layer_count)]

    @property
    def capacity(self) -> int:
        """Rows that the buffers have, spare ones included."""
        return len(self._mask)

    def step(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Add a row `[B, n_kv, d]` of K and V to each layer, and attend to all rows there are
        with `[B, n_q, d]`; return the last layer's result, `[B, n_q, d]`."""
        if self.length == self.capacity:
            self._grow()
        self._write(keys, values)
        return self._attend(queries)

    def timed_step(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, clock: Clock
    ) -> StepTimes:
        """Do as `step`, and return the seconds of its parts."""
        started = clock()
        is_full = self.length == self.capacity
        if is_full:
            self._grow()
        grown = clock()
        self._write(keys, values)
        written = clock()
        self._attend(queries)
        ended = clock()
        return StepTimes(grown - started if is_full else None, written - grown, ended - written)

    def _write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        row = self.length
        self.length += 1
        self._mask[row] = 0
        for all_keys, all_values in zip(self._keys, self._values, strict=True):
            all_keys[:, :, row] = keys
            all_values[:, :, row] = values

    def _grow(self) -> None:
        self.growths += 1
        for planes in (self._keys, self._values):
            for layer, plane in enumerate(planes):
                planes[layer] = self._grown(plane)
        # The least finite number: -1e9 is minus infinity in half precision.
        least = torch.finfo(self._mask.dtype).min
        grown = self._mask.new_full((len(self._mask) + self._bucket,), least)
        grown[: self.length] = 0
        self._mask = grown

    def _grown(self, plane: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, width = plane.shape
        grown = plane.new_empty((batch, heads, rows + self._bucket, width))
        grown[:, :, :rows] = plane
        # Not left as they were found: 0 * NaN is NaN.
        grown[:, :, rows:] = self._spare
        return grown

    def _attend(self, queries: torch.Tensor) -> torch.Tensor:
        batch, heads, width = queries.shape
        folded = (queries / math.sqrt(width)).view(batch, heads // self._group, self._group, width)
        attended = folded
        for keys, values in zip(self._keys, self._values, strict=True):
            scores = folded @ keys.transpose(2, 3) + self._mask
            attended = scores.softmax(-1) @ values
        return attended.reshape(batch, heads, width)


# -- the model's constants --------------------------------------------------------------


def bucket_costs(shape: ModelShape, drawn: Drawn, clock: Clock) -> BucketCosts:
    """Measure growths, attention and the rest of a step along whole generations.

    Two sizes of buckets tell what a row costs that is copied, and one that is cleared.
    """
    read: dict[int, list[float]] = defaultdict(list)
    grown: dict[tuple[int, int], list[float]] = defaultdict(list)
    rest: list[float] = []
    for number in range(COST_ROUNDS + 1):
        for share in BUCKET_SHARES:
            bucket = max(1, drawn.steps // share)
            cache = BucketCache(shape, drawn, bucket)
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


# -- runs -------------------------------------------------------------------------------


@dataclass(slots=True)
class Contender:
    """Buckets of one size, and the runs so far."""

    size: int
    make: Callable[[], BucketCache]
    predicted_seconds: float
    steps: list[list[float]] = field(default_factory=list)
    growths: int = 0

    @property
    def typical(self) -> float:
        """Seconds of a generation in which each step takes its median over the rounds.

        A disturbance of the machine hits other steps in each round, so it does not count.
        """
        return float(sum(statistics.median(step) for step in zip(*self.steps, strict=True)))

    def report(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "growths": self.growths,
            "seconds": round(self.typical, 6),
            "runs": [round(sum(each), 6) for each in self.steps],
            "predicted_seconds": round(self.predicted_seconds, 6),
        }


def generate(contender: Contender, drawn: Drawn, clock: Clock) -> tuple[torch.Tensor, list[float]]:
    """Return the last step's result, as fp32 `[B, n_q, d]`, and the seconds of each step."""
    cache = contender.make()
    attended = drawn.queries[0]
    ends = [clock()]
    for queries, keys, values in zip(drawn.queries, drawn.keys, drawn.values, strict=True):
        attended = cache.step(queries, keys, values)
        ends.append(clock())
    contender.growths = cache.growths
    return attended.to(torch.float32), [end - start for start, end in pairwise(ends)]


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
            raise Internal(f"{where}: {contender.size:,} rows: attention differs by {difference:g}")


def measure_point(
    shape: ModelShape, point: Point, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    drawn = Drawn.of(
        shape, batch=point.batch, prompt=arguments.prompt, new=point.new, seed=arguments.seed
    )
    rows = Rows(arguments.prompt, point.new)
    # CPU time of one thread: its waiting for a core is no cost of a cache. Several threads wait
    # for each other, so wall-clock time counts.
    clock = time.thread_time if arguments.threads == 1 else time.perf_counter
    progress.say(f"{point}: measuring the model's constants")
    costs = bucket_costs(shape, drawn, clock)
    contenders = [
        Contender(
            size,
            partial(BucketCache, shape, drawn, size),
            costs.seconds(rows, size, reads_spare=True),
        )
        for size in rows.bucket_sizes
    ]
    measure = partial(generate, drawn=drawn, clock=clock)
    tolerance = TOLERANCES[shape.data_type]
    time_rounds(contenders, measure, str(point), arguments.repeats, tolerance, progress)
    best, model = min(contenders, key=lambda each: each.typical), costs.best_bucket(rows)
    return {
        **asdict(point),
        "bucket_costs": asdict(costs),
        "copy_to_attend": round(costs.ratio, 3),
        "best": best.size,
        "best_seconds": round(best.typical, 6),
        "model": round(model, 2),
        "best_to_model": round(best.size / model, 3),
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
            for name in ("dtype", "layers", "prompt", "threads", "repeats", "seed")
        },
        "clock": "processor" if arguments.threads == 1 else "wall-clock",
        "points": [measure_point(shape, point, arguments, progress) for point in points],
    }


def show(result: Mapping[str, Any]) -> None:
    for point in result["points"]:
        sizes = point["sizes"]
        print(
            f"{point['batch']} x {point['new']}: r = 1 {1e3 * sizes[0]['seconds']:.1f} ms, upfront "
            f"{1e3 * sizes[-1]['seconds']:.1f} ms, best r {point['best']}: "
            f"{1e3 * point['best_seconds']:.1f} ms (model: {point['model']:.0f}), copy/attend "
            f"{point['copy_to_attend']}; {result['clock']} time"
        )


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--shape", default="opt-125m", help="a built-in shape")
    add("--dtype", default="float32", choices=[each.value for each in DataType])
    add("--points", default="4x64,4x256,1x256,1x1024", help="batch x new tokens, with commas")
    add("--layers", type=int, default=2, help="layers whose attention runs in a step")
    add("--prompt", type=int, default=16, help="rows in the cache before the first step")
    add("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    add("--repeats", type=int, default=5, help="timed generations of each cache and size")
    add("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    arguments.threads = thread_count(arguments.threads)
    points = read_points(arguments.points)
    with ended_by_signals():
        finish(arguments, measure(arguments, points, Progress()), show)
    return 0


if __name__ == "__main__":
    sys.exit(main())

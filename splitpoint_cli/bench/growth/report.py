"""Results of `bench growth`, as JSON and as a table; runs nothing, needs no torch."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.table import Table

from splitpoint.config import counted
from splitpoint.costs.page_choice import BucketCosts, PageCosts, Rows
from splitpoint_cli.bench.growth.workload import GrowthWorkload, Point
from splitpoint_cli.bench.shared.report import commit, hardware, report_table
from splitpoint_cli.output import seconds_text


class Growth(StrEnum):
    """Kinds of caches: buckets behind a mask, buckets of which a slice is read, our pages."""

    MASKED = "masked"
    SLICED = "sliced"
    PAGES = "pages"


@dataclass(frozen=True, slots=True)
class Run:
    """All timed generations of one cache.

    Attributes:
        size: rows of a bucket, or tokens of a page.
        growths: how often memory was added.
        typical: seconds of a generation in which each step takes its median over the rounds. A
            disturbance of the machine hits other steps in each round, so it does not count.
        seconds: of each generation.
    """

    growth: Growth
    size: int
    growths: int
    typical: float
    seconds: tuple[float, ...]

    @classmethod
    def of_steps(
        cls, growth: Growth, size: int, growths: int, rounds: Sequence[Sequence[float]]
    ) -> Run:
        """Return the run of some generations by the seconds of their steps."""
        typical = sum(statistics.median(step) for step in zip(*rounds, strict=True))
        return cls(growth, size, growths, typical, tuple(map(sum, rounds)))


@dataclass(frozen=True, slots=True)
class PointResult:
    """Everything measured at one point."""

    point: Point
    rows: Rows
    buckets: BucketCosts
    pages: PageCosts
    runs: tuple[Run, ...]

    def runs_of(self, growth: Growth) -> list[Run]:
        return [run for run in self.runs if run.growth is growth]

    def best(self, growth: Growth) -> Run:
        return min(self.runs_of(growth), key=lambda run: run.typical)

    def model(self, growth: Growth) -> float:
        """Return the best size by the model, not rounded. A slice reads no spare row: all at once
        is best."""
        if growth is Growth.SLICED:
            return float(self.rows.new)
        if growth is Growth.PAGES:
            return self.pages.best_page(self.rows)
        return self.buckets.best_bucket(self.rows)

    def predicted(self, run: Run) -> float:
        """Return the model's seconds of a run."""
        if run.growth is Growth.PAGES:
            return self.pages.seconds(self.rows, run.size)
        return self.buckets.seconds(self.rows, run.size, reads_spare=run.growth is Growth.MASKED)


def report_of(
    workload: GrowthWorkload, results: Sequence[PointResult], kernels: str
) -> dict[str, Any]:
    """Return the JSON object. Times in seconds, sizes in rows of a sequence.

    `kernels`: those of a worker, by which pages were attended to.
    """
    facts = asdict(workload)
    del facts["points"]
    return {
        "benchmark": "growth",
        **facts,
        "kernels": kernels,
        "hardware": hardware(),
        "commit": commit(),
        "clock": "cpu" if workload.threads == 1 else "wall",
        "points": [_point_json(result) for result in results],
        "growths_exponents": _exponents(results),
        # Raised as an error otherwise: a wrong answer has no time.
        "verified": True,
    }


def _point_json(result: PointResult) -> dict[str, Any]:
    ratio = result.pages.ratio
    return {
        **asdict(result.point),
        "bucket_costs": asdict(result.buckets),
        "copy_to_attend": round(result.buckets.ratio, 3),
        "page_costs": asdict(result.pages),
        # JSON has no infinity.
        "page_to_row": round(ratio, 3) if math.isfinite(ratio) else None,
        "growth": {kind.value: _growth_json(result, kind) for kind in Growth},
    }


def _growth_json(result: PointResult, kind: Growth) -> dict[str, Any]:
    best, model = result.best(kind), result.model(kind)
    return {
        "best": best.size,
        "best_seconds": round(best.typical, 6),
        "model": round(model, 2),
        "best_to_model": round(best.size / model, 3),
        "sizes": [
            {
                "size": run.size,
                "growths": run.growths,
                "seconds": round(run.typical, 6),
                "runs": [round(each, 6) for each in run.seconds],
                "predicted_seconds": round(result.predicted(run), 6),
            }
            for run in result.runs_of(kind)
        ],
    }


def _exponents(results: Sequence[PointResult]) -> dict[str, dict[str, float]]:
    """Return by batch the e of T ~ N^e, with T growths at the best r: measured, and the model's.

    A batch with only one N has none. The paper's is 0.5.
    """
    by_batch: dict[int, list[PointResult]] = defaultdict(list)
    for result in results:
        by_batch[result.point.batch].append(result)
    return {
        str(batch): {
            "measured": _slope(
                [(each.point.new, each.best(Growth.MASKED).growths) for each in group]
            ),
            "model": _slope(
                [(each.point.new, each.point.new / each.model(Growth.MASKED)) for each in group]
            ),
        }
        for batch, group in by_batch.items()
        if len(group) > 1
    }


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of log y over log x by least squares."""
    xs, ys = ([math.log(value) for value in values] for values in zip(*points, strict=True))
    return round(statistics.linear_regression(xs, ys).slope, 3)


def table_of(report: Mapping[str, Any]) -> Table:
    """Return for each point the paper's two extremes, the best bucket and page, and the model's."""
    table = report_table(
        f"{report['shape']} {report['dtype']}: attention of {counted(report['layers'], 'layer')} "
        f"after {counted(report['prompt'], 'row')}, {counted(report['threads'], 'thread')}",
        *("batch x new", "r = 1", "upfront", "best r", "model r", "copy/attend"),
        *("best slice", "best page", "model page", "page/row"),
    )
    for point in report["points"]:
        masked, sliced, pages = (point["growth"][kind.value] for kind in Growth)
        sizes = masked["sizes"]
        table.add_row(
            f"{point['batch']} x {point['new']:,}",
            seconds_text(sizes[0]["seconds"]),
            seconds_text(sizes[-1]["seconds"]),
            f"{masked['best']:,}: {seconds_text(masked['best_seconds'])}",
            f"{masked['model']:.0f}",
            f"{point['copy_to_attend']:.2f}",
            seconds_text(sliced["best_seconds"]),
            f"{pages['best']:,}: {seconds_text(pages['best_seconds'])}",
            f"{pages['model']:.0f}",
            "-" if point["page_to_row"] is None else f"{point['page_to_row']:.1f}",
        )
    exponents = [
        f"batch {batch}: T ~ N^{each['measured']} measured, N^{each['model']} by the model"
        for batch, each in report["growths_exponents"].items()
    ]
    table.caption = "\n".join(
        [
            "seconds of all steps of a generation; r: rows of a bucket; page: tokens of a page; "
            "model r, model page: the best by the model",
            "copy/attend: cost of copying a row over that of attending to it; page/row: cost of "
            "a page over that of a row",
            f"{report['hardware']}, {report['clock']} time, "
            f"{counted(report['repeats'], 'generation')} of each, medians step by step",
            f"pages by a worker's kernels: {report['kernels']}",
            *exponents,
        ]
    )
    return table

"""`splitpoint bench growth`: how much a cache should grow at once, measured beside BMC's model.

runs.py has what is run; it is imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitpoint.extras import need_all
from splitpoint_cli.bench.growth.picture import picture_of
from splitpoint_cli.bench.growth.report import report_of, table_of
from splitpoint_cli.bench.growth.workload import GrowthWorkload, read_points
from splitpoint_cli.bench.shared import options
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.shared.report import hand_over_report
from splitpoint_cli.output import AsJson, OutputFile
from splitpoint_cli.plots import check_picture, save

_Points = Annotated[
    str,
    typer.Option(
        help="Points to measure, with commas: sequences of a batch, x, new tokens of each.",
        metavar="BxN,...",
    ),
]
_Layers = Annotated[
    int, typer.Option(help="Number of layers whose attention runs in a step.", min=1)
]
_Prompt = Annotated[
    int, typer.Option(help="Rows of each sequence in the cache before the first step.", min=1)
]
_Repeats = Annotated[
    int, typer.Option(help="Number of timed generations of each cache and size.", min=1)
]
_Picture = Annotated[
    Path | None,
    typer.Option(
        help="Draw the results as a picture into this file; absent: none.", metavar="FILE"
    ),
]


def growth(
    shape: options.RandomShape = "opt-125m",
    dtype: options.ElementType = "float32",
    points: _Points = "4x64,4x256,1x256,1x1024",
    layers: _Layers = 2,
    prompt: _Prompt = 16,
    threads: options.Threads = 0,
    repeats: _Repeats = 5,
    seed: options.Seed = 0,
    as_json: AsJson = False,
    output: OutputFile = None,
    png: _Picture = None,
) -> None:
    """Measure how much a cache should grow at once: by one row, buckets, pages, or all upfront.

    Buckets of 2, 4, 8, ... rows are contiguous; their spare rows are attended to behind a mask,
    or left out by a slice. Pages are those of a worker. All caches get the same rows, and each
    result is compared. BMC's model predicts the best size from constants that are measured in
    the same run. CPU only.
    """
    need_all("a benchmark")
    workload = GrowthWorkload(
        shape=shape.lower(),
        dtype=dtype,
        layers=layers,
        prompt=prompt,
        points=read_points(points),
        threads=options.thread_count(threads),
        repeats=repeats,
        seed=seed,
    )
    if png is not None:
        check_picture(png)
    from splitpoint_cli.bench.growth.runs import run_all

    report = report_of(workload, *run_all(workload, Progress()))
    if png is not None:
        save(picture_of(report), png)
    hand_over_report(report, table_of, as_json=as_json, output=output)

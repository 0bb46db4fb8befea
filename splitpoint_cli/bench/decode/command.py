"""`splitpoint bench decode`: our worker against transformers' generate, same weights, one process.

This file is the command; what is run is in decode_runs.py, which is imported
(with torch) only once the benchmark starts.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.extras import need_all
from splitpoint.shapes import BUILT_IN_SHAPES
from splitpoint_cli.bench.decode.report import Workload, report_of, table_of
from splitpoint_cli.bench.options import (
    Batch,
    ElementType,
    EverybodysDevice,
    NewTokens,
    PromptTokens,
    RandomShape,
    Threads,
)
from splitpoint_cli.bench.progress import Progress
from splitpoint_cli.bench.restore.workload import check_data_type
from splitpoint_cli.report import AsJson, OutputFile, hand_over, print_table


def decode(
    shape: RandomShape = "opt-125m",
    dtype: ElementType = "float32",
    batch: Batch = 8,
    prompt: PromptTokens = 512,
    new: NewTokens = 128,
    repeats: Annotated[int, typer.Option(help="Timed runs of each contender.", min=1)] = 5,
    device: EverybodysDevice = "cpu",
    threads: Threads = 0,
    seed: Annotated[int, typer.Option(help="Of weights and prompts.")] = 0,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Our worker, in process, against transformers' generate with both of its caches.

    Each of transformers' caches runs with both of its attention implementations, and
    the fastest of the four counts. Runs alternate; figures are medians.
    """
    need_all("a benchmark")
    if shape.lower() not in BUILT_IN_SHAPES:
        raise InvalidArgument(
            f"no shape is called {shape!r}: there are {', '.join(BUILT_IN_SHAPES)}", field="shape"
        )
    check_data_type(dtype)
    workload = Workload(
        shape=shape.lower(),
        dtype=dtype,
        batch=batch,
        prompt=prompt,
        new=new,
        repeats=repeats,
        device=device,
        threads=threads or len(os.sched_getaffinity(0)),
        seed=seed,
    )
    try:
        from splitpoint_cli.bench.decode.runs import run_all
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"the benchmark needs {error.name}: install splitpoint[dev]", reason="NO_PEER"
        ) from error
    runs = run_all(workload, Progress())
    report = report_of(workload, runs)
    hand_over(
        report,
        lambda: print_table(table_of(report)),
        as_json=as_json,
        output=output,
        indent=None,
    )

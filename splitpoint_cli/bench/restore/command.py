"""`splitpoint bench restore`: a cached prefix brought back in every way, beside its limit.

This file is the command; what is run is in restore_runs.py, which is imported
(with torch) only once the benchmark starts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from splitpoint import config
from splitpoint.extras import need_all
from splitpoint_cli.bench.options import ElementType, LinkRate, RandomShape, Threads
from splitpoint_cli.bench.progress import Progress
from splitpoint_cli.bench.restore.picture import picture_of
from splitpoint_cli.bench.restore.report import report_of, table_of
from splitpoint_cli.bench.restore.workload import CHUNK_TOKENS, RestoreWorkload
from splitpoint_cli.files import check_output
from splitpoint_cli.plots import check_picture, save
from splitpoint_cli.report import AsJson, OutputFile, hand_over, print_table
from worker_service.lanes.timeline import Trace

SWEEP_POINTS = 16


def restore(
    shape: RandomShape = "opt-125m",
    dtype: ElementType = "float32",
    prompt: Annotated[
        int, typer.Option(help="Cached tokens of each sequence.", min=CHUNK_TOKENS)
    ] = 2000,
    batch: Annotated[int, typer.Option(help="Sequences, one after the other.", min=1)] = 1,
    layers: Annotated[
        int, typer.Option(help="Only so many layers of the shape; 0: all.", min=0)
    ] = 0,
    link_rate: LinkRate = None,
    balance: Annotated[
        bool,
        typer.Option(
            "--balance",
            help="Emulate a link on which loading everything takes as long as recomputing it "
            "from token ids.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="Where to.", metavar="cpu|cuda|cuda:N")] = "cpu",
    threads: Threads = 0,
    repeats: Annotated[int, typer.Option(help="Timed runs of each contender.", min=5)] = 5,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Measure the time over all splits, too.")
    ] = False,
    tile: Annotated[
        int, typer.Option(help="Tokens of X on the link at once; 0: the planner's.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of weights and prompts.", min=0)] = 0,
    as_json: AsJson = False,
    output: OutputFile = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw the sweep and the contenders.", metavar="FILE")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write the lanes of one pipelined run, for `splitpoint trace`.", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Loading, recomputing, KVPR's sequential split, the pipelined split and its serial twin.

    All of them restore the same prefix from a real arena, in turns; each result is
    compared with what was stored. Figures are medians, and each split the best that
    was measured.
    """
    need_all("a benchmark")
    workload = RestoreWorkload(
        shape=shape.lower(),
        dtype=dtype,
        prompt=prompt,
        batch=batch,
        layers=layers,
        link_rate=None if link_rate is None else config.parse_rate(link_rate, field="link_rate"),
        device=device,
        threads=threads or len(os.sched_getaffinity(0)),
        repeats=repeats,
        sweep_points=SWEEP_POINTS if sweep else 0,
        tile=tile,
        seed=seed,
        balance=balance,
    )
    if png is not None:
        check_picture(png)
    check_output(trace, "trace")
    from splitpoint_cli.bench.restore.runs import run_all

    recorder = None if trace is None else Trace(_facts(workload))
    results = run_all(workload, Progress(), recorder)
    report = report_of(workload, results)
    if png is not None:
        save(picture_of(report), png)
    if trace is not None and recorder is not None:
        recorder.write(trace)
    hand_over(
        report,
        lambda: print_table(table_of(report)),
        as_json=as_json,
        output=output,
        indent=None,
    )


def _facts(workload: RestoreWorkload) -> dict[str, str]:
    """The title of a trace's picture."""
    facts = {
        "shape": f"{workload.shape} {workload.dtype}",
        "device": f"{workload.device} ({workload.threads} threads)",
        "cached": f"{workload.batch} x {workload.prompt}",
    }
    if workload.link_rate is not None:
        facts["link"] = f"emulated at {config.format_rate(workload.link_rate)}"
    return facts

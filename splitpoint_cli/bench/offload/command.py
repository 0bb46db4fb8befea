"""`splitpoint bench offload`: decoding with the cache on the host, beside its limit and its peers.

This file is the command; what is run is in offload_runs.py, which is imported (with
torch) only once the benchmark starts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from splitpoint.config import parse_rate
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.extras import need_all
from splitpoint_cli.bench.offload.picture import draw_sweep
from splitpoint_cli.bench.offload.report import OffloadWorkload, report_of, table_of
from splitpoint_cli.bench.options import (
    Batch,
    ElementType,
    EverybodysDevice,
    LinkRate,
    NewTokens,
    PromptTokens,
    Threads,
)
from splitpoint_cli.bench.progress import Progress
from splitpoint_cli.bench.restore.workload import check_data_type
from splitpoint_cli.files import check_output
from splitpoint_cli.models import find_shape
from splitpoint_cli.plots import check_picture
from splitpoint_cli.report import AsJson, OutputFile, hand_over, print_table


def offload(
    shape: Annotated[
        str,
        typer.Option(
            help="A built-in shape, or a checkpoint folder for its sizes; the weights are random.",
            metavar="SHAPE|DIR",
        ),
    ] = "opt-125m",
    dtype: ElementType = "float32",
    batch: Batch = 8,
    prompt: PromptTokens = 512,
    new: NewTokens = 32,
    link_rate: LinkRate = None,
    device: EverybodysDevice = "cpu",
    threads: Threads = 0,
    repeats: Annotated[int, typer.Option(help="Timed runs of each contender.", min=1)] = 5,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also measure the step time over the split.")
    ] = False,
    change_link_rate: Annotated[
        float | None,
        typer.Option(
            help="Also a run in whose middle the emulated link's rate is multiplied by this.",
            metavar="FACTOR",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and prompts.")] = 0,
    as_json: AsJson = False,
    output: OutputFile = None,
    png_file: Annotated[
        Path | None, typer.Option("--png", help="Draw the sweep here.", metavar="FILE")
    ] = None,
    trace_file: Annotated[
        Path | None,
        typer.Option("--trace", help="Write the timeline as Chrome trace JSON.", metavar="FILE"),
    ] = None,
) -> None:
    """Decode from a cache on the host: loading all of it, splits in turn and overlapped.

    Our own decode with the cache on the device says which tokens are right and what a
    step computes; on a GPU transformers' offloaded cache runs beside, with its faster
    attention. Runs alternate; figures are medians.
    """
    need_all("a benchmark")
    model = find_shape(shape, dtype)
    check_data_type(dtype)
    if change_link_rate is not None and not 0 < change_link_rate < float("inf"):
        raise InvalidArgument("the factor must be above 0", field="change_link_rate")
    if png_file is not None:
        if not sweep:
            raise InvalidArgument("--png draws what --sweep measures", field="png")
        check_picture(png_file)
    check_output(trace_file, "trace")
    workload = OffloadWorkload(
        shape=model.name,
        dtype=dtype,
        batch=batch,
        prompt=prompt,
        new=new,
        link_rate=None if link_rate is None else parse_rate(link_rate, field="link_rate"),
        repeats=repeats,
        device=device,
        threads=threads or len(os.sched_getaffinity(0)),
        seed=seed,
        sweep=sweep,
        changed_link_factor=change_link_rate,
    )
    try:
        from splitpoint_cli.bench.offload.runs import peer_of, run_all
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"the benchmark needs {error.name}: install splitpoint[dev]", reason="NO_PEER"
        ) from error
    progress = Progress()
    peer = peer_of(model, workload, progress)
    results = run_all(model, workload, progress, peer, trace_file)
    report = report_of(workload, results)
    if png_file is not None:
        draw_sweep(report, png_file)
    hand_over(
        report,
        lambda: print_table(table_of(report)),
        as_json=as_json,
        output=output,
        indent=None,
    )

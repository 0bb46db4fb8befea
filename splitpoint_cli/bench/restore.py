"""`splitpoint bench restore`: a cached prefix brought back in every way, beside its limit.

restore_runs.py has what is run; it is imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitpoint import config
from splitpoint.extras import need_all
from splitpoint_cli.bench import harness
from splitpoint_cli.bench.harness import CHUNK_TOKENS, Progress, hand_over_report
from splitpoint_cli.bench.restore_report import (
    RestoreWorkload,
    picture_of,
    report_of,
    table_of,
)
from splitpoint_cli.files import check_output
from splitpoint_cli.output import AsJson, OutputFile, check_picture, save_picture
from worker_service.lanes.timeline import Trace

SWEEP_POINTS = 16

_Prompt = Annotated[int, typer.Option(help="Cached tokens of each sequence.", min=CHUNK_TOKENS)]
_Batch = Annotated[int, typer.Option(help="Sequences, one after the other.", min=1)]
_Layers = Annotated[int, typer.Option(help="Only this many layers of the shape; 0: all.", min=0)]
_Balance = Annotated[
    bool,
    typer.Option(
        "--balance",
        help="Emulate a link on which loading everything takes as long as recomputing it "
        "from token ids.",
    ),
]
_Device = Annotated[str, typer.Option(help="Device to restore to.", metavar="cpu|cuda|cuda:N")]
_Repeats = Annotated[int, typer.Option(help="Timed runs of each contender.", min=5)]
_Sweep = Annotated[bool, typer.Option("--sweep", help="Also measure the time over all splits.")]
_Tile = Annotated[
    int, typer.Option(help="Tokens of X on the link at once; 0: the planner's.", min=0)
]
_Seed = Annotated[int, typer.Option(help="Seed of weights and prompts.", min=0)]
_Picture = Annotated[
    Path | None, typer.Option(help="Draw the sweep and the contenders.", metavar="FILE")
]
_TraceFile = Annotated[
    Path | None,
    typer.Option(help="Write the lanes of one pipelined run as Chrome trace JSON.", metavar="FILE"),
]


def restore(
    shape: harness.RandomShape = "opt-125m",
    dtype: harness.ElementType = "float32",
    prompt: _Prompt = 2000,
    batch: _Batch = 1,
    layers: _Layers = 0,
    link_rate: harness.LinkRate = None,
    balance: _Balance = False,
    device: _Device = "cpu",
    threads: harness.Threads = 0,
    repeats: _Repeats = 5,
    sweep: _Sweep = False,
    tile: _Tile = 0,
    seed: _Seed = 0,
    as_json: AsJson = False,
    output: OutputFile = None,
    png: _Picture = None,
    trace: _TraceFile = None,
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
        threads=harness.thread_count(threads),
        repeats=repeats,
        sweep_points=SWEEP_POINTS if sweep else 0,
        tile=tile,
        seed=seed,
        balance=balance,
    )
    check_picture(png)
    check_output(trace, "trace")
    from splitpoint_cli.bench.restore_runs import run_all

    recorder = None if trace is None else Trace(_facts(workload))
    results = run_all(workload, Progress(), recorder)
    report = report_of(workload, results)
    if png is not None:
        save_picture(picture_of(report), png)
    if trace is not None and recorder is not None:
        recorder.write(trace)
    hand_over_report(report, table_of, as_json=as_json, output=output)


def _facts(workload: RestoreWorkload) -> dict[str, str]:
    """Return what a reader of the trace should know."""
    facts = {
        "shape": f"{workload.shape} {workload.dtype}",
        "device": f"{workload.device} ({workload.threads} threads)",
        "cached": f"{workload.batch} x {workload.prompt}",
    }
    if workload.link_rate is not None:
        facts["link"] = f"emulated at {config.format_rate(workload.link_rate)}"
    return facts

"""`splitpoint bench offload`: decoding with the cache on the host, beside its limit and its peers.

runs.py has what is run; it is imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from splitpoint.config import parse_rate
from splitpoint.errors import InvalidArgument
from splitpoint.extras import need_all
from splitpoint.shapes import Encoding
from splitpoint_cli.bench.offload.picture import draw_sweep
from splitpoint_cli.bench.offload.report import OffloadWorkload, report_of, table_of
from splitpoint_cli.bench.shared import options
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.shared.report import hand_over_report
from splitpoint_cli.files import check_output
from splitpoint_cli.models import find_shape
from splitpoint_cli.plots import check_picture
from splitpoint_cli.report import AsJson, OutputFile

ENCODINGS = [each.value for each in Encoding if each.is_lossy]

_Shape = Annotated[
    str,
    typer.Option(
        help="A built-in shape, or a checkpoint folder for its sizes; the weights are random.",
        metavar="SHAPE|DIR",
    ),
]
_Sweep = Annotated[bool, typer.Option("--sweep", help="Also measure the step time over the split.")]
_ChangedRate = Annotated[
    float | None,
    typer.Option(
        help="Also a run in whose middle the emulated link's rate is multiplied by this.",
        metavar="FACTOR",
    ),
]
_WeightsOnHost = Annotated[
    bool,
    typer.Option(
        "--weights-on-host", help="Keep all layers, the head and the table on the host, too."
    ),
]
_Encodings = Annotated[
    list[str],
    typer.Option(
        "--kv-encoding",
        help="Also the pipelined split from a store with this encoding; may be repeated.",
        metavar="int8|int4",
    ),
]
_Picture = Annotated[
    Path | None, typer.Option("--png", help="Draw the sweep here.", metavar="FILE")
]
_TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Write the timeline as Chrome trace JSON.", metavar="FILE"),
]


def offload(
    shape: _Shape = "opt-125m",
    dtype: options.ElementType = "float32",
    batch: options.Batch = 8,
    prompt: options.PromptTokens = 512,
    new: options.NewTokens = 32,
    link_rate: options.LinkRate = None,
    device: options.ContendersDevice = "cpu",
    threads: options.Threads = 0,
    repeats: options.Repeats = 5,
    sweep: _Sweep = False,
    change_link_rate: _ChangedRate = None,
    weights_on_host: _WeightsOnHost = False,
    kv_encoding: _Encodings = [],  # noqa: B006 - typer's way to say "none"
    seed: options.Seed = 0,
    as_json: AsJson = False,
    output: OutputFile = None,
    png_file: _Picture = None,
    trace_file: _TraceFile = None,
) -> None:
    """Decode from a cache on the host: loading all of it, KVPR's order, and ours.

    Our own decode with the cache on the device says which tokens are right and what a
    step computes; on a GPU transformers' offloaded cache runs beside, with its faster
    attention. Runs alternate; figures are medians.
    """
    need_all("a benchmark")
    model = find_shape(shape, dtype)
    options.check_data_type(dtype)
    if change_link_rate is not None and not 0 < change_link_rate < float("inf"):
        raise InvalidArgument("the factor must be above 0", field="change_link_rate")
    if png_file is not None:
        if not sweep:
            raise InvalidArgument("--png draws what --sweep measures", field="png")
        check_picture(png_file)
    check_output(trace_file, "trace")
    for name in kv_encoding:
        if name not in ENCODINGS:
            raise InvalidArgument(
                f"{name!r} is none of {', '.join(ENCODINGS)}", field="kv_encoding"
            )
    workload = OffloadWorkload(
        shape=model.name,
        dtype=dtype,
        batch=batch,
        prompt=prompt,
        new=new,
        link_rate=None if link_rate is None else parse_rate(link_rate, field="link_rate"),
        repeats=repeats,
        device=device,
        threads=options.thread_count(threads),
        seed=seed,
        sweep=sweep,
        changed_link_factor=change_link_rate,
        weights_on_host=weights_on_host,
        kv_encodings=tuple(dict.fromkeys(kv_encoding)),
    )
    with options.importing_peer():
        from splitpoint_cli.bench.offload.runs import peer_of, run_all
    progress = Progress()
    peer = peer_of(model, workload, progress)
    results = run_all(model, workload, progress, peer, trace_file)
    report = report_of(workload, results)
    if png_file is not None:
        draw_sweep(report, png_file)
    hand_over_report(report, table_of, as_json=as_json, output=output)

"""`splitpoint bench decode`: our worker against transformers' generate, same weights, one process.

runs.py has what is run; it is imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

from splitpoint.extras import need_all
from splitpoint_cli.bench.decode.report import Workload, report_of, table_of
from splitpoint_cli.bench.shared import options
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.shared.report import hand_over_report
from splitpoint_cli.report import AsJson, OutputFile


def decode(
    shape: options.RandomShape = "opt-125m",
    dtype: options.ElementType = "float32",
    batch: options.Batch = 8,
    prompt: options.PromptTokens = 512,
    new: options.NewTokens = 128,
    repeats: options.Repeats = 5,
    device: options.ContendersDevice = "cpu",
    threads: options.Threads = 0,
    seed: options.Seed = 0,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Our worker, in process, against transformers' generate with both of its caches.

    Each of transformers' caches runs with both of its attention implementations, and
    the fastest of the four counts. Runs alternate; figures are medians.
    """
    need_all("a benchmark")
    options.built_in_shape(shape.lower())
    options.check_data_type(dtype)
    workload = Workload(
        shape=shape.lower(),
        dtype=dtype,
        batch=batch,
        prompt=prompt,
        new=new,
        repeats=repeats,
        device=device,
        threads=options.thread_count(threads),
        seed=seed,
    )
    with options.importing_peer():
        from splitpoint_cli.bench.decode.runs import run_all
    report = report_of(workload, run_all(workload, Progress()))
    hand_over_report(report, table_of, as_json=as_json, output=output)

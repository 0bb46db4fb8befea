"""`splitpoint bench`: Splitpoint beside its peers and its limits, in one run.

torch is imported only once a benchmark runs.
"""

from __future__ import annotations

import typer

from splitpoint_cli.bench import decode, offload, restore
from splitpoint_cli.bench.ending import ending_by_signals

app = typer.Typer(no_args_is_help=True)
for command in (decode.decode, offload.offload, restore.restore):
    app.command()(ending_by_signals(command))


@app.callback()
def bench() -> None:
    """Measure Splitpoint beside its peers and its limits, in one run."""

"""`splitpoint bench`: measurements, each against a peer in the same run.

torch is imported only once a benchmark runs.
"""

from __future__ import annotations

import typer

app = typer.Typer(help="Measure against peers, in one run.", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure against peers, in one run."""

"""Progress of a batch on stderr: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from splitpoint.config import counted

LINE_SECONDS = 10.0


@contextmanager
def shown(
    console: Console, total: int, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str, int], None]]:
    """Show how many of `total` requests are done, by what is done with them."""
    if not console.is_terminal:
        yield _lines(console, total, clock)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        tasks = {}

        def on_progress(what: str, done: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done)

        yield on_progress


def _lines(console: Console, total: int, clock: Callable[[], float]) -> Callable[[str, int], None]:
    told = clock()

    def on_progress(what: str, done: int) -> None:
        nonlocal told
        if clock() - told >= LINE_SECONDS:
            told = clock()
            console.print(f"{what}: {done:,} of {counted(total, 'request')}", markup=False)

    return on_progress

"""Progress of offline requests on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from splitpoint_offline.results import Result

# Is called with each result as it comes.
OnResult = Callable[[Result], None]


@contextmanager
def shown(total: int, *, wanted: bool | None) -> Iterator[OnResult]:
    """Show the prompts that are done on stderr. `wanted`: None: if stderr is a terminal."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("prompts"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, tokens=0)
        tokens = 0

        def on_result(result: Result) -> None:
            nonlocal tokens
            tokens += sum(len(each.token_ids) for each in result.completions)
            progress.update(task, advance=1, tokens=tokens)

        yield on_result

"""Progress of a benchmark on standard error: what runs, how far, and the time left.

A terminal shows a bar, drawn between runs only, so that drawing is never measured. Other outputs
get a line now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from splitpoint_cli.output import duration_text, err

# Between two lines where there is no terminal.
LINE_SECONDS = 10.0

Item = TypeVar("Item")


class Progress:
    """Prints to `console`; `clock` is in seconds."""

    def __init__(self, console: Console = err, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(text, markup=False)

    def track(self, what: str, items: Sequence[Item]) -> Iterator[Item]:
        """Yield the items, and show how many are done and how long the others will take."""
        if self._console.is_terminal:
            return self._bar(what, items)
        return self._lines(what, items)

    def rounds(self, what: str, contenders: Iterable[Item], count: int) -> Iterator[Item]:
        """`track` each contender `count` times; every other round in reverse order, so that
        none always runs on a warm or a hot machine."""
        there, back = [*contenders], [*contenders][::-1]
        return self.track(what, [each for n in range(count) for each in (back if n % 2 else there)])

    def _bar(self, what: str, items: Sequence[Item]) -> Iterator[Item]:
        with Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=self._console,
            auto_refresh=False,
            transient=True,
            get_time=self._clock,
        ) as bars:
            task = bars.add_task(what, total=len(items))
            bars.refresh()
            for item in items:
                yield item
                bars.update(task, advance=1, refresh=True)

    def _lines(self, what: str, items: Sequence[Item]) -> Iterator[Item]:
        began = told = self._clock()
        self.say(f"{what}: {len(items)} in all")
        for done, item in enumerate(items, start=1):
            yield item
            now = self._clock()
            if now - told >= LINE_SECONDS and done < len(items):
                left = (now - began) / done * (len(items) - done)
                self.say(f"{what}: {done} of {len(items)}, about {duration_text(left)} left")
                told = now

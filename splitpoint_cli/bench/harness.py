"""What all benchmarks share: options, contenders in turns, and one form of report.

Contenders run in rounds, every other round in reverse order. A report is one JSON object: the
workload, the machine, what each contender measured, and ratios. Its table has a row for each
contender, its picture a bar. Needs no torch.
"""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.table import Table

from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, ModelShape
from splitpoint_cli.output import duration_text, err, hand_over, new_figure, print_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# As a worker has it: tokens of a chunk, and prompt tokens of a step.
CHUNK_TOKENS = 64
MAX_BATCHED_TOKENS = 512

# -- options: each benchmark has its own defaults ----------------------------------------

RandomShape = Annotated[
    # The flag is named: typer before 0.28 makes `--SHAPE` of this unit.
    str,
    typer.Option("--shape", help="A built-in shape; its weights are random.", metavar="SHAPE"),
]
ElementType = Annotated[str, typer.Option(help="Element type.", metavar="float32|bfloat16|float16")]
Batch = Annotated[int, typer.Option(help="Sequences at once.", min=1)]
PromptTokens = Annotated[int, typer.Option(help="Prompt tokens of each.", min=1)]
NewTokens = Annotated[int, typer.Option(help="New tokens of each.", min=2)]
Repeats = Annotated[int, typer.Option(help="Timed runs of each contender.", min=1)]
LinkRate = Annotated[
    str | None,
    typer.Option(
        help="Emulate a link of this rate on a CPU: 184MB is 184 MB per second.",
        metavar="RATE",
    ),
]
ContendersDevice = Annotated[
    str, typer.Option(help="Where all contenders run.", metavar="cpu|cuda|cuda:N")
]
Threads = Annotated[int, typer.Option(help="CPU threads; 0: one per core.", min=0)]
Seed = Annotated[int, typer.Option(help="Seed of weights and prompts.")]


def thread_count(threads: int) -> int:
    """Return the value of `--threads`, or the number of cores for 0."""
    return threads or len(os.sched_getaffinity(0))


def built_in_shape(name: str) -> ModelShape:
    """Return the shape of that name. Raises InvalidArgument with the names that exist."""
    if name not in BUILT_IN_SHAPES:
        raise InvalidArgument(
            f"no shape is called {name!r}: there are {', '.join(BUILT_IN_SHAPES)}", field="shape"
        )
    return BUILT_IN_SHAPES[name]


def check_data_type(name: str) -> None:
    """Raise InvalidArgument with the names that exist if this is none of them."""
    names = [known.value for known in DataType]
    if name not in names:
        raise InvalidArgument(
            f"no data type is called {name!r}: there are {', '.join(names)}", field="dtype"
        )


@contextmanager
def importing_peer() -> Iterator[None]:
    """Raise FailedPrecondition if a module that the block imports is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"the benchmark needs {error.name}: install splitpoint[dev]", reason="NO_PEER"
        ) from error


# -- runs ---------------------------------------------------------------------------------

# Between two lines where there is no terminal.
LINE_SECONDS = 10.0

Item = TypeVar("Item")
Sample = TypeVar("Sample")


class Progress:
    """Shows on standard error what runs, how far it is, and the time left.

    A terminal shows a bar, drawn between runs only, so that drawing is never measured. Other
    outputs get a line now and then.
    """

    def __init__(self, console: Console = err, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: in seconds."""
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
        """`track` each contender `count` times; every other round in reverse order.

        So no contender always runs on a warm or a hot machine.
        """
        there, back = [*contenders], [*contenders][::-1]
        return self.track(what, [each for n in range(count) for each in (back if n % 2 else there)])

    def in_turns(
        self, what: str, contenders: Mapping[Item, Callable[[], Sample]], count: int
    ) -> dict[Item, list[Sample]]:
        """Run each contender `count` times in `rounds`; return the results of each."""
        runs: dict[Item, list[Sample]] = {name: [] for name in contenders}
        for name in self.rounds(what, contenders, count):
            runs[name].append(contenders[name]())
        return runs

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


# -- reports ------------------------------------------------------------------------------


def hardware() -> str:
    """Return the processor and its cores, for people."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """Return the commit of the source tree; "unknown" without one, or without git."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return "unknown"
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"


def json_report(
    benchmark: str, workload: Mapping[str, Any], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON object: what was measured, on what, and what came of it."""
    machine = {"hardware": hardware(), "commit": commit()}
    return {"benchmark": benchmark, **workload, **machine, **facts}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its head, and its text by a contender's facts in the JSON object."""

    head: str
    text: Callable[[Mapping[str, Any]], str]


def text_of(value: Item | None, text: Callable[[Item], str]) -> str:
    """Return the text of a value; empty if there is none."""
    return "" if value is None else text(value)


def contender_table(
    title: str,
    first: str,
    columns: Sequence[Column],
    contenders: Mapping[str, Mapping[str, Any]],
    caption: Iterable[str],
) -> Table:
    """Return a row for each contender. Columns that none of them fills are left out."""
    texts = {name: [each.text(facts) for each in columns] for name, facts in contenders.items()}
    used = [place for place in range(len(columns)) if any(row[place] for row in texts.values())]
    table = report_table(title, first, *(columns[place].head for place in used))
    for name, row in texts.items():
        table.add_row(name, *(row[place] for place in used))
    table.caption = "\n".join(caption)
    return table


def report_table(title: str, first: str, *others: str) -> Table:
    """Return an empty table: a column of names, then columns of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", title=title)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def ratio_lines(ratios: Mapping[str, float]) -> list[str]:
    return [f"{name.replace('_', ' ')}: {value}" for name, value in ratios.items()]


def agreeing_share(mine: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens before each sequence's first difference.

    Sequences of different lengths are compared in their common part only.
    """
    agreeing = total = 0
    for ours, theirs in zip(mine, reference, strict=True):
        pairs = list(zip(ours, theirs, strict=False))
        total += len(pairs)
        differing = (index for index, (one, other) in enumerate(pairs) if one != other)
        agreeing += next(differing, len(pairs))
    return agreeing / total


def hand_over_report(
    report: Mapping[str, Any],
    table_of: Callable[[Mapping[str, Any]], Table],
    *,
    as_json: bool,
    output: Path | None,
) -> None:
    """Write the report to `output`, if any; print it as one line of JSON or as a table."""
    hand_over(
        report,
        lambda: print_table(table_of(report)),
        as_json=as_json,
        output=output,
        indent=None,
    )


@dataclass(frozen=True, slots=True)
class Line:
    """A line over the split; `style`, `colour`: as matplotlib has them. None: the next colour."""

    label: str
    style: str
    splits: Sequence[float]
    seconds: Sequence[float]
    colour: str | None = None


def sweep_picture(title: str, lines: Sequence[Line], contenders: Mapping[str, float]) -> Figure:
    """Draw lines over the split, and a bar for the seconds of each contender, the first on top.

    Raises MissingExtra without matplotlib.
    """
    figure = new_figure()
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    for line in lines:
        curves.plot(line.splits, line.seconds, line.style, label=line.label, color=line.colour)
    curves.set_xlabel("split: tokens rebuilt from activations")
    curves.set_ylabel("seconds, median")
    curves.set_ylim(bottom=0)
    curves.grid(linewidth=0.3)
    curves.legend(fontsize=8)
    places, seconds = range(len(contenders)), list(contenders.values())
    drawn = bars.barh(places, seconds, color="#7f7f7f")
    bars.bar_label(drawn, [f"{value:.3g} s" for value in seconds], padding=3, fontsize=8)
    bars.set_yticks(places, list(contenders), fontsize=8)
    bars.invert_yaxis()
    bars.set_xlim(0, 1.15 * max(seconds))
    bars.set_xlabel("seconds, median")
    figure.suptitle(title, fontsize=10)
    return figure

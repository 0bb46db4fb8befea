"""Parts that the benchmarks share: options, results, a stack under test, quiet times, memory.

A process that runs beside a measured one stalls its threads, and a median of a few runs
then shows the other process. So each run is timed together with the share of a processor
that others used, and the quieter half of the runs counts. A process's private memory is read from
the kernel: heaps of malloc, and other mappings.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from splitpoint.client import AsyncClient
from splitpoint.errors import InvalidArgument
from splitpoint_cli.bench.harness import commit, hardware
from splitpoint_cli.files import check_output
from splitpoint_cli.output import FILE_HELP, FLAG_HELP, hand_over
from splitpoint_cli.stack.options import stack_options
from splitpoint_cli.stack.plan import Stack, plan_stack
from splitpoint_cli.stack.runner import StackRunner

T = TypeVar("T")

_TICKS = os.sysconf("SC_CLK_TCK")
# Processors' worth of other work during a run that still counts as quiet.
QUIET = 0.25


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """A run's result and seconds; `foreign`: processors that other processes kept busy."""

    result: T
    seconds: float
    foreign: float


def timed(run: Callable[[], T]) -> Timed[T]:
    """Run once."""
    busy, own, started = busy_seconds(), _own_seconds(), time.perf_counter()
    result = run()
    seconds = time.perf_counter() - started
    foreign = (busy_seconds() - busy) - (_own_seconds() - own)
    return Timed(result, seconds, max(0.0, foreign) / seconds)


def quieter_half(runs: Sequence[Timed[T]]) -> Sequence[Timed[T]]:
    """Return the half of the runs, at least one, beside which the least else was done."""
    return sorted(runs, key=lambda each: each.foreign)[: (len(runs) + 1) // 2]


def median_seconds(runs: Sequence[Timed[T]]) -> float:
    """Return the median of the quieter half."""
    return statistics.median(each.seconds for each in quieter_half(runs))


def is_quiet(runs: Sequence[Timed[T]]) -> bool:
    """Return True if the quieter half was quiet."""
    return all(each.foreign <= QUIET for each in quieter_half(runs))


def busy_seconds() -> float:
    """Return the seconds for which all processors have worked, or another host kept them."""
    fields = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _own_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# glibc maps a thread's malloc arena at a multiple of this (HEAP_MAX_SIZE on 64 bits).
_ARENA_ALIGNMENT = 64 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of a process that belong to no file and no shared memory.

    Attributes:
        anonymous: all of them.
        heap: of the main arena of malloc.
        arenas: of malloc's arenas of other threads.
        mapped: of other anonymous mappings: large arrays, the device's cache, stacks.
        files: of pages of files that were written to (relocated code, copy on write).
        rss: resident bytes with everything shared, for comparison.
    """

    anonymous: int
    heap: int
    arenas: int
    mapped: int
    files: int
    rss: int

    @property
    def malloc(self) -> int:
        return self.heap + self.arenas


def memory_of(pid: int | str) -> Memory:
    """Read the memory of a process. Raises FileNotFoundError, ProcessLookupError if it is gone."""
    parts = dict.fromkeys(("heap", "arenas", "mapped", "files"), 0)
    rss = 0
    kind = "mapped"
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            kind = _kind(first, rest.split())
        elif first == "Rss:":
            rss += int(rest.split()[0]) * 1024
        elif first == "Anonymous:":
            parts[kind] += int(rest.split()[0]) * 1024
    return Memory(anonymous=sum(parts.values()), rss=rss, **parts)


def _kind(addresses: str, fields: list[str]) -> str:
    if len(fields) > 4:
        return "heap" if fields[4] == "[heap]" else "files" if fields[4][0] == "/" else "mapped"
    low, high = (int(part, 16) for part in addresses.split("-"))
    is_arena = low % _ARENA_ALIGNMENT == 0 and high - low <= _ARENA_ALIGNMENT
    return "arenas" if is_arena and "w" in fields[0] else "mapped"


def children_of(parent: int) -> dict[int, str]:
    """Return each child's name by process id: the service, or "worker" and its id."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) != parent:
            continue
        name = next((word for word in words if word.endswith("_service")), words[0])
        if "--worker-id" in words:
            name = f"worker {words[words.index('--worker-id') + 1]}"
        found[int(folder.name)] = name.removesuffix("_service")
    return found


def processor_seconds(pid: int) -> float:
    """Return user and system time of all threads of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Vocabulary of the bundled model, for random token ids.
VOCABULARY = 4096


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--json` and `--output`, described by a module's docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help=FLAG_HELP)
    parser.add_argument("--output", type=_place, metavar="FILE", help=FILE_HELP)
    return parser


def _place(text: str) -> Path:
    try:
        check_output(Path(text), "output")
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(error.message) from error
    return Path(text)


def finish(
    arguments: argparse.Namespace,
    result: Mapping[str, Any],
    show: Callable[[Mapping[str, Any]], None],
) -> None:
    """Add commit and hardware to the result; write it to `--output`, and print or `show` it."""
    report = {"commit": commit(), "hardware": hardware(), **result}
    hand_over(
        report,
        lambda: show(report),
        as_json=arguments.json,
        output=arguments.output,
        indent=None,
    )


@asynccontextmanager
async def serving(
    name: str, *, token: str | None = None, **options: Any
) -> AsyncIterator[tuple[Stack, AsyncClient]]:
    """Run a stack on the CPU, with these options of `up`, and a client of it with this token."""
    stack = plan_stack(
        stack_options(
            device="cpu", listen="127.0.0.1:0", instance=f"{name}-{os.getpid()}", **options
        )
    )
    runner = StackRunner(stack, quiet=True)
    running = runner.running(asyncio.Event())
    async with running, AsyncClient(runner.addresses[0], token=token) as client:
        yield stack, client


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Return token ids without the special ones."""
    return [rng.randrange(2, VOCABULARY) for _ in range(count)]

"""Times of runs beside the processor seconds that other processes took meanwhile.

A process that runs beside a measured one stalls its threads, and a median of a few runs
then shows the other process. So each run is timed together with the share of a processor
that others used, and the quieter half of the runs counts.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

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


def tree_seconds() -> float:
    """Return the processor seconds of this process and of all that came from it and still run."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        number = int(place.parent.name)
        parents[number] = int(fields[1])
        seconds[number] = (int(fields[11]) + int(fields[12])) / _TICKS
    ours = {os.getpid()}
    while more := {each for each, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(seconds.get(each, 0.0) for each in ours)

"""Timing of runs that no other process disturbed.

A process that runs beside a measured one stalls its threads, and a median of a few runs
shows the other process. Each run is therefore timed with the processor seconds that other
processes took meanwhile, and repeated if these were too many.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
# Processor seconds of others: the resolution of /proc/stat, and a share of the run.
_LEAST_FOREIGN = 0.02
_FOREIGN_SHARE = 0.10
MOST_TRIES = 6


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a run; `quiet` is False if every try was disturbed."""

    seconds: float
    quiet: bool


def timed(run: Callable[[], object], prepare: Callable[[], None] = lambda: None) -> Timed:
    """Time `run`, again while it was disturbed; `prepare` comes before each try, untimed.

    If all tries were disturbed, the least disturbed one counts.
    """
    tries: list[tuple[float, float]] = []
    for _ in range(MOST_TRIES):
        prepare()
        busy, own, started = _busy_seconds(), _own_seconds(), time.perf_counter()
        run()
        seconds = time.perf_counter() - started
        foreign = (_busy_seconds() - busy) - (_own_seconds() - own)
        if foreign <= max(_LEAST_FOREIGN, _FOREIGN_SHARE * seconds):
            return Timed(seconds, True)
        tries.append((foreign / seconds, seconds))
    return Timed(min(tries)[1], False)


def _busy_seconds() -> float:
    """Return the seconds for which all processors together have worked, for this host or others."""
    fields = [int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _own_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

"""The time for which OpenMP's threads spin for each other before they sleep.

By default GNU OpenMP spins for milliseconds at every barrier. Next to another worker, a
benchmark or a build, spinning threads keep the threads they wait for from running: products
took up to twenty times as long (docs/log.md). So every process spins briefly, except a worker
with cores of its own on a processor where waking a thread is slow: on a Xeon with AMX a decode
step took 55 ms with brief spinning and 35 ms without the limit; on an EPYC both took the same
time.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from splitpoint.host.processor import AMX_BF16

SPIN_COUNT = "GOMP_SPINCOUNT"
WAIT_POLICY = "OMP_WAIT_POLICY"
# Loops before a thread sleeps: some microseconds.
BRIEF = "1000"
# GNU OpenMP's own default: some milliseconds.
LONG = "300000"

# The environment before this module changed it.
_GIVEN = {name: os.environ[name] for name in (SPIN_COUNT, WAIT_POLICY) if name in os.environ}


def wait_briefly() -> None:
    """Limit spinning in this process; must come before torch is imported.

    Values that the user set stay.
    """
    if not _GIVEN:
        os.environ.setdefault(SPIN_COUNT, BRIEF)


def spin_count(*, threads: int, workers: int, cores: int, flags: Collection[str]) -> str:
    """Return how often threads of CPU workers spin before they sleep.

    Args:
        threads: compute threads of each worker.
        workers: CPU workers on this host.
        cores: cores that they may run on, together.
        flags: instruction sets of the processor.
    """
    have_own_cores = threads > 1 and threads * workers <= cores
    return LONG if have_own_cores and AMX_BF16 in flags else BRIEF


def spin_environment(count: str) -> Mapping[str, str]:
    """Return the environment that gives a child `count`. Empty if the user decided."""
    return {} if _GIVEN else {SPIN_COUNT: count}


def spins_long(environment: Mapping[str, str] = os.environ) -> bool | None:
    """Return how this process's threads wait; None if the user's own policy decides it."""
    if WAIT_POLICY in environment:
        return None
    count = environment.get(SPIN_COUNT, LONG)
    return int(count) >= int(LONG) if count.isdigit() else None

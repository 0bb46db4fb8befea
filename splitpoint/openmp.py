"""How OpenMP's threads wait for each other: briefly, so that cores can be shared.

GNU OpenMP spins for milliseconds at every barrier unless told otherwise. Alone on its
cores a worker gains nothing measurable from that; beside another one, a benchmark or a
build, threads that spin keep those from running that they wait for: products took up
to twenty times as long (docs/log.md).
"""

from __future__ import annotations

import os

# Loops before a thread sleeps: some microseconds.
SPINS = "1000"


def wait_briefly() -> None:
    """For this process; must come before torch is imported. What the user set, stays."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)

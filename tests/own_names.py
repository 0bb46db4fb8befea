"""Names that say which test process made them, so that several may test on one machine.

Instances of `splitpoint up` and folders in shared memory are found by name. With the
process id in each, tests neither meet nor blame each other for what is left behind.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from splitpoint.config import SHARED_MEMORY

_OWNER = re.compile(r"splitpoint-(?:\d+-)?test-(\d+)-")


def instance_name(name: str) -> str:
    """The name of a stack of this test process."""
    return f"test-{os.getpid()}-{name}"


def shared_memory_folder() -> Path:
    """A path for a folder of arenas that no other test has; not made here."""
    return SHARED_MEMORY / f"splitpoint-test-{os.getpid()}-{time.monotonic_ns()}"


def owner_of(entry: str) -> int | None:
    """The test process whose name stands in an entry of /dev/shm; None: it names none."""
    found = _OWNER.match(entry)
    return int(found[1]) if found is not None else None

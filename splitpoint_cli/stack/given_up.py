"""Workers that `splitpoint up` has given up: a file beside their sockets, read by `status`.

The scheduler only sees that such a worker does not answer; `up` alone knows its deaths and
its next start.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = "given-up.json"
_MOST_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class GivenUpWorker:
    """One worker of a running `up`.

    Attributes:
        address: its `unix:` address, as the scheduler knows it.
        why: how it ended, and how often.
        retry_seconds: from now until the next attempt to start it.
    """

    address: str
    why: str
    retry_seconds: float


def write_given_up(runtime: Path, workers: Iterable[GivenUpWorker]) -> None:
    """Replace the content of the file in `runtime`; remove the file if there are no workers."""
    path = runtime / _NAME
    now = time.time()
    told = [
        {"address": worker.address, "why": worker.why, "retry_at": now + worker.retry_seconds}
        for worker in workers
    ]
    if not told:
        path.unlink(missing_ok=True)
        return
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    file = os.open(
        fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(file, "w") as stream:
        json.dump(told, stream)
    fresh.rename(path)


def read_given_up(addresses: Iterable[str]) -> dict[str, GivenUpWorker]:
    """Return the workers at these addresses that their `up` has given up, by address.

    Addresses other than socket files of this host and user have none.
    """
    wanted = {address for address in addresses if address.startswith("unix:/")}
    folders = {Path(address.removeprefix("unix:")).parent for address in wanted}
    found = [worker for folder in folders for worker in _read(folder / _NAME)]
    return {worker.address: worker for worker in found if worker.address in wanted}


def _read(path: Path) -> list[GivenUpWorker]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # none, not on this host, or not for this user
        return []
    with os.fdopen(file, "rb") as stream:
        facts = os.fstat(file)
        # The folder's name came from the scheduler: accept files of this user only.
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            return []
        try:
            return [_parsed(told) for told in json.loads(stream.read(_MOST_BYTES))]
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return []  # damaged: `status` reports the rest


def _parsed(told: Any) -> GivenUpWorker:
    seconds = float(told["retry_at"]) - time.time()
    if not math.isfinite(seconds):
        raise ValueError("it is never tried again")
    return GivenUpWorker(str(told["address"]), str(told["why"]), max(0.0, seconds))

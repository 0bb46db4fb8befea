"""Notes of `splitpoint up` in files beside its sockets, which `status` and `top` read.

They say what the scheduler cannot: that a worker was given up, with its deaths and its next
start, and where the gateway is, which asks the scheduler as any client does.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_GIVEN_UP = "given-up.json"
_GATEWAY = "gateway.json"
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


@dataclass(frozen=True, slots=True)
class GatewayNote:
    """The gateway of a running `up`.

    Attributes:
        url: "http://HOST:PORT" or "https://HOST:PORT", as this host reaches it.
        certificate: PEM of what it serves with; empty without TLS.
    """

    url: str
    certificate: str


def forget_notes(runtime: Path) -> None:
    """Remove what a killed `up` left."""
    for name in (_GIVEN_UP, _GATEWAY):
        (runtime / name).unlink(missing_ok=True)


def write_given_up(runtime: Path, workers: Iterable[GivenUpWorker]) -> None:
    """Replace the content of the file in `runtime`; remove the file if there are no workers."""
    now = time.time()
    told = [
        {"address": worker.address, "why": worker.why, "retry_at": now + worker.retry_seconds}
        for worker in workers
    ]
    if told:
        _write(runtime / _GIVEN_UP, told)
    else:
        (runtime / _GIVEN_UP).unlink(missing_ok=True)


def write_gateway(runtime: Path, gateway: GatewayNote) -> None:
    """Write the file in `runtime`."""
    _write(runtime / _GATEWAY, asdict(gateway))


def read_given_up(addresses: Iterable[str]) -> dict[str, GivenUpWorker]:
    """Return the workers at these addresses that their `up` has given up, by address.

    Addresses other than socket files of this host and user have none.
    """
    wanted = {*addresses}
    found: dict[str, GivenUpWorker] = {}
    for folder in _folders(wanted):
        try:
            workers = [_worker(told) for told in _read(folder / _GIVEN_UP) or ()]
        except _DAMAGED:
            continue  # `status` reports the rest
        found |= {worker.address: worker for worker in workers if worker.address in wanted}
    return found


def read_gateways(addresses: Iterable[str]) -> list[GatewayNote]:
    """Return the gateways of the `up` whose workers have these addresses, by URL.

    Addresses other than socket files of this host and user have none.
    """
    found = []
    for folder in _folders(addresses):
        try:
            if (told := _read(folder / _GATEWAY)) is not None:
                found.append(GatewayNote(str(told["url"]), str(told["certificate"])))
        except _DAMAGED:
            continue
    return sorted(found, key=lambda each: each.url)


_DAMAGED = (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError)


def _folders(addresses: Iterable[str]) -> set[Path]:
    """Return the folders of the socket files among the addresses."""
    return {
        Path(address.removeprefix("unix:")).parent
        for address in addresses
        if address.startswith("unix:/")
    }


def _write(path: Path, told: object) -> None:
    """Replace the file at once, as one that only this user reads."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    file = os.open(
        fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(file, "w") as stream:
        json.dump(told, stream)
    fresh.rename(path)


def _read(path: Path) -> Any:
    """Return the file's value; None if there is none for this user. Raises one of _DAMAGED."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # none, not on this host, or not for this user
        return None
    with os.fdopen(file, "rb") as stream:
        facts = os.fstat(file)
        # The folder's name came from the scheduler: accept files of this user only.
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            return None
        return json.loads(stream.read(_MOST_BYTES))


def _worker(told: Any) -> GivenUpWorker:
    seconds = float(told["retry_at"]) - time.time()
    if not math.isfinite(seconds):
        raise ValueError("it is never tried again")
    return GivenUpWorker(str(told["address"]), str(told["why"]), max(0.0, seconds))

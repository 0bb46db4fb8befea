"""The kernel: new enough, of a known architecture, and with the locks that sessions rely on."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from splitpoint.arena import presence
from splitpoint_cli.checks.finding import Finding, Verdict

# Open file description locks, by which a store knows that a worker is gone.
_LEAST = (3, 15)
# Populating a mapping at once, by which an arena gets its huge pages.
_POPULATE = (5, 14)


def check_kernel(system: str, release: str, machine: str) -> Finding:
    """Check the kernel; the arguments are those of `os.uname`."""
    name = "kernel"
    # The part after the first dash is the distributor's.
    found = f"{system} {release.partition('-')[0]} on {machine}"
    version = _version(release)
    if system != "Linux":
        return Finding(name, Verdict.PROBLEM, found, "Splitpoint runs on Linux only.")
    if version < _LEAST:
        return Finding(
            name,
            Verdict.PROBLEM,
            f"{found}: without open file description locks",
            f"Linux {_text(_LEAST)} or newer is needed.",
        )
    if machine != "x86_64":
        return Finding(
            name,
            Verdict.WARNING,
            f"{found}: the arena's order of writes is only proven on x86-64",
            'Use an x86-64 host, or see docs/arena-format.md, "Order of writes".',
        )
    if version < _POPULATE:
        return Finding(
            name,
            Verdict.NOTE,
            f"{found}: an arena gets no huge pages before Linux {_text(_POPULATE)}",
        )
    return Finding(name, Verdict.OK, found)


def check_locks(folder: Path) -> Finding:
    """Check in the folder of arenas that an open file sees the lock of another one."""
    name = "file locks"
    session = b"doctor\0\0"
    with tempfile.NamedTemporaryFile(dir=folder, prefix="splitpoint-doctor-") as file:
        other = os.open(file.name, os.O_RDWR | os.O_CLOEXEC)
        try:
            presence.hold(file.fileno(), session)
            is_seen = presence.is_held(other, session)
        except OSError as error:
            return _no_locks(name, folder, error.strerror or str(error))
        finally:
            os.close(other)
    if not is_seen:
        return _no_locks(name, folder, "one open file does not see the lock of another")
    return Finding(name, Verdict.OK, f"open file description locks work in {folder}")


def _no_locks(name: str, folder: Path, why: str) -> Finding:
    return Finding(
        name,
        Verdict.PROBLEM,
        f"open file description locks do not work in {folder}: {why}",
        "Run on the host's own kernel (in a container: the default runtime, not a user-space "
        "kernel), or no store can tell whether a worker is alive.",
    )


def _version(release: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"

"""What a check says: one finding, in words, with what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from splitpoint.errors import SplitpointError

T = TypeVar("T")


class Verdict(StrEnum):
    """How bad it is. Only problems change the exit code."""

    OK = "ok"
    NOTE = "note"  # worth knowing; nothing to do unless one wants to
    WARNING = "warning"  # it works, but slower or not for long
    PROBLEM = "problem"  # it does not start, or something that was asked for does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One subject's verdict.

    `found`: what there is, one sentence. `advice`: what to do, with the command; empty
    where nothing is to be done.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the machine tells about itself."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")
    dev: Path = Path("/dev")


@dataclass(frozen=True, slots=True)
class Check:
    """A named piece of work; `run` gives one finding or several."""

    name: str
    run: Callable[[], Finding | Iterable[Finding]]


def run_check(check: Check) -> tuple[Finding, ...]:
    """What the check finds. An error that it did not expect is a finding, too."""

    def run() -> tuple[Finding, ...]:
        found = check.run()
        return (found,) if isinstance(found, Finding) else tuple(found)

    result = attempt(check.name, run)
    return (result,) if isinstance(result, Finding) else result


def attempt(name: str, work: Callable[[], T]) -> T | Finding:
    """What `work` returns, or a finding of this name that tells what it raised."""
    try:
        return work()
    except SplitpointError as error:
        return Finding(name, Verdict.PROBLEM, one_line(error.message))
    except Exception as error:
        # A bare machine, a container or a kernel may differ from all that were seen: the
        # other checks are worth having all the same.
        return Finding(
            name,
            Verdict.WARNING,
            f"this could not be checked: {type(error).__name__}: {one_line(str(error))}",
            "If it also keeps `splitpoint up` from starting, please report it",
        )


def one_line(text: str) -> str:
    return " ".join(text.split())


def read_text(path: Path) -> str | None:
    """What the kernel says there, without spaces around it; None: it does not say."""
    try:
        return path.read_text().strip()
    except OSError:
        return None

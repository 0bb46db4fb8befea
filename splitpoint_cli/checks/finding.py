"""Results of checks: findings in words, with advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from splitpoint.errors import SplitpointError

T = TypeVar("T")


class Verdict(StrEnum):
    """Severity of a finding. Only problems change the exit code."""

    OK = "ok"
    NOTE = "note"  # worth knowing; needs no action
    WARNING = "warning"  # it works, but slowly or not for long
    PROBLEM = "problem"  # it does not start, or an option has no effect


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict on one subject.

    `found`: the facts in one sentence. `advice`: what to do, with the command; empty if
    nothing is to be done.
    """

    name: str
    verdict: Verdict
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Places:
    """Folders with facts about the machine."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Check:
    """A named check; `run` returns one finding or several."""

    name: str
    run: Callable[[], Finding | Iterable[Finding]]


def run_check(check: Check) -> tuple[Finding, ...]:
    """Run a check; return its findings, or one about an unexpected error."""

    def run() -> tuple[Finding, ...]:
        found = check.run()
        return (found,) if isinstance(found, Finding) else tuple(found)

    result = attempt(check.name, run)
    return (result,) if isinstance(result, Finding) else result


def attempt(name: str, work: Callable[[], T]) -> T | Finding:
    """Return the result of `work`, or a finding of this name about its error."""
    try:
        return work()
    except SplitpointError as error:
        return Finding(name, Verdict.PROBLEM, one_line(error.message))
    except Exception as error:
        # An unknown kind of machine must not keep the other checks from running.
        return Finding(
            name,
            Verdict.WARNING,
            f"this could not be checked: {type(error).__name__}: {one_line(str(error))}",
            "If it also keeps `splitpoint up` from starting, please report it",
        )


def one_line(text: str) -> str:
    return " ".join(text.split())


def read_text(path: Path) -> str | None:
    """Return the text of a kernel's file, stripped; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None

"""What a worker's numerics are, from what was asked for and what excludes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from splitpoint.errors import InvalidArgument
from splitpoint.numerics import Numerics
from splitpoint.options.worker import NUMERICS


@dataclass(frozen=True, slots=True)
class WorkerNumerics:
    """What the bits of a worker's results depend on, and why, for people.

    Attributes:
        digest: of what decides the bits (`digest.py`); empty if numerics are fast.
    """

    numerics: Numerics
    reason: str
    digest: str = ""


NOT_CHECKED = WorkerNumerics(Numerics.FAST, "not checked")


def decide(wish: str, *, obstacle: str | None, check: Callable[[], str | None]) -> WorkerNumerics:
    """Return the numerics for `--numerics`.

    Args:
        obstacle: why no check can lead to invariant numerics; None: nothing is known.
        check: returns what depends on other rows; None: nothing. Called only if it matters.

    Raises InvalidArgument if invariant numerics are asked for and cannot be had.
    """
    if wish == Numerics.FAST:
        return WorkerNumerics(Numerics.FAST, "as asked for")
    found = check() if obstacle is None else obstacle
    if found is None:
        return WorkerNumerics(Numerics.INVARIANT, "no operator depends on what is beside a row")
    check_wish(wish, found)
    return WorkerNumerics(Numerics.FAST, found)


def check_wish(wish: str, found: str | None) -> None:
    """Raise InvalidArgument if invariant numerics are asked for and `found` is against it."""
    if wish == Numerics.INVARIANT and found is not None:
        raise InvalidArgument(
            f"{NUMERICS.flag} invariant cannot be had here: {found}", field=NUMERICS.name
        )

"""Keeps suspects apart on one worker, so that a second failure of an engine names its cause. Pure.

A suspect ran on an engine that failed (`requests/failover.py`).
"""

from __future__ import annotations


class Trial:
    """The suspect that runs on one worker, and the requests that are not past their start there.

    Requests are named by arrival.
    """

    def __init__(self) -> None:
        self._suspect: int | None = None
        # No token of these has come from this worker yet.
        self._starting: set[int] = set()

    def may_start(self, *, is_suspect: bool) -> bool:
        """Return True if a request may start here.

        Nothing starts beside a suspect, and a suspect starts only beside requests that are
        past their start.
        """
        return self._suspect is None and not (is_suspect and self._starting)

    def start(self, arrival: int, *, is_suspect: bool) -> None:
        if is_suspect:
            self._suspect = arrival
        else:
            self._starting.add(arrival)

    def got_tokens(self, arrival: int, *, is_suspect: bool) -> bool:
        """Note that tokens came. Return True if that may let another request start.

        `is_suspect`: the request is a suspect after these tokens.
        """
        was_starting = arrival in self._starting
        self._starting.discard(arrival)
        if self._suspect == arrival and not is_suspect:
            self._suspect = None
            return True
        return was_starting and not self._starting

    def end(self, arrival: int) -> None:
        """Note that a request left the worker."""
        self._starting.discard(arrival)
        if self._suspect == arrival:
            self._suspect = None

    def check_integrity(self, running: set[int]) -> list[str]:
        """Return one line per violated invariant. `running`: every request on the worker."""
        known = self._starting if self._suspect is None else {*self._starting, self._suspect}
        return [] if known <= running else [f"{known - running} are on trial but do not run"]

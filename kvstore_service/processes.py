"""Whether a client's process is gone for certain: only then may its slots be reused.

A process is named by its id and its start time, since ids are used again. One
that cannot be seen from here (another PID namespace) is never called gone.
"""

from __future__ import annotations

import logging
import os
import select
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Process id and start time in clock ticks since boot (/proc/PID/stat field 22)."""

    process_id: int
    start_ticks: int


class ProcessWatch(Protocol):
    """Answers for one process; `close` when nobody asks any more."""

    def is_gone(self) -> bool:
        """True only if the process has ended for certain."""

    def close(self) -> None: ...


class LinuxProcessWatch:
    """Watches through a pidfd, which names the process and not its number."""

    def __init__(self, identity: ProcessIdentity) -> None:
        self._identity = identity
        self._pidfd: int | None = None
        self._visible = _start_ticks(identity.process_id) == identity.start_ticks
        if not self._visible:
            _log.warning(
                "process %d cannot be seen from here: what it holds is freed only when it says so",
                identity.process_id,
            )
            return
        try:
            self._pidfd = os.pidfd_open(identity.process_id)
        except OSError as error:  # no pidfds in this kernel or sandbox, or none left
            _log.info("no pidfd for process %d: %s", identity.process_id, error.strerror)
            return
        if _start_ticks(identity.process_id) != identity.start_ticks:
            # It ended in between and the pidfd names its successor.
            os.close(self._pidfd)
            self._pidfd = None

    def is_gone(self) -> bool:
        if not self._visible:
            return False
        if self._pidfd is None:
            return _start_ticks(self._identity.process_id) != self._identity.start_ticks
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _start_ticks(process_id: int) -> int | None:
    """Start time of a process; None when there is none of this id."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, field 2, may hold spaces and parentheses.
    return int(text.rpartition(")")[2].split()[19])

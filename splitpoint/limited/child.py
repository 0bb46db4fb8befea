"""The limited process's own end: its limits, and its loop of requests.

The service's end of a socket is this process's standard input. It ends with the service, and the
kernel ends it when one request takes too long. It cannot write files, and has little memory.
"""

from __future__ import annotations

import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from splitpoint.limited import frames

# Seconds of the processor that one request may take unless the service says otherwise, and bytes
# of the process's memory.
MOST_SECONDS = 2.0
MOST_MEMORY_BYTES = 1 << 30


def serve(answer: Callable[[Sequence[str]], tuple[str, ...]]) -> None:
    """Limit this process, and answer the service's requests until the service is gone.

    The program's argument: seconds of the processor that one request may take.
    """
    most_seconds = float(sys.argv[1])
    _limit()
    with socket.socket(fileno=sys.stdin.fileno()) as link, suppress(ConnectionError, EOFError):
        while True:
            parts = frames.receive(link)
            signal.setitimer(signal.ITIMER_PROF, most_seconds)
            answered = answer(parts)
            signal.setitimer(signal.ITIMER_PROF, 0)
            frames.send(link, *answered)


def _limit() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the service decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for limit, most in (
        (resource.RLIMIT_AS, MOST_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))

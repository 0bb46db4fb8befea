"""The limited process's own end: its limits, its loop of requests, and the messages of both ends.

The service's end of a socket is this process's standard input. It ends with the service, and the
kernel ends it when one request takes too long. It cannot write files, and has little memory. A
message is texts with their lengths before them.
"""

from __future__ import annotations

import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

# Seconds of the processor that one request may take unless the service says otherwise, and bytes
# of the process's memory.
MOST_SECONDS = 2.0
MOST_MEMORY_BYTES = 1 << 30

_COUNT = struct.Struct("<B")
_LENGTH = struct.Struct("<I")
MOST_PARTS = 8
# A chat has at most a message's 4 MiB, and a prompt as much; templates come as JSON.
MOST_BYTES = 16 << 20


def serve(answer: Callable[[Sequence[str]], tuple[str, ...]]) -> None:
    """Limit this process, and answer the service's requests until the service is gone.

    The program's argument: seconds of the processor that one request may take.
    """
    most_seconds = float(sys.argv[1])
    _limit()
    with socket.socket(fileno=sys.stdin.fileno()) as link, suppress(ConnectionError, EOFError):
        while True:
            parts = receive(link)
            signal.setitimer(signal.ITIMER_PROF, most_seconds)
            answered = answer(parts)
            signal.setitimer(signal.ITIMER_PROF, 0)
            send(link, *answered)


def _limit() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the service decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for limit, most in (
        (resource.RLIMIT_AS, MOST_MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))


class BadFrame(Exception):
    """The other end sent what no frame can be."""


def send(link: socket.socket, *parts: str) -> None:
    """Raises OSError: the other end is gone, or does not read (TimeoutError)."""
    encoded = [part.encode(errors="replace") for part in parts]
    lengths = b"".join(_LENGTH.pack(len(part)) for part in encoded)
    link.sendall(b"".join([_COUNT.pack(len(encoded)), lengths, *encoded]))


def receive(link: socket.socket, deadline: float | None = None) -> list[str]:
    """Return the parts of the next message.

    Args:
        deadline: on the monotonic clock; None waits for ever.

    Raises EOFError (the other end is gone), TimeoutError, BadFrame.
    """
    [count] = _COUNT.unpack(_read(link, _COUNT.size, deadline))
    if count > MOST_PARTS:
        raise BadFrame(f"{count} parts")
    sizes = [_LENGTH.unpack(_read(link, _LENGTH.size, deadline))[0] for _ in range(count)]
    if sum(sizes) > MOST_BYTES:
        raise BadFrame(f"{sum(sizes)} bytes")
    try:
        return [_read(link, size, deadline).decode() for size in sizes]
    except UnicodeDecodeError as error:
        raise BadFrame("no UTF-8") from error


def _read(link: socket.socket, size: int, deadline: float | None) -> bytes:
    found = bytearray()
    while len(found) < size:
        if deadline is not None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            link.settimeout(remaining)
        piece = link.recv(min(size - len(found), 1 << 20))
        if not piece:
            raise EOFError
        found += piece
    return bytes(found)

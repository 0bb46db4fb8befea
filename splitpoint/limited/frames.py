"""Messages between a service and its limited process: texts with their lengths before them."""

from __future__ import annotations

import socket
import struct
import time

_COUNT = struct.Struct("<B")
_LENGTH = struct.Struct("<I")
MOST_PARTS = 8
# A chat has at most a message's 4 MiB, and a prompt as much; templates come as JSON.
MOST_BYTES = 16 << 20


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

"""Proof that a client of an arena is alive: a lock that the kernel drops with its process.

A process that maps an arena for a session locks one byte of the file (an open file
description lock) for as long as it may write the payload. Only the kernel can release it,
and does so however the process ends. So an unlocked byte proves that the session no longer
writes, also after the store restarted, and between containers, where process ids mean
nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from splitpoint.errors import FailedPrecondition

# struct flock: type, whence, start, length, pid (0 for these locks).
_FLOCK = struct.Struct("@hhqqi4x")
# Far past the end of any arena, and clear of the sign of a file offset.
_FIRST_BYTE = 1 << 62


class SessionHeld(FailedPrecondition):
    """Another open file holds this session's lock."""


def hold(fd: int, session_id: bytes) -> None:
    """Lock the session's byte through `fd`, until the last copy of `fd` is closed.

    Raises SessionHeld when another open file has it.
    """
    try:
        _control(fd, fcntl.F_OFD_SETLK, session_id)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise SessionHeld("the session's presence is held by another process") from None
        raise


def is_held(fd: int, session_id: bytes) -> bool:
    """Return True if an open file other than `fd` holds the session's byte."""
    answer = _control(fd, fcntl.F_OFD_GETLK, session_id)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _control(fd: int, command: int, session_id: bytes) -> bytes:
    byte = _FIRST_BYTE | int.from_bytes(session_id[:8], "little") & (_FIRST_BYTE - 1)
    return fcntl.fcntl(fd, command, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))

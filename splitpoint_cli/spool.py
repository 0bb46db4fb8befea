"""Output of a command that must go on when its reader is gone.

A reader that died makes each write fail (EPIPE), one that only stopped reading lets a full pipe
block it. Either would stop a supervisor, so a thread writes, and drops what is not read.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from typing import TextIO

# Most bytes of text that wait for a slow reader; what comes on top is dropped.
MOST_BYTES = 1 << 20
# Longest wait at the end for a reader that takes nothing.
_LAST_SECONDS = 1.0


class Spool(io.TextIOBase):
    """A text stream in front of a descriptor. Writing neither waits nor fails."""

    def __init__(self, stream: TextIO) -> None:
        """`stream` has a descriptor, which stays open; its own buffer is flushed."""
        self._stream = stream
        self._fd = stream.fileno()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._written_bytes = 0
        self._is_closing = False
        self._changed = threading.Condition()
        # A write that never returns must not keep the process.
        self._thread = threading.Thread(target=self._write_all, name="spool", daemon=True)
        self._thread.start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's: consoles choose their characters by it."""
        return self._stream.encoding

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode(self.encoding or "utf-8", errors="backslashreplace")
        with self._changed:
            if self._waiting_bytes + len(data) <= MOST_BYTES:
                self._waiting.append(data)
                self._waiting_bytes += len(data)
                self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread writes as fast as the reader takes."""

    def finish(self) -> None:
        """Wait until all is written, as long as the reader takes something."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            written = -1
            while self._waiting_bytes and written != self._written_bytes:
                written = self._written_bytes
                self._changed.wait_for(partial(self._has_moved, written), _LAST_SECONDS)

    def _has_moved(self, written: int) -> bool:
        return not self._waiting_bytes or self._written_bytes != written

    def _write_all(self) -> None:
        is_broken = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closing)
                if not self._waiting:
                    return
                data = self._waiting.popleft()
            while data and not is_broken:
                try:
                    count = os.write(self._fd, data)
                except BlockingIOError:  # the descriptor is shared with one that does not block
                    select.select([], [self._fd], [])
                    continue
                except OSError:  # no reader is left, or no space
                    is_broken = True
                    break
                data = data[count:]
                self._took(count)
            self._took(len(data))

    def _took(self, count: int) -> None:
        with self._changed:
            self._waiting_bytes -= count
            self._written_bytes += count
            self._changed.notify_all()


@contextmanager
def spooled_output() -> Iterator[None]:
    """Spool stdout and stderr during the block. Within another such block: nothing changes.

    A stream without a descriptor, such as one in memory, always has its reader.
    """
    spools = []
    with ExitStack() as restored:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream is None or isinstance(stream, Spool) or not _has_descriptor(stream):
                continue
            spool = Spool(stream)
            spools.append(spool)
            restored.enter_context(redirect(spool))
        try:
            yield
        finally:
            for spool in spools:
                spool.finish()


def _has_descriptor(stream: TextIO) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError):  # io.UnsupportedOperation is both
        return False
    return True

"""The file of answers: one line for each request, in the order in which they end.

A line is written by one call and then never touched. So a process that is killed at any byte leaves
whole lines and at most one half, which the next run drops: its request is answered again.

The first half of a line's id is a digest of its request, so that the next run notices an answer to
another request with the same custom_id.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from splitpoint.errors import FailedPrecondition, InvalidArgument, ResourceExhausted

_ID_PREFIX = "batch_req_"
_DIGEST_CHARACTERS = 16
# What every line begins with.
_START = f'{{"id":"{_ID_PREFIX}'.encode()
# Seconds between two calls of fsync: what a loss of power can take is answered again.
SYNC_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Earlier:
    """A line of an earlier run. `number` is that of the request's line if `custom_id` is None.

    `digest` is that of the request that was answered.
    """

    custom_id: str | None
    number: int
    has_failed: bool
    digest: str


class AnswerFile:
    """The answers of a batch, and those of its earlier runs. Close it, or use `with`."""

    def __init__(
        self, path: Path, *, mode: int = 0o666, take: Callable[[int], None] = lambda size: None
    ) -> None:
        """Open or make the file, and lock it.

        `mode`: of a new file. `take`: called with the bytes of a line before it is written; what it
        raises, `write` raises.

        Raises InvalidArgument if it cannot be written, FailedPrecondition if another batch
        writes it.
        """
        self.path = path
        self._take = take
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
        except OSError as error:
            raise InvalidArgument(f"{path}: {error.strerror}", field="out") from error
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise InvalidArgument(f"{path} must be a file, which can be read again", field="out")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise FailedPrecondition(
                f"another splitpoint batch is writing {path}", reason="BATCH_RUNS"
            ) from None
        self._size = os.fstat(self._fd).st_size
        self._synced_at = time.monotonic()

    def earlier(self) -> Iterator[Earlier]:
        """Yield the answers that are there, and drop a half line at the end.

        Raises InvalidArgument, and changes nothing, if a line is no answer of a batch.
        """
        for _, found in self._rows():
            yield found

    def drop_failed(self) -> None:
        """Replace the file in one step by one without the answers that are errors.

        Raises InvalidArgument as `earlier`, ResourceExhausted.
        """
        if not any(found.has_failed for found in self.earlier()):
            return
        fresh = self.path.with_name(f".{self.path.name}.retry")
        try:
            fd = os.open(
                fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
            os.fchmod(fd, stat.S_IMODE(os.fstat(self._fd).st_mode))
            # Before it has the name, so that no other command can lock it first.
            fcntl.flock(fd, fcntl.LOCK_EX)
            with os.fdopen(os.dup(fd), "ab") as kept:
                kept.writelines(line for line, found in self._rows() if not found.has_failed)
            os.fsync(fd)
            fresh.replace(self.path)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            raise ResourceExhausted(
                f"{self.path}: {error.strerror}", reason="CANNOT_WRITE"
            ) from error
        os.close(self._fd)
        self._fd, self._size = fd, os.fstat(fd).st_size

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line. Raises ResourceExhausted; the line is then not in the file."""
        line = json.dumps(row, separators=(",", ":")).encode() + b"\n"
        self._take(len(line))
        written = 0
        try:
            while written < len(line):
                written += os.write(self._fd, line[written:])
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            raise ResourceExhausted(
                f"{self.path}: {error.strerror}", reason="CANNOT_WRITE"
            ) from error
        self._size += len(line)
        if time.monotonic() - self._synced_at >= SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Return once all that was written is on the disk."""
        os.fsync(self._fd)
        self._synced_at = time.monotonic()

    def close(self) -> None:
        self.sync()
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rows(self) -> Iterator[tuple[bytes, Earlier]]:
        """Yield each whole line; a line of another kind of file is not read to its end."""
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            number = offset = 0
            while start := file.read(len(_START)):
                number += 1
                line = start + file.readline() if start == _START else start
                if not line.endswith(b"\n") and _is_half(start, file):
                    os.ftruncate(self._fd, offset)
                    self._size = offset
                    return
                yield line, self._earlier(number, line)
                offset += len(line)

    def _earlier(self, number: int, line: bytes) -> Earlier:
        try:
            row = json.loads(line)
            custom_id, error, response = row["custom_id"], row["error"], row["response"]
            if not line.startswith(_START) or not isinstance(custom_id, str | None):
                raise ValueError
            failed = error is not None or response["status_code"] != 200
            digest = row["id"].removeprefix(_ID_PREFIX)[:_DIGEST_CHARACTERS]
            return Earlier(custom_id, 0 if error is None else int(error["line"]), failed, digest)
        except (KeyError, TypeError, ValueError, RecursionError):
            raise self._foreign(f"line {number} is no answer of a batch") from None

    def _foreign(self, why: str) -> InvalidArgument:
        return InvalidArgument(f"{self.path}: {why}; give another file", field="out")


def _is_half(start: bytes, rest: BinaryIO) -> bool:
    """Return True for a line that a killed run left without its end.

    `start`: its first bytes. After a loss of power zeros may follow: `rest` is read for them.
    """
    if start == _START:
        return True
    pieces = iter(lambda: rest.read(1 << 20), b"")
    return _START.startswith(start.rstrip(b"\0")) and not any(each.strip(b"\0") for each in pieces)


def response_row(
    custom_id: str, digest: str, status: int, request_id: str, body: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the line of a request that was answered, also by an error. `digest`: the request's."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {
        "id": _new_id(digest),
        "custom_id": custom_id,
        "response": response,
        "error": None,
    }


def fault_row(
    custom_id: str | None, digest: str, number: int, message: str, *, code: str = "invalid_line"
) -> dict[str, Any]:
    """Return the line of a line that is no request, or is not asked. `number`: counted from 1."""
    error = {
        "code": code,
        "message": f"line {number}: {message}",
        "param": None,
        "line": number,
    }
    return {
        "id": _new_id(digest),
        "custom_id": custom_id,
        "response": None,
        "error": error,
    }


def _new_id(digest: str) -> str:
    return f"{_ID_PREFIX}{digest}{secrets.token_hex(8)}"

"""The two files of a batch: its requests and its answers.

The requests are checked once from front to end, then read line by line in any order. Of each line
only its place and digests of its custom_id and its request are kept, about 170 bytes.

The answers have one line for each request, in the order in which they end. A line is written by one
call and then never touched. So a process that is killed at any byte leaves whole lines and at most
one half, which the next run drops: its request is answered again. The first half of a line's id is
a digest of its request, so that the next run notices an answer to another request with the same
custom_id.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import stat
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from gateway_service.openai.json_body import parsed
from splitpoint.errors import FailedPrecondition, InvalidArgument, ResourceExhausted

# Longest line. The scheduler takes messages of 4 MiB; JSON may need some bytes for each of theirs.
MOST_LINE_BYTES = 32 << 20
MOST_ID_CHARACTERS = 512
_METHOD = "POST"
_DIGEST_BYTES = 16
_REQUEST_DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Line:
    """One request. `number` counts the file's lines from 1."""

    number: int
    custom_id: str
    url: str
    body: Any

    @property
    def digest(self) -> str:
        """16 characters that differ if the url or the body does, however they are written."""
        try:
            asked = json.dumps([self.url, self.body], sort_keys=True, separators=(",", ":"))
        except RecursionError:  # nested too deeply for any answer but a refusal
            asked = self.url
        return _request_digest(asked.encode())


@dataclass(frozen=True, slots=True)
class Fault:
    """A line that is no request, and why. `custom_id` is None if it has none."""

    number: int
    custom_id: str | None
    message: str

    @property
    def digest(self) -> str:
        """16 characters that differ if the line's fault does."""
        return _request_digest(self.message.encode("utf-8", "surrogatepass"))


class Source:
    """The requests of a file. Close it, or use `with`."""

    def __init__(
        self, path: Path, urls: frozenset[str], most_line_bytes: int | None = None
    ) -> None:
        """`urls`: those that a request may have. Raises InvalidArgument."""
        self.path = path
        self._most_bytes = most_line_bytes or MOST_LINE_BYTES
        self._urls = urls
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise InvalidArgument(f"{path}: {error.strerror}", field="in") from error
        if not self._file.seekable():
            self._file.close()
            raise InvalidArgument(f"{path} must be a file, which can be read twice", field="in")
        self._offsets = array("Q")
        self._numbers = array("Q")
        self._digests = array("Q")
        # Position of each line by the digest of its custom_id.
        self._positions: dict[bytes, int] = {}
        # Lines without a custom_id by their number.
        self._nameless: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._offsets)

    def index(self, on_bytes: Callable[[int], None] = lambda _: None) -> None:
        """Read the file once. `on_bytes` gets the number of bytes read so far.

        Raises InvalidArgument if two lines have one custom_id.
        """
        for number, offset, text in self._lines():
            line = self._line(number, text)
            custom_id = line.custom_id
            position = len(self._offsets)
            if custom_id is None:
                self._nameless[number] = position
            else:
                first = self._positions.setdefault(_digest(custom_id), position)
                if first != position:
                    raise InvalidArgument(
                        f"{self.path}: lines {self._numbers[first]} and {number} have the same "
                        f"custom_id {custom_id!r}",
                        field="in",
                    )
            self._offsets.append(offset)
            self._numbers.append(number)
            self._digests.append(int(line.digest, 16))
            on_bytes(offset + len(text or b""))

    def read(self, position: int) -> Line | Fault:
        """Return the line at a position, counted from 0 without empty lines."""
        self._file.seek(self._offsets[position])
        return self._line(self._numbers[position], self._next())

    def digest_of(self, position: int) -> str:
        """Return the digest of the request at a position."""
        return f"{self._digests[position]:016x}"

    def position_of(self, custom_id: str | None, number: int) -> int | None:
        """Return the position of a line by its id, or by its number if it has none."""
        if custom_id is None:
            return self._nameless.get(number)
        return self._positions.get(_digest(custom_id))

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lines(self) -> Iterator[tuple[int, int, bytes | None]]:
        """Yield number, offset and text of each line that is not empty; None if it is too long."""
        number = 0
        while True:
            offset = self._file.tell()
            text = self._next()
            if text == b"":
                return
            number += 1
            if text is None or text.strip():
                yield number, offset, text

    def _next(self) -> bytes | None:
        """Return the next line with its end; empty at the end of the file, None if too long."""
        text = self._file.readline(self._most_bytes + 1)
        if len(text) <= self._most_bytes:
            return text
        while text and not text.endswith(b"\n"):
            text = self._file.readline(self._most_bytes)
        return None

    def _line(self, number: int, text: bytes | None) -> Line | Fault:
        if text is None:
            return Fault(number, None, f"the line has more than {self._most_bytes:,} bytes")
        return _read(number, text, self._urls)


def _read(number: int, text: bytes, urls: frozenset[str]) -> Line | Fault:
    try:
        value = parsed(text)
    except InvalidArgument as error:
        return Fault(number, None, error.message.replace("the body", "the line", 1))
    if not isinstance(value, dict):
        return Fault(number, None, "the line is no JSON object")
    custom_id, url = value.get("custom_id"), value.get("url")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MOST_ID_CHARACTERS:
        wanted = f"a string of 1 to {MOST_ID_CHARACTERS} characters"
        return Fault(number, None, f"custom_id must be {wanted}")
    if value.get("method", _METHOD) != _METHOD:
        return Fault(number, custom_id, f"method must be {_METHOD}")
    if not isinstance(url, str) or url not in urls:
        return Fault(number, custom_id, f"url must be one of {', '.join(sorted(urls))}")
    if not isinstance(value.get("body"), dict):
        return Fault(number, custom_id, "body must be a JSON object")
    return Line(number, custom_id, url, value["body"])


def _request_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_REQUEST_DIGEST_BYTES).hexdigest()


def _digest(custom_id: str) -> bytes:
    # JSON can hold half of a surrogate pair, which UTF-8 cannot.
    text = custom_id.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()


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

"""The file of requests: checked once from front to end, then read line by line in any order.

Of each line only its place and digests of its custom_id and its request are kept, about 170 bytes.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from gateway_service.openai.json_body import parsed
from splitpoint.errors import InvalidArgument

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

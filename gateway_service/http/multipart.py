"""Bodies of multipart/form-data (RFC 7578), read as they come: no file is kept in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from email.message import Message

from gateway_service.openai.errors import HttpError

_MOST_BOUNDARY = 70
_MOST_HEAD_BYTES = 4096
_MOST_VALUE_BYTES = 4096
_MOST_PARTS = 16
_KIND = "multipart/form-data"


def _wrong(why: str) -> HttpError:
    return HttpError(400, f"the body is not {_KIND}: {why}", reason="INVALID_FORM")


async def read_form(
    content_type: str,
    chunks: AsyncIterator[bytes],
    write: Callable[[bytes], Awaitable[None]],
) -> dict[str, str]:
    """Return the values of a form by their names; that of the field `file` is the file's name.

    `write`: gets the content of that field, piece by piece. Raises HttpError (400, 415), and what
    `chunks` and `write` raise.
    """
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != _KIND:
        raise HttpError(415, f"the content-type must be {_KIND}", reason="UNSUPPORTED_MEDIA_TYPE")
    if not isinstance(boundary, str) or not 0 < len(boundary) <= _MOST_BOUNDARY:
        raise _wrong("it has no boundary")
    reader = _Reader(chunks)
    mark = f"\r\n--{boundary}".encode()
    values: dict[str, str] = {}
    await reader.text(mark, 0)
    while await reader.text(b"\r\n", 2) != "--":
        name, filename = _names(await reader.text(b"\r\n\r\n", _MOST_HEAD_BYTES))
        if name in values or len(values) == _MOST_PARTS:
            raise _wrong("it has a field twice, or too many of them")
        if name == "file":
            values[name] = filename
            async for piece in reader.until(mark):
                await write(piece)
        else:
            values[name] = await reader.text(mark, _MOST_VALUE_BYTES)
    return values


def _names(head: str) -> tuple[str, str]:
    """Return the name of a part and that of its file, from its headers."""
    for line in head.split("\r\n"):
        kind, _, value = line.partition(":")
        if kind.strip().lower() == "content-disposition":
            header = Message()
            header["content-disposition"] = value.strip()
            name = header.get_param("name", header="content-disposition")
            if header.get_content_disposition() == "form-data" and isinstance(name, str):
                return name, header.get_filename() or ""
    raise _wrong("a part has no name")


class _Reader:
    """The bytes of a body up to marks in it. It holds little more than one chunk."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        # The first boundary stands at the begin of a line, too.
        self._bytes = bytearray(b"\r\n")
        self._is_ended = False

    async def until(self, mark: bytes) -> AsyncIterator[bytes]:
        """Yield what is before the mark, and drop the mark."""
        while (at := self._bytes.find(mark)) < 0:
            count = len(self._bytes) - len(mark) + 1
            if count > 0:
                piece = bytes(self._bytes[:count])
                del self._bytes[:count]
                yield piece
            chunk = await anext(self._chunks, None)
            if chunk is None:
                # The last boundary may have no end of line.
                if self._is_ended or mark != b"\r\n":
                    raise _wrong("it ends too early")
                self._is_ended, chunk = True, mark
            self._bytes += chunk
        piece = bytes(self._bytes[:at])
        del self._bytes[: at + len(mark)]
        if piece:
            yield piece

    async def text(self, mark: bytes, most: int) -> str:
        """Return what is before the mark as text, at most this many bytes."""
        found = bytearray()
        async for piece in self.until(mark):
            found += piece
            if len(found) > most:
                raise _wrong("a boundary is missing, or a field is too long")
        try:
            return found.decode()
        except UnicodeDecodeError:
            raise _wrong("a field is not UTF-8") from None

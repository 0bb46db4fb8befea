"""The files of the disk tier as bytes; see docs/arena-format.md.

Pure: it encodes, decodes and validates, and opens no file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from splitpoint.arena.format import (
    ENDIAN_TAG,
    ArenaFormatError,
    BadLayout,
    BadMagic,
    ForeignByteOrder,
    LayoutHashMismatch,
    SizeMismatch,
    Truncated,
    UnsupportedVersion,
)
from splitpoint.arena.records import NO_PARENT
from splitpoint.config import format_size
from splitpoint.errors import InvalidArgument
from splitpoint.keys import KEY_BYTES
from splitpoint.shapes import PAGE_ALIGNMENT, ArenaLayout, align

VERSION = 1
SEGMENT_MAGIC = b"SPLTSEGM"
RECORD_MAGIC = b"SPLTCHNK"
FOOTER_MAGIC = b"SPLTINDX"
SEGMENT_HEADER_BYTES = 4096
RECORD_HEADER_BYTES = 256
TRAILER_BYTES = 64
# Largest number of records of a segment.
MOST_RECORDS = 1 << 20
# Size of a segment, if the bound and the chunks allow it; and the most records of large chunks.
SEGMENT_BYTES = 64 << 20
LEAST_SEGMENTS = 4
_WISHED_SEGMENTS = 16
_WISHED_RECORDS = 8
# Folders and the lock.
FOLDER_BYTES = 64 << 10

# magic, version, endian tag, layout hash, segment number, record bytes, payload bytes, length of
# the layout
_SEGMENT = struct.Struct("<8sII16sQQQI")
_LAYOUT_OFFSET = 64
# magic, version, token count, layout hash, segment number, record index, chunk index, key, parent,
# salt tag, fingerprint, checksum, payload bytes, zero | CRC
_RECORD = struct.Struct("<8sII16sQII32s32s16sQQQ100x")
_KEY_OFFSET = 48
# magic, version, record count, segment number, CRC of the headers, zero | CRC
_TRAILER = struct.Struct("<8sIIQI32x")


class BadHeaderChecksum(ArenaFormatError):
    """A header's CRC does not agree with its bytes."""


class MisplacedRecord(ArenaFormatError):
    """A record names another segment or place than the one where it lies."""


class NotOfThisChunk(ArenaFormatError):
    """A record holds another chunk, or a payload of another size, than the one expected."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The front of a segment file. It names the layout, so that a folder explains itself."""

    layout: ArenaLayout
    number: int

    def encode(self) -> bytes:
        """Return 4,096 bytes."""
        text = self.layout.to_json().encode()
        body = _SEGMENT.pack(
            SEGMENT_MAGIC,
            VERSION,
            ENDIAN_TAG,
            self.layout.layout_hash,
            self.number,
            record_bytes(self.layout),
            self.layout.chunk_bytes,
            len(text),
        )
        return _sealed(body.ljust(_LAYOUT_OFFSET, b"\0") + text, SEGMENT_HEADER_BYTES)

    @classmethod
    def decode(cls, block: bytes) -> SegmentHeader:
        """Validate every field. Raises the ArenaFormatError of the first violation."""
        if len(block) < SEGMENT_HEADER_BYTES:
            raise Truncated(f"a segment header of {len(block)} bytes")
        fields = _SEGMENT.unpack_from(block)
        magic, version, endian_tag, layout_hash, number, record, payload, length = fields
        if magic != SEGMENT_MAGIC:
            raise BadMagic(f"the file begins with {magic!r}: no segment of a disk tier")
        if endian_tag != ENDIAN_TAG:
            raise ForeignByteOrder(f"endian tag {endian_tag:#010x}")
        if version != VERSION:
            raise UnsupportedVersion(f"disk tier format {version}; this code knows {VERSION}")
        _check_crc(block[:SEGMENT_HEADER_BYTES])
        try:
            text = block[_LAYOUT_OFFSET : _LAYOUT_OFFSET + length].decode()
            layout = ArenaLayout.from_json(text)
        except (ValueError, KeyError, TypeError, InvalidArgument) as error:
            raise BadLayout(f"the layout is not readable: {error}") from error
        if layout.layout_hash != layout_hash:
            raise LayoutHashMismatch("the layout hash is not that of the layout")
        if (record, payload) != (record_bytes(layout), layout.chunk_bytes):
            raise SizeMismatch("the sizes of records do not follow from the layout")
        return cls(layout, number)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record says about the chunk whose payload follows it."""

    key: bytes
    parent_key: bytes  # empty for the first chunk of a sequence
    layout_hash: bytes
    salt_tag: bytes
    fingerprint: int
    checksum: int
    token_count: int
    chunk_index: int
    payload_bytes: int
    segment_number: int
    record_index: int

    def encode(self) -> bytes:
        """Return 256 bytes."""
        body = _RECORD.pack(
            RECORD_MAGIC,
            VERSION,
            self.token_count,
            self.layout_hash,
            self.segment_number,
            self.record_index,
            self.chunk_index,
            self.key,
            self.parent_key or NO_PARENT,
            self.salt_tag,
            self.fingerprint,
            self.checksum,
            self.payload_bytes,
        )
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def decode(cls, header: bytes) -> RecordHeader:
        """Validate what needs no other file. Raises ArenaFormatError."""
        if len(header) < RECORD_HEADER_BYTES:
            raise Truncated(f"a record header of {len(header)} bytes")
        fields = _RECORD.unpack_from(header)
        magic, version, token_count, layout_hash, number, index, chunk_index = fields[:7]
        key, parent_key, tag, fingerprint, checksum, payload_bytes = fields[7:]
        if magic != RECORD_MAGIC:
            raise BadMagic("no record begins here")
        if version != VERSION:
            raise UnsupportedVersion(f"record format {version}; this code knows {VERSION}")
        _check_crc(header[:RECORD_HEADER_BYTES])
        return cls(
            key=key,
            parent_key=b"" if parent_key == NO_PARENT else parent_key,
            layout_hash=layout_hash,
            salt_tag=tag,
            fingerprint=fingerprint,
            checksum=checksum,
            token_count=token_count,
            chunk_index=chunk_index,
            payload_bytes=payload_bytes,
            segment_number=number,
            record_index=index,
        )

    def check_place(self, layout: ArenaLayout, number: int, index: int) -> None:
        """Raise MisplacedRecord or NotOfThisChunk unless the record belongs where it lies."""
        if (self.segment_number, self.record_index) != (number, index):
            raise MisplacedRecord(
                f"record {self.record_index} of segment {self.segment_number} lies at {index} of "
                f"{number}"
            )
        if self.layout_hash != layout.layout_hash:
            raise LayoutHashMismatch("the record was written for another layout")
        if (self.payload_bytes, self.token_count) != (layout.chunk_bytes, layout.chunk_tokens):
            raise NotOfThisChunk("the record holds no full chunk of this layout")


def record_bytes(layout: ArenaLayout) -> int:
    """Return the bytes of a record: header, payload, zeros up to a page's border."""
    return align(RECORD_HEADER_BYTES + layout.chunk_bytes, PAGE_ALIGNMENT)


def record_offset(layout: ArenaLayout, index: int) -> int:
    return SEGMENT_HEADER_BYTES + index * record_bytes(layout)


def segment_size(layout: ArenaLayout, record_count: int) -> int:
    """Return the bytes of a finished segment on the disk, in whole pages."""
    footer = record_count * RECORD_HEADER_BYTES + TRAILER_BYTES
    return align(record_offset(layout, record_count) + footer)


@dataclass(frozen=True, slots=True)
class Division:
    """How a bound is divided: segments of at most `record_count` records.

    Attributes:
        segment_bytes: largest size of one.
    """

    record_count: int
    segment_bytes: int

    @classmethod
    def of(cls, layout: ArenaLayout, size_bytes: int) -> Division:
        """Divide a bound. Raises InvalidArgument if it does not hold four segments."""
        room = size_bytes - FOLDER_BYTES
        wished = max(SEGMENT_BYTES, segment_size(layout, _WISHED_RECORDS))
        most = max(min(wished, room // _WISHED_SEGMENTS), segment_size(layout, 1))
        if LEAST_SEGMENTS * most > room:
            least = LEAST_SEGMENTS * segment_size(layout, 1) + FOLDER_BYTES
            raise InvalidArgument(
                f"the disk tier holds at least {LEAST_SEGMENTS} chunks: give it "
                f"{format_size(least)} or more",
                field="tier_disk_size",
            )
        fixed = SEGMENT_HEADER_BYTES + TRAILER_BYTES + PAGE_ALIGNMENT
        count = (most - fixed) // (record_bytes(layout) + RECORD_HEADER_BYTES)
        count = max(1, min(count, MOST_RECORDS))
        return cls(count, segment_size(layout, count))


def encode_footer(number: int, headers: Sequence[bytes]) -> bytes:
    """Return the copies of all record headers, and the trailer that checks them."""
    block = b"".join(headers)
    body = _TRAILER.pack(FOOTER_MAGIC, VERSION, len(headers), number, zlib.crc32(block))
    return block + body + zlib.crc32(body).to_bytes(4, "little")


def decode_trailer(trailer: bytes, number: int) -> tuple[int, int]:
    """Return the number of records and the CRC of their headers. Raises ArenaFormatError."""
    if len(trailer) < TRAILER_BYTES:
        raise Truncated(f"a trailer of {len(trailer)} bytes")
    magic, version, count, segment_number, headers_crc = _TRAILER.unpack_from(trailer)
    if magic != FOOTER_MAGIC:
        raise BadMagic("the segment has no footer")
    if version != VERSION:
        raise UnsupportedVersion(f"footer format {version}; this code knows {VERSION}")
    _check_crc(trailer[:TRAILER_BYTES])
    if segment_number != number or count > MOST_RECORDS:
        raise MisplacedRecord("the footer belongs to another segment")
    return count, headers_crc


def check_footer(layout: ArenaLayout, number: int, size: int, trailer: bytes) -> tuple[int, int]:
    """Return `decode_trailer` of a file of `size` bytes.

    Raises ArenaFormatError, also if the records and the footer do not make up the file.
    """
    count, headers_crc = decode_trailer(trailer, number)
    if record_offset(layout, count) + count * RECORD_HEADER_BYTES + TRAILER_BYTES != size:
        raise Truncated("the footer does not lie where it should")
    return count, headers_crc


def keys_of_footer(headers: bytes, headers_crc: int) -> list[bytes]:
    """Return the keys of all records. Raises BadHeaderChecksum."""
    if zlib.crc32(headers) != headers_crc:
        raise BadHeaderChecksum("the footer's bytes differ from their CRC")
    return [
        headers[start : start + KEY_BYTES]
        for start in range(_KEY_OFFSET, len(headers), RECORD_HEADER_BYTES)
    ]


def _sealed(body: bytes, size: int) -> bytes:
    """Pad to `size` with the CRC as its last four bytes."""
    body = body.ljust(size - 4, b"\0")
    if len(body) != size - 4:
        raise InvalidArgument("the layout is too long for a segment header", field="layout")
    return body + zlib.crc32(body).to_bytes(4, "little")


def _check_crc(block: bytes) -> None:
    if zlib.crc32(block[:-4]) != int.from_bytes(block[-4:], "little"):
        raise BadHeaderChecksum("the header's bytes differ from their CRC")

"""The arena file's geometry and superblocks as bytes; see docs/arena-format.md.

Pure: it encodes, decodes and validates, and opens no file.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from splitpoint.config import format_size
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.shapes import ArenaLayout, DataType, Encoding, Plane, align

MAGIC = b"SPLARENA"
VERSION = 2
ENDIAN_TAG = 0x01020304
SUPERBLOCK_BYTES = 4096
RECORDS_OFFSET = 2 * SUPERBLOCK_BYTES
RECORD_BYTES = 256
TOKEN_BYTES = 4
PAYLOAD_ALIGNMENT = 2 << 20
ID_BYTES = 16
FINGERPRINT_LIMIT = 64

# magic, version, endian tag, size | layout hash | seven layout fields,
# slot_count, record size, fingerprint length | fingerprint | instance, boot |
# epoch, sequence, condition, process id, encoding, zero, page bytes
_SUPERBLOCK = struct.Struct("<8sIIQ16s10I64s16s16sQQIII4xQ")
_CRC_OFFSET = SUPERBLOCK_BYTES - 4
_DATA_TYPES = tuple(DataType)
_ENCODINGS = tuple(Encoding)
_LAYER_LIMIT = 4096
_DIMENSION_LIMIT = 1 << 24


class ArenaFormatError(FailedPrecondition):
    """An invariant of docs/arena-format.md is violated; the class says which one."""


class Truncated(ArenaFormatError):
    """A superblock, block or record is shorter than it must be."""


class BadMagic(ArenaFormatError):
    """A superblock does not begin with the magic: this is no arena."""


class UnsupportedVersion(ArenaFormatError):
    """The format version is not one this code knows."""


class ForeignByteOrder(ArenaFormatError):
    """Written on a machine of the other byte order."""


class BadSuperblockChecksum(ArenaFormatError):
    """The superblock's CRC does not agree with its bytes."""


class BadLayout(ArenaFormatError):
    """A layout field is out of bounds."""


class LayoutHashMismatch(ArenaFormatError):
    """The layout hash is not that of the layout fields, or not the one expected."""


class BadRecordSize(ArenaFormatError):
    """Slot records have another size than 256."""


class BadSlotCount(ArenaFormatError):
    """The slot count is zero, or not the one expected."""


class SizeMismatch(ArenaFormatError):
    """The size does not follow from layout and slot count, or is not the file's."""


class BadCondition(ArenaFormatError):
    """The condition is neither open nor closed."""


class BadEpoch(ArenaFormatError):
    """The epoch is zero."""


class NoValidSuperblock(ArenaFormatError):
    """Both superblocks are damaged; nothing in the file may be served."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Offsets in the file of this layout and slot count."""

    layout: ArenaLayout
    slot_count: int

    def __post_init__(self) -> None:
        if self.slot_count < 1:
            raise InvalidArgument("an arena has at least one slot", field="slot_count")

    @property
    def tokens_offset(self) -> int:
        return align(RECORDS_OFFSET + self.slot_count * RECORD_BYTES)

    @property
    def token_row_bytes(self) -> int:
        return self.layout.chunk_tokens * TOKEN_BYTES

    @property
    def payload_offset(self) -> int:
        end = self.tokens_offset + self.slot_count * self.token_row_bytes
        return align(end, PAYLOAD_ALIGNMENT)

    @property
    def planes(self) -> list[Plane]:
        """Payload planes in file order, with offsets from the start of the file."""
        return self.layout.planes(self.payload_offset, self.slot_count)

    @property
    def size_bytes(self) -> int:
        last = self.planes[-1]
        return align(last.offset + last.slot_bytes * self.slot_count, PAYLOAD_ALIGNMENT)

    @classmethod
    def fitting(cls, layout: ArenaLayout, size_bytes: int) -> Geometry:
        """Return the largest arena of at most `size_bytes`. Raises InvalidArgument if none fits."""
        if cls(layout, 1).size_bytes > size_bytes:
            what, size = "chunk", f"{layout.chunk_tokens} tokens"
            if layout.page_bytes:
                what, size = "page", format_size(layout.page_bytes)
            raise InvalidArgument(
                f"{format_size(size_bytes)} of host memory hold no {what}: "
                f"one of {size} makes a file of {format_size(cls(layout, 1).size_bytes)}",
                field="host_memory",
            )
        slot_bytes = RECORD_BYTES + layout.chunk_tokens * TOKEN_BYTES + layout.chunk_bytes
        low, high = 1, size_bytes // slot_bytes
        while low < high:
            middle = (low + high + 1) // 2
            if cls(layout, middle).size_bytes <= size_bytes:
                low = middle
            else:
                high = middle - 1
        return cls(layout, low)


class Condition(IntEnum):
    """The state in which the file was left. No check is skipped because of it."""

    OPEN = 1
    CLOSED = 2


@dataclass(frozen=True, slots=True)
class Superblock:
    """The fields of a superblock. Ids have 16 bytes; epoch and sequence only grow."""

    layout: ArenaLayout
    slot_count: int
    instance_id: bytes
    boot_id: bytes
    epoch: int
    sequence: int
    condition: Condition
    process_id: int

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.layout, self.slot_count)

    @property
    def offset(self) -> int:
        """The position of this superblock, by its sequence."""
        return self.sequence % 2 * SUPERBLOCK_BYTES

    def encode(self) -> bytes:
        """Return 4,096 bytes, CRC included."""
        fingerprint = self.layout.model_fingerprint
        if len(fingerprint) > FINGERPRINT_LIMIT:
            raise InvalidArgument(
                f"a model fingerprint has at most {FINGERPRINT_LIMIT} bytes",
                field="model_fingerprint",
            )
        body = _SUPERBLOCK.pack(
            MAGIC,
            VERSION,
            ENDIAN_TAG,
            self.geometry.size_bytes,
            self.layout.layout_hash,
            self.layout.chunk_tokens,
            self.layout.layer_count,
            self.layout.kv_head_count,
            self.layout.head_dim,
            self.layout.hidden_size,
            _DATA_TYPES.index(self.layout.data_type),
            int(self.layout.has_activations),
            self.slot_count,
            RECORD_BYTES,
            len(fingerprint),
            fingerprint,
            self.instance_id,
            self.boot_id,
            self.epoch,
            self.sequence,
            self.condition,
            self.process_id,
            _ENCODINGS.index(self.layout.encoding),
            self.layout.page_bytes,
        ).ljust(_CRC_OFFSET, b"\0")
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def decode(cls, block: bytes) -> Superblock:
        """Validate every field. Raises the ArenaFormatError of the first violation."""
        if len(block) < SUPERBLOCK_BYTES:
            raise Truncated(f"a superblock of {len(block)} bytes")
        fields = _SUPERBLOCK.unpack_from(block)
        magic, version, endian_tag, size_bytes, layout_hash = fields[:5]
        if magic != MAGIC:
            raise BadMagic(f"the file begins with {magic!r}: not an arena")
        if endian_tag != ENDIAN_TAG:
            raise ForeignByteOrder(f"endian tag {endian_tag:#010x}")
        if version != VERSION:
            raise UnsupportedVersion(f"arena format {version}; this code knows {VERSION}")
        if zlib.crc32(block[:_CRC_OFFSET]) != int.from_bytes(
            block[_CRC_OFFSET:SUPERBLOCK_BYTES], "little"
        ):
            raise BadSuperblockChecksum("the superblock's bytes differ from their CRC")
        slot_count, record_bytes, fingerprint_length, fingerprint = fields[12:16]
        instance_id, boot_id, epoch, sequence, condition, process_id = fields[16:22]
        layout = _decode_layout(fields[5:12], fingerprint, fingerprint_length, *fields[22:])
        if layout.layout_hash != layout_hash:
            raise LayoutHashMismatch("the layout hash is not that of the layout fields")
        if record_bytes != RECORD_BYTES:
            raise BadRecordSize(f"records of {record_bytes} bytes")
        if slot_count < 1:
            raise BadSlotCount("an arena without slots")
        if Geometry(layout, slot_count).size_bytes != size_bytes:
            raise SizeMismatch(f"{slot_count} slots of this layout do not make {size_bytes} bytes")
        if condition not in (Condition.OPEN, Condition.CLOSED):
            raise BadCondition(f"condition {condition}")
        if epoch < 1:
            raise BadEpoch("epoch 0")
        return cls(
            layout=layout,
            slot_count=slot_count,
            instance_id=instance_id,
            boot_id=boot_id,
            epoch=epoch,
            sequence=sequence,
            condition=Condition(condition),
            process_id=process_id,
        )


def choose_superblock(first: bytes, second: bytes) -> Superblock:
    """Return the valid superblock with the higher sequence.

    Raises NoValidSuperblock, or the error of both if it is the same one (another version,
    not an arena).
    """
    found: list[Superblock] = []
    errors: list[ArenaFormatError] = []
    for block in (first, second):
        try:
            found.append(Superblock.decode(block))
        except ArenaFormatError as error:
            errors.append(error)
    if found:
        return max(found, key=lambda superblock: superblock.sequence)
    if type(errors[0]) is type(errors[1]):
        raise errors[0]
    raise NoValidSuperblock(
        f"no valid superblock: {errors[0].message}; {errors[1].message}"
    ) from errors[0]


def _decode_layout(
    fields: tuple[int, ...],
    fingerprint: bytes,
    fingerprint_length: int,
    encoding: int,
    page_bytes: int,
) -> ArenaLayout:
    chunk_tokens, layers, kv_heads, head_dim, hidden, data_type, activations = fields
    least = 0 if page_bytes else 1  # `ArenaLayout` refuses tensors beside pages
    for name, value, limit in (
        ("layer_count", layers, _LAYER_LIMIT),
        ("kv_head_count", kv_heads, _DIMENSION_LIMIT),
        ("head_dim", head_dim, _DIMENSION_LIMIT),
        ("hidden_size", hidden, _DIMENSION_LIMIT),
    ):
        if not least <= value <= limit:
            raise BadLayout(f"{name} is {value}")
    if data_type >= len(_DATA_TYPES):
        raise BadLayout(f"data type {data_type}")
    if activations > 1:
        raise BadLayout(f"has_activations is {activations}")
    if fingerprint_length > FINGERPRINT_LIMIT:
        raise BadLayout(f"a model fingerprint of {fingerprint_length} bytes")
    if encoding >= len(_ENCODINGS):
        raise BadLayout(f"encoding {encoding}")
    try:
        return ArenaLayout(
            chunk_tokens=chunk_tokens,
            layer_count=layers,
            kv_head_count=kv_heads,
            head_dim=head_dim,
            hidden_size=hidden,
            data_type=_DATA_TYPES[data_type],
            has_activations=bool(activations),
            model_fingerprint=fingerprint[:fingerprint_length],
            encoding=_ENCODINGS[encoding],
            page_bytes=page_bytes,
        )
    except InvalidArgument as error:
        raise BadLayout(error.message) from error

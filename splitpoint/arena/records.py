"""Slot records of the arena as bytes: commit words, grant and chunk blocks.

docs/arena-format.md tells the order in which a store writes them, and what each state
relies on.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import xxhash

from splitpoint.arena.format import RECORD_BYTES, ArenaFormatError, Truncated
from splitpoint.keys import KEY_BYTES
from splitpoint.shapes import ArenaLayout

COMMIT_BYTES = 8
GRANT_OFFSET = COMMIT_BYTES
CHUNK_OFFSET = 64
SALT_TAG_BYTES = 16
NO_PARENT = bytes(KEY_BYTES)

# generation, epoch, session id, start ticks, process id, zero | CRC
_GRANT = struct.Struct("<QQ16sQI8x")
# generation, key, parent, layout hash, salt tag, fingerprint, checksum, seal
# number, token_count, chunk index, zero | CRC
_CHUNK = struct.Struct("<Q32s32s16s16sQQQII52x")


class UnknownState(ArenaFormatError):
    """A commit word names no state."""


class BadGeneration(ArenaFormatError):
    """A slot in use has generation 0, which was never granted."""


class BadGrantChecksum(ArenaFormatError):
    """A grant block's CRC does not agree."""


class BadChunkChecksum(ArenaFormatError):
    """A chunk block's CRC does not agree."""


class GenerationMismatch(ArenaFormatError):
    """A block belongs to another generation than the commit word."""


class ForeignLayout(ArenaFormatError):
    """A chunk was written for another layout."""


class BadTokenCount(ArenaFormatError):
    """A chunk holds no token, or more than chunk_tokens; a page's row is not full."""


class BadTokenRow(ArenaFormatError):
    """A token id is negative, or not zero past the token count."""


class FingerprintMismatch(ArenaFormatError):
    """The token fingerprint is not that of the token row."""


class BadParent(ArenaFormatError):
    """A first chunk with a parent key, a later one without, or a page with one."""


class PayloadMismatch(ArenaFormatError):
    """The payload differs from its checksum."""


class RowsNotZero(ArenaFormatError):
    """The payload has rows past its tokens that are not zero."""


class SlotState(IntEnum):
    FREE = 0
    WRITING = 1
    SEALED = 2
    QUARANTINED = 3


def commit_word(generation: int, state: SlotState) -> int:
    return generation << 8 | state


def split_commit_word(word: int) -> tuple[int, SlotState]:
    """Return (generation, state). Raises UnknownState and BadGeneration."""
    generation, number = word >> 8, word & 0xFF
    try:
        state = SlotState(number)
    except ValueError:
        raise UnknownState(f"state {number}") from None
    if generation == 0 and state is not SlotState.FREE:
        raise BadGeneration(f"a {state.name} slot of generation 0")
    return generation, state


def first_generation(epoch: int) -> int:
    """Return the lower bound of generations first granted in this epoch.

    So no number of an earlier epoch comes back, even if a commit word was damaged.
    """
    return epoch << 32 | 1


# Computed for every chunk; a store serves few tenants at a time.
@lru_cache(maxsize=1024)
def salt_tag(salt: bytes) -> bytes:
    """Return the hash of a tenant's salt that records keep to tell tenants apart."""
    return hashlib.sha256(b"splitpoint salt tag v1\0" + salt).digest()[:SALT_TAG_BYTES]


@dataclass(frozen=True, slots=True)
class GrantBlock:
    """The session that may write the slot: written at reserve, valid while WRITING or
    QUARANTINED."""

    generation: int
    epoch: int
    session_id: bytes
    process_id: int
    process_start_ticks: int

    def encode(self) -> bytes:
        body = _GRANT.pack(
            self.generation,
            self.epoch,
            self.session_id,
            self.process_start_ticks,
            self.process_id,
        )
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def decode(cls, record: bytes) -> GrantBlock:
        """Decode a whole record. Raises Truncated and BadGrantChecksum."""
        body = _checked(record, GRANT_OFFSET, _GRANT.size, BadGrantChecksum)
        generation, epoch, session_id, start_ticks, process_id = _GRANT.unpack(body)
        return cls(generation, epoch, session_id, process_id, start_ticks)


@dataclass(frozen=True, slots=True)
class ChunkBlock:
    """The contents of a sealed slot: written at seal."""

    generation: int
    key: bytes
    parent_key: bytes  # NO_PARENT for the first chunk of a sequence
    layout_hash: bytes
    salt_tag: bytes
    fingerprint: int
    checksum: int
    seal_number: int
    token_count: int
    chunk_index: int

    def encode(self) -> bytes:
        body = _CHUNK.pack(
            self.generation,
            self.key,
            self.parent_key,
            self.layout_hash,
            self.salt_tag,
            self.fingerprint,
            self.checksum,
            self.seal_number,
            self.token_count,
            self.chunk_index,
        )
        return body + zlib.crc32(body).to_bytes(4, "little")

    @classmethod
    def decode(cls, record: bytes) -> ChunkBlock:
        """Decode a whole record. Raises Truncated and BadChunkChecksum."""
        body = _checked(record, CHUNK_OFFSET, _CHUNK.size, BadChunkChecksum)
        return cls(*_CHUNK.unpack(body))


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """A whole validated record. `grant` is None when free, `chunk` unless sealed."""

    generation: int
    state: SlotState
    grant: GrantBlock | None
    chunk: ChunkBlock | None

    @classmethod
    def decode(cls, record: bytes, token_row: bytes, layout: ArenaLayout) -> SlotRecord:
        """Validate everything that the state relies on, except the payload.

        `token_row` is the slot's row of the token plane. Raises the ArenaFormatError of the
        first violation.
        """
        if len(record) < RECORD_BYTES:
            raise Truncated(f"a record of {len(record)} bytes")
        generation, state = split_commit_word(int.from_bytes(record[:COMMIT_BYTES], "little"))
        if state is SlotState.FREE:
            return cls(generation, state, None, None)
        grant = GrantBlock.decode(record)
        if grant.generation != generation:
            raise GenerationMismatch(f"grant of {grant.generation}, slot at {generation}")
        if state is not SlotState.SEALED:
            return cls(generation, state, grant, None)
        chunk = ChunkBlock.decode(record)
        if chunk.generation != generation:
            raise GenerationMismatch(f"chunk of {chunk.generation}, slot at {generation}")
        _check_chunk(chunk, token_row, layout)
        return cls(generation, state, grant, chunk)


def encode_token_row(packed_tokens: bytes, chunk_tokens: int) -> bytes:
    """Return the slot's row of the token plane: ids from `pack_tokens`, then zeros."""
    return packed_tokens.ljust(4 * chunk_tokens, b"\0")


def _check_chunk(chunk: ChunkBlock, token_row: bytes, layout: ArenaLayout) -> None:
    if chunk.layout_hash != layout.layout_hash:
        raise ForeignLayout("the chunk was written for another layout")
    # A page's row is its key: any bytes, and all of them.
    least = layout.chunk_tokens if layout.page_bytes else 1
    if not least <= chunk.token_count <= layout.chunk_tokens:
        raise BadTokenCount(f"{chunk.token_count} tokens in a chunk of {layout.chunk_tokens}")
    if len(token_row) < 4 * layout.chunk_tokens:
        raise Truncated(f"a token row of {len(token_row)} bytes")
    if not layout.page_bytes:
        _check_tokens(token_row, chunk.token_count)
    tokens = token_row[: 4 * chunk.token_count]
    if xxhash.xxh3_64_intdigest(tokens) != chunk.fingerprint:
        raise FingerprintMismatch("the tokens differ from their fingerprint")
    if (chunk.parent_key == NO_PARENT) != (chunk.chunk_index == 0):
        raise BadParent(f"chunk {chunk.chunk_index} with the wrong kind of parent")
    if layout.page_bytes and chunk.chunk_index:
        raise BadParent("a page follows no other")


def _check_tokens(token_row: bytes, token_count: int) -> None:
    token_ids = struct.unpack_from(f"<{token_count}i", token_row)
    if min(token_ids) < 0 or token_row[4 * token_count :].strip(b"\0"):
        raise BadTokenRow("a negative token, or tokens past the token count")


def _checked(record: bytes, offset: int, size: int, error: type[ArenaFormatError]) -> bytes:
    """Return the `size` bytes at `offset`. Raises `error` if the CRC after them differs."""
    end = offset + size
    if len(record) < end + 4:
        raise Truncated(f"a record of {len(record)} bytes")
    body = record[offset:end]
    if zlib.crc32(body) != int.from_bytes(record[end : end + 4], "little"):
        raise error("the bytes of the block differ from their CRC")
    return body

"""The arena as a worker or the store maps it: planes, commit words, checksums, payloads.

Attaching validates the file against docs/arena-format.md. It never decides which slot may be
used; it only tells whether a slot still holds what a handle names. The payload of a slot is its
part of every plane, in file order; a chunk that travels between hosts is sent as ranges of it.
"""

from __future__ import annotations

import mmap
import os
import stat
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from splitpoint.arena import presence
from splitpoint.arena.format import (
    RECORD_BYTES,
    RECORDS_OFFSET,
    SUPERBLOCK_BYTES,
    ArenaFormatError,
    BadSlotCount,
    LayoutHashMismatch,
    SizeMismatch,
    Superblock,
    choose_superblock,
)
from splitpoint.arena.records import PayloadMismatch, RowsNotZero, SlotState, commit_word
from splitpoint.errors import NotFound
from splitpoint.host.memory_order import fence
from splitpoint.shapes import ArenaLayout

Bytes = npt.NDArray[np.uint8]

_WORDS_PER_RECORD = RECORD_BYTES // 8
_FIRST_WORD = RECORDS_OFFSET // 8
# xxhash releases the GIL from this size on (its own constant).
_GIL_RELEASE_BYTES = 100_000
_BLOCK_BYTES = 512 << 10


class NotARegularFile(ArenaFormatError):
    """The arena's path is a link, device or folder."""


class ForeignOwner(ArenaFormatError):
    """The file belongs to another user."""


class PermissionsTooOpen(ArenaFormatError):
    """Group or others have permissions on the file."""


class InstanceMismatch(ArenaFormatError):
    """The file is another arena than the one expected."""


class EpochMismatch(ArenaFormatError):
    """Another store has adopted the arena since the caller got its epoch."""


class Arena:
    """One mapped arena. Slots are in [0, slot_count).

    The metadata (superblocks, records, tokens) is mapped read-only unless
    `write_metadata` is set, which only the store does; the payload is writable
    unless `read_only` is set.

    Attributes:
        path, layout, slot_count, size_bytes: of the file.
        geometry: offsets in the file.
        superblock: as it was when this arena was mapped.
        fd: the open file, which holds the presence locks; closed by `close`, or when this
            object is collected.
    """

    def __init__(
        self,
        path: Path,
        fd: int,
        superblock: Superblock,
        *,
        write_metadata: bool = False,
        read_only: bool = False,
    ) -> None:
        """Map an open, validated file; this object owns `fd`. Workers use `attach`.

        Raises NoMemoryFence on a processor whose accesses cannot be ordered.
        """
        fence()
        self.path = path
        self.fd = fd
        self._close_fd = weakref.finalize(self, os.close, fd)
        self.superblock = superblock
        self.geometry = superblock.geometry
        self.layout = self.geometry.layout
        self.slot_count = self.geometry.slot_count
        self.size_bytes = self.geometry.size_bytes
        payload_offset = self.geometry.payload_offset
        metadata = mmap.mmap(
            fd,
            payload_offset,
            prot=mmap.PROT_READ | (mmap.PROT_WRITE if write_metadata else 0),
        )
        self.metadata = memoryview(metadata)
        self._words = self.metadata.cast("Q")
        payload = mmap.mmap(
            fd,
            self.size_bytes - payload_offset,
            prot=mmap.PROT_READ | (0 if read_only else mmap.PROT_WRITE),
            offset=payload_offset,
        )
        self.payload: Bytes = np.frombuffer(payload, dtype=np.uint8)
        # Each plane's part of a slot is too small for the hash to release the GIL.
        self._has_small_parts = (
            self.layout.chunk_bytes > _BLOCK_BYTES
            and max(plane.slot_bytes for plane in self.geometry.planes) < _GIL_RELEASE_BYTES
        )
        self._scratch = threading.local()
        self._planes: dict[tuple[int, str], Bytes] = {}
        for plane in self.geometry.planes:
            start = plane.offset - payload_offset
            rows = self.payload[start : start + self.slot_count * plane.slot_bytes]
            self._planes[plane.layer, plane.tensor] = rows.reshape(
                self.slot_count, plane.slot_bytes
            )

    @classmethod
    def attach(
        cls,
        path: Path,
        *,
        layout: ArenaLayout,
        slot_count: int,
        instance_id: bytes,
        epoch: int,
        session_id: bytes = b"",
    ) -> Arena:
        """Map the arena that the store's answer to Attach describes, for that session.

        The session's presence is held until `close`; the store serves only sessions that
        hold it. Without a session the arena is only inspected.

        Raises NotFound if the file is gone, and the ArenaFormatError of the first invariant
        that does not hold.
        """
        fd = open_arena(path)
        try:
            superblock = read_superblock(fd)
            if superblock.layout.layout_hash != layout.layout_hash:
                raise LayoutHashMismatch(f"{path} was made for another layout")
            if superblock.slot_count != slot_count:
                raise BadSlotCount(f"{path} has {superblock.slot_count} slots, not {slot_count}")
            if superblock.instance_id != instance_id:
                raise InstanceMismatch(f"{path} is another arena than the store named")
            if superblock.epoch != epoch:
                raise EpochMismatch(f"{path} is in epoch {superblock.epoch}, not {epoch}")
            if session_id:
                presence.hold(fd, session_id)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, superblock)

    @classmethod
    def attach_read_only(cls, path: Path) -> Arena:
        """Map the arena at `path`, of any layout, without write access.

        Raises what `attach` raises.
        """
        fd = open_arena(path, read_only=True)
        try:
            superblock = read_superblock(fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, superblock, read_only=True)

    def plane(self, layer: int, tensor: str) -> Bytes:
        """Return the view `[slot_count, slot_bytes]` of one tensor ("K", "V" or "X") of a layer."""
        return self._planes[layer, tensor]

    # -- commit words ---------------------------------------------------------------

    def is_current(
        self,
        slots: Sequence[int],
        generations: Sequence[int],
        *,
        state: SlotState = SlotState.SEALED,
    ) -> bool:
        """Return True if every slot is sealed (or in another `state`) under its generation.

        Call it before reading and again after the last byte was read; if the second call returns
        False, the bytes must not be used. If the file was truncated, the result is False: the
        kernel returns zeros for the rest of the file's last memory page.
        """
        if os.fstat(self.fd).st_size != self.size_bytes:
            return False
        words, slot_count = self._words, self.slot_count
        # Payload that was read before this call is older than the words, payload that is
        # read after it is newer.
        fence()
        is_current = all(
            0 <= slot < slot_count
            and words[_FIRST_WORD + slot * _WORDS_PER_RECORD] == commit_word(generation, state)
            for slot, generation in zip(slots, generations, strict=True)
        )
        fence()
        return is_current

    def commit_word(self, slot: int) -> int:
        """Read the slot's commit word: one aligned 8-byte read."""
        return self._words[_FIRST_WORD + self._checked(slot) * _WORDS_PER_RECORD]

    def record(self, slot: int) -> bytes:
        """Copy the slot's record, for `SlotRecord.decode`."""
        start = RECORDS_OFFSET + self._checked(slot) * RECORD_BYTES
        return bytes(self.metadata[start : start + RECORD_BYTES])

    def token_row(self, slot: int) -> bytes:
        """Copy the slot's row of the token plane."""
        size = self.geometry.token_row_bytes
        start = self.geometry.tokens_offset + self._checked(slot) * size
        return bytes(self.metadata[start : start + size])

    # -- payload ----------------------------------------------------------------------

    def checksum(self, slot: int) -> int:
        """Return XXH3-64 of the slot over all planes in file order.

        Safe to call from any thread; other threads run meanwhile.
        """
        self._checked(slot)
        digest = xxhash.xxh3_64()
        if self._has_small_parts:
            for block in self._blocks(slot):
                digest.update(block.data)
        else:
            for plane in self._planes.values():
                digest.update(plane[slot])
        return digest.intdigest()

    def _blocks(self, slot: int) -> Iterator[Bytes]:
        """Yield the payload in blocks that are large enough for the hash to release the GIL.

        A thread that hashes many small parts one after another keeps the GIL for the interpreter's
        whole switch interval of 5 ms.
        """
        block: Bytes | None = getattr(self._scratch, "block", None)
        if block is None:
            block = self._scratch.block = np.empty(_BLOCK_BYTES, dtype=np.uint8)
        filled = 0
        for plane in self._planes.values():
            row = plane[slot]
            if filled + len(row) > _BLOCK_BYTES:
                yield block[:filled]
                filled = 0
            block[filled : filled + len(row)] = row
            filled += len(row)
        yield block[:filled]

    def check_payload(self, slot: int, token_count: int, checksum: int) -> None:
        """Read the slot back. Safe to call from any thread.

        Raises PayloadMismatch, or RowsNotZero if a row at or past `token_count` is not zero.
        """
        if self.checksum(slot) != checksum:
            raise PayloadMismatch(f"the payload of slot {slot} differs from its checksum")
        chunk_tokens = self.layout.chunk_tokens
        if token_count == chunk_tokens:
            return
        for (layer, tensor), plane in self._planes.items():
            heads = 1 if tensor == "X" else self.layout.kv_head_count
            if plane[slot].reshape(heads, chunk_tokens, -1)[:, token_count:].any():
                raise RowsNotZero(
                    f"slot {slot} has rows past its {token_count} tokens in {tensor}{layer}"
                )

    def zero(self, slot: int) -> None:
        """Zero the slot in all planes. Safe to call from any thread; numpy releases the GIL."""
        self._checked(slot)
        for plane in self._planes.values():
            plane[slot] = 0

    def close(self) -> None:
        """Drop this object's views. The memory stays mapped while any other view exists."""
        self._planes.clear()
        self._words.release()
        self.metadata.release()
        self.payload = np.empty(0, dtype=np.uint8)
        self._close_fd()

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.slot_count:
            raise IndexError(f"slot {slot} of an arena of {self.slot_count}")
        return slot


# -- opening -------------------------------------------------------------------------


def open_arena(path: Path, *, read_only: bool = False) -> int:
    """Open the regular file at `path`, which must be this user's and closed to others.

    Raises NotFound, NotARegularFile, ForeignOwner or PermissionsTooOpen.
    """
    try:
        # Non-blocking, so that a pipe in its place does not block this process.
        access = os.O_RDONLY if read_only else os.O_RDWR
        fd = os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise NotFound(f"there is no arena at {path}") from None
    except PermissionError as error:
        raise ForeignOwner(f"{path} may not be opened: {error.strerror}") from error
    except OSError as error:  # ELOOP: a symbolic link; EISDIR, ENXIO: no file
        raise NotARegularFile(f"{path} cannot be an arena: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise NotARegularFile(f"{path} is not a regular file")
        if found.st_uid != os.geteuid():
            raise ForeignOwner(f"{path} belongs to user {found.st_uid}")
        if found.st_mode & 0o077:
            raise PermissionsTooOpen(f"{path} has mode {found.st_mode & 0o777:o}, not 600")
    except ArenaFormatError:
        os.close(fd)
        raise
    return fd


def read_superblock(fd: int) -> Superblock:
    """Return the current superblock. Raises ArenaFormatError."""
    superblock = choose_superblock(
        os.pread(fd, SUPERBLOCK_BYTES, 0),
        os.pread(fd, SUPERBLOCK_BYTES, SUPERBLOCK_BYTES),
    )
    size = os.fstat(fd).st_size
    if size != superblock.geometry.size_bytes:
        raise SizeMismatch(f"the file has {size} bytes, not {superblock.geometry.size_bytes}")
    return superblock


def superblock_at(path: Path) -> Superblock:
    """Return the superblock of the arena at `path`, which need not be in use.

    Raises what `open_arena` and `read_superblock` raise.
    """
    fd = open_arena(path, read_only=True)
    try:
        return read_superblock(fd)
    finally:
        os.close(fd)


# Most bytes of one message; the contract allows 1 MiB. Measured over the loopback against
# a plain stream of equal messages: 0.6 of its rate with 256 KiB, 0.9 with 512 KiB, 0.55
# with 1 MiB, where every copy of a message is newly allocated by the kernel.
PIECE_BYTES = 512 << 10


class Payload:
    """The payloads of one mapped arena.

    Attributes:
        size_bytes: of one slot's payload.
    """

    def __init__(self, arena: Arena) -> None:
        self._planes = [arena.plane(plane.layer, plane.tensor) for plane in arena.geometry.planes]
        self.size_bytes = arena.layout.chunk_bytes

    def gather(self, slot: int, offset: int, size: int) -> bytes:
        """Copy bytes [offset, offset + size) of the slot's payload."""
        return b"".join(part.data for part in self._parts(slot, offset, size))

    def scatter(self, slot: int, offset: int, data: bytes) -> None:
        """Write `data` into the slot's payload at `offset`."""
        source = np.frombuffer(data, dtype=np.uint8)
        start = 0
        for part in self._parts(slot, offset, len(data)):
            part[:] = source[start : start + len(part)]
            start += len(part)

    def _parts(self, slot: int, offset: int, size: int) -> Iterator[Bytes]:
        """Yield the views that make up [offset, offset + size) of the payload."""
        end = offset + size
        if not 0 <= offset <= end <= self.size_bytes:
            raise ValueError(f"[{offset}, {end}) of a payload of {self.size_bytes} bytes")
        first = 0
        for plane in self._planes:
            last = first + plane.shape[1]
            if first < end and offset < last:
                yield plane[slot, max(offset - first, 0) : end - first]
            first = last


def pieces(payload_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of the messages that a payload is sent in."""
    for offset in range(0, payload_bytes, PIECE_BYTES):
        yield offset, min(PIECE_BYTES, payload_bytes - offset)

"""The folder of uploaded files and batches: private, bounded, and found again after a restart.

An object is a record, `ID.json`, and its content, `ID.data`, if it is a file. Ids are made here, so
that no name of a client's becomes a path. Whatever else is in the folder is left alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gateway_service.openai.batches import File, Purpose
from gateway_service.openai.errors import HttpError
from splitpoint.config import format_size
from splitpoint.errors import FailedPrecondition
from splitpoint.host.files import private_folder, replace_file
from splitpoint.tasks import FileThread

_log = logging.getLogger(__name__)

FILE, BATCH = "file-", "batch_"
# Objects together, and those of one owner.
MOST_COUNT = 10_000
_MOST_OF_OWNER = 1_000
# Files and ended batches are removed after this long.
KEPT_SECONDS = 30 * 24 * 3600
OPEN_STATUSES = frozenset({"validating", "in_progress", "cancelling"})
_NAME = re.compile(r"\.?((?:file-|batch_)[0-9a-f]{32})\.(json|data)(\..*)?")
_BLOCK_BYTES = 4096
# Bytes of content that are written or read at a time.
PIECE_BYTES = 1 << 20


@dataclass(slots=True)
class Record:
    """A file or a batch.

    Attributes:
        owner: the tenant or key that may see it.
        value: OpenAI's object.
        disk_bytes: of the record itself, without its content.
    """

    owner: str
    value: dict[str, Any]
    disk_bytes: int = 0

    @property
    def id(self) -> str:
        found: str = self.value["id"]
        return found

    @property
    def is_open(self) -> bool:
        """True of a batch that has not ended."""
        return self.value.get("status") in OPEN_STATUSES


def output_id(batch_id: str, kind: str) -> str:
    """Return the id of a batch's output file ("output") or error file ("error")."""
    digest = hashlib.blake2b(f"{batch_id}/{kind}".encode(), digest_size=16).hexdigest()
    return f"{FILE}{digest}"


class Folder:
    """The objects of one gateway. Close it.

    Args:
        path: made with mode 0700 if it is absent.
        most_bytes: of contents and records together.

    Raises FolderNotPrivate, NotFound without the folder's parent, FailedPrecondition if another
    gateway has the folder or it cannot be read.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        private_folder(path)
        self._path = path
        self.most_bytes = most_bytes
        self.used_bytes = 0
        # Answers are written in other threads.
        self._lock = threading.Lock()
        self._records: dict[str, Record] = {}
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._lock_fd = os.open(path / "lock", flags, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._load()
        except BlockingIOError:
            os.close(self._lock_fd)
            raise FailedPrecondition(f"{path} is the batch folder of another gateway") from None
        except OSError as error:
            raise FailedPrecondition(f"the batch folder {path}: {error.strerror}") from error

    def close(self) -> None:
        """Let another gateway have the folder."""
        os.close(self._lock_fd)

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self._path / f"{file_id}.data"

    def all(self, kind: str, owner: str | None = None) -> list[Record]:
        """Return files or batches, the newest last. `owner`: whose; None: all."""
        return [
            record
            for record in [*self._records.values()]  # another thread may add one
            if record.id.startswith(kind) and owner in (None, record.owner)
        ]

    def get(self, kind: str, owner: str, name: str) -> Record:
        """Return an object of an owner. Raises HttpError (404) if it has none by this id."""
        record = self._records.get(name) if name.startswith(kind) else None
        if record is None or record.owner != owner:
            what = "file" if kind == FILE else "batch"
            shown = name[:64].encode(errors="replace").decode()
            raise HttpError(404, f"No such {what}: {shown}", reason=f"{what.upper()}_NOT_FOUND")
        return record

    def check_count(self, owner: str) -> None:
        """Raise HttpError (507) if there is no place for another object."""
        own = len(self.all("", owner))
        if own >= _MOST_OF_OWNER or len(self._records) >= MOST_COUNT:
            raise HttpError(
                507,
                f"there are too many files and batches: at most {_MOST_OF_OWNER:,} of a client and "
                f"{MOST_COUNT:,} of all; delete files",
                reason="TOO_MANY_FILES",
            )

    def check_room(self, size: int) -> None:
        """Raise HttpError if this many bytes do not fit: 413 if they never do, else 507."""
        if size > self.most_bytes:
            raise HttpError(
                413,
                f"the file has more than {format_size(self.most_bytes)}, which is all that this "
                "gateway keeps (--batch-disk)",
                reason="FILE_TOO_LARGE",
            )
        if self.used_bytes + size > self.most_bytes:
            raise HttpError(
                507,
                f"the files of batches have {format_size(self.most_bytes)} (--batch-disk): delete "
                "some",
                reason="DISK_FULL",
            )

    def take(self, size: int) -> None:
        """Count bytes that will be written. Raises HttpError as `check_room`."""
        with self._lock:
            self.check_room(size)
            self.used_bytes += size

    def give_back(self, size: int) -> None:
        with self._lock:
            self.used_bytes -= size

    def save(self, record: Record) -> None:
        """Write a record, a new one or a changed one, in one step. Raises HttpError (507)."""
        text = json.dumps({"owner": record.owner, "object": record.value}).encode()
        size = -(-len(text) // _BLOCK_BYTES) * _BLOCK_BYTES
        is_new = record.id not in self._records
        if is_new and record.value.get("purpose") != "batch_output":
            self.take(size)
        else:  # a batch must be able to end
            self.give_back(record.disk_bytes - size)
        record.disk_bytes = size
        try:
            replace_file(self._path / f"{record.id}.json", text, 0o600)
        except OSError as error:
            if is_new:
                self.give_back(size)
            raise disk_error(error) from error
        self._records[record.id] = record

    def remove(self, record: Record) -> None:
        """Remove an object. Raises HttpError (507) if the disk refuses."""
        try:
            # A content without a record is removed at the next start.
            (self._path / f"{record.id}.json").unlink(missing_ok=True)
            self._records.pop(record.id, None)
            self.give_back(record.disk_bytes)
            self.remove_content(record.id)
        except OSError as error:
            raise disk_error(error) from error

    def remove_content(self, file_id: str) -> None:
        """Remove a content, if it is there. Raises OSError."""
        path = self.content(file_id)
        with suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            self.give_back(size)

    def add_file(
        self, name: str, owner: str, filename: str, purpose: Purpose, *, seconds: int = KEPT_SECONDS
    ) -> Record:
        """Record a file whose content is there, for this many seconds. Raises HttpError (507)."""
        now = int(time.time())
        value: File = {
            "id": name,
            "object": "file",
            "bytes": self.content(name).stat().st_size,
            "created_at": now,
            "expires_at": now + seconds,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        record = Record(owner, {**value})
        self.save(record)
        return record

    def remove_old(self) -> None:
        """Remove files and ended batches whose time is over."""
        used = {record.value["input_file_id"] for record in self.all(BATCH) if record.is_open}
        now = time.time()
        for record in [*self._records.values()]:
            expires_at = record.value["expires_at"]
            if record.value["object"] == "batch":
                expires_at = record.value["created_at"] + KEPT_SECONDS
            if now >= expires_at and record.id not in used and not record.is_open:
                self.remove(record)

    @asynccontextmanager
    async def upload(self) -> AsyncIterator[tuple[str, Callable[[bytes], Awaitable[None]]]]:
        """Yield the id of a new file, and the function that appends to its content.

        Nothing is appended for empty bytes: they return once all is on the disk. The content is
        removed unless the block records the file. Raises HttpError (413, 507).
        """
        name = f"{FILE}{secrets.token_hex(16)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        pending, taken = bytearray(), 0
        try:
            with os.fdopen(os.open(self.content(name), flags, 0o600), "wb", 0) as file:
                async with FileThread() as files:

                    async def write(piece: bytes) -> None:
                        nonlocal taken
                        self.take(len(piece))
                        taken += len(piece)
                        pending.extend(piece)
                        if len(pending) >= PIECE_BYTES or not piece:
                            whole = bytes(pending)
                            pending.clear()
                            await files.run(_write_all, file, whole, not piece)

                    yield name, write
        except OSError as error:
            raise disk_error(error) from error
        finally:
            if name not in self._records:
                self.content(name).unlink(missing_ok=True)
                self.give_back(taken)

    def _load(self) -> None:
        """Read the records, and remove what a killed gateway left unfinished. Raises OSError."""
        contents: list[str] = []
        for entry in [*os.scandir(self._path)]:
            match = _NAME.fullmatch(entry.name)
            if match is None or not entry.is_file(follow_symlinks=False):
                continue
            name, kind, is_unfinished = match[1], match[2], match[3] or entry.name.startswith(".")
            if is_unfinished:
                os.unlink(entry.path)
            elif kind == "data":
                contents.append(name)
                self.used_bytes += entry.stat().st_size
            elif (record := _read(Path(entry.path), name)) is not None:
                self._records[name] = record
                self.used_bytes += record.disk_bytes
        by_age = sorted(self._records.items(), key=lambda item: item[1].value["created_at"])
        self._records = dict(by_age)
        wanted = {
            output_id(record.id, kind)
            for record in self.all(BATCH)
            if record.is_open
            for kind in ("output", "error")
        }
        for name in contents:
            if name not in self._records and name not in wanted:
                self.remove_content(name)


def _read(path: Path, name: str) -> Record | None:
    """Return a record; None, with a line in the log, if the file is damaged. Raises OSError."""
    text = path.read_bytes()
    try:
        found = json.loads(text)
        value = found["object"]
        record = Record(found["owner"], value, -(-len(text) // _BLOCK_BYTES) * _BLOCK_BYTES)
        whole = ("created_at", "expires_at", "object")
        if value["id"] == name and all(each in value for each in whole):
            return record
    except (ValueError, KeyError, TypeError):
        pass
    _log.error("%s is damaged; it is left alone, and its object is lost", path.name)
    return None


def _write_all(file: Any, content: bytes, is_end: bool) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]
    if is_end:
        os.fsync(file.fileno())


def disk_error(error: OSError) -> HttpError:
    """Return the error for a disk that refuses; the path is not the client's business."""
    return HttpError(507, f"the disk of batches: {error.strerror}", reason="DISK_FULL")


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield a content piece by piece. Raises OSError."""
    while piece := file.read(PIECE_BYTES):
        yield piece

"""Safe reading of the untrusted files of a model folder.

Nothing here waits for a pipe, reads from a device, follows a loop of links, or uses more memory
than a file of a sensible size needs.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
from pathlib import Path
from typing import Any

from splitpoint.errors import InvalidArgument

# The largest index of a known checkpoint has 10 MB, the largest tokenizer.json 35.
MOST_JSON_BYTES = 64 << 20
MOST_TOKENIZER_BYTES = 256 << 20


def is_there(path: Path, most_bytes: int | None = None) -> bool:
    """Return False if the path does not exist.

    Raises InvalidArgument for anything but a regular file of at most `most_bytes`.
    """
    if not os.path.lexists(path):
        return False
    try:
        found = path.stat()
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from error
    _check(path, found, most_bytes)
    return True


def read_bytes(path: Path, most_bytes: int = MOST_JSON_BYTES) -> bytes:
    """Read the whole file. Raises InvalidArgument unless it is a regular file within bounds."""
    try:
        # Opening a pipe would otherwise wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            _check(path, os.fstat(file.fileno()), most_bytes)
            return file.read(most_bytes)
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Raises InvalidArgument for any other contents."""
    return parse_object(path, read_bytes(path))


def parse_object(path: Path, content: bytes) -> dict[str, Any]:
    """Parse a JSON object, with each key once and all numbers finite. Raises InvalidArgument."""
    try:
        found = json.loads(
            content.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except UnicodeDecodeError as error:
        raise _bad(path, "is not UTF-8") from error
    except RecursionError:
        raise _bad(path, "cannot be read: it is nested too deeply") from None
    except ValueError as error:
        raise _bad(path, f"cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise _bad(path, "is not a JSON object")
    return found


def _check(path: Path, found: os.stat_result, most_bytes: int | None) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _bad(path, "is not a regular file")
    if most_bytes is not None and found.st_size > most_bytes:
        raise _bad(path, f"has {found.st_size:,} bytes, at most {most_bytes:,} are read")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = sorted(key for key, _ in pairs)
        twice = next(key for key, after in itertools.pairwise(names) if key == after)
        raise ValueError(f"it has the key {twice[:64]!r} twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}, which is no JSON")


def _bad(path: Path, what: str) -> InvalidArgument:
    return InvalidArgument(f"{path} {what}", field="model")

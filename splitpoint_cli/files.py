"""Files that appear whole or not at all, and checks of their paths."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.host.files import replace_file


def check_output(path: Path | None, field: str) -> None:
    """Check that a file can be written, before the work for it. Accept None.

    Raises InvalidArgument that names the option `field`.
    """
    if path is None:
        return
    option, folder = f"--{field.replace('_', '-')}", path.parent
    if not folder.is_dir():
        raise InvalidArgument(f"{option}: {folder} is no folder", field=field)
    if path.is_dir():
        raise InvalidArgument(f"{option}: {path} is a folder, not a file", field=field)
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InvalidArgument(f"{option}: {path} cannot be written", field=field)


def write_private_json(path: Path, value: Mapping[str, object]) -> None:
    """Write or replace a file of one JSON object that only this user can read."""
    replace_file(path, f"{json.dumps(value, ensure_ascii=False, indent=2)}\n".encode(), 0o600)


def share_secret(used: Path, others: Sequence[Path]) -> list[Path]:
    """Give the files of one secret the same content; return those that have another.

    A missing `used` is copied from the first of the others that is there, and then those that are
    missing from it. Without others, or any file, nothing is done. Raises FailedPrecondition.
    """
    if not others:
        return []
    try:
        source = next((path for path in (used, *others) if path.exists()), None)
        if source is None:
            return []
        secret = source.read_bytes()
        for path in (used, *others):
            if not path.exists():
                replace_file(path, secret, 0o600)
        return [path for path in others if path.read_bytes() != secret]
    except OSError as error:
        raise FailedPrecondition(
            f"the secret of the chunk keys, {error.filename}: {error.strerror}"
        ) from error

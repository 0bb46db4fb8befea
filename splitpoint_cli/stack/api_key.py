"""The key of `up --api-key`: a tokens file for the gateway alone, with one client in it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from splitpoint.errors import InvalidArgument
from splitpoint.transport.access import Caller, Role, TokenEntry, digest_of, entry_text
from splitpoint.transport.tls import read_private
from splitpoint_cli.stack.options import API_KEY_VARIABLE, StackOptions

_FILE = "api-key.toml"
_KEY = re.compile(r"[!-~]{8,1024}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The tokens file of a gateway, in the stack's private folder. It has the key's digest only.

    Attributes:
        entry: the file's text.
    """

    tokens_file: Path
    entry: str

    def write(self) -> None:
        """Write the file with mode 0600, in one step. Raises OSError."""
        fresh = self.tokens_file.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(self.entry)
        fresh.replace(self.tokens_file)


def api_key_of(options: StackOptions, runtime: Path) -> ApiKey | None:
    """Return the key of the options or of the environment; None if there is none.

    The key of the environment counts only for a stack with a gateway and without tokens. Raises
    InvalidArgument, PermissionDenied (a file that is open to others).
    """
    given = options.api_key is not None or options.api_key_file is not None
    if given:
        _check_options(options)
    elif options.http is None or options.tokens is not None:
        return None
    key: str | None
    if options.api_key_file is not None:
        text = read_private(options.api_key_file, "the key", field="api_key_file")
        key = text.decode("ascii", "replace").strip()
    else:
        key = options.api_key if given else os.environ.get(API_KEY_VARIABLE)
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise InvalidArgument(
            "the API key has 8 to 1,024 printable ASCII characters without blanks", field="api_key"
        )
    entry = TokenEntry(Caller("api-key", Role.CLIENT), digest_of(key))
    return ApiKey(runtime / _FILE, entry_text(entry))


def _check_options(options: StackOptions) -> None:
    for other, why in (
        (options.http is None, "needs --http"),
        (options.tokens is not None, "and --tokens: give one of them"),
        (
            options.api_key is not None and options.api_key_file is not None,
            "and --api-key-file: give one of them",
        ),
    ):
        if other:
            raise InvalidArgument(f"--api-key {why}", field="api_key")

"""`splitpoint token`: makes a bearer token and enters its digest into a tokens file."""

from __future__ import annotations

import fcntl
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TextIO

import typer

from splitpoint.errors import AlreadyExists, InvalidArgument
from splitpoint.host.files import replace_file
from splitpoint.options.option import Option
from splitpoint.transport.access import (
    LEAST_WEIGHT,
    MOST_WEIGHT,
    Caller,
    Role,
    TokenEntry,
    check_name,
    digest_of,
    entry_text,
    parse_tokens,
)
from splitpoint.transport.tls import read_private
from splitpoint_cli.options import of, takes_options

TOKEN_BYTES = 32


def add_token(path: Path, caller: Caller) -> str:
    """Return a new token for the caller; append its entry to the file, made if it is missing.

    The file is replaced in one step: a service never sees half of it. Raises
    AlreadyExists (the name is taken), InvalidArgument, PermissionDenied (the
    file is open to others).
    """
    token = secrets.token_urlsafe(TOKEN_BYTES)
    with _alone(path.parent):
        before = _text_of(path)
        entries = parse_tokens(before, path)
        if caller.name in {entry.caller.name for entry in entries}:
            raise AlreadyExists(
                f"{path} has a token of {caller.name}; delete that entry to revoke it"
            )
        if before:
            before = before.rstrip("\n") + "\n\n"
        text = before + entry_text(TokenEntry(caller, digest_of(token)))
        parse_tokens(text, path)  # a tenant has one weight
        replace_file(path, text.encode(), 0o600)
    return token


def _text_of(path: Path) -> str:
    if not path.exists():
        return ""
    return read_private(path, "the tokens file").decode("utf-8", "replace")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder, so that two commands do not lose each other's entry."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidArgument(f"{folder}: {error.strerror}", field="file") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


_FILE: Option[str] = Option(
    "file",
    str,
    "",
    "Tokens file of the services; made with mode 0600 if it is missing.",
    unit="PATH",
    is_required=True,
)
_NAME: Option[str] = Option(
    "name",
    str,
    "",
    "Name of the token's holder, for logs and for revoking.",
    unit="NAME",
    is_required=True,
)
_ROLE: Option[str] = Option(
    "role",
    str,
    Role.CLIENT.value,
    "Permissions: client generates; worker is for services among themselves; admin sees "
    "everything.",
    choices=tuple(Role),
)
_TENANT: Option[str] = Option(
    "tenant",
    str,
    "",
    "Tenant of a client; only clients of one tenant share cached prefixes; absent: none.",
    unit="NAME",
)
_WEIGHT: Option[float | None] = Option(
    "weight",
    float,
    None,
    "Weight of the tenant: its share of the devices, in proportion to the weights of other "
    "tenants; absent: that of its other tokens, else 1.",
    unit="N",
    least=LEAST_WEIGHT,
    most=MOST_WEIGHT,
)


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """Values of the options of `splitpoint token`."""

    file: str = of(_FILE)
    name: str = of(_NAME)
    role: str = of(_ROLE)
    tenant: str = of(_TENANT)
    weight: float | None = of(_WEIGHT)


@takes_options
def token(
    options: TokenOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Write the token into this new file of mode 0600, for --token-file and "
            "SPLITPOINT_TOKEN_FILE; absent: print it.",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Make a token, print it once or write it to a file, and enter its digest into the tokens file.

    Running services know it within a second. Deleting its entry revokes it.
    """
    role = Role(options.role)
    check_name(options.name, field="name")
    if options.tenant:
        check_name(options.tenant, field="tenant")
        if role is not Role.CLIENT:
            raise InvalidArgument("only clients have tenants", field="tenant")
    if options.weight is not None and role is not Role.CLIENT:
        raise InvalidArgument("only clients have weights", field="weight")
    caller = Caller(options.name, role, options.tenant, options.weight or 1.0)
    if out is not None:
        with _new_private_file(out) as secret:
            secret.write(f"{add_token(Path(options.file), caller)}\n")
        return
    print(add_token(Path(options.file), caller))
    if sys.stdout.isatty():
        print("It is shown this once; --out FILE keeps it in a file of mode 0600.", file=sys.stderr)


@contextmanager
def _new_private_file(path: Path) -> Iterator[TextIO]:
    """Make a file that only this user can read; remove it if the block fails.

    Raises AlreadyExists, or InvalidArgument where no file can be made.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise AlreadyExists(f"--out: {path} exists already, and is left as it is") from None
    except OSError as error:
        raise InvalidArgument(f"--out: {path}: {error.strerror}", field="out") from error
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)  # whatever the umask
            yield file
    except BaseException:
        path.unlink()
        raise

"""Redis's address and credentials, from arguments and files. Opens no connection."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from splitpoint.errors import InvalidArgument
from splitpoint.transport.tls import read_private


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Redis's address and credentials. `repr` and `name` do not show the password."""

    # redis://host:port/db, rediss://host:port/db or unix:///path, without credentials.
    name: str
    host: str = ""
    port: int = 6379
    database: int = 0
    socket_path: str = ""
    tls: bool = False
    # PEM file with the authority of the server's certificate. None: the system's.
    ca_file: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)


def redis_options(arguments: argparse.Namespace) -> RedisOptions | None:
    """Return the parsed options; None without --redis. Raises as `read_redis_options`."""
    return read_redis_options(
        arguments.redis,
        password_file=arguments.redis_password_file,
        ca_file=arguments.redis_ca,
    )


def read_redis_options(
    url: str | None, *, password_file: str | None = None, ca_file: str | None = None
) -> RedisOptions | None:
    """Return None without a URL. Raises InvalidArgument, PermissionDenied."""
    if url is None:
        if password_file or ca_file:
            raise InvalidArgument("a Redis password or CA needs --redis URL", field="redis")
        return None
    password = None if password_file is None else _read_password(Path(password_file))
    return parse_redis_url(url, password=password, ca_file=ca_file)


def parse_redis_url(
    url: str, *, password: str | None = None, ca_file: str | None = None
) -> RedisOptions:
    """Return the options. Raises InvalidArgument without the URL: it may have a password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _bad_url("it does not parse") from None
    if parts.query or parts.fragment:
        raise _bad_url("options after ? or # are not supported")
    if parts.password and password is not None:
        raise _bad_url("it has a password, and so has --redis-password-file")
    secret = unquote(parts.password) if parts.password else password
    user = unquote(parts.username) if parts.username else None
    if ca_file is not None and parts.scheme != "rediss":
        raise _bad_url("--redis-ca is for rediss:// only")
    if parts.scheme == "unix":
        if not parts.path.startswith("/"):
            raise _bad_url("the path of a socket is absolute: unix:///run/redis.sock")
        return RedisOptions(
            f"unix://{parts.path}", socket_path=unquote(parts.path), user=user, password=secret
        )
    if parts.scheme not in ("redis", "rediss"):
        raise _bad_url("it must start with redis://, rediss:// or unix://")
    database = parts.path.strip("/") or "0"
    if not parts.hostname or not database.isdecimal():
        raise _bad_url("it has no host, or a database that is no number")
    port = 6379 if port is None else port
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return RedisOptions(
        f"{parts.scheme}://{host}:{port}/{database}",
        host=parts.hostname,
        port=port,
        database=int(database),
        tls=parts.scheme == "rediss",
        ca_file=ca_file,
        user=user,
        password=secret,
    )


def _bad_url(why: str) -> InvalidArgument:
    return InvalidArgument(f"--redis is no usable URL: {why}", field="redis")


def _read_password(path: Path) -> str:
    """Return the first line of a file that other users cannot read."""
    secret = read_private(path, "the Redis password file", field="redis_password_file")
    try:
        lines = secret.decode().splitlines()
    except UnicodeDecodeError:  # its text would show the secret
        raise InvalidArgument(
            f"the Redis password file {path} is no text", field="redis_password_file"
        ) from None
    if not lines or not lines[0]:
        raise InvalidArgument(
            f"the Redis password file {path} is empty", field="redis_password_file"
        )
    return lines[0]

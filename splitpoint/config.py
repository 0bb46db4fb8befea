"""Values of options that several programs share: sizes, rates, addresses, folders and counts."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import stat
from pathlib import Path

from splitpoint.errors import FailedPrecondition, InvalidArgument

DEFAULT_ADDRESS = "127.0.0.1:50050"
# Of a store alone.
DEFAULT_STORE_ADDRESS = "127.0.0.1:50051"
SHARED_MEMORY = Path("/dev/shm")
# The kernel's sun_path is 108 bytes with its final zero.
SOCKET_PATH_LIMIT = 107

# -- sizes ------------------------------------------------------------------------

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)(b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
# Bytes per second; see `parse_rate`.
LEAST_RATE = 1_000_000


def parse_size(text: str, *, field: str = "") -> int:
    """Return the bytes of "8GiB", "512MB", "1.5g" or "123".

    KiB, MiB, GiB and the bare letters k, m, g are powers of 1024; kB, MB, GB powers of 1000.
    Raises InvalidArgument for anything else, naming the option `field`.
    """
    size = _size_of(text)
    if size is None:
        raise InvalidArgument(
            f"{_option(field)}{text!r} is not a size (examples: 8GiB, 512MB, 1073741824)",
            field=field,
        )
    return size


def _option(field: str) -> str:
    """Return the beginning of an error about an option."""
    return f"--{field.replace('_', '-')}: " if field else ""


def _size_of(text: str) -> int | None:
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        return None
    number, prefix, binary, byte = match.groups()
    base = 1000 if byte and prefix and not binary else 1024
    factor = base ** _POWERS[prefix.lower()]
    # Integers stay exact however large they are.
    return int(number) * factor if number.isdigit() else int(float(number) * factor)


def parse_rate(text: str, *, field: str) -> int:
    """Return the bytes per second of "184MB", "184MB/s" or "16GiB"; sizes as in `parse_size`.

    Raises InvalidArgument for anything else, and for less than 1 MB/s: no link is that slow,
    so the unit was probably forgotten.
    """
    amount = text.strip().removesuffix("/s").strip()
    rate = _size_of(amount)
    if rate is None:
        raise InvalidArgument(
            f"{_option(field)}{text!r} is not a rate (examples: 184MB, 25GB, each per second)",
            field=field,
        )
    if rate < LEAST_RATE:
        meant = f"; did you mean {amount}MB?" if amount.isdigit() and rate else ""
        raise InvalidArgument(
            f"{_option(field)}{text} is {rate:,} bytes per second, under the least rate of "
            f"{format_rate(LEAST_RATE)}{meant}",
            field=field,
        )
    return rate


def format_rate(bytes_per_second: float) -> str:
    """Return a rate in powers of 1000, as links are sold: "184 MB/s", "25.6 GB/s"."""
    value = bytes_per_second
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if value < 999.5 or unit == "GB/s":
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a duration with at most three digits: "41.2 ms", "1.3 s"."""
    milliseconds = f"{seconds * 1e3:.3g}"
    # 999.9 ms would be rounded to three digits as 1e+03 ms.
    return f"{seconds:.3g} s" if float(milliseconds) >= 1000 else f"{milliseconds} ms"


def format_size(size_bytes: int) -> str:
    """Return a size with at most three digits: "512 B", "1.5 KiB", "8 GiB"."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5 or unit == "TiB":
            break
        value /= 1024
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    number = f"{value:.{digits}f}"
    return f"{number.rstrip('0').rstrip('.') if digits else number} {unit}"


# -- addresses ------------------------------------------------------------------------


def default_address() -> str:
    """Return where clients find schedulers: $SPLITPOINT_ADDRESS, else DEFAULT_ADDRESS."""
    return os.environ.get("SPLITPOINT_ADDRESS") or DEFAULT_ADDRESS


def check_addresses(text: str, *, field: str = "address") -> tuple[str, ...]:
    """Return the addresses of a list with commas. Raises InvalidArgument, also without any."""
    given = [part.strip() for part in text.split(",")]
    return tuple(check_address(part, field=field) for part in dict.fromkeys(given))


def check_address(text: str, *, field: str = "address") -> str:
    """Return `host:port` or `unix:/absolute/path` unchanged. Raises InvalidArgument."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path.startswith("/") or len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
            raise InvalidArgument(
                f"{text!r}: a socket path is absolute and at most {SOCKET_PATH_LIMIT} bytes long",
                field=field,
            )
        return text
    host, port = _split_host_port(text)
    if not host or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument(
            f"{text!r} is not an address (examples: {DEFAULT_ADDRESS}, unix:/run/store.sock)",
            field=field,
        )
    return text


def check_listen_address(
    text: str, *, field: str = "listen", has_tls: bool = False, has_tokens: bool = False
) -> str:
    """Return an address that a service may bind unchanged.

    Raises InvalidArgument for anything but a socket file or a loopback port, unless the
    service has both TLS and tokens; the error names the missing arguments.
    """
    check_address(text, field=field)
    if is_local_address(text) or (has_tls and has_tokens):
        return text
    missing = [] if has_tls else ["--tls-cert and --tls-key (encryption)"]
    missing += [] if has_tokens else ["--tokens (permitted callers)"]
    raise InvalidArgument(
        f"{text!r} is not a loopback address: beyond 127.0.0.1, [::1], localhost and unix: sockets "
        f"a service listens only with TLS and tokens; missing: {', '.join(missing)}",
        field=field,
        reason="OPEN_LISTEN_ADDRESS",
    )


def reachable_address(bound: str) -> str:
    """Return the address at which a client on this host reaches a service bound to `bound`."""
    host, port = _split_host_port(bound)
    if bound.startswith("unix:"):
        return bound
    return {"0.0.0.0": f"127.0.0.1:{port}", "::": f"[::1]:{port}"}.get(host, bound)


def is_local_address(text: str) -> bool:
    """Return True for a socket file or a loopback port, whose bytes stay on this host."""
    if text.startswith("unix:"):
        return True
    host, _ = _split_host_port(text)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _split_host_port(text: str) -> tuple[str, str]:
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:  # a bare IPv6 address without a port
        return "", ""
    return host, port


# -- folders ---------------------------------------------------------------------------


def make_runtime(folder: Path) -> None:
    """Make the folder of `runtime_path`, and the one above it. Raises FailedPrecondition."""
    make_private(folder.parent)
    make_private(folder)


def runtime_path(instance: str) -> Path:
    """Return the folder for the sockets of one instance, which may not exist.

    It is under XDG_RUNTIME_DIR if that is set, else /tmp/splitpoint-UID.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and os.access(base, os.W_OK):
        parent = Path(base) / "splitpoint"
    else:
        parent = Path("/tmp") / f"splitpoint-{os.getuid()}"
    return parent / check_instance(instance)


def arena_path(instance: str) -> Path:
    """Return the path of an instance's arena; the store makes its folder."""
    return SHARED_MEMORY / f"splitpoint-{os.getuid()}-{check_instance(instance)}" / "arena"


def check_instance(name: str) -> str:
    """Return a stack's name unchanged: at most 32 letters, digits, `-` and `_`, no `-` first."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,31}", name):
        raise InvalidArgument(
            f"{name!r} is not an instance name (1 to 32 letters, digits, - and _, the first no -)",
            field="instance",
        )
    return name


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter, or check an existing one.

    Raises FailedPrecondition for a symbolic link or another user's folder, which another
    user of /tmp may have made.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise FailedPrecondition(
                f"{folder} is not a folder of this user; remove it or set XDG_RUNTIME_DIR"
            ) from None
        folder.chmod(0o700)


def remove_tree(folder: Path) -> None:
    """Remove a folder and its contents, if it exists."""
    if folder.exists():
        shutil.rmtree(folder)


def counted(count: int, singular: str, plural: str = "") -> str:
    """Return "1 token" or "2,000 tokens". `plural`: if it is not the singular with an s."""
    return f"{count:,} {singular if count == 1 else plural or f'{singular}s'}"

"""Where processes listen, how much memory there is, and how every service starts and ends.

Knows no model, no gRPC and no service: sizes, addresses, folders and signals only.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
import re
import shutil
import signal
import stat
from dataclasses import dataclass
from pathlib import Path

from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.observe.logs import add_log_arguments

DEFAULT_ADDRESS = "127.0.0.1:50050"
READY_PREFIX = "READY "
SHARED_MEMORY = Path("/dev/shm")
# The kernel's sun_path is 108 bytes with its final zero.
SOCKET_PATH_LIMIT = 107

# -- sizes ------------------------------------------------------------------------

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?)(b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
# Bytes per second; see `parse_rate`.
LEAST_RATE = 1_000_000


def parse_size(text: str, *, field: str = "") -> int:
    """Bytes from "8GiB", "512MB", "1.5g" or "123".

    KiB, MiB, GiB and the bare letters k, m, g are powers of 1024; kB, MB, GB
    powers of 1000. `field` is the option that said so. Raises InvalidArgument for
    anything else.
    """
    size = _size_of(text)
    if size is None:
        raise InvalidArgument(
            f"{_option(field)}{text!r} is not a size (examples: 8GiB, 512MB, 1073741824)",
            field=field,
        )
    return size


def _option(field: str) -> str:
    """What an error about an option begins with."""
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
    """Bytes per second from "184MB", "184MB/s" or "16GiB"; sizes as in `parse_size`.

    Raises InvalidArgument for anything else and for less than 1 MB/s: no link is that
    slow, and a copy over it would take hours, so a unit was forgotten.
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
    """For people, in powers of 1000 as links are sold: "184 MB/s", "25.6 GB/s"."""
    value = bytes_per_second
    for unit in ("B/s", "kB/s", "MB/s", "GB/s"):
        if value < 999.5 or unit == "GB/s":
            break
        value /= 1000
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def format_size(size_bytes: int) -> str:
    """For people: "512 B", "1.5 KiB", "8 GiB"; at most three digits that matter."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 999.5 or unit == "TiB":
            break
        value /= 1024
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    number = f"{value:.{digits}f}"
    return f"{number.rstrip('0').rstrip('.') if digits else number} {unit}"


# -- the machine --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What this process may use, in bytes. None: no such limit."""

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None
    cgroup_available_bytes: int | None

    @property
    def usable_bytes(self) -> int:
        """The tighter of MemAvailable and what the cgroup leaves."""
        if self.cgroup_available_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, self.cgroup_available_bytes)


def memory_facts(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryFacts:
    """Read /proc/meminfo and the memory limits of this process's cgroups (v2 and v1)."""
    meminfo = {}
    for line in (proc / "meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        meminfo[key] = int(rest.split()[0]) * 1024
    limits = _cgroup_memory(proc, cgroup)
    return MemoryFacts(
        total_bytes=meminfo["MemTotal"],
        available_bytes=meminfo["MemAvailable"],
        cgroup_limit_bytes=min((limit for limit, _ in limits), default=None),
        cgroup_available_bytes=min((max(0, limit - used) for limit, used in limits), default=None),
    )


def _cgroup_memory(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """(limit, used) of every memory cgroup above this process that has a limit."""
    limits = []
    for line in _read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, names = cgroup, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / group.lstrip("/")
        # A container sees its own group as the root although /proc names it in full.
        for candidate in (folder, *folder.parents):
            if not candidate.is_relative_to(root):
                break
            limit, used = (_read_text(candidate / name).strip() for name in names)
            # v1 says "no limit" with a number near 2^63.
            if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
                limits.append((int(limit), int(used)))
    return limits


def _read_text(path: Path) -> str:
    """The file's text; empty where the kernel has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def available_cores() -> int:
    """Cores this process may run on: affinity, cut by the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read_text(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


# -- addresses ------------------------------------------------------------------------


def default_address() -> str:
    """Where clients look for a scheduler: $SPLITPOINT_ADDRESS, else DEFAULT_ADDRESS."""
    return os.environ.get("SPLITPOINT_ADDRESS") or DEFAULT_ADDRESS


def check_address(text: str, *, field: str = "address") -> str:
    """`host:port` or `unix:/absolute/path`, returned as given. Raises InvalidArgument."""
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
    """An address a service may bind: a socket file, a loopback port, any other only if secured.

    Raises InvalidArgument for an interface that others can reach without both
    TLS and tokens, naming the arguments that are missing.
    """
    check_address(text, field=field)
    if is_local_address(text) or (has_tls and has_tokens):
        return text
    missing = [] if has_tls else ["--tls-cert and --tls-key (encryption)"]
    missing += [] if has_tokens else ["--tokens (who may call)"]
    raise InvalidArgument(
        f"{text!r} is not a loopback address: beyond 127.0.0.1, [::1], localhost and unix: sockets "
        f"a service listens only with TLS and tokens; missing: {', '.join(missing)}",
        field=field,
        reason="OPEN_LISTEN_ADDRESS",
    )


def reachable_address(bound: str) -> str:
    """Where a client on this host reaches a service bound to `bound`."""
    host, port = _split_host_port(bound)
    if bound.startswith("unix:"):
        return bound
    return {"0.0.0.0": f"127.0.0.1:{port}", "::": f"[::1]:{port}"}.get(host, bound)


def is_local_address(text: str) -> bool:
    """Whether what is sent there stays on this host: a socket file or a loopback port."""
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


def runtime_directory(instance: str) -> Path:
    """A folder of mode 0700 for the sockets of one instance; made when missing.

    Under XDG_RUNTIME_DIR when there is one, else /tmp/splitpoint-UID. Raises
    FailedPrecondition when somebody else owns what is there.
    """
    folder = runtime_path(instance)
    make_private(folder.parent)
    make_private(folder)
    return folder


def runtime_path(instance: str) -> Path:
    """Where `runtime_directory` is, whether it is there or not."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if base and os.access(base, os.W_OK):
        parent = Path(base) / "splitpoint"
    else:
        parent = Path("/tmp") / f"splitpoint-{os.getuid()}"
    return parent / check_instance(instance)


def arena_path(instance: str) -> Path:
    """Where the arena of an instance lies; its folder is made by the store."""
    return SHARED_MEMORY / f"splitpoint-{os.getuid()}-{check_instance(instance)}" / "arena"


def check_instance(name: str) -> str:
    """The name of one running stack: letters, digits, `-` and `_`, at most 32 of them."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", name):
        raise InvalidArgument(
            f"{name!r} is not an instance name (letters, digits, - and _, at most 32)",
            field="instance",
        )
    return name


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter, or check that it is one.

    A symbolic link or another owner's folder raises FailedPrecondition: in
    /tmp somebody else may have been there first.
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
    """Remove a folder and what is in it; nothing happens when it is gone already."""
    if folder.exists():
        shutil.rmtree(folder)


# -- the life of a service ----------------------------------------------------------------


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every service has."""
    parser.add_argument(
        "--listen", required=True, metavar="ADDRESS", help="host:port (0: any) or unix:/path"
    )
    parser.add_argument(
        "--parent-fd", type=int, metavar="N", help="stop when this inherited pipe is closed"
    )
    parser.add_argument("--reflection", action="store_true", help="serve gRPC reflection")
    add_log_arguments(parser)
    tracing = parser.add_argument_group("traces (docs/tracing.md)")
    tracing.add_argument(
        "--otlp-endpoint",
        metavar="HOST:PORT|URL|env",
        help="send OpenTelemetry spans to this collector by OTLP/gRPC; https:// for TLS; env: "
        "where OTEL_EXPORTER_OTLP_ENDPOINT says",
    )
    security = parser.add_argument_group("security")
    security.add_argument("--tls-cert", metavar="PATH", help="PEM chain; serve TLS on ports")
    security.add_argument("--tls-key", metavar="PATH", help="its private key, mode 0600")
    security.add_argument(
        "--tls-ca",
        metavar="PATH",
        help="verify peers: demand a certificate of it from clients, and speak TLS to the ports "
        "of other services",
    )
    security.add_argument(
        "--tls-server-name",
        default="",
        metavar="NAME",
        help="the name that other services' certificates carry, where it is not the host by which "
        "they are reached",
    )
    security.add_argument("--tokens", metavar="FILE", help="TOML of who may call, mode 0600")
    security.add_argument(
        "--token-file", metavar="PATH", help="the token shown to other services, mode 0600"
    )


def announce_ready(address: str) -> None:
    """Print the line the supervisor waits for. `address` is what clients connect to."""
    print(f"{READY_PREFIX}{address}", flush=True)


def stop_on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set `stop`. Call inside the running loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def watch_parent(fd: int, stop: asyncio.Event) -> None:
    """Set `stop` once the other end of the inherited pipe `fd` is closed.

    The kernel closes it however the parent dies, kill -9 included. Call inside
    the running loop; returns at once.
    """
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(fd, 4096):
            loop.remove_reader(fd)
            stop.set()

    loop.add_reader(fd, readable)

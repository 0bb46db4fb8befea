"""What a store's options say about Mooncake, checked before anything is started.

Whether Mooncake can be loaded on this host, and what to install if not; the network interface that
it is confined to. The engine listens on all interfaces, whatever it is told. `confine` binds its
listening sockets to one, so that the kernel refuses connections that come in by another.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec

from splitpoint.config import check_address, parse_size
from splitpoint.errors import InvalidArgument
from splitpoint.extras import MissingExtra
from splitpoint.options.store import (
    ENGINE,
    OPEN_NETWORK,
    TIER_POOL,
    TIER_POOL_MEMORY,
    TIER_POOL_REPLICAS,
)

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 16  # IFNAMSIZ, with the zero at the end


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface. Raises InvalidArgument if it has none."""
    name = interface.encode()
    if not 0 < len(name) < _NAME_BYTES:
        raise InvalidArgument(
            f"a network interface has a name of 1 to {_NAME_BYTES - 1} bytes",
            field="transfer-interface",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name))
        except OSError as error:
            there = ", ".join(each for _, each in socket.if_nameindex())
            raise InvalidArgument(
                f"--transfer-interface {interface}: no such interface with an IPv4 address "
                f"({error.strerror}); this host has {there}",
                field="transfer-interface",
            ) from error
    return socket.inet_ntoa(answer[20:24])


def confine(interface: str) -> int:
    """Bind this process's listening sockets to an interface. Return their number.

    Linux allows it without privileges since 5.7, for sockets that are not bound to another one.
    Raises OSError.
    """
    count = 0
    name = interface.encode()
    for found in _sockets(is_listening=True):
        bound = found.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _NAME_BYTES)
        if bound.rstrip(b"\0") != name:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
        count += 1
    return count


def end_connections() -> None:
    """End this process's TCP connections: those that came in before its sockets were confined."""
    for found in _sockets(is_listening=False):
        with suppress(OSError):  # not connected, or no longer
            found.shutdown(socket.SHUT_RDWR)


def _sockets(*, is_listening: bool) -> Iterator[socket.socket]:
    """Yield this process's TCP sockets, each open until the next one."""
    for number in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                continue
            found = socket.socket(fileno=os.dup(int(number)))
        except OSError:
            continue  # closed meanwhile
        with found:
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and (
                found.type == socket.SOCK_STREAM
            )
            if is_tcp and is_listening == bool(
                found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            ):
                yield found


# Shared libraries that the wheel links but does not bring, and Debian's packages of them.
LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libcurl.so.4": "libcurl4",
    "libnuma.so.1": "libnuma1",
}


def has_wheel() -> bool:
    return find_spec(ENGINE) is not None


def missing_packages() -> list[str]:
    """Return Debian's packages of the libraries that this host lacks.

    It loads those that there are, so a store does not call it.
    """
    return [package for library, package in LIBRARIES.items() if not _loads(library)]


def how_to_install() -> str:
    """Return what is missing and how to get it; empty if nothing is."""
    if not has_wheel():
        return "Mooncake is not installed: pip install 'splitpoint[mooncake]'"
    if missing := missing_packages():
        return f"Mooncake's wheel needs {' '.join(missing)}: apt-get install {' '.join(missing)}"
    return ""


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The pool of several hosts' memory.

    Attributes:
        master: address of the Mooncake master, "HOST:PORT".
        memory_bytes: what this store gives to the pool.
        replicas: copies of each chunk.
    """

    master: str
    memory_bytes: int
    replicas: int


@dataclass(frozen=True, slots=True)
class MooncakeSettings:
    """How a store uses Mooncake.

    Attributes:
        interface: the network interface that the engine is confined to.
        has_transfer: other stores read this arena, and this store reads theirs.
        pool: None if the store uses no pool.
    """

    interface: str
    has_transfer: bool
    pool: PoolSettings | None


def settings_of(arguments: argparse.Namespace) -> MooncakeSettings | None:
    """Return None if the options use no Mooncake. Raises InvalidArgument, MissingExtra."""
    has_transfer = arguments.transfer == ENGINE
    pool = _pool_of(arguments)
    interface = arguments.transfer_interface
    if not has_transfer and pool is None:
        for name, is_given in (
            ("transfer-interface", interface is not None),
            ("trusted-network", arguments.trusted_network),
        ):
            if is_given:
                raise InvalidArgument(
                    f"--{name} needs --transfer mooncake or --tier-mooncake", field=name
                )
        return None
    option = "--transfer mooncake" if has_transfer else "--tier-mooncake"
    if interface is None:
        raise InvalidArgument(
            f"{option} needs --transfer-interface NAME: {OPEN_NETWORK}, so name the private "
            "network that it may listen on",
            field="transfer-interface",
        )
    if arguments.tokens is not None and not arguments.trusted_network:
        raise InvalidArgument(
            f"{option} beside --tokens needs --trusted-network: Mooncake asks for no token, so "
            "every host on that network can read the chunks of all tenants",
            field="trusted-network",
        )
    address_of(interface)
    if not has_wheel():
        raise MissingExtra(option, ENGINE, ENGINE)
    return MooncakeSettings(interface, has_transfer, pool)


def _pool_of(arguments: argparse.Namespace) -> PoolSettings | None:
    master, replicas = arguments.tier_pool, arguments.tier_pool_replicas
    memory = parse_size(arguments.tier_pool_memory, field=TIER_POOL_MEMORY.name)
    if master is None:
        for given, is_given in (
            (TIER_POOL_MEMORY, memory != 0),
            (TIER_POOL_REPLICAS, replicas != 1),
        ):
            if is_given:
                raise InvalidArgument(f"{given.flag} needs {TIER_POOL.flag}", field=given.name)
        return None
    try:
        is_of_network = not check_address(master).startswith("unix:")
    except InvalidArgument:
        is_of_network = False
    if not is_of_network:
        raise InvalidArgument(
            f"{TIER_POOL.flag}: {master!r} is not the HOST:PORT of a Mooncake master (example: "
            "rack-1:50051)",
            field=TIER_POOL.name,
        )
    return PoolSettings(master, memory, replicas)

"""The network interface that Mooncake is confined to.

The engine listens on all interfaces, whatever it is told. `confine` binds its listening sockets
to one, so that the kernel refuses connections that come in by another.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress

from splitpoint.errors import InvalidArgument

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

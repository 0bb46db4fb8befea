"""Allocates an arena's pages on one NUMA node: that of the GPUs, or a given one.

Pages of a tmpfs file come from the node of the allocating thread's memory policy, with
posix_fallocate and with a mapping. So that thread's policy is set while the file is made.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from splitpoint.errors import FailedPrecondition, InvalidArgument

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_DEFAULT, _BIND = 0, 2
_BITS = 64
_NVIDIA = "0x10de"
_DISPLAY = "0x03"


def choose_node(wish: str, *, sys_folder: Path = Path("/sys")) -> int | None:
    """Return the node for "auto", "none" or a number; None: the kernel decides.

    "auto" is the node of the NVIDIA GPUs if all are on one, and None on a machine with one
    node. Raises InvalidArgument for a node without memory.
    """
    if wish == "none":
        return None
    nodes = parse_nodes((sys_folder / "devices/system/node/has_memory").read_text())
    if wish == "auto":
        found = gpu_nodes(sys_folder)
        return found.pop() if len(nodes) > 1 and len(found) == 1 else None
    if not wish.isdecimal():
        raise InvalidArgument("--numa-node is auto, none or a number", field="numa-node")
    if int(wish) not in nodes:
        raise InvalidArgument(
            f"there is no NUMA node {wish} with memory here; there is "
            + ", ".join(str(node) for node in sorted(nodes)),
            field="numa-node",
        )
    return int(wish)


def parse_nodes(text: str) -> set[int]:
    """Parse a kernel list of nodes such as "0-1,4"."""
    nodes: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            nodes.update(range(int(first), int(last or first) + 1))
    return nodes


def gpu_nodes(sys_folder: Path) -> set[int]:
    """Return the nodes of the NVIDIA display devices that have one."""
    nodes = set()
    for device in (sys_folder / "bus/pci/devices").glob("*"):
        vendor, kind, node = (
            (device / name).read_text().strip() for name in ("vendor", "class", "numa_node")
        )
        if vendor == _NVIDIA and kind.startswith(_DISPLAY) and int(node) >= 0:
            nodes.add(int(node))
    return nodes


def set_memory_policy(node: int | None) -> None:
    """Bind this thread's new pages to a node; None: unbind. Raises FailedPrecondition."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        raise FailedPrecondition(f"binding to a NUMA node is not known on {platform.machine()}")
    words = 1 if node is None else node // _BITS + 1
    mask = (ctypes.c_ulong * words)()
    if node is not None:
        mask[node // _BITS] = 1 << node % _BITS
    libc = ctypes.CDLL(None, use_errno=True)
    mode = _DEFAULT if node is None else _BIND
    # The kernel reads one bit less than the given limit.
    limit = 0 if node is None else words * _BITS + 1
    if libc.syscall(number, mode, None if node is None else mask, ctypes.c_ulong(limit)):
        raise FailedPrecondition(
            f"binding to NUMA node {node} failed: {os.strerror(ctypes.get_errno())}",
            reason="NUMA_BIND_FAILED",
        )


@contextmanager
def bound_to(
    node: int | None, *, set_policy: Callable[[int | None], None] = set_memory_policy
) -> Iterator[None]:
    """Bind this thread's allocations to the node within the context; None: do nothing."""
    if node is None:
        yield
        return
    set_policy(node)
    try:
        yield
    finally:
        set_policy(None)

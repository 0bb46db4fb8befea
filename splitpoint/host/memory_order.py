"""Fences for memory that processes share, on processors that reorder accesses.

x86 makes stores visible in program order and does not reorder loads, which is all that the
arena's protocol needs (docs/arena-format.md, section Order of writes). Other processors need
a fence instruction, which neither Python nor numpy can issue. There the system call
membarrier(2) is one: the kernel executes a full barrier in the calling thread.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable
from functools import cache

from splitpoint.errors import FailedPrecondition

# Processors with total store order.
_ORDERED = frozenset({"x86_64", "amd64", "i386", "i686"})
# The number of membarrier(2), by processor.
_MEMBARRIER = {"aarch64": 283, "riscv64": 283, "loongarch64": 283, "ppc64le": 365, "x86_64": 324}
_QUERY = 0
# Full barriers in the calling thread, and in running threads of processes that asked for
# them (none here). MEMBARRIER_CMD_PRIVATE_EXPEDITED returns without one in a process of a
# single thread; MEMBARRIER_CMD_GLOBAL takes milliseconds.
_GLOBAL_EXPEDITED = 1 << 1

# Calls membarrier(2) with a command; returns its result, or -errno.
Membarrier = Callable[[int], int]


class NoMemoryFence(FailedPrecondition):
    """The processor may reorder accesses, and the kernel offers no fence."""


def fence() -> None:
    """Let all earlier accesses of this thread to shared memory come before all later ones.

    Does nothing on x86; takes about 2 µs elsewhere. Raises NoMemoryFence.
    """
    issue = _own_fence()
    if issue is not None:
        issue()


def fence_of(machine: str, membarrier: Membarrier | None) -> Callable[[], None] | None:
    """Return the fence of a processor (`platform.machine()`); None if it needs none.

    Raises NoMemoryFence if `membarrier` is None or lacks the command.
    """
    if machine.lower() in _ORDERED:
        return None
    offered = -1 if membarrier is None else membarrier(_QUERY)
    if membarrier is None or offered < 0 or not offered & _GLOBAL_EXPEDITED:
        raise NoMemoryFence(
            f"{machine} reorders accesses to shared memory, and this kernel has no membarrier(2) "
            f"with MEMBARRIER_CMD_GLOBAL_EXPEDITED (Linux 4.16), or forbids it: the arena cannot "
            f"be shared safely here"
        )

    def issue() -> None:
        result = membarrier(_GLOBAL_EXPEDITED)
        if result < 0:
            raise NoMemoryFence(f"membarrier(2) failed: {os.strerror(-result)}")

    return issue


def kernel_membarrier(machine: str) -> Membarrier | None:
    """Return the system call of this kernel; None if its number is not known."""
    number = _MEMBARRIER.get(machine)
    if number is None:
        return None
    library = ctypes.CDLL(None, use_errno=True)

    def call(command: int) -> int:
        result: int = library.syscall(number, command, 0, 0)
        return result if result >= 0 else -ctypes.get_errno()

    return call


@cache
def _own_fence() -> Callable[[], None] | None:
    machine = platform.machine()
    return fence_of(machine, kernel_membarrier(machine))

"""Fences by processor: none on x86, membarrier(2) elsewhere, and a refusal without it."""

from __future__ import annotations

import errno
import platform
import sys

import pytest

from splitpoint.host.memory_order import NoMemoryFence, fence, fence_of, kernel_membarrier

GLOBAL_EXPEDITED = 2


class Kernel:
    """membarrier(2) of a kernel that offers the commands in `offered`."""

    def __init__(self, offered: int, result: int = 0) -> None:
        self.offered = offered
        self.result = result
        self.commands: list[int] = []

    def __call__(self, command: int) -> int:
        self.commands.append(command)
        return self.result if command else self.offered


@pytest.mark.parametrize("machine", ["x86_64", "AMD64", "i686"])
def test_x86_needs_no_fence(machine: str) -> None:
    kernel = Kernel(offered=-errno.ENOSYS)
    assert fence_of(machine, kernel) is None
    assert fence_of(machine, None) is None
    assert kernel.commands == []


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le", "riscv64", "a new one"])
def test_other_processors_call_the_kernel_each_time(machine: str) -> None:
    kernel = Kernel(offered=GLOBAL_EXPEDITED | 8)
    issue = fence_of(machine, kernel)
    assert issue is not None
    issue()
    issue()
    assert kernel.commands == [0, GLOBAL_EXPEDITED, GLOBAL_EXPEDITED]


@pytest.mark.parametrize("offered", [-errno.ENOSYS, -errno.EPERM, 0, 1 | 8])
def test_without_the_call_the_processor_is_refused(offered: int) -> None:
    with pytest.raises(NoMemoryFence, match=r"aarch64 reorders accesses .* membarrier"):
        fence_of("aarch64", Kernel(offered))
    with pytest.raises(NoMemoryFence):
        fence_of("s390x", None)


def test_a_fence_that_fails_is_an_error() -> None:
    issue = fence_of("aarch64", Kernel(GLOBAL_EXPEDITED, result=-errno.EINVAL))
    assert issue is not None
    with pytest.raises(NoMemoryFence, match="Invalid argument"):
        issue()


@pytest.mark.skipif(sys.platform != "linux", reason="membarrier is Linux's")
def test_this_kernel_carries_the_fence_out() -> None:
    """The real system call, as another processor would use it."""
    call = kernel_membarrier(platform.machine())
    if call is None or call(0) < 0:
        pytest.skip("this kernel has no membarrier(2), or forbids it")
    issue = fence_of("aarch64", call)
    assert issue is not None
    for _ in range(100):
        issue()
    fence()
    assert kernel_membarrier("a processor without a number") is None

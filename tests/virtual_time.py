"""An event loop whose clock stands still while anything runs, and jumps over each wait."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

Parameters = ParamSpec("Parameters")


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time is `now`. A busy machine changes nothing that a test sees of time."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Jumps(self))

    def time(self) -> float:
        return self.now


class _Jumps(selectors.SelectSelector):
    """Moves the loop's clock instead of waiting for a timer."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:  # no timer: only a file can wake the loop
            return super().select(None)
        found = super().select(0)
        if not found:
            self._loop.now += max(0.0, timeout)
        return found


def pass_time(seconds: float) -> None:
    """Let time pass, as something does that keeps the running loop busy."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.now += seconds


def in_virtual_time(
    test: Callable[Parameters, Coroutine[Any, Any, None]],
) -> Callable[Parameters, None]:
    """Run a test on a loop of its own with virtual time."""

    @functools.wraps(test)
    def run(*arguments: Parameters.args, **named: Parameters.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test(*arguments, **named))

    return run

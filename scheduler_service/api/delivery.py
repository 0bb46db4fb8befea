"""Wakes the readers of requests with new tokens, and ends deliveries that are not read.

Readers are woken in rounds that leave the event loop time.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from scheduler_service.api.request import Request
from splitpoint.errors import Cancelled

# A round is followed by a pause of this many times its own length, so that deliveries take at most
# a third of the loop.
PAUSE = 2.0
# Most seconds of a pause: other work of the loop may have made the round long.
LONGEST_PAUSE = 0.1
# Seconds of a round after which no pause is needed.
SHORT = 0.002


class Rounds:
    """Readers that wait are woken at once, unless the round before took long.

    With a few readers each step of an engine is delivered as it comes. With hundreds, a round of
    writes takes as long as a step, and a scheduler that began a round for every step would fall
    behind its workers for good. Tokens that come meanwhile wait for the next round, where they
    share a message: the busier the loop, the cheaper is a token.
    """

    def __init__(self) -> None:
        self._waiting: set[Request] = set()
        self._began = 0.0
        # None: the next round may begin at once.
        self._pause: asyncio.Handle | None = None

    def add(self, request: Request) -> None:
        """Note that a request has new tokens."""
        self._waiting.add(request)

    def deliver(self) -> None:
        """Begin a round now, or let one begin when the pause is over."""
        if self._pause is None and self._waiting:
            self._begin()

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        for request in self._waiting:
            request.wake_readers()
        self._waiting.clear()
        # Runs after all that was woken by now.
        self._pause = loop.call_soon(self._written)

    def _written(self) -> None:
        """Measure the round, in which every reader has handed its message to gRPC."""
        loop = asyncio.get_running_loop()
        seconds = loop.time() - self._began
        if seconds < SHORT:
            self._over()
        else:
            self._pause = loop.call_later(min(PAUSE * seconds, LONGEST_PAUSE), self._over)

    def _over(self) -> None:
        self._pause = None
        self.deliver()


class StallBound:
    """Let each wait inside of `with` take this many seconds at most; for one task.

        with StallBound(30.0) as bound:
            for message in messages:
                bound.begin()
                await write(message)
                bound.end()

    A wait that takes longer is cancelled, and Cancelled (SLOW_READER) raised. There is one timer
    for all waits, set anew at most once in `seconds`: one for each would cost more than it guards.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        # None: it waits for nothing.
        self._since: float | None = None
        self._is_over = False
        self._cancelling = 0

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def __enter__(self) -> StallBound:
        if self._task is None:
            raise RuntimeError("only a task can wait")
        self._cancelling = self._task.cancelling()
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if not self._is_over or self._task is None:
            return
        # As asyncio.timeout does: a cancellation from elsewhere is not overruled.
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise Cancelled(
                f"nothing was read for {self._seconds:g} s", reason="SLOW_READER"
            ) from None

    def _look(self) -> None:
        """Cancel a wait that takes too long; else look again when one may have taken so long."""
        left = self._seconds
        if self._since is not None:
            left -= self._loop.time() - self._since
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        elif self._task is not None:
            self._is_over = True
            self._task.cancel()

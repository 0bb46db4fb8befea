"""Ends a delivery whose client does not read."""

from __future__ import annotations

import asyncio
from types import TracebackType

from splitpoint.errors import Cancelled


class StallBound:
    """Let each wait inside of `with` take so many seconds at most; for one task.

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

"""Wakes the readers of requests with new tokens, in rounds that leave the event loop time."""

from __future__ import annotations

import asyncio

from scheduler_service.api.request import Request

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

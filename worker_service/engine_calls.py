"""Calls of other threads that run on the engine's thread, between two of its steps."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, TypeVar

from splitpoint.errors import Internal
from worker_service.engine.engine import Engine
from worker_service.engine.messages import Call

Result = TypeVar("Result")

# Message to callers and requests after the engine's thread has failed.
ENGINE_FAILED = "the engine failed; the worker restarts"
# Time limit of one engine step: more than a long prefill on a slow device takes.
STEP_TIMEOUT_SECONDS = 120.0


class EngineCalls:
    """The calls that wait for the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._has_failed = False
        self._waiting: set[concurrent.futures.Future[Any]] = set()

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run `function` on the engine's thread; called on the event loop.

        Raises Internal if the engine has failed, and what the function raises.
        """
        if self._has_failed:
            raise Internal(ENGINE_FAILED, reason="ENGINE_FAILED")
        done = self._post(function)
        self._waiting.add(done)
        try:
            return await asyncio.wrap_future(done)
        finally:
            self._waiting.discard(done)

    def without_copies(self, function: Callable[[], None]) -> None:
        """Run `function` on the engine's thread while nothing is copied, and wait for it.

        Call it from any thread except the engine's and the event loop's. Raises TimeoutError
        if the engine does not start `function` in time; `function` is then never run.
        """

        def call() -> None:
            with self._engine.lanes.without_copies():
                function()

        done = self._post(call)
        concurrent.futures.wait([done], STEP_TIMEOUT_SECONDS)
        if done.cancel():
            raise TimeoutError(f"the engine's step did not end within {STEP_TIMEOUT_SECONDS:g} s")
        done.result()

    def fail(self) -> None:
        """End all calls, those of later, too: the engine has failed. Called on the event loop."""
        self._has_failed = True
        for call in self._waiting:
            if not call.done():
                call.set_exception(Internal(ENGINE_FAILED, reason="ENGINE_FAILED"))

    def _post(self, function: Callable[[], Result]) -> concurrent.futures.Future[Result]:
        """Post a call; it does not run if its future is cancelled before it begins."""
        done: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def begin() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self._engine.post(Call(begin))
        return done

"""Places at which a service process that fork_server.py has forked ends with SIGKILL.

No code of the services knows them.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # never returns to the code that failed


def _countdown(count: int) -> Callable[[], bool]:
    left = [count]

    def is_due() -> bool:
        left[0] -= 1
        return left[0] == 0

    return is_due


def _in_prefill(count: int) -> None:
    """Before the results of a step with prefill leave the engine."""
    from worker_service.engine.engine import Engine

    is_due, real = _countdown(count), Engine._postprocess

    def postprocess(self: Any, result: Any) -> Any:
        if result is not None and max(result.batch.counts) > 1 and is_due():
            _die()
        return real(self, result)

    Engine._postprocess = postprocess  # type: ignore[method-assign]


def _after_a_seal(count: int) -> None:
    """When the store has sealed a chunk, and the worker does not know it yet."""
    from worker_service.store.client import StoreClient

    is_due, real = _countdown(count), StoreClient.seal

    async def seal(self: Any, *arguments: Any, **named: Any) -> Any:
        answer = await real(self, *arguments, **named)
        if is_due():
            _die()
        return answer

    StoreClient.seal = seal  # type: ignore[method-assign]


def _before_a_token_is_sent(count: int) -> None:
    """When a step has computed tokens, before a Run stream has them."""
    from worker_service.streams import RunStreams

    is_due, real = _countdown(count), RunStreams.emit

    def emit(self: Any, output: Any, busy: Any) -> Any:
        if output.tokens and is_due():
            _die()
        return real(self, output, busy)

    RunStreams.emit = emit  # type: ignore[method-assign]


def _mid_copy(count: int) -> None:
    """When a part of a chunk's bytes is in its slot of the arena."""
    import worker_service.store.write_back

    write_back: Any = worker_service.store.write_back
    is_due, real = _countdown(count), write_back.copy_runs

    def copy_runs(source: Any, plane: Any, pages: Any, slots: Any, **named: Any) -> Any:
        if is_due():
            half = max(1, len(plane[slots[0]]) // 2)
            plane[slots[0]][:half] = source[pages[0]][:half]
            _die()
        return real(source, plane, pages, slots, **named)

    write_back.copy_runs = copy_runs


def _half_an_answer(count: int) -> None:
    """When half of an answer of a batch is in its file."""
    from gateway_service.batch.files import AnswerFile

    is_due, real = _countdown(count), AnswerFile.write

    def write(self: Any, row: Any) -> None:
        if is_due():
            line = json.dumps(row, separators=(",", ":")).encode()
            os.write(self._fd, line[: len(line) // 2])
            _die()
        real(self, row)

    AnswerFile.write = write  # type: ignore[method-assign]


FAILPOINTS: dict[str, Callable[[int], None]] = {
    "prefill": _in_prefill,
    "seal": _after_a_seal,
    "send": _before_a_token_is_sent,
    "copy": _mid_copy,
    "answer": _half_an_answer,
}

"""Runs a batch: chooses the order, keeps a number of requests open, and repeats what may pass."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from gateway_service.batch.files import AnswerFile, Earlier, Fault, Source, fault_row, response_row
from gateway_service.batch.jobs import Outcome, Requests, refused
from gateway_service.batch.order import PrefixOrder
from splitpoint.client.scheduler_attempts import pause_after
from splitpoint.errors import (
    InvalidArgument,
    PermissionDenied,
    Retryable,
    SplitpointError,
    Unauthenticated,
    Unavailable,
)
from splitpoint.tasks import FileThread, run_all

Result = TypeVar("Result")

# Every other request would fail the same way.
_FATAL = (PermissionDenied, Unauthenticated)
# UNAVAILABLE for these reasons is about the request alone.
_FINAL_REASONS = frozenset({"TOO_MANY_MOVES"})
# After this many, UNAVAILABLE is an error of the request if others are answered meanwhile.
_MOST_ROUNDS = 5


class Order(StrEnum):
    """The order in which requests are sent."""

    PREFIX = "prefix"
    FILE = "file"


@dataclass(slots=True)
class Totals:
    """What a run came to.

    Attributes:
        line_count: requests in the file.
        earlier_count, earlier_failed_count: answered by earlier runs, and with an error.
        answered_count, failed_count: answered by this run, and with an error.
        errors: of this run, by HTTP status.
        prompt_tokens, cached_tokens, completion_tokens: of this run, over all answers.
    """

    line_count: int = 0
    earlier_count: int = 0
    earlier_failed_count: int = 0
    answered_count: int = 0
    failed_count: int = 0
    errors: Counter[int] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens that were computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def open_count(self) -> int:
        return self.line_count - self.earlier_count - self.answered_count

    def add_fault(self) -> None:
        """Count a line that is no request."""
        self.answered_count += 1
        self.failed_count += 1
        self.errors[400] += 1

    def add(self, outcome: Outcome) -> None:
        self.answered_count += 1
        if outcome.status != 200:
            self.failed_count += 1
            self.errors[outcome.status] += 1
        self.prompt_tokens += outcome.prompt_tokens
        self.cached_tokens += outcome.cached_tokens
        self.completion_tokens += outcome.completion_tokens


def unanswered(
    source: Source,
    *targets: AnswerFile,
    with_failed: bool = True,
    on_row: Callable[[], None] = lambda: None,
) -> tuple[Totals, array[int]]:
    """Return the positions of requests without an answer. Raises InvalidArgument.

    `with_failed`: answers that are errors count. `on_row`: called with each answer that is there.
    """
    totals = Totals(line_count=len(source))
    is_answered = bytearray(len(source))
    for target in targets:
        for earlier in target.earlier():
            on_row()
            if earlier.has_failed and not with_failed:
                continue
            position = _position_of(earlier, source, target)
            if not is_answered[position]:
                is_answered[position] = 1
                totals.earlier_count += 1
                totals.earlier_failed_count += earlier.has_failed
    positions = array("Q", (n for n in range(len(source)) if not is_answered[n]))
    return totals, positions


def _position_of(earlier: Earlier, source: Source, target: AnswerFile) -> int:
    position = source.position_of(earlier.custom_id, earlier.number)
    if position is None:
        raise InvalidArgument(
            f"{target.path} has an answer to {earlier.custom_id or f'line {earlier.number}'}, "
            f"which is no request of {source.path}; give another file",
            field="out",
        )
    if earlier.digest != source.digest_of(position):
        raise InvalidArgument(
            f"{target.path} has an answer to another request with the custom_id "
            f"{earlier.custom_id!r} than {source.path} has; give another file",
            field="out",
        )
    return position


class Answers(Protocol):
    """Where answers go, such as an AnswerFile."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line. Raises ResourceExhausted."""
        ...


# Gets what is done ("sorting", "answering"), and how many requests so far.
OnProgress = Callable[[str, int], None]


@dataclass(slots=True)
class Batch:
    """One run over a batch.

    Attributes:
        concurrency: requests that are open at a time.
        retry_seconds: how long errors that may pass are repeated while no request succeeds.
    """

    source: Source
    answers: Answers
    order: Order
    concurrency: int
    retry_seconds: float
    on_progress: OnProgress
    totals: Totals = field(default_factory=Totals)
    # When a request ended last.
    _progressed_at: float = 0.0

    async def run(self, requests: Requests, positions: Sequence[int]) -> None:
        """Answer the requests at these positions. Raises the error that ends the batch.

        Their files are read and written in a thread.
        """
        self._progressed_at = time.monotonic()
        totals = self.totals
        async with FileThread() as files:
            if self.order is Order.PREFIX:
                positions = await self._sorted(files, requests, positions)

            async def answer(position: int) -> None:
                await self._answer(files, requests, position)
                self.on_progress("answering", totals.earlier_count + totals.answered_count)

            await self._each(positions, answer)

    async def _sorted(
        self, files: FileThread, requests: Requests, positions: Sequence[int]
    ) -> Sequence[int]:
        done = 0
        with PrefixOrder() as order:

            async def add(position: int) -> None:
                nonlocal done
                order.add(await self._key(files, requests, position), position)
                done += 1
                self.on_progress("sorting", done)

            await self._each(positions, add)
            return order.positions()

    async def _key(self, files: FileThread, requests: Requests, position: int) -> bytes:
        line = await files.run(self.source.read, position)
        if isinstance(line, Fault):
            return b""
        try:
            return await self._repeated(lambda: requests.key(line))
        except SplitpointError:  # it will be answered with this error; those come first
            return b""

    async def _answer(self, files: FileThread, requests: Requests, position: int) -> None:
        line = await files.run(self.source.read, position)
        digest, write = self.source.digest_of(position), self.answers.write
        if isinstance(line, Fault):
            await files.run(write, fault_row(line.custom_id, digest, line.number, line.message))
            self.totals.add_fault()
            return
        try:
            outcome = await self._repeated(lambda: requests.answer(line))
        except SplitpointError as error:
            outcome = refused(line, error)
        row = response_row(line.custom_id, digest, outcome.status, outcome.request_id, outcome.body)
        await files.run(write, row)
        self.totals.add(outcome)

    async def _repeated(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of `work`; repeat it after errors that may pass.

        Raises its other errors, and _Ends for one that ends the batch.
        """
        failed_at: float | None = None
        rounds = 0
        while True:
            try:
                return await work()
            except _FATAL as error:
                raise _Ends(error) from error
            except Retryable as error:
                now = time.monotonic()
                failed_at = now if failed_at is None else failed_at
                rounds += 1
                if not _may_pass(error) or (
                    rounds > _MOST_ROUNDS and self._is_alone(error, failed_at)
                ):
                    raise
                if now - max(self._progressed_at, failed_at) >= self.retry_seconds:
                    raise _Ends(error) from error
                await asyncio.sleep(pause_after(rounds, error.retry_after_seconds or 0.0))

    def _is_alone(self, error: Retryable, failed_at: float) -> bool:
        """Return True if the schedulers answer others meanwhile: then it is about the request."""
        return isinstance(error, Unavailable) and self._progressed_at > failed_at

    async def _each(self, positions: Sequence[int], work: Callable[[int], Awaitable[None]]) -> None:
        """Do the work for each position, in order; `count` at a time."""
        waiting = iter(positions)

        async def go_on() -> None:
            for position in waiting:
                await work(position)
                self._progressed_at = time.monotonic()

        try:
            await run_all(go_on() for _ in range(min(self.concurrency, len(positions))))
        except _Ends as ends:
            raise ends.error from None


class _Ends(Exception):
    """An error that ends the batch."""

    def __init__(self, error: SplitpointError) -> None:
        super().__init__(error.message)
        self.error = error


def _may_pass(error: Retryable) -> bool:
    if isinstance(error, Unavailable):
        return error.reason not in _FINAL_REASONS
    return error.retry_after_seconds is not None

"""Idempotent calls: a repeated request gets the first answer, also while that is being made.

Answers are remembered per session. Calls that are still running are shared. This module
does not know what the calls do.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from splitpoint.errors import AlreadyExists, SplitpointError

_log = logging.getLogger(__name__)

# Retries come within seconds; a busy worker makes some hundred calls a second.
ANSWER_LIMIT = 2048
ANSWER_BYTES_LIMIT = 8 << 20

Answer = bytes | SplitpointError
Response = TypeVar("Response", bound=Message)


class AnswerCache:
    """The answers to a session's newest requests, by request id, in bounded memory."""

    def __init__(self) -> None:
        self._bytes = 0
        self._answers: OrderedDict[bytes, tuple[bytes, Answer]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, request_id: bytes, digest: bytes) -> Answer | None:
        """Return the first answer to this request. None if the request is new.

        Raises AlreadyExists if the id was used for a request with another digest.
        """
        known = self._answers.get(request_id)
        if known is None:
            return None
        if known[0] != digest:
            raise AlreadyExists("this request_id was used for another request")
        return known[1]

    def put(self, request_id: bytes, digest: bytes, answer: Answer) -> None:
        replaced = self._answers.get(request_id)
        if replaced is not None:
            self._bytes -= _size(replaced[1])
        self._answers[request_id] = (digest, answer)
        self._bytes += _size(answer)
        while len(self._answers) > ANSWER_LIMIT or (
            self._bytes > ANSWER_BYTES_LIMIT and len(self._answers) > 1
        ):
            _, (_, oldest) = self._answers.popitem(last=False)
            self._bytes -= _size(oldest)


def _size(answer: Answer) -> int:
    return len(answer) if isinstance(answer, bytes) else 0


@dataclass(frozen=True, slots=True)
class Call(Generic[Response]):
    """One request that must not be carried out twice.

    Attributes:
        name: session id and request id.
        digest: hash of the request's type and content.
    """

    name: tuple[bytes, bytes]
    digest: bytes
    answers: AnswerCache
    response_type: type[Response]

    @classmethod
    def of(
        cls, request: Any, answers: AnswerCache, response_type: type[Response]
    ) -> Call[Response]:
        """Return the call of a request, which has the fields session_id and request_id."""
        content = request.SerializeToString(deterministic=True)
        kind = request.DESCRIPTOR.full_name.encode()
        digest = hashlib.blake2b(kind + b"\0" + content, digest_size=16).digest()
        return cls((request.session_id, request.request_id), digest, answers, response_type)


class IdempotentCalls:
    """The calls that are running, and the answers of those that ended."""

    def __init__(self) -> None:
        self._running: dict[tuple[bytes, bytes], tuple[bytes, asyncio.Task[Any]]] = {}

    async def answer(
        self,
        call: Call[Response],
        work: Callable[[], Response | Coroutine[Any, Any, Response]],
        *,
        keep_errors: bool = False,
    ) -> Response:
        """Return the first answer to a request; carry a new one out.

        A coroutine of `work` runs to its end, also if its caller is cancelled. `keep_errors`: a
        failure may have had an effect, so a retry must not try again.
        """
        known = await self._known(call)
        if known is not None:
            return known
        response = work()
        if isinstance(response, Message):
            return self._answered(call, response)
        task = asyncio.create_task(self._carry_out(call, response, keep_errors))
        self._running[call.name] = (call.digest, task)
        task.add_done_callback(lambda task: self._done(call, task))
        return await asyncio.shield(task)

    async def _known(self, call: Call[Response]) -> Response | None:
        """Return the answer of an earlier request, waiting for it. None if the call is new.

        Raises AlreadyExists if the request id was used for another request, and the error
        of the first call if it was remembered.
        """
        remembered = call.answers.get(call.name[1], call.digest)
        if isinstance(remembered, SplitpointError):
            raise remembered.with_traceback(None)
        if remembered is not None:
            return call.response_type.FromString(remembered)
        running = self._running.get(call.name)
        if running is None:
            return None
        if running[0] != call.digest:
            raise AlreadyExists("this request_id was used for another request")
        answer: Response = await asyncio.shield(running[1])
        return answer

    def _answered(self, call: Call[Response], response: Response) -> Response:
        """Remember the answer to a new call and return it."""
        call.answers.put(call.name[1], call.digest, response.SerializeToString())
        return response

    async def _carry_out(
        self, call: Call[Response], work: Coroutine[Any, Any, Response], keep_errors: bool
    ) -> Response:
        try:
            return self._answered(call, await work)
        except SplitpointError as error:
            if keep_errors:
                call.answers.put(call.name[1], call.digest, error)
            raise

    def _done(self, call: Call[Any], task: asyncio.Task[Any]) -> None:
        del self._running[call.name]
        if not task.cancelled() and (error := task.exception()) is not None:
            # Waiting callers get the error, too; the log has it if all of them went away.
            _log.info("a call was refused: %s", error)

    async def close(self) -> None:
        """Wait for the running calls."""
        tasks = [task for _, task in self._running.values()]
        await asyncio.gather(*tasks, return_exceptions=True)

"""Every mutation once: a repeated request gets its first answer again, also while that is made.

Answers are remembered in the session's book; what is still under way is shared.
Knows no rpc's meaning.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from kvstore_service.sessions import AnswerBook
from splitpoint.errors import AlreadyExists, SplitpointError

_log = logging.getLogger(__name__)

Response = TypeVar("Response", bound=Message)


@dataclass(frozen=True, slots=True)
class Call(Generic[Response]):
    """One request that must not be carried out twice.

    Attributes:
        name: session and request id.
        digest: stands for the request's whole content, its kind included.
    """

    name: tuple[bytes, bytes]
    digest: bytes
    answers: AnswerBook
    response_type: type[Response]

    @classmethod
    def of(cls, request: Any, answers: AnswerBook, response_type: type[Response]) -> Call[Response]:
        """`request` has the fields session_id and request_id."""
        content = request.SerializeToString(deterministic=True)
        kind = request.DESCRIPTOR.full_name.encode()
        digest = hashlib.blake2b(kind + b"\0" + content, digest_size=16).digest()
        return cls((request.session_id, request.request_id), digest, answers, response_type)


class OnceTable:
    """The calls that take longer than one turn of the event loop."""

    def __init__(self) -> None:
        self._running: dict[tuple[bytes, bytes], tuple[bytes, asyncio.Task[Any]]] = {}

    async def known(self, call: Call[Response]) -> Response | None:
        """The answer this request had or is about to get; None: it is new.

        Raises AlreadyExists when its id was used for another request, and what
        the first call raised, if errors of its kind are remembered.
        """
        remembered = call.answers.recall(call.name[1], call.digest)
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

    def answered(self, call: Call[Response], response: Response) -> Response:
        """Remember what a new call was answered."""
        call.answers.remember(call.name[1], call.digest, response.SerializeToString())
        return response

    async def run(
        self, call: Call[Response], work: Coroutine[Any, Any, Response], *, keep_errors: bool
    ) -> Response:
        """Carry out a new call to its end, whether or not its caller waits for it.

        `keep_errors`: a failure may have had an effect, so a retry must not try again.
        """
        task = asyncio.create_task(self._carry_out(call, work, keep_errors))
        self._running[call.name] = (call.digest, task)
        task.add_done_callback(lambda task: self._done(call, task))
        return await asyncio.shield(task)

    async def _carry_out(
        self, call: Call[Response], work: Coroutine[Any, Any, Response], keep_errors: bool
    ) -> Response:
        try:
            return self.answered(call, await work)
        except SplitpointError as error:
            if keep_errors:
                call.answers.remember(call.name[1], call.digest, error)
            raise

    def _done(self, call: Call[Any], task: asyncio.Task[Any]) -> None:
        del self._running[call.name]
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever waits gets it too; here it is for callers that went away.
            _log.info("a call was refused: %s", error)

    async def close(self) -> None:
        """Wait for what is under way."""
        tasks = [task for _, task in self._running.values()]
        await asyncio.gather(*tasks, return_exceptions=True)

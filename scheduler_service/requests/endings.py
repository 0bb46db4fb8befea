"""Ends requests: with an answer or an error, counted, logged and traced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from scheduler_service.api.request import Request
from scheduler_service.policy.admission import AdmissionQueue
from scheduler_service.requests import log_facts
from scheduler_service.requests.accounts import Accounts
from scheduler_service.requests.answers import completion, completion_of_tokens
from scheduler_service.requests.attempts import Attempt, Attempts
from scheduler_service.requests.failover import Finished
from scheduler_service.requests.table import RequestTable
from splitpoint.errors import SplitpointError
from splitpoint.observe.logs import LogFacts, for_request
from splitpoint.v1 import scheduler_pb2

_log = logging.getLogger(__name__)


class Endings:
    """The ends of all requests.

    Attributes:
        an_end: set when a request ends.
    """

    def __init__(
        self,
        accounts: Accounts,
        requests: RequestTable,
        admission: AdmissionQueue,
        attempts: Attempts,
        clock: Callable[[], float],
    ) -> None:
        self.an_end = asyncio.Event()
        self._accounts = accounts
        self._requests = requests
        self._admission = admission
        self._attempts = attempts
        self._clock = clock

    def complete(
        self, attempt: Attempt, ending: Finished, step_seconds: float | None = None
    ) -> None:
        """End a request with its whole answer. `step_seconds`: mean of its steps, if known."""
        now = self._clock()
        message = completion(
            attempt,
            reason=ending.reason,
            matched_stop=ending.matched_stop,
            step_seconds=step_seconds,
            now=now,
        )
        self._admission.completed(attempt.request)
        self._completed(attempt.request, message, now)

    def complete_resumed(self, request: Request, ending: Finished) -> None:
        """End a request whose client had all tokens: it lost the last message only."""
        now = self._clock()
        message = completion_of_tokens(
            request, reason=ending.reason, matched_stop=ending.matched_stop, now=now
        )
        self._completed(request, message, now)

    def _completed(
        self, request: Request, message: scheduler_pb2.GenerateComplete, now: float
    ) -> None:
        request.complete(message, now)
        self._accounts.completed(message, request.output.resumed_count)
        self._ended(request, log_facts.of_completed(request, message))

    def fail(self, request: Request, error: SplitpointError) -> None:
        """End a request with an error, unless it has ended."""
        if not request.has_ended:
            self._accounts.failed(error)
            self._end_with_error(request, error)

    def reject(self, request: Request, error: SplitpointError) -> None:
        """End a request that is not queued."""
        self._accounts.rejected(error)
        self._end_with_error(request, error)

    def _end_with_error(self, request: Request, error: SplitpointError) -> None:
        attempt = self._attempts.of(request)
        request.fail(error, self._clock())
        worker_id = attempt.worker_id if attempt is not None else None
        facts = log_facts.of_failed(request, error, worker_id)
        self._ended(request, facts, error_reason=error.reason)

    def _ended(self, request: Request, facts: LogFacts, error_reason: str = "") -> None:
        with for_request(request.request_id):
            _log.info("request ended", extra={"facts": facts})
        request.span.set(**facts)
        request.span.end(request.ended_at, error=error_reason)
        self._requests.ended(request)
        self._admission.withdraw(request)
        self.an_end.set()

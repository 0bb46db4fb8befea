"""Starts waiting requests: looks their prefixes up, and opens attempts on workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from scheduler_service.api.request import Request
from scheduler_service.policy.admission import AdmissionQueue, Admitted, GrantError
from scheduler_service.prefixes.lookup import CachedPrefix
from scheduler_service.requests.attempts import Attempt, Attempts
from scheduler_service.requests.endings import Endings
from scheduler_service.requests.sharing import Sharing
from scheduler_service.requests.tasks import RequestTasks
from splitpoint.errors import SplitpointError


class Starts:
    """The starts of all requests. `lookup_seconds`: how long the answer to a lookup is used."""

    def __init__(
        self,
        admission: AdmissionQueue,
        attempts: Attempts,
        sharing: Sharing,
        tasks: RequestTasks,
        endings: Endings,
        find_prefix: Callable[[bytes, Sequence[int]], Awaitable[CachedPrefix]],
        clock: Callable[[], float],
        *,
        lookup_seconds: float,
    ) -> None:
        self._admission = admission
        self._attempts = attempts
        self._sharing = sharing
        self._tasks = tasks
        self._endings = endings
        self._find_prefix = find_prefix
        self._clock = clock
        self._lookup_seconds = lookup_seconds
        self._is_starting = False

    async def look_up(self, request: Request) -> None:
        """Find out where the request's sequence is cached."""
        if request.output.lacks_prompt_logprobs:
            # Its worker computes the whole prompt.
            request.cached = CachedPrefix()
            request.times.looked_up = self._clock()
            return
        tokens = [*request.prompt, *request.output.token_ids]
        with request.span.part("peek") as span:
            request.cached = await self._find_prefix(request.tenant_salt, tokens)
            span.set(cached_tokens=max(request.cached.own.values(), default=0))
        request.times.looked_up = self._clock()

    def start_waiting(self) -> None:
        """Start, in order, every waiting request that may start now.

        Paused requests that are in the way of others go back to the queue. A start that fails lets
        another one start; the call under way sees to that.
        """
        if self._is_starting:
            return
        self._is_starting = True
        try:
            self._start_all()
            self._put_back_paused()
        finally:
            self._is_starting = False
        self._sharing.changed()

    def _admit(self) -> Admitted | None:
        """Return the next request that may start now; one that cannot be granted ends."""
        while True:
            try:
                return self._admission.admit()
            except GrantError as error:
                self._tasks.failed(error.request)

    def _start_all(self) -> None:
        while (admitted := self._admit()) is not None:
            request, now = admitted.request, self._clock()
            request.times.unplaceable = None
            request.span.record("queue", request.since, now)
            attempt = self._attempts.open(admitted)
            looked_up = request.times.looked_up
            if looked_up is None or now - looked_up > self._lookup_seconds:
                self._tasks.spawn(request, self._look_up_and_start(attempt))
                continue
            with self._tasks.contained(request):
                self._start(attempt)

    def _put_back_paused(self) -> None:
        """Let paused requests give up their places where others wait for them.

        They are queued when their workers have let go of them, and start again, from what is
        stored of them, once their readers have caught up.
        """
        if not self._admission.is_waited_for:
            return
        for request in self._admission.to_put_back(self._attempts.leaving()):
            attempt = self._attempts.of(request)
            if attempt is not None:
                self._attempts.put_back(attempt)

    async def _look_up_and_start(self, attempt: Attempt) -> None:
        await self.look_up(attempt.request)
        if attempt in self._attempts:  # neither abandoned, paused nor lost meanwhile
            self._start(attempt)
            if attempt not in self._attempts:
                self.start_waiting()

    def _start(self, attempt: Attempt) -> None:
        try:
            self._attempts.start(attempt)
        except SplitpointError as error:
            self._attempts.release(attempt)
            self._endings.fail(attempt.request, error)

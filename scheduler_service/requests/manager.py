"""Leads every request from its arrival to its end.

    start -> look up its prefix -> queue -> attempt on a worker -> tokens -> complete
                                     ^               |
                                     +---------------+ the worker is lost

All of it runs on one event loop. Decisions are made by the modules of `placement`;
`Attempts` tells the workers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from scheduler_service.api.delivery import Rounds
from scheduler_service.api.output import Output
from scheduler_service.api.request import Request
from scheduler_service.cluster.connection import WorkerConnection
from scheduler_service.cluster.registry import Registry
from scheduler_service.options import SchedulerOptions
from scheduler_service.placement.answer_lengths import AnswerLengths
from scheduler_service.policy.admission import AdmissionQueue, Rejected
from scheduler_service.prefixes.lookup import CachedPrefix
from scheduler_service.prefixes.marks import ChunkMarks
from scheduler_service.requests.accounts import ABANDONED_REASON, Accounts, Resumption
from scheduler_service.requests.answers import rejection
from scheduler_service.requests.attempts import Attempt, Attempts
from scheduler_service.requests.availability import check_workers
from scheduler_service.requests.endings import Endings
from scheduler_service.requests.failover import (
    Finished,
    GiveUp,
    after_lost_attempt,
    find_culprit,
    finished,
    suspect,
)
from scheduler_service.requests.sharing import Sharing
from scheduler_service.requests.starts import Starts
from scheduler_service.requests.table import RequestTable
from scheduler_service.requests.tasks import RequestTasks
from scheduler_service.requests.tenants import TenantFacts, TenantLabels, tenants_of
from splitpoint.config import counted
from splitpoint.errors import (
    FailedPrecondition,
    Internal,
    SplitpointError,
    Unavailable,
    from_code,
)
from splitpoint.keys import tenant_salt
from splitpoint.observe.logs import for_request
from splitpoint.observe.tracing import NO_SPAN, Span
from splitpoint.options.scheduler import AnswerCharge
from splitpoint.v1 import types_pb2, worker_pb2

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.1
_ENDED = "the worker ended the request"


class RequestManager:
    """Owns all requests, and listens to their readers and to all workers."""

    def __init__(
        self,
        options: SchedulerOptions,
        registry: Registry,
        find_prefix: Callable[[bytes, Sequence[int]], Awaitable[CachedPrefix]],
        accounts: Accounts,
        *,
        clock: Callable[[], float],
        on_readiness: Callable[[], None],
    ) -> None:
        self.options = options
        self.limits = options.limits
        self.registry = registry
        self.accounts = accounts
        expects = options.answer_charge is AnswerCharge.EXPECTED
        lengths = AnswerLengths() if expects else None
        self.admission = AdmissionQueue(
            options.limits.queue_capacity, lengths, options.objective, options.policy, clock
        )
        self.requests = RequestTable(options.limits)
        self.attempts = Attempts(registry, self.admission, accounts, options.objective, clock)
        self.sharing = Sharing(registry, self.admission, clock)
        self.tenant_labels = TenantLabels(options.server_key)
        self.is_draining = False
        self._clock = clock
        self._on_readiness = on_readiness
        self._tasks = RequestTasks(self._fail_and_cancel)
        self._endings = Endings(accounts, self.requests, self.admission, self.attempts, clock)
        self._starts = Starts(
            self.admission,
            self.attempts,
            self.sharing,
            self._tasks,
            self._endings,
            find_prefix,
            clock,
            lookup_seconds=options.limits.lookup_lifetime_seconds,
        )
        self._rounds = Rounds()
        self._arrivals = itertools.count()
        self._last_arrival: asyncio.Task[None] | None = None

    # -- a request arrives ------------------------------------------------------------------

    def prepare(self, request: Request) -> None:
        """Make the text of the tokens that a client brought along. Any thread may call this.

        Raises InvalidArgument if the answer ended before the last of them.
        """
        model = self.options.model
        request.output = Output(
            request.sampling,
            model.tokenizer,
            model.eos_token_ids,
            prompt=request.prompt,
        )
        request.output.resume(request.resume.token_ids)

    def start(self, request: Request, span: Span = NO_SPAN) -> Request:
        """Accept a prepared request, or return the known one of its id.

        The caller attaches a reader to the result before it awaits anything.

        An accepted request takes the span over and ends it.

        Raises AlreadyExists (same id, other body), ResourceExhausted (the tenant has as
        many as it may), NotFound (unknown worker), InvalidArgument (a split that no store
        can serve), Unavailable (draining, or no worker is ready), FailedPrecondition and
        OutOfRange (the client cannot go on reading here).
        """
        self.requests.expire(self._clock())
        known = self.requests.find(request)
        if known is not None:
            known.check_resume(request.resume)
            if request.resume.next_index:
                self.accounts.resumed(Resumption.ATTACHED)
            return known
        if request.resume.next_index > len(request.output):
            raise FailedPrecondition(
                "this scheduler does not know the request: send resume.token_ids, too",
                reason="RESUME_UNKNOWN",
            )
        self.requests.check_quota(request.tenant)
        if self.is_draining:
            raise Unavailable(
                "the scheduler is draining",
                reason="DRAINING",
                retry_after_seconds=self.limits.retry_seconds,
            )
        ending = finished(request)
        if ending is None:
            check_workers(request, self.registry, self.limits.retry_seconds)
        self._accept(request, span)
        if request.resume.token_ids:
            self.accounts.resumed(Resumption.FORCED)
        if ending is not None:
            self._endings.complete_resumed(request, ending)
            return request
        self._last_arrival = self._tasks.spawn(request, self._arrive(request, self._last_arrival))
        return request

    def _accept(self, request: Request, span: Span) -> None:
        options = self.options
        request.arrival = next(self._arrivals)
        request.times.arrived = self._clock()
        request.residency = request.residency or options.default_residency
        request.tenant_salt = tenant_salt(options.server_key, request.tenant, request.cache_salt)
        request.listener = self
        request.lag_tokens = self.limits.lag_tokens
        request.span = span
        span.set(request_id=request.request_id)
        self.requests.add(request)

    async def _arrive(self, request: Request, before: asyncio.Task[None] | None) -> None:
        await self._starts.look_up(request)
        if before is not None:
            # Stores may answer a later request first; requests are queued in order.
            await asyncio.wait({before})
        if request.has_ended:
            return
        verdict = self.admission.submit(request)
        if isinstance(verdict, Rejected):
            self._endings.reject(request, rejection(verdict, request, self.limits))
            return
        self._starts.start_waiting()

    def tenants(self) -> list[TenantFacts]:
        """Return every tenant that has had a request, the one with most service first."""
        return tenants_of(self.admission, self._clock())

    def oldest_wait_seconds(self) -> float:
        """Return how long the longest-waiting request has waited in the queue; 0 if none waits.

        Paused requests wait for their readers, and do not count.
        """
        since = [request.since for request in self.admission.queue() if not request.is_paused]
        return self._clock() - min(since) if since else 0.0

    # -- a worker reports -----------------------------------------------------------------------

    def on_worker_ready(self, worker: WorkerConnection) -> None:
        if worker.ready is None:
            raise RuntimeError("a worker was announced that is not ready")
        self.admission.add_worker(worker.ready.facts)
        self._starts.start_waiting()
        self._on_readiness()

    def on_worker_draining(self, worker: WorkerConnection) -> None:
        self.admission.close_worker(worker.worker_id)
        self._on_readiness()

    def on_worker_lost(self, worker: WorkerConnection) -> None:
        account = self.admission.account(worker.worker_id)
        were_alone = account is None or not account.others.request_count
        self.admission.remove_worker(worker.worker_id)
        self.sharing.forget(worker.worker_id)
        lost = self.attempts.on(worker.worker_id)
        if lost:
            _log.warning(
                "worker %s was lost with %s", worker.worker_id, counted(len(lost), "request")
            )
        # A worker that ended its stream by itself has not failed, and one that hangs or is cut off
        # is still there: no request ended it.
        has_died = worker.was_lost and not worker.is_silent
        culprit = self._blame(lost, were_alone=were_alone) if has_died else None
        for attempt in lost:
            attempt.span.end(error="WORKER_LOST")
            self.attempts.release(attempt)
            request = attempt.request
            request.moves += int(attempt.plan is not None and culprit in (None, request))
            self._retry(attempt, None, is_culprit=request is culprit)
        self._starts.start_waiting()
        self._on_readiness()

    def _blame(self, lost: Sequence[Attempt], *, were_alone: bool) -> Request | None:
        """Return the request that ended an engine; if that is not known, suspect all it ran."""
        running = [attempt.request for attempt in lost if attempt.plan is not None]
        culprit = find_culprit(running, were_alone=were_alone)
        if culprit is None:
            for request in running:
                suspect(request)
        return culprit

    def on_step(self, worker: WorkerConnection, response: worker_pb2.RunResponse) -> None:
        if response.telemetry.HasField("device_chunk_marks"):
            marks = ChunkMarks(response.telemetry.device_chunk_marks)
            self.admission.set_device_marks(worker.worker_id, marks)
        if response.HasField("profile") and worker.ready is not None:
            self.admission.set_facts(worker.ready.facts)
        for report in response.restores:
            attempt = self.attempts.find(report.request_id, report.attempt)
            if attempt is not None:
                attempt.restored(report)
        for prompt in response.prompt_logprobs:
            attempt = self.attempts.find(prompt.request_id, prompt.attempt)
            if attempt is not None and not attempt.request.has_ended:
                with self._tasks.contained(attempt.request):
                    self._on_prompt(attempt, prompt)
        now = self._clock()
        for result in response.tokens:
            attempt = self.attempts.find(result.request_id, result.attempt)
            if attempt is None or attempt.request.has_ended:
                self.accounts.late_count += 1
                continue
            try:  # a context manager would take as long as much of what it surrounds
                self._on_tokens(attempt, result, now)
            except Exception:
                self._tasks.failed(attempt.request)
        self._rounds.deliver()
        for finish in response.finishes:
            attempt = self.attempts.find(finish.request_id, finish.attempt)
            if attempt is not None:  # else the request was retried
                with self._tasks.contained(attempt.request):
                    self._on_finish(attempt, finish)
        if response.HasField("others"):
            self.sharing.heard(worker.worker_id, response.others)
        has_room = self.admission.computed(worker.worker_id, response.prefilled_token_count)
        if response.finishes or response.HasField("others") or has_room:
            self._starts.start_waiting()

    def _on_tokens(self, attempt: Attempt, result: worker_pb2.TokenResult, now: float) -> None:
        request, token_ids = attempt.request, result.token_ids
        try:
            count = request.output.count_new(result.first_index, len(token_ids))
        except ValueError as error:
            self._skipped(attempt, error)
            return
        if not count:
            self.accounts.duplicate_count += 1
            return
        self.accounts.tokens_came(request.times, count, now, request.output.resumed_count)
        if request.times.first_token is None:
            attempt.span.record("first token", attempt.sent_at, now)
        request.times.tokens_came(now)
        request.drafts.add(result)
        request.selected.add(result)
        request.append(token_ids[-count:], result.logprobs[-count:])
        self._rounds.add(request)
        if self.admission.tokens_came(attempt.admitted):
            self._starts.start_waiting()

    def _on_prompt(self, attempt: Attempt, result: worker_pb2.PromptLogprobs) -> None:
        request = attempt.request
        prompt = request.output.prompt_logprobs
        if prompt is None:
            return
        try:
            prompt.add(result)
        except ValueError as error:
            self._skipped(attempt, error)
            return
        self._rounds.add(request)

    def _skipped(self, attempt: Attempt, error: ValueError) -> None:
        """Try elsewhere what a worker reported with gaps."""
        with for_request(attempt.request.request_id):
            _log.error("worker %s skipped tokens: %s", attempt.worker_id, error)
        self.attempts.cancel(attempt)
        if attempt in self.attempts:
            self.attempts.release(attempt)
        gap = Internal(f"worker {attempt.worker_id} skipped tokens", reason="TOKENS_SKIPPED")
        self._retry(attempt, gap)

    def _on_finish(self, attempt: Attempt, finish: worker_pb2.RequestFinish) -> None:
        if finish.error_code:
            attempt.span.end(error=finish.error_reason)
        self.attempts.release(attempt)
        request = attempt.request
        if request.has_ended:
            return
        request.selected.finished(finish)
        if finish.error_code:
            error = from_code(finish.error_code, finish.error_message, finish.error_reason)
            if not isinstance(error, Unavailable):
                self._endings.fail(request, error)
                return
            # A draining worker refuses before its health tells so. Nothing ran there.
            is_drain = error.reason == "DRAINING"
            if is_drain:
                self.admission.close_worker(attempt.worker_id)
            self._retry(attempt, error, is_loss=not is_drain)
        elif finish.reason in (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH):
            has_steps = finish.HasField("mean_step_seconds")
            seconds = finish.mean_step_seconds if has_steps else None
            self._endings.complete(attempt, Finished(finish.reason, finish.matched_stop), seconds)
        elif attempt.is_put_back:
            self._retry(attempt, None, is_loss=False)
        else:
            self._retry(attempt, Unavailable(_ENDED, reason="WORKER_DRAINED"))

    def _retry(
        self,
        attempt: Attempt,
        cause: SplitpointError | None,
        *,
        is_culprit: bool = False,
        is_loss: bool = True,
    ) -> None:
        """Queue the request of a released attempt again, unless it has all tokens or failed
        too often. `cause`: why the attempt ended alone; None: the worker was lost."""
        request = attempt.request
        if request.has_ended:
            return
        is_counted = is_loss and attempt.plan is not None
        request.refusals += int(is_counted and cause is not None)
        outcome = after_lost_attempt(
            request,
            is_culprit=is_culprit,
            cause=cause,
            most_refusals=self.limits.refusal_count,
            most_moves=self.limits.move_count,
        )
        if isinstance(outcome, Finished):
            self._endings.complete(attempt, outcome)
            return
        request.losses += int(is_counted)
        if isinstance(outcome, GiveUp):
            self._endings.fail(request, outcome.error)
            return
        if is_counted:
            self.accounts.failover_count += 1
        request.times.looked_up = None
        # The tokens stay the same, and so do the names of their chunks.
        request.cached = CachedPrefix(marks=request.cached.marks)
        self.admission.resubmit(request)

    # -- a request ends -------------------------------------------------------------------------

    def _fail_and_cancel(self, request: Request, error: SplitpointError) -> None:
        self._endings.fail(request, error)
        attempt = self.attempts.of(request)
        if attempt is not None:
            self.attempts.cancel(attempt)
        # One that was not sent yet is over at once.
        self._starts.start_waiting()

    # -- readers report -------------------------------------------------------------------------

    def on_pause(self, request: Request, paused: bool) -> None:
        attempt = self.attempts.of(request)
        if attempt is None:
            self.admission.resumed(request)
            self._starts.start_waiting()  # a paused one is not placed
        elif attempt.plan is None:
            if paused:
                self.attempts.release(attempt)
                self._retry(attempt, None, is_loss=False)
                self._starts.start_waiting()
        elif attempt.is_put_back:
            pass  # it is on its way to the queue
        elif paused and request.is_suspect:
            # Nothing starts beside a suspect, so it makes room for as long as its reader takes.
            self.attempts.put_back(attempt)
        else:
            self.attempts.pause(attempt)
            if paused:
                self._starts.start_waiting()  # it makes room for others that wait

    def on_abandoned(self, request: Request) -> None:
        error = Unavailable("every reader left", reason=ABANDONED_REASON)
        self._fail_and_cancel(request, error)

    # -- time passes ----------------------------------------------------------------------------

    async def tick_forever(self) -> None:
        """Call `tick` until cancelled. An exception is logged; the next one comes all the same."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            try:
                self.tick()
            except Exception:
                _log.exception("a tick failed")

    def tick(self) -> None:
        """Forget old requests, and fail those that waited too long for a worker."""
        now = self._clock()
        if self.sharing.tick() or self.admission.decides_by_time:
            self._starts.start_waiting()
        self.requests.expire(now)
        for request in self.admission.queue():
            if self.admission.is_placeable(request):
                request.times.unplaceable = None
                continue
            if request.times.unplaceable is None:
                request.times.unplaceable = now
            if now - request.times.unplaceable >= self.limits.worker_wait_seconds:
                waited = f"{self.limits.worker_wait_seconds:g} s"
                error = Unavailable(
                    f"no worker that could run it was ready for {waited}", reason="NO_WORKER"
                )
                self._endings.fail(request, error)

    async def drain(self, grace_seconds: float) -> None:
        """Accept nothing new, wait for running requests, and fail those that do not end."""
        self.is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while self.requests.running():
                    self._endings.an_end.clear()
                    await self._endings.an_end.wait()
        for request in self.requests.running():
            with for_request(request.request_id):
                _log.warning("did not end within %g s", grace_seconds)
            attempt = self.attempts.of(request)
            if attempt is not None:
                self.attempts.cancel(attempt)
                if attempt in self.attempts:
                    self.attempts.release(attempt)
            error = Unavailable(
                f"the scheduler stopped before the answer was whole, after {grace_seconds:g} s",
                reason="STOPPED",
            )
            self._endings.fail(request, error)

    async def close(self) -> None:
        """Fail what still runs."""
        await self._tasks.close()
        for request in self.requests.running():
            self._endings.fail(request, Unavailable("the scheduler stopped", reason="STOPPED"))

"""The life of every request, from its arrival to its end.

    start -> look up its prefix -> queue -> attempt on a worker -> tokens -> complete
                                     ^               |
                                     +---------------+ the worker is lost

All of it runs on one event loop. Decisions are made by the modules of `policy` and `placement`, and
by `failover.py`; `attempt.py` has the command that a worker gets.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from scheduler_service.api.capabilities import check_capabilities
from scheduler_service.api.delivery import Rounds
from scheduler_service.api.output import Output
from scheduler_service.api.request import Request
from scheduler_service.cluster.connection import ReadyWorker, WorkerConnection
from scheduler_service.cluster.registry import Registry
from scheduler_service.options import SchedulerOptions
from scheduler_service.placement.answer_lengths import AnswerLengths
from scheduler_service.prefixes.lookup import CachedPrefix, ChunkMarks
from scheduler_service.requests.admission import AdmissionQueue, GrantError, Rejected
from scheduler_service.requests.answers import (
    completion,
    completion_of_tokens,
    facts_of_completed,
    facts_of_failed,
    facts_of_plan,
    rejection,
)
from scheduler_service.requests.attempt import Attempt
from scheduler_service.requests.counters import ABANDONED_REASON, Counters, Resumption
from scheduler_service.requests.failover import (
    Finished,
    GiveUp,
    after_lost_attempt,
    find_culprit,
    finished,
    suspect,
)
from scheduler_service.requests.sharing import Sharing
from scheduler_service.requests.table import RequestTable
from scheduler_service.requests.tenants import TenantFacts, TenantLabels, tenants_of
from splitpoint.config import counted
from splitpoint.errors import (
    FailedPrecondition,
    Internal,
    NotFound,
    SplitpointError,
    Unavailable,
    from_code,
)
from splitpoint.keys import tenant_salt
from splitpoint.observe.logs import LogFacts, for_request
from splitpoint.observe.tracing import NO_SPAN, Span
from splitpoint.options.scheduler import AnswerCharge
from splitpoint.planning.plan import Plan
from splitpoint.v1 import scheduler_pb2, types_pb2, worker_pb2

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
        counters: Counters,
        *,
        clock: Callable[[], float],
        on_readiness: Callable[[], None],
    ) -> None:
        self.options = options
        self.limits = options.limits
        self.registry = registry
        self.counters = counters
        expects = options.answer_charge is AnswerCharge.EXPECTED
        lengths = AnswerLengths() if expects else None
        self.admission = AdmissionQueue(
            options.limits.queue_capacity, lengths, options.objective, options.policy, clock
        )
        self.requests = RequestTable(options.limits)
        # Under way, by request id and number: late messages of others do not count.
        self.attempts: dict[tuple[str, int], Attempt] = {}
        self.sharing = Sharing(registry, self.admission, clock)
        self.tenant_labels = TenantLabels(options.server_key)
        self.is_draining = False
        self._clock = clock
        self._on_readiness = on_readiness
        self._find_prefix = find_prefix
        self._rounds = Rounds()
        self._arrivals = itertools.count()
        self._last_arrival: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_starting = False
        # Set when a request ends.
        self._an_end = asyncio.Event()

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
                self.counters.resumed(Resumption.ATTACHED)
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
            self._check_workers(request)
        self._accept(request, span)
        if request.resume.token_ids:
            self.counters.resumed(Resumption.FORCED)
        if ending is not None:
            self._complete_resumed(request, ending)
            return request
        self._last_arrival = self._spawn(request, self._arrive(request, self._last_arrival))
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

    def _check_workers(self, request: Request) -> None:
        """Check that a worker could run an arriving request.

        Raises NotFound (unknown worker), Unavailable (none is ready), and what
        `check_capabilities` raises.
        """
        ready = self.registry.ready()
        if request.worker_id:
            if self.registry.find(request.worker_id) is None and self.registry.all_names_known:
                names = ", ".join(sorted(worker.worker_id for worker in ready)) or "none is ready"
                raise NotFound(
                    f"no worker is called {request.worker_id!r} (workers: {names})",
                    reason="WORKER_NOT_FOUND",
                )
            ready = [worker for worker in ready if worker.worker_id == request.worker_id]
        if not ready:
            raise Unavailable(
                "the worker is not ready" if request.worker_id else "no worker is ready",
                reason="NO_WORKER",
                retry_after_seconds=self.limits.retry_seconds,
            )
        facts = [connection.ready.facts for connection in ready if connection.ready is not None]
        check_capabilities(request, facts)

    async def _arrive(self, request: Request, before: asyncio.Task[None] | None) -> None:
        await self._look_up(request)
        if before is not None:
            # Stores may answer a later request first; requests are queued in order.
            await asyncio.wait({before})
        if request.has_ended:
            return
        verdict = self.admission.submit(request)
        if isinstance(verdict, Rejected):
            self._reject(request, rejection(verdict, request, self.limits))
            return
        self._start_waiting()

    async def _look_up(self, request: Request) -> None:
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

    # -- waiting requests start ---------------------------------------------------------------

    def _start_waiting(self) -> None:
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
        self.sharing.changed()

    def _admit(self) -> Attempt | None:
        """Return the next request that may start now; one that cannot be granted ends."""
        while True:
            try:
                return self.admission.admit()
            except GrantError as error:
                self._failed(error.request)

    def _start_all(self) -> None:
        while (attempt := self._admit()) is not None:
            request, now = attempt.request, self._clock()
            request.times.unplaceable = None
            request.span.record("queue", request.since, now)
            self.attempts[attempt.key] = attempt
            looked_up = request.times.looked_up
            if looked_up is None or now - looked_up > self.limits.lookup_lifetime_seconds:
                self._spawn(request, self._look_up_and_start(attempt))
                continue
            with self._contained(request):
                self._start(attempt)

    def _put_back_paused(self) -> None:
        """Let paused requests give up their places where others wait for them.

        They are queued when their workers have let go of them, and start again, from what is
        stored of them, once their readers have caught up.
        """
        if not self.admission.is_waited_for:
            return
        for request in self.admission.to_put_back(self._leaving()):
            attempt = self._attempt_of(request)
            if attempt is not None:
                self._put_back(attempt)

    async def _look_up_and_start(self, attempt: Attempt) -> None:
        await self._look_up(attempt.request)
        if attempt.key in self.attempts:  # neither abandoned, paused nor lost meanwhile
            self._start(attempt)
            if attempt.key not in self.attempts:
                self._start_waiting()

    def _start(self, attempt: Attempt) -> None:
        try:
            self._tell(attempt)
        except SplitpointError as error:
            self._release(attempt)
            self._fail(attempt.request, error)

    # -- attempts: each begins once and is released once ------------------------------------------

    def _tell(self, attempt: Attempt) -> None:
        """Plan it, then tell the worker. Raises InvalidArgument for a plan that cannot be."""
        worker = self._worker(attempt)
        if worker is None:
            raise RuntimeError(f"memory was granted on {attempt.worker_id}, which is away")
        began = self._clock()
        plan = attempt.make_plan(worker.facts, self.options.objective)
        self._note_start(attempt, plan, began)
        worker.stream.admit(attempt.command())

    def _note_start(self, attempt: Attempt, plan: Plan, began: float) -> None:
        request, now = attempt.request, self._clock()
        attempt.sent_at = now
        request.span.record("plan", began, now, **facts_of_plan(plan))
        attempt.span = request.span.begin(
            "attempt", now, worker=attempt.worker_id, attempt=attempt.number
        )
        waited = None
        if request.times.dispatched is None:
            request.times.dispatched = now
            waited = now - request.times.arrived
        account = self.admission.account(attempt.worker_id)
        if account is None:
            raise RuntimeError(f"worker {attempt.worker_id} has no account")
        account.kappa.placed(plan.cached_tokens, plan.new_tokens)
        self.counters.placed(plan, account.kappa_crit, waited)

    def _pause(self, attempt: Attempt) -> None:
        """Tell the worker, which was told of the attempt, whether the request is paused."""
        worker = self._worker(attempt)
        if worker is not None:
            worker.stream.set_paused(attempt.request.request_id, attempt.request.is_paused)

    def _put_back(self, attempt: Attempt) -> None:
        """Stop an attempt of which the worker was told, to run its request again later.

        Does nothing if the worker is away: the attempt is lost with it.
        """
        worker = self._worker(attempt)
        if worker is not None:
            attempt.is_put_back = True
            worker.stream.cancel(*attempt.key)

    def _cancel(self, attempt: Attempt) -> None:
        """Stop it. Its memory stays charged until the worker has let go of it."""
        worker = self._worker(attempt)
        if attempt.plan is None or worker is None:
            self._release(attempt)  # the worker does not know it
        else:
            worker.stream.cancel(*attempt.key)

    def _release(self, attempt: Attempt) -> None:
        """End it: its memory may be granted again. Raises KeyError if it has ended."""
        attempt.span.end()
        del self.attempts[attempt.key]
        self.admission.release(attempt.request)

    def attempts_on(self, worker_id: str) -> list[Attempt]:
        """Return the attempts on a worker."""
        return [each for each in self.attempts.values() if each.worker_id == worker_id]

    def _attempt_of(self, request: Request) -> Attempt | None:
        return next((each for each in self.attempts.values() if each.request is request), None)

    def _leaving(self) -> set[int]:
        """Return the requests, by arrival, that their workers were told to let go of."""
        return {
            each.request.arrival
            for each in self.attempts.values()
            if each.is_put_back or each.request.has_ended
        }

    def _worker(self, attempt: Attempt) -> ReadyWorker | None:
        worker = self.registry.find(attempt.worker_id)
        return worker.ready if worker is not None else None

    # -- a worker reports -----------------------------------------------------------------------

    def on_worker_ready(self, worker: WorkerConnection) -> None:
        if worker.ready is None:
            raise RuntimeError("a worker was announced that is not ready")
        self.admission.add_worker(worker.ready.facts)
        self._start_waiting()
        self._on_readiness()

    def on_worker_draining(self, worker: WorkerConnection) -> None:
        self.admission.close_worker(worker.worker_id)
        self._on_readiness()

    def on_worker_lost(self, worker: WorkerConnection) -> None:
        account = self.admission.account(worker.worker_id)
        were_alone = account is None or not account.others.request_count
        self.admission.remove_worker(worker.worker_id)
        self.sharing.forget(worker.worker_id)
        lost = self.attempts_on(worker.worker_id)
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
            self._release(attempt)
            request = attempt.request
            request.moves += int(attempt.plan is not None and culprit in (None, request))
            self._retry(attempt, None, is_culprit=request is culprit)
        self._start_waiting()
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
            attempt = self.attempts.get((report.request_id, report.attempt))
            if attempt is not None:
                attempt.restored(report)
        for prompt in response.prompt_logprobs:
            attempt = self.attempts.get((prompt.request_id, prompt.attempt))
            if attempt is not None and not attempt.request.has_ended:
                with self._contained(attempt.request):
                    self._on_prompt(attempt, prompt)
        now = self._clock()
        for result in response.tokens:
            attempt = self.attempts.get((result.request_id, result.attempt))
            if attempt is None or attempt.request.has_ended:
                self.counters.late_count += 1
                continue
            try:  # a context manager would take as long as much of what it surrounds
                self._on_tokens(attempt, result, now)
            except Exception:
                self._failed(attempt.request)
        self._rounds.deliver()
        for finish in response.finishes:
            attempt = self.attempts.get((finish.request_id, finish.attempt))
            if attempt is not None:  # else the request was retried
                with self._contained(attempt.request):
                    self._on_finish(attempt, finish)
        if response.HasField("others"):
            self.sharing.heard(worker.worker_id, response.others)
        has_room = self.admission.computed(worker.worker_id, response.prefilled_token_count)
        if response.finishes or response.HasField("others") or has_room:
            self._start_waiting()

    def _on_tokens(self, attempt: Attempt, result: worker_pb2.TokenResult, now: float) -> None:
        request, token_ids = attempt.request, result.token_ids
        try:
            count = request.output.count_new(result.first_index, len(token_ids))
        except ValueError as error:
            self._skipped(attempt, error)
            return
        if not count:
            self.counters.duplicate_count += 1
            return
        self.counters.tokens_came(request.times, count, now, request.output.resumed_count)
        if request.times.first_token is None:
            attempt.span.record("first token", attempt.sent_at, now)
        request.times.tokens_came(now)
        request.drafts.add(result)
        request.selected.add(result)
        request.append(token_ids[-count:], result.logprobs[-count:])
        self._rounds.add(request)
        if self.admission.tokens_came(attempt.request):
            self._start_waiting()

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
        self._cancel(attempt)
        if attempt.key in self.attempts:
            self._release(attempt)
        gap = Internal(f"worker {attempt.worker_id} skipped tokens", reason="TOKENS_SKIPPED")
        self._retry(attempt, gap)

    def _on_finish(self, attempt: Attempt, finish: worker_pb2.RequestFinish) -> None:
        if finish.error_code:
            attempt.span.end(error=finish.error_reason)
        self._release(attempt)
        request = attempt.request
        if request.has_ended:
            return
        request.selected.finished(finish)
        if finish.error_code:
            error = from_code(finish.error_code, finish.error_message, finish.error_reason)
            if not isinstance(error, Unavailable):
                self._fail(request, error)
                return
            # A draining worker refuses before its health tells so. Nothing ran there.
            is_drain = error.reason == "DRAINING"
            if is_drain:
                self.admission.close_worker(attempt.worker_id)
            self._retry(attempt, error, is_loss=not is_drain)
        elif finish.reason in (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH):
            has_steps = finish.HasField("mean_step_seconds")
            seconds = finish.mean_step_seconds if has_steps else None
            self._complete(attempt, Finished(finish.reason), seconds)
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
            self._complete(attempt, outcome)
            return
        request.losses += int(is_counted)
        if isinstance(outcome, GiveUp):
            self._fail(request, outcome.error)
            return
        if is_counted:
            self.counters.failover_count += 1
        request.times.looked_up = None
        # The tokens stay the same, and so do the names of their chunks.
        request.cached = CachedPrefix(marks=request.cached.marks)
        self.admission.resubmit(request)

    # -- a request ends -------------------------------------------------------------------------

    def _complete(
        self, attempt: Attempt, ending: Finished, step_seconds: float | None = None
    ) -> None:
        """End a request with its whole answer. `step_seconds`: mean of its steps, if known."""
        now = self._clock()
        message = completion(attempt, reason=ending.reason, step_seconds=step_seconds, now=now)
        self.admission.completed(attempt.request)
        self._completed(attempt.request, message, now)

    def _complete_resumed(self, request: Request, ending: Finished) -> None:
        """End a request whose client had all tokens: it lost the last message only."""
        now = self._clock()
        message = completion_of_tokens(request, reason=ending.reason, now=now)
        self._completed(request, message, now)

    def _completed(
        self, request: Request, message: scheduler_pb2.GenerateComplete, now: float
    ) -> None:
        request.complete(message, now)
        self.counters.completed(message, request.output.resumed_count)
        self._ended(request, facts_of_completed(request, message))

    def _fail(self, request: Request, error: SplitpointError) -> None:
        """End a request with an error, unless it has ended."""
        if not request.has_ended:
            self.counters.failed(error)
            self._end_with_error(request, error)

    def _reject(self, request: Request, error: SplitpointError) -> None:
        """End a request that is not queued."""
        self.counters.rejected(error)
        self._end_with_error(request, error)

    def _end_with_error(self, request: Request, error: SplitpointError) -> None:
        attempt = self._attempt_of(request)
        request.fail(error, self._clock())
        worker_id = attempt.worker_id if attempt is not None else None
        facts = facts_of_failed(request, error, worker_id)
        self._ended(request, facts, error_reason=error.reason)

    def _ended(self, request: Request, facts: LogFacts, error_reason: str = "") -> None:
        with for_request(request.request_id):
            _log.info("request ended", extra={"facts": facts})
        request.span.set(**facts)
        request.span.end(request.ended_at, error=error_reason)
        self.requests.ended(request)
        self.admission.withdraw(request)
        self._an_end.set()

    def _fail_and_cancel(self, request: Request, error: SplitpointError) -> None:
        self._fail(request, error)
        attempt = self._attempt_of(request)
        if attempt is not None:
            self._cancel(attempt)
        # One that was not sent yet is over at once.
        self._start_waiting()

    # -- background work, which keeps an unexpected error to its own request -----------------------

    def _spawn(self, request: Request, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(request, work), name=request.request_id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contextmanager
    def _contained(self, request: Request) -> Iterator[None]:
        """Let an exception end the request and nothing else."""
        try:
            yield
        except Exception:
            self._failed(request)

    def _failed(self, request: Request) -> None:
        """Log the exception at hand with an incident id, and end the request with it."""
        incident = secrets.token_hex(8)
        with for_request(request.request_id):
            _log.exception("incident %s", incident, extra={"incident": incident})
        error = Internal(f"internal error, incident {incident}", incident=incident)
        self._fail_and_cancel(request, error)

    async def _run(self, request: Request, work: Coroutine[Any, Any, None]) -> None:
        with for_request(request.request_id), self._contained(request):
            await work

    # -- readers report -------------------------------------------------------------------------

    def on_pause(self, request: Request, paused: bool) -> None:
        attempt = self._attempt_of(request)
        if attempt is None:
            self.admission.resumed(request)
            self._start_waiting()  # a paused one is not placed
        elif attempt.plan is None:
            if paused:
                self._release(attempt)
                self._retry(attempt, None, is_loss=False)
                self._start_waiting()
        elif attempt.is_put_back:
            pass  # it is on its way to the queue
        elif paused and request.is_suspect:
            # Nothing starts beside a suspect, so it makes room for as long as its reader takes.
            self._put_back(attempt)
        else:
            self._pause(attempt)
            if paused:
                self._start_waiting()  # it makes room for others that wait

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
            self._start_waiting()
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
                self._fail(request, error)

    async def drain(self, grace_seconds: float) -> None:
        """Accept nothing new, wait for running requests, and fail those that do not end."""
        self.is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while self.requests.running():
                    self._an_end.clear()
                    await self._an_end.wait()
        for request in self.requests.running():
            with for_request(request.request_id):
                _log.warning("did not end within %g s", grace_seconds)
            attempt = self._attempt_of(request)
            if attempt is not None:
                self._cancel(attempt)
                if attempt.key in self.attempts:
                    self._release(attempt)
            error = Unavailable(
                f"the scheduler stopped before the answer was whole, after {grace_seconds:g} s",
                reason="STOPPED",
            )
            self._fail(request, error)

    async def close(self) -> None:
        """Fail what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for request in self.requests.running():
            self._fail(request, Unavailable("the scheduler stopped", reason="STOPPED"))

    # -- questions -------------------------------------------------------------------------------

    def tenants(self) -> list[TenantFacts]:
        """Return every tenant that has had a request, the one with most service first."""
        return tenants_of(self.admission, self._clock())

    def oldest_wait_seconds(self) -> float:
        """Return how long the longest-waiting request has waited in the queue; 0 if none waits.

        Paused requests wait for their readers, and do not count.
        """
        since = [request.since for request in self.admission.queue() if not request.is_paused]
        return self._clock() - min(since) if since else 0.0

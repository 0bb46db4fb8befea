"""Leads every request from its arrival to its end: look up, queue, place, deliver, place again.

All of it runs on one event loop. The decisions are made elsewhere (admission,
routing, planning); this carries them out and keeps the books straight: each
placement is granted once and released once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from scheduler_service.api.output import Transcript
from scheduler_service.api.request import Request, RequestTable
from scheduler_service.api.validation import GenerateInput
from scheduler_service.cluster.registry import ReadyWorker, Registry, WorkerConnection
from scheduler_service.cluster.run_stream import Accepted, Duplicate, Gap, take
from scheduler_service.limits import Limits
from scheduler_service.placement.admission import Admission, Admitted, Rejected, Ticket
from scheduler_service.placement.fetch_plan import Fetch
from scheduler_service.placement.footprint import Demand
from scheduler_service.placement.planning import Wishes, plan_attempt
from scheduler_service.prefixes.lookup import Prefixes
from scheduler_service.requests import log_facts
from scheduler_service.requests.accounts import ABANDONED_REASON, Accounts
from scheduler_service.requests.answers import completion, rejection
from scheduler_service.requests.attempts import Placement, Placements, admit_command
from scheduler_service.requests.availability import check_workers
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.errors import Internal, SplitpointError, Unavailable, from_code
from splitpoint.keys import tenant_salt
from splitpoint.observe.logs import LogFacts, for_request
from splitpoint.observe.tracing import NO_SPAN, Span
from splitpoint.planning.planner import Objective, Residency
from splitpoint.v1 import types_pb2, worker_pb2
from splitpoint.words import counted

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.1


class RequestManager:
    """Owner of all requests and listener to all workers."""

    def __init__(
        self,
        registry: Registry,
        find_prefixes: Callable[[bytes, Sequence[int]], Awaitable[Prefixes]],
        limits: Limits,
        accounts: Accounts,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        server_key: bytes,
        default_residency: Residency | None,
        objective: Objective = Objective.LATENCY,
        clock: Callable[[], float],
        on_readiness: Callable[[], None],
    ) -> None:
        self.registry = registry
        self.limits = limits
        self.admission = Admission(limits.queue_capacity)
        self.requests = RequestTable(limits)
        self.is_draining = False
        self._an_end = asyncio.Event()
        self.accounts = accounts
        self._find_prefixes = find_prefixes
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._server_key = server_key
        self._default_residency = default_residency
        # What plans are to be best at.
        self.objective = objective
        self._clock = clock
        self._on_readiness = on_readiness
        self._arrivals = itertools.count()
        # One count for all requests: no attempt is ever mistaken for another.
        self._attempts = itertools.count(1)
        self._last_arrival: asyncio.Task[None] | None = None
        self._waiting: dict[int, Request] = {}  # by arrival
        self._placements = Placements()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- a request arrives -----------------------------------------------------------

    def start(self, request: GenerateInput, span: Span = NO_SPAN) -> Request:
        """The running or remembered request of this id, or a new one. Attach to it at once.

        A new one takes the span over, and ends it.

        Raises AlreadyExists (same id, other body), ResourceExhausted (the
        tenant has as many as it may), NotFound (unknown worker),
        InvalidArgument (a split that no store can give), Unavailable (draining,
        or no worker is ready).
        """
        self.requests.expire(self._clock())
        known = self.requests.find(request)
        if known is not None:
            return known
        self.requests.check_quota(request.tenant)
        if self.is_draining:
            raise Unavailable(
                "the scheduler is draining",
                reason="DRAINING",
                retry_after_seconds=self.limits.retry_seconds,
            )
        check_workers(request, self.registry, self.limits.retry_seconds)
        created = Request(
            request,
            Transcript(request, self._tokenizer, self._eos_token_ids),
            self,
            arrival=next(self._arrivals),
            now=self._clock(),
            lag_tokens=self.limits.lag_tokens,
            span=span,
        )
        span.set(request_id=created.request_id)
        self.requests.add(created)
        self._last_arrival = self._spawn(created, self._arrive(created, self._last_arrival))
        return created

    async def _arrive(self, request: Request, before: asyncio.Task[None] | None) -> None:
        prefixes = await self._look_up(request)
        if before is not None:
            # A store may answer the later of two peeks first; the queue may not.
            await asyncio.wait({before})
        if request.has_ended:
            return
        verdict = self.admission.submit(self._ticket(request, prefixes))
        if isinstance(verdict, Rejected):
            limits = self.limits
            error = rejection(
                verdict,
                queue_capacity=limits.queue_capacity,
                retry_seconds=limits.retry_seconds,
                restore_method=request.input.restore_method,
            )
            self._reject(request, error)
            return
        self._queue(request)
        self._place_waiting()

    def _queue(self, request: Request) -> None:
        self._waiting[request.arrival] = request
        request.times.queued = self._clock()

    def _ticket(self, request: Request, prefixes: Prefixes) -> Ticket:
        wanted = request.input.residency or self._default_residency
        return Ticket(
            arrival=request.arrival,
            demand=Demand(request.input.token_count, wanted),
            worker_id=request.input.worker_id,
            cached_tokens=prefixes.own,
            sources=prefixes.sources,
        )

    async def _look_up(self, request: Request) -> Prefixes:
        """Where the request's sequence is cached."""
        tokens = [*request.input.prompt, *request.transcript.token_ids]
        with request.span.part("peek") as span:
            found = await self._find_prefixes(self._salt(request), tokens)
            span.set(cached_tokens=max(found.own.values(), default=0))
        request.times.peeked = self._clock()
        return found

    def _salt(self, request: Request) -> bytes:
        return tenant_salt(self._server_key, request.input.tenant, request.input.cache_salt)

    def waiting_request(self, ticket: Ticket) -> Request:
        """Whose ticket it is. The ticket must be in the queue."""
        return self._waiting[ticket.arrival]

    # -- a request is placed ------------------------------------------------------------

    def _place_waiting(self) -> None:
        """Everybody who may start now starts, in order."""
        while (admitted := self.admission.admit()) is not None:
            request = self._waiting.pop(admitted.ticket.arrival)
            request.times.unplaceable = None
            now = self._clock()
            request.span.record("queue", request.times.queued or now, now)
            placement = Placement(request, next(self._attempts), admitted.worker_id)
            self._placements.add(placement)
            peeked = request.times.peeked
            if peeked is None or self._clock() - peeked > self.limits.peek_lifetime_seconds:
                self._spawn(request, self._look_up_and_dispatch(placement, admitted))
                continue
            with self._containing(request):
                ticket = admitted.ticket
                self._dispatch(placement, admitted, Prefixes(ticket.cached_tokens, ticket.sources))

    async def _look_up_and_dispatch(self, placement: Placement, admitted: Admitted) -> None:
        prefixes = await self._look_up(placement.request)
        if placement in self._placements:  # neither abandoned nor lost meanwhile
            self._dispatch(placement, admitted, prefixes)

    def _dispatch(self, placement: Placement, admitted: Admitted, prefixes: Prefixes) -> None:
        request = placement.request
        worker = self._ready_worker(placement)
        if worker is None:
            raise RuntimeError(f"a place was granted on {placement.worker_id}, which is away")
        delivered = request.transcript.token_ids
        began = self._clock()
        try:
            planned = plan_attempt(
                worker.facts,
                admitted,
                token_count=len(request.input.prompt) + len(delivered),
                cached_tokens=prefixes.own.get(placement.worker_id, 0),
                wishes=Wishes(
                    request.input.split_tokens, request.input.restore_method, self.objective
                ),
                sources=prefixes.sources.get(placement.worker_id, ()),
            )
        except SplitpointError as error:
            self._release(placement)
            self._fail(request, error)
            return
        plan = planned.plan if isinstance(planned, Fetch) else planned
        placement.plan = plan
        placement.dispatched = self._clock()
        request.span.record("plan", began, placement.dispatched, **log_facts.of_plan(plan))
        placement.span = request.span.begin(
            "attempt", placement.dispatched, worker=placement.worker_id, attempt=placement.attempt
        )
        waited = None
        if request.times.dispatched is None:
            request.times.dispatched = placement.dispatched
            waited = request.times.dispatched - request.times.arrived
        self.accounts.placed(plan, waited)
        command = admit_command(placement, planned, delivered, self._salt(request))
        worker.stream.admit(command)
        if request.is_paused:
            worker.stream.set_paused(request.request_id, True)

    def _ready_worker(self, placement: Placement) -> ReadyWorker | None:
        worker = self.registry.find(placement.worker_id)
        return worker.ready if worker is not None else None

    def _release(self, placement: Placement) -> None:
        """The placement is over: its memory may be granted again."""
        placement.span.end()
        self._placements.remove(placement)
        self.admission.release(placement.worker_id, placement.request.arrival)

    def _withdraw(self, request: Request) -> None:
        """Stop a placed request; its memory stays charged until the worker lets go of it."""
        placement = self._placements.of(request)
        if placement is None:
            return
        worker = self._ready_worker(placement)
        if placement.plan is None or worker is None:
            self._release(placement)  # the worker never heard of it
        else:
            worker.stream.cancel(*placement.key)

    # -- a worker speaks ------------------------------------------------------------------

    def on_worker_ready(self, worker: WorkerConnection) -> None:
        if worker.ready is None:
            raise RuntimeError("a worker was announced that is not ready")
        self.admission.add_worker(worker.ready.facts)
        self._place_waiting()
        self._on_readiness()

    def on_worker_draining(self, worker: WorkerConnection) -> None:
        self.admission.close_worker(worker.worker_id)
        self._on_readiness()

    def on_worker_lost(self, worker: WorkerConnection) -> None:
        """What ran there is placed again, its delivered tokens forced."""
        self.admission.remove_worker(worker.worker_id)
        lost = self._placements.on(worker.worker_id)
        if lost:
            _log.warning("worker %s was lost with %d requests", worker.worker_id, len(lost))
        for placement in lost:
            placement.span.end(error="WORKER_LOST")
            self._release(placement)
            self._place_again(placement, None)
        self._place_waiting()
        self._on_readiness()

    def on_step(self, worker: WorkerConnection, response: worker_pb2.RunResponse) -> None:
        for report in response.restores:
            placement = self._placements.find(report.request_id, report.attempt)
            if placement is not None:
                placement.report = report
        for result in response.tokens:
            placement = self._placements.find(result.request_id, result.attempt)
            if placement is None or placement.request.has_ended:
                self.accounts.came_late()
                continue
            with self._containing(placement.request):
                self._on_tokens(placement, result)
        for finish in response.finishes:
            placement = self._placements.find(finish.request_id, finish.attempt)
            if placement is not None:  # else it was placed again
                with self._containing(placement.request):
                    self._on_finish(placement, finish)
        if response.finishes:
            self._place_waiting()

    def _on_tokens(self, placement: Placement, result: worker_pb2.TokenResult) -> None:
        request = placement.request
        verdict = take(result.first_index, len(result.token_ids), len(request.transcript))
        match verdict:
            case Duplicate():
                self.accounts.came_twice()
            case Accepted(offset):
                now = self._clock()
                self.accounts.tokens_came(request.times, len(result.token_ids) - offset, now)
                if request.times.first_token is None:
                    placement.span.record("first token", placement.dispatched, now)
                request.times.tokens_came(now)
                request.transcript.append(result.token_ids[offset:], result.logprobs[offset:])
                request.produced()
            case Gap(expected, first):
                with for_request(request.request_id):
                    _log.error(
                        "worker %s skipped tokens: index %d came where %d was due",
                        placement.worker_id,
                        first,
                        expected,
                    )
                self._withdraw(request)
                if placement in self._placements:
                    self._release(placement)
                self._place_again(placement, None)

    def _on_finish(self, placement: Placement, finish: worker_pb2.RequestFinish) -> None:
        if finish.error_code:
            placement.span.end(error=finish.error_reason)
        self._release(placement)
        request = placement.request
        if request.has_ended:
            return
        if finish.error_code:
            error = from_code(finish.error_code, finish.error_message, finish.error_reason)
            if isinstance(error, Unavailable) and error.reason == "DRAINING":
                # It told us before its health did. Nothing ran, so nothing was lost.
                self.admission.close_worker(placement.worker_id)
                self._place_again(placement, error, is_loss=False)
            elif isinstance(error, Unavailable):
                self._place_again(placement, error)
            else:
                self._fail(request, error)
        elif finish.reason in (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH):
            has_steps = finish.HasField("mean_step_seconds")
            seconds = finish.mean_step_seconds if has_steps else None
            self._complete(placement, finish.reason, finish.matched_stop, seconds)
        else:
            cause = Unavailable("the worker ended the request", reason="WORKER_DRAINED")
            self._place_again(placement, cause)

    # -- a request goes on, or ends -----------------------------------------------------------

    def _place_again(
        self, placement: Placement, cause: Unavailable | None, *, is_loss: bool = True
    ) -> None:
        """Queue a request whose placement was lost, at its old place in line."""
        request = placement.request
        if request.has_ended:
            return
        if placement.plan is not None:
            # The last token may have come and only its finish be missing.
            if len(request.transcript) and request.transcript.ends_in_stop:
                matched = request.transcript.matched_stop
                self._complete(placement, types_pb2.FINISH_REASON_STOP, matched)
                return
            if len(request.transcript) >= request.input.max_tokens:
                self._complete(placement, types_pb2.FINISH_REASON_LENGTH, "")
                return
            request.losses += is_loss
        if request.losses >= self.limits.loss_count:
            quarantine = Internal(
                f"{counted(request.losses, 'worker was', 'workers were')} lost while this "
                "request ran; it is not tried again",
                reason="REQUEST_QUARANTINED",
            )
            self._fail(request, cause or quarantine)
            return
        if is_loss and placement.plan is not None:
            self.accounts.failed_over()
        request.times.peeked = None
        self._queue(request)
        self.admission.resubmit(self._ticket(request, Prefixes()))

    def _complete(
        self,
        placement: Placement,
        reason: types_pb2.FinishReason,
        matched_stop: str,
        step_seconds: float | None = None,
    ) -> None:
        request = placement.request
        if placement.plan is None:
            raise RuntimeError(f"{request.request_id} ended before it was dispatched")
        stopped = reason == types_pb2.FINISH_REASON_STOP
        text = request.transcript.finish(stopped=stopped)
        now = self._clock()
        message = completion(
            request,
            worker_id=placement.worker_id,
            plan=placement.plan,
            report=placement.report,
            reason=reason,
            matched_stop=(matched_stop or request.transcript.matched_stop) if stopped else "",
            text=text,
            step_seconds=step_seconds,
            now=now,
        )
        request.complete(message, now)
        self.accounts.completed(message)
        self._ended(request, log_facts.of_completed(request, message))

    def _reject(self, request: Request, error: SplitpointError) -> None:
        """It was looked up, and is turned away."""
        self.accounts.rejected(error)
        self._end_without(request, error)

    def _fail(self, request: Request, error: SplitpointError) -> None:
        if not request.has_ended:
            self.accounts.failed(error)
            self._end_without(request, error)

    def _end_without(self, request: Request, error: SplitpointError) -> None:
        placement = self._placements.of(request)
        request.fail(error, self._clock())
        worker_id = placement.worker_id if placement is not None else None
        self._ended(request, log_facts.of_failed(request, error, worker_id), error)

    def _ended(
        self, request: Request, facts: LogFacts, error: SplitpointError | None = None
    ) -> None:
        with for_request(request.request_id):
            _log.info("request ended", extra={"facts": facts})
        request.span.set(**facts)
        request.span.end(request.ended_at, error=error.reason if error else "")
        self.requests.ended(request)
        self._an_end.set()
        if self._waiting.pop(request.arrival, None) is not None:
            self.admission.withdraw(request.arrival)

    # -- its readers speak -----------------------------------------------------------------

    def on_pause(self, request: Request, paused: bool) -> None:
        placement = self._placements.of(request)
        if placement is None or placement.plan is None:
            return  # told when it is dispatched
        worker = self._ready_worker(placement)
        if worker is not None:
            worker.stream.set_paused(request.request_id, paused)

    def on_abandoned(self, request: Request) -> None:
        """Nobody reads it any more."""
        self._fail(request, Unavailable("every reader left", reason=ABANDONED_REASON))
        self._withdraw(request)
        self._place_waiting()

    # -- time passes -------------------------------------------------------------------------

    async def keep_house(self) -> None:
        """Bounded waits and a bounded memory; until cancelled."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self.tick()

    def tick(self) -> None:
        now = self._clock()
        self.requests.expire(now)
        for ticket in self.admission.queue():
            request = self.waiting_request(ticket)
            if self.admission.is_placeable(ticket):
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
        """Take nothing new; what runs may end within the grace period, the rest is told."""
        self.is_draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while self.requests.running():
                    self._an_end.clear()
                    await self._an_end.wait()
        for request in self.requests.running():
            with for_request(request.request_id):
                _log.warning("did not end within %g s", grace_seconds)
            placement = self._placements.of(request)
            self._withdraw(request)
            if placement is not None:
                self._release(placement)
            error = Unavailable(
                f"the scheduler stopped before the answer was whole, after {grace_seconds:g} s",
                reason="STOPPED",
            )
            self._fail(request, error)

    async def close(self) -> None:
        """Fails what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for request in self.requests.running():
            self._fail(request, Unavailable("the scheduler stopped", reason="STOPPED"))

    def _spawn(self, request: Request, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def contained() -> None:
            with for_request(request.request_id), self._containing(request):
                await work

        task = asyncio.create_task(contained(), name=request.request_id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contextmanager
    def _containing(self, request: Request) -> Iterator[None]:
        """A bug ends its own request, with an incident id, and no other."""
        try:
            yield
        except Exception:
            incident = secrets.token_hex(8)
            with for_request(request.request_id):
                _log.exception("incident %s", incident, extra={"incident": incident})
            error = Internal(f"internal error, incident {incident}", incident=incident)
            self._fail(request, error)
            self._withdraw(request)

"""One attempt: a request on one worker, from the grant of memory to its release."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from scheduler_service.api.request import Request
from scheduler_service.cluster.connection import ReadyWorker
from scheduler_service.cluster.registry import Registry
from scheduler_service.placement.fetch_plan import PlannedAttempt
from scheduler_service.placement.plan_report import actual_plan
from scheduler_service.placement.planning import PlanOptions, plan_attempt
from scheduler_service.policy.admission import AdmissionQueue, Admitted
from scheduler_service.requests import log_facts
from scheduler_service.requests.accounts import Accounts
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.observe.tracing import NO_SPAN, Span
from splitpoint.planning.plan import Objective, Plan, RestoreMethod
from splitpoint.selection import FULL, Selection, speculation_beside
from splitpoint.speculation import PLAIN, DraftMethod, Speculation
from splitpoint.transport.convert import (
    plan_to_proto,
    selection_to_proto,
    speculation_from_proto,
    tier_to_proto,
)
from splitpoint.v1 import worker_pb2


@dataclass(slots=True, eq=False)
class Attempt:
    admitted: Admitted
    number: int
    # None until the worker was told.
    plan: Plan | None = None
    # Cancelled to run again later: it is queued when the worker has let go of it.
    is_put_back: bool = False
    # What the worker was asked to draft; what it lacks drafts nothing.
    speculation: Speculation = PLAIN
    can_draft: bool = False
    # The worker would draft by default, but not beside the request's selection.
    drafts_give_way: bool = False
    # What the worker was asked to select.
    selection: Selection = FULL
    # What the worker says of its restore.
    report: worker_pb2.RestoreReport | None = None
    # From the command to the release; when that began, on the scheduler's clock.
    span: Span = NO_SPAN
    sent_at: float = 0.0

    @property
    def request(self) -> Request:
        return self.admitted.request

    def restored(self, report: worker_pb2.RestoreReport) -> None:
        """Note what the worker says of its restore."""
        self.report = report
        if self.plan is not None:
            cached, least = (
                actual_plan(self.plan, report).cached_tokens,
                self.request.least_cached_tokens,
            )
            self.request.least_cached_tokens = cached if least is None else min(cached, least)

    @property
    def worker_id(self) -> str:
        return self.admitted.worker_id

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.number


class Attempts:
    """The attempts under way. Each is opened once and released once."""

    def __init__(
        self,
        registry: Registry,
        admission: AdmissionQueue,
        accounts: Accounts,
        objective: Objective,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._admission = admission
        self._accounts = accounts
        self._objective = objective
        self._clock = clock
        # One count for all requests: no attempt is ever mistaken for another.
        self._numbers = itertools.count(1)
        self._by_key: dict[tuple[str, int], Attempt] = {}

    def open(self, admitted: Admitted) -> Attempt:
        """Begin the books of an attempt; nothing is sent yet."""
        attempt = Attempt(admitted, next(self._numbers))
        self._by_key[attempt.key] = attempt
        return attempt

    def start(self, attempt: Attempt) -> None:
        """Plan it, then tell the worker. Raises InvalidArgument for a plan that cannot be."""
        worker = self._worker(attempt)
        if worker is None:
            raise RuntimeError(f"memory was granted on {attempt.worker_id}, which is away")
        began = self._clock()
        planned = self._plan(attempt, worker.facts)
        attempt.selection = worker.facts.followed(attempt.request.selection)
        attempt.request.selected.started(worker.facts)
        asked = speculation_from_proto(attempt.request.speculation, worker.facts.speculation)
        beside = speculation_beside(attempt.selection, asked)
        attempt.drafts_give_way = asked.is_on and not beside.is_on
        asked = beside
        attempt.speculation = asked
        methods = worker.facts.draft_methods
        attempt.can_draft = asked.method in methods or (
            asked.method is DraftMethod.AUTO and bool(methods)
        )
        self._note_start(attempt, planned.plan, began)
        worker.stream.admit(_admit_command(attempt, planned))

    def pause(self, attempt: Attempt) -> None:
        """Tell the worker, which was told of the attempt, whether the request is paused."""
        worker = self._worker(attempt)
        if worker is not None:
            worker.stream.set_paused(attempt.request.request_id, attempt.request.is_paused)

    def put_back(self, attempt: Attempt) -> None:
        """Stop an attempt of which the worker was told, to run its request again later.

        Does nothing if the worker is away: the attempt is lost with it.
        """
        worker = self._worker(attempt)
        if worker is not None:
            attempt.is_put_back = True
            worker.stream.cancel(*attempt.key)

    def cancel(self, attempt: Attempt) -> None:
        """Stop it. Its memory stays charged until the worker has let go of it."""
        worker = self._worker(attempt)
        if attempt.plan is None or worker is None:
            self.release(attempt)  # the worker does not know it
        else:
            worker.stream.cancel(*attempt.key)

    def release(self, attempt: Attempt) -> None:
        """End it: its memory may be granted again. Raises KeyError if it has ended."""
        attempt.span.end()
        del self._by_key[attempt.key]
        self._admission.release(attempt.admitted)

    def find(self, request_id: str, number: int) -> Attempt | None:
        """Return None if the attempt is over: its late messages no longer count."""
        return self._by_key.get((request_id, number))

    def of(self, request: Request) -> Attempt | None:
        return next((a for a in self._by_key.values() if a.request is request), None)

    def leaving(self) -> set[int]:
        """Return the requests, by arrival, that their workers were told to let go of."""
        return {
            a.request.arrival for a in self._by_key.values() if a.is_put_back or a.request.has_ended
        }

    def on(self, worker_id: str) -> list[Attempt]:
        return [a for a in self._by_key.values() if a.worker_id == worker_id]

    def __contains__(self, attempt: Attempt) -> bool:
        return attempt.key in self._by_key

    def __len__(self) -> int:
        return len(self._by_key)

    # -- plan, then send --------------------------------------------------------------------

    def _plan(self, attempt: Attempt, worker: WorkerFacts) -> PlannedAttempt:
        request = attempt.request
        return plan_attempt(
            worker,
            attempt.admitted.grant,
            token_count=request.known_count,
            cached_tokens=request.cached.own.get(attempt.worker_id, 0),
            options=PlanOptions(request.split_tokens, request.restore_method, self._objective),
            sources=request.cached.sources.get(attempt.worker_id, ()),
        )

    def _note_start(self, attempt: Attempt, plan: Plan, began: float) -> None:
        request, now = attempt.request, self._clock()
        attempt.plan, attempt.sent_at = plan, now
        request.span.record("plan", began, now, **log_facts.of_plan(plan))
        attempt.span = request.span.begin(
            "attempt", now, worker=attempt.worker_id, attempt=attempt.number
        )
        waited = None
        if request.times.dispatched is None:
            request.times.dispatched = now
            waited = now - request.times.arrived
        account = self._admission.account(attempt.worker_id)
        if account is None:
            raise RuntimeError(f"worker {attempt.worker_id} has no account")
        account.kappa.placed(plan.cached_tokens, plan.new_tokens)
        self._accounts.placed(plan, account.kappa_crit, waited)

    def _worker(self, attempt: Attempt) -> ReadyWorker | None:
        worker = self._registry.find(attempt.worker_id)
        return worker.ready if worker is not None else None


def _admit_command(attempt: Attempt, planned: PlannedAttempt) -> worker_pb2.AdmitCommand:
    request = attempt.request
    command = worker_pb2.AdmitCommand(
        request_id=request.request_id,
        attempt=attempt.number,
        prompt_token_ids=request.prompt,
        # The client has these: the worker is forced to repeat them.
        delivered_token_ids=request.output.token_ids,
        sampling=request.sampling,
        plan=plan_to_proto(planned.plan),
        tenant_salt=request.tenant_salt,
        traceparent=attempt.span.traceparent,
        speculation=request.speculation,
        bad_words=[worker_pb2.BadWord(token_ids=each) for each in request.bad_words],
    )
    if not attempt.selection.is_full:
        command.selection.CopyFrom(selection_to_proto(attempt.selection))
    if planned.source is not None:
        command.source_store_address = planned.source.address
        if not planned.source.address:
            command.source_tier = tier_to_proto(planned.source.tier)
        command.source_cached_tokens = planned.source.cached_tokens
        command.meeting_tokens = planned.meeting_tokens
    if request.split_tokens is not None:
        command.forced_split_tokens = request.split_tokens
    elif request.restore_method is RestoreMethod.LOAD:
        command.forced_split_tokens = 0
    return command

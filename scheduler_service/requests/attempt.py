"""One attempt: a request on one worker, from the grant of memory to its release."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.api.request import Request
from scheduler_service.placement.footprint import Grant
from scheduler_service.placement.plan_report import actual_plan
from scheduler_service.placement.planning import PlanOptions, plan_attempt
from scheduler_service.prefixes.lookup import FetchSource
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.observe.tracing import NO_SPAN, Span
from splitpoint.planning.plan import Objective, Plan
from splitpoint.selection import FULL, Selection, speculation_beside
from splitpoint.speculation import PLAIN, DraftMethod, Speculation
from splitpoint.transport.convert import (
    plan_to_proto,
    selection_to_proto,
    speculation_to_proto,
    tier_to_proto,
)
from splitpoint.v1 import worker_pb2


@dataclass(slots=True, eq=False)
class Attempt:
    """A request on one worker, what that was asked to do, and what it told."""

    request: Request
    worker_id: str
    grant: Grant
    # No two attempts share it.
    number: int
    # None until the worker was told.
    plan: Plan | None = None
    # What is fetched first; None: nothing.
    source: FetchSource | None = None
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
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.number

    def make_plan(self, worker: WorkerFacts, objective: Objective) -> Plan:
        """Plan it, and what the worker is asked to select and to draft. Return the plan.

        Raises InvalidArgument for a plan that cannot be.
        """
        request = self.request
        plan, self.source = plan_attempt(
            worker,
            self.grant,
            token_count=request.known_count,
            cached_tokens=request.cached.own.get(self.worker_id, 0),
            options=PlanOptions(request.forced, objective),
            sources=request.cached.sources.get(self.worker_id, ()),
        )
        self.selection = worker.followed(request.selection)
        request.selected.started(worker)
        asked = request.speculation.over(worker.speculation)
        self.speculation = speculation_beside(self.selection, asked)
        self.drafts_give_way = asked.is_on and not self.speculation.is_on
        methods, method = worker.draft_methods, self.speculation.method
        self.can_draft = method in methods or (method is DraftMethod.AUTO and bool(methods))
        self.plan = plan
        return plan

    def command(self) -> worker_pb2.AdmitCommand:
        """Return what the worker is told. Raises RuntimeError without a plan."""
        if self.plan is None:
            raise RuntimeError("an attempt begins without a plan")
        request = self.request
        command = worker_pb2.AdmitCommand(
            request_id=request.request_id,
            attempt=self.number,
            prompt_token_ids=request.prompt,
            # The client has these: the worker is forced to repeat them.
            delivered_token_ids=request.output.token_ids,
            sampling=request.sampling,
            plan=plan_to_proto(self.plan),
            tenant_salt=request.tenant_salt,
            traceparent=self.span.traceparent,
            speculation=speculation_to_proto(self.speculation),
            bad_words=[worker_pb2.BadWord(token_ids=each) for each in request.bad_words],
        )
        if not self.selection.is_full:
            command.selection.CopyFrom(selection_to_proto(self.selection))
        if self.source is not None:
            command.source_store_address = self.source.address
            if not self.source.address:
                command.source_tier = tier_to_proto(self.source.tier)
            command.source_cached_tokens = self.source.cached_tokens
            command.meeting_tokens = self.source.meeting_tokens
        if request.forced is not None and request.forced.split_tokens is not None:
            command.forced_split_tokens = request.forced.split_tokens
        return command

"""Attempts of requests on workers, from the grant to the release, and what a worker is told.

Each is granted once and released once; who may have one is decided by admission.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler_service.api.request import Request
from scheduler_service.placement.fetch_plan import Fetch
from splitpoint.observe.tracing import NO_SPAN, Span
from splitpoint.planning.planner import Plan, RestoreMethod
from splitpoint.transport.convert import plan_to_proto
from splitpoint.v1 import worker_pb2


@dataclass(slots=True, eq=False)
class Placement:
    """One attempt of a request on one worker."""

    request: Request
    attempt: int
    worker_id: str
    # None until the worker was told.
    plan: Plan | None = None
    report: worker_pb2.RestoreReport | None = None
    # From the command to the release; when that began, on the scheduler's clock.
    span: Span = NO_SPAN
    dispatched: float = 0.0

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.attempt


class Placements:
    """All that are granted at the moment."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, int], Placement] = {}

    def add(self, placement: Placement) -> None:
        self._by_key[placement.key] = placement

    def remove(self, placement: Placement) -> None:
        """Raises KeyError for one that is over already."""
        del self._by_key[placement.key]

    def find(self, request_id: str, attempt: int) -> Placement | None:
        """None when that attempt is over: what comes of it no longer counts."""
        return self._by_key.get((request_id, attempt))

    def of(self, request: Request) -> Placement | None:
        return next((p for p in self._by_key.values() if p.request is request), None)

    def on(self, worker_id: str) -> list[Placement]:
        return [p for p in self._by_key.values() if p.worker_id == worker_id]

    def __contains__(self, placement: Placement) -> bool:
        return placement.key in self._by_key

    def __len__(self) -> int:
        return len(self._by_key)


def admit_command(
    placement: Placement, planned: Fetch | Plan, delivered: Sequence[int], tenant_salt: bytes
) -> worker_pb2.AdmitCommand:
    """What starts it on its worker. `delivered`: tokens the client has, which are forced."""
    wanted = placement.request.input
    plan = planned.plan if isinstance(planned, Fetch) else planned
    command = worker_pb2.AdmitCommand(
        request_id=placement.request.request_id,
        attempt=placement.attempt,
        prompt_token_ids=wanted.prompt,
        delivered_token_ids=delivered,
        sampling=wanted.sampling,
        plan=plan_to_proto(plan),
        tenant_salt=tenant_salt,
        traceparent=placement.span.traceparent,
    )
    if isinstance(planned, Fetch):
        command.source_store_address = planned.source.address
        command.source_cached_tokens = planned.source.cached_tokens
    if wanted.split_tokens is not None:
        command.forced_split_tokens = wanted.split_tokens
    elif wanted.restore_method is RestoreMethod.LOAD:
        command.forced_split_tokens = 0
    return command

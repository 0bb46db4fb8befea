"""Checks that an arriving request has a worker that could run it."""

from __future__ import annotations

from scheduler_service.api.request import Request
from scheduler_service.api.selection import check_selection
from scheduler_service.api.speculation import check_draft_method
from scheduler_service.api.structured import check_structured_output
from scheduler_service.cluster.registry import Registry
from scheduler_service.placement.planning import check_split
from splitpoint.errors import NotFound, Unavailable


def check_workers(request: Request, registry: Registry, retry_seconds: float) -> None:
    """Raises NotFound (unknown worker), Unavailable (none is ready), InvalidArgument (a forced
    split that no store can serve, a draft method that no worker has), or FailedPrecondition (a
    selection that no worker has artefacts for, structured output that none can follow)."""
    ready = registry.ready()
    if request.worker_id:
        if registry.find(request.worker_id) is None and registry.all_names_known:
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
            retry_after_seconds=retry_seconds,
        )
    facts = [connection.ready.facts for connection in ready if connection.ready is not None]
    check_split(request.split_tokens, facts)
    check_draft_method(request.speculation, facts)
    check_selection(request.selection, facts)
    check_structured_output(request.sampling, facts)

"""Background work for requests, which keeps an unexpected error to its own request."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from scheduler_service.api.request import Request
from splitpoint.errors import Internal, SplitpointError
from splitpoint.observe.logs import for_request

_log = logging.getLogger(__name__)


class RequestTasks:
    """Tasks of requests. `on_error` must end the request that it is given."""

    def __init__(self, on_error: Callable[[Request, SplitpointError], None]) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, request: Request, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._run(request, work), name=request.request_id)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contextmanager
    def contained(self, request: Request) -> Iterator[None]:
        """Let an exception end the request and nothing else."""
        try:
            yield
        except Exception:
            self.failed(request)

    def failed(self, request: Request) -> None:
        """Log the exception at hand with an incident id, and end the request with it."""
        incident = secrets.token_hex(8)
        with for_request(request.request_id):
            _log.exception("incident %s", incident, extra={"incident": incident})
        error = Internal(f"internal error, incident {incident}", incident=incident)
        self._on_error(request, error)

    async def close(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, request: Request, work: Coroutine[Any, Any, None]) -> None:
        with for_request(request.request_id), self.contained(request):
            await work

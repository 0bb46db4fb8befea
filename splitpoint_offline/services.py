"""Store, worker and scheduler as tasks of one event loop, over sockets in a private folder.

They are the services' own `run`: nothing here knows what they do. No port is opened.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvstore_service.__main__ import run as run_store
from scheduler_service.__main__ import run as run_scheduler
from splitpoint.client import AsyncClient
from splitpoint.config import make_runtime
from splitpoint.errors import Internal
from splitpoint.service import OnReady, Setup
from splitpoint.transport.tls import PLAIN
from splitpoint_offline.options import Settings
from worker_service.__main__ import run as run_worker

Run = Callable[[Setup, OnReady], Coroutine[None, None, None]]
# The scheduler connects to its worker within this time after the worker is ready.
_CONNECT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Services:
    """The running services, and a client of the scheduler.

    Attributes:
        failure: ends with the error of a service that ended by itself.
    """

    client: AsyncClient
    failure: asyncio.Future[None]


@asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Services]:
    """Serve in this block. Raises what the services raise at their start."""
    loop = asyncio.get_running_loop()
    failure: asyncio.Future[None] = loop.create_future()
    make_runtime(settings.runtime)
    async with AsyncExitStack() as started:
        started.callback(failure.cancel)
        for name, run in (
            ("store", functools.partial(run_store, settings.store)),
            ("worker", functools.partial(run_worker, settings.worker)),
            ("scheduler", functools.partial(run_scheduler, settings.scheduler)),
        ):
            await started.enter_async_context(_service(name, run, failure))
        client = AsyncClient(settings.scheduler_address, identity=PLAIN)
        started.push_async_callback(client.close)
        await client.wait_ready(_CONNECT_SECONDS)
        yield Services(client, failure)


@asynccontextmanager
async def _service(name: str, run: Run, failure: asyncio.Future[None]) -> AsyncIterator[None]:
    """Run a service in this block, from its readiness to the end of its drain."""
    setup = Setup(asyncio.Event(), PLAIN, None, None)
    ready = asyncio.Event()
    task = asyncio.create_task(run(setup, lambda _: ready.set()), name=name)
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.is_set():
            _check_running(name, task)
        task.add_done_callback(functools.partial(_note_end, name, setup, failure))
        yield
    finally:
        waiting.cancel()
        setup.stop.set()
        # The error of a service that failed is that of `failure`, or was raised above.
        await asyncio.wait({task})


def _check_running(name: str, task: asyncio.Task[None]) -> None:
    """Raise the error of a service that ended before it was ready."""
    task.result()
    raise Internal(f"the {name} ended before it was ready")


def _note_end(
    name: str, setup: Setup, failure: asyncio.Future[None], task: asyncio.Task[None]
) -> None:
    if setup.stop.is_set() or failure.done():
        return
    error = None if task.cancelled() else task.exception()
    failure.set_exception(error or Internal(f"the {name} ended by itself"))

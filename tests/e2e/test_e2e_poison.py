"""A request that ends the worker process that runs it: two of three die, and no other request.

About 20 s: three worker processes start, and two of them again.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from forked_service import ForkedService
from local_stack import (
    StackShape,
    make_scheduler,
    start_service,
    stop_process,
    wait_for_workers,
)
from tiny_models import build_tiny, clear_prompt

from scheduler_service.cluster.connection import WorkerConnection, WorkerListener
from splitpoint.client import AsyncClient
from splitpoint.errors import Internal
from splitpoint.v1 import worker_pb2

WORKERS = 3
NEW_TOKENS = 40


class Workers:
    """Worker processes that are started again when they die, as `splitpoint up` does."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.killed: list[str] = []
        self._folder = folder
        self._sockets = sockets
        self._processes: dict[str, ForkedService] = {}
        self._restarts: list[asyncio.Task[None]] = []

    async def start(self, name: str) -> None:
        self._processes[name] = await start_service(
            *("worker_service", "--listen", f"unix:{self._sockets}/w{name}", "--worker-id", name),
            *("--model", str(self._folder), "--device", "cpu", "--dtype", "float32"),
            *("--device-memory", "64MiB", "--threads", "1"),
        )

    def kill(self, name: str) -> None:
        """kill -9, and start it again in the background."""
        self.killed.append(name)
        self._processes[name].kill()
        self._restarts.append(asyncio.create_task(self._restart(name)))

    async def stop(self) -> None:
        await asyncio.gather(*self._restarts)
        await asyncio.gather(*map(stop_process, self._processes.values()))

    async def _restart(self, name: str) -> None:
        await self._processes[name].wait()
        await self.start(name)


class Poison:
    """Passes the events of workers on; ends the process that sends the first token of a request.

    As if the worker had died of it: the message is lost, and so is all that follows.
    """

    def __init__(self, request_id: str, listener: WorkerListener, workers: Workers) -> None:
        self._request_id = request_id
        self._listener = listener
        self._workers = workers
        self._dead: set[WorkerConnection] = set()
        self.on_worker_ready = listener.on_worker_ready
        self.on_worker_draining = listener.on_worker_draining

    def on_worker_lost(self, worker: WorkerConnection) -> None:
        self._dead.discard(worker)
        self._listener.on_worker_lost(worker)

    def on_step(self, worker: WorkerConnection, response: worker_pb2.RunResponse) -> None:
        if worker in self._dead:
            return
        if any(result.request_id == self._request_id for result in response.tokens):
            self._dead.add(worker)
            self._workers.kill(worker.worker_id)
        else:
            self._listener.on_step(worker, response)


async def test_a_poison_request_ends_two_engines_and_the_others_finish(
    folder: Path, tmp_path: Path
) -> None:
    model = build_tiny("llama")
    poison, *innocent = [clear_prompt(model, 30, NEW_TOKENS, seed=seed) for seed in range(7)]
    workers = Workers(folder, tmp_path)
    async with AsyncExitStack() as cleanup:
        cleanup.push_async_callback(workers.stop)
        await asyncio.gather(*(workers.start(str(name)) for name in range(WORKERS)))
        scheduler = make_scheduler(folder, tmp_path, StackShape(workers=WORKERS))
        address = await scheduler.start("127.0.0.1:0")
        cleanup.push_async_callback(scheduler.stop, 1.0)
        client = await cleanup.enter_async_context(AsyncClient(address))
        await wait_for_workers(client, WORKERS, seconds=60)
        scheduler.registry.listener = Poison("poison", scheduler.manager, workers)
        answers = [
            client.generate(prompt, max_tokens=NEW_TOKENS, ignore_eos=True).complete()
            for prompt, _ in innocent
        ]
        bad = client.generate(
            poison[0], max_tokens=NEW_TOKENS, ignore_eos=True, request_id="poison"
        ).complete()
        error, *done = await asyncio.gather(bad, *answers, return_exceptions=True)
        assert isinstance(error, Internal)
        assert error.reason == "REQUEST_QUARANTINED"
        for (_, wanted), answer in zip(innocent, done, strict=True):
            assert not isinstance(answer, BaseException)
            assert list(answer.token_ids) == wanted
        assert len(workers.killed) == 2
        await wait_for_workers(client, WORKERS, seconds=60)
        status = await client.scheduler_status()
        assert (status.completed_count, status.failed_count) == (len(innocent), 1)

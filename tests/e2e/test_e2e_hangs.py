"""A worker process that is stopped beyond its lease, and one that is cut off: streams go on.

Real processes: a store and two workers.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked_service import ForkedService
from local_stack import (
    StackShape,
    make_scheduler,
    start_service,
    start_store,
    stop_process,
    wait_for_workers,
)
from own_names import shared_memory_folder
from tiny_models import build_tiny, clear_prompt, write_tiny
from waiting import until

from scheduler_service.service import Scheduler
from splitpoint.client import AsyncClient
from splitpoint.transport.channels import open_channel
from splitpoint.transport.statuses import NO_ANSWER
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc

NEW_TOKENS = 160
LEASE_SECONDS = 1.0
SHAPE = StackShape(workers=2, lease_seconds=LEASE_SECONDS)


@functools.cache
def references() -> tuple[list[tuple[list[int], list[int]]], tuple[list[int], list[int]]]:
    """Prompts with their greedy tokens: those that are disturbed, and one for afterwards."""
    model = build_tiny("llama")
    disturbed = [clear_prompt(model, 30 + seed, NEW_TOKENS, seed=seed) for seed in range(4)]
    return disturbed, clear_prompt(model, 44, 30, seed=99)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Made before anything runs: the proxies are on this process's event loop, too.
    references()
    return write_tiny("llama", tmp_path_factory.mktemp("llama"))


class Proxy:
    """Forwards one UNIX socket to another, byte by byte, until it is cut.

    A cut connection stays open and passes nothing on in either direction. What arrives is
    delivered, late, when the proxy heals.
    """

    def __init__(self, listen: Path, target: Path) -> None:
        self._listen = listen
        self._target = target
        self._passes = asyncio.Event()
        self._passes.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self._listen)

    def cut(self) -> None:
        self._passes.clear()

    def heal(self) -> None:
        self._passes.set()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(self._target)
        for source, sink in ((reader, back), (there, writer)):
            self._tasks.add(asyncio.create_task(self._pass_on(source, sink)))

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                await self._passes.wait()
                sink.write(data)
                await sink.drain()
            await self._passes.wait()
        except ConnectionError:
            pass
        finally:
            sink.close()


@dataclass
class Cluster:
    client: AsyncClient
    scheduler: Scheduler
    workers: list[ForkedService]
    proxies: list[Proxy]
    store: kvstore_pb2_grpc.KvStoreServiceStub
    sockets: Path

    async def stats(self) -> kvstore_pb2.GetStatsResponse:
        answer: kvstore_pb2.GetStatsResponse
        answer = await self.store.GetStats(kvstore_pb2.GetStatsRequest(check_integrity=True))
        return answer


@asynccontextmanager
async def cluster(folder: Path, sockets: Path) -> AsyncIterator[Cluster]:
    arena = shared_memory_folder() / "arena"
    async with AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, arena.parent, ignore_errors=True)
        store = await start_store(folder, f"unix:{sockets}/kv", arena, SHAPE)
        cleanup.push_async_callback(stop_process, store)
        workers = await asyncio.gather(
            *(
                start_service(
                    *("worker_service", "--listen", f"unix:{sockets}/real{name}"),
                    *("--worker-id", str(name), "--kvstore", f"unix:{sockets}/kv"),
                    *("--model", str(folder), "--device", "cpu", "--dtype", "float32"),
                    *("--device-memory", "64MiB", "--threads", "1"),
                )
                for name in range(SHAPE.workers)
            )
        )
        for worker in workers:
            cleanup.push_async_callback(stop_process, worker)
            cleanup.callback(worker.send_signal, signal.SIGCONT)
        proxies = [Proxy(sockets / f"w{n}", sockets / f"real{n}") for n in range(SHAPE.workers)]
        for proxy in proxies:
            await proxy.start()
            cleanup.push_async_callback(proxy.stop)
        scheduler = make_scheduler(folder, sockets, SHAPE)
        address = await scheduler.start("127.0.0.1:0")
        cleanup.push_async_callback(scheduler.stop, 1.0)
        client = await cleanup.enter_async_context(AsyncClient(address))
        channel = await cleanup.enter_async_context(open_channel(f"unix:{sockets}/kv"))
        await wait_for_workers(client, SHAPE.workers, seconds=60)
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        yield Cluster(client, scheduler, workers, proxies, stub, sockets)


async def until_gone(running: Cluster, worker_id: str) -> float:
    """Wait until the scheduler has given a worker up; return the seconds that it took."""
    began = time.monotonic()
    registry = running.scheduler.registry
    await until(lambda: registry.find(worker_id) not in registry.ready())
    return time.monotonic() - began


async def lose_one_beside_streams(running: Cluster, lose: str) -> int:
    """Stop or cut off a worker that runs requests, check every answer, and return the worker.

    Which worker gets requests depends on the costs that both have measured.
    """
    manager = running.scheduler.manager
    streams = [
        running.client.generate(prompt, max_tokens=NEW_TOKENS, ignore_eos=True)
        for prompt, _ in references()[0]
    ]
    answers = [asyncio.create_task(stream.complete()) for stream in streams]
    busy: list[int] = []
    async with asyncio.timeout(60):
        while not busy:
            await asyncio.sleep(0)
            busy = [
                number
                for number in range(SHAPE.workers)
                if any(
                    len(attempt.request.output) > 20 for attempt in manager.attempts_on(str(number))
                )
            ]
    victim = busy[0]
    if lose == "stop":
        running.workers[victim].send_signal(signal.SIGSTOP)
    else:
        running.proxies[victim].cut()
    assert manager.attempts_on(str(victim))
    seconds = await until_gone(running, str(victim))
    print(f"\n{lose}: noticed after {seconds:.2f} s")
    for (_, tokens), answer in zip(references()[0], await asyncio.gather(*answers), strict=True):
        assert list(answer.token_ids) == tokens
    listed = await running.client.list_workers()
    lost = next(each for each in listed if each.id == str(victim))
    assert not lost.ready
    assert lost.loss_count == 1
    assert manager.counters.failover_count >= 1
    return victim


async def test_a_worker_that_is_stopped_beyond_its_lease_is_fenced(
    folder: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(folder, tmp_path) as running:
        victim = await lose_one_beside_streams(running, "stop")
        sealed = (await running.stats()).sealed_slot_count
        late = running.scheduler.manager.counters.late_count
        running.workers[victim].send_signal(signal.SIGCONT)
        await wait_for_workers(running.client, 2, seconds=60)
        prompt, tokens = references()[1]
        for worker_id in ("0", "1"):
            answer = await running.client.generate(
                prompt, max_tokens=30, ignore_eos=True, worker=worker_id
            ).complete()
            assert list(answer.token_ids) == tokens
        assert running.scheduler.manager.counters.late_count == late
        async with asyncio.timeout(30):
            while True:
                stats = await running.stats()
                if not (stats.quarantined_slot_count or stats.writing_slot_count):
                    break
                await asyncio.sleep(0.1)
        assert list(stats.integrity_violations) == []
        assert stats.sealed_slot_count >= sealed
    assert NO_ANSWER in caplog.text
    # The store has ended the session of the stopped process: what that one would seal now is
    # refused (tests/kvstore/test_kvstore_process.py).
    assert "the KV store session was lost" in capfd.readouterr().err


async def test_a_worker_that_is_cut_off_is_given_up_and_frees_its_requests(
    folder: Path, tmp_path: Path
) -> None:
    async with cluster(folder, tmp_path) as running:
        victim = await lose_one_beside_streams(running, "cut")
        # The worker notices, too, that its scheduler is gone: its requests end, while the
        # proxy still holds the connection.
        async with open_channel(f"unix:{tmp_path}/real{victim}") as channel:
            stream = worker_pb2_grpc.WorkerServiceStub(channel).Run()
            async with asyncio.timeout(60):
                while True:
                    response = await stream.read()
                    assert isinstance(response, worker_pb2.RunResponse)
                    if not response.running_count:
                        break
            stream.cancel()
        running.proxies[victim].heal()
        await wait_for_workers(running.client, 2, seconds=60)
        assert running.scheduler.manager.counters.late_count == 0
        stats = await running.stats()
        assert list(stats.integrity_violations) == []

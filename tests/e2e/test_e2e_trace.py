"""A worker process on an emulated link: what it says of itself, and what its trace holds."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from local_stack import (
    StackShape,
    make_scheduler,
    start_service,
    start_store,
    stop_process,
    wait_for_workers,
)
from tiny_models import write_tiny
from trace_files import read_trace

from splitpoint.client import AsyncClient
from splitpoint.planning.schedule import Lane, Schedule

PROMPT = list(range(3, 103))


async def test_restores_are_in_the_trace_and_nothing_of_the_request(
    tmp_path: Path, shm_folder: Path
) -> None:
    folder = write_tiny("opt", tmp_path / "model")
    file = tmp_path / "trace.json"
    shape = StackShape(workers=1)
    store_address = f"unix:{tmp_path}/kv"
    store = await start_store(folder, store_address, shm_folder / "store" / "arena", shape)
    worker = await start_service(
        "worker_service",
        *("--listen", f"unix:{tmp_path}/w0", "--model", str(folder), "--kvstore", store_address),
        *("--device", "cpu", "--dtype", "float32", "--device-memory", "96MiB"),
        *("--link-rate", "20MB", "--trace", str(file)),
    )
    scheduler = make_scheduler(folder, tmp_path, shape)
    try:
        async with AsyncClient(await scheduler.start("127.0.0.1:0")) as client:
            await wait_for_workers(client, 1)
            [status] = await client.list_workers()
            assert status.schedule is Schedule.PIPELINED
            assert status.emulated_link_bytes_per_second == 20e6
            assert "emulated at 20 MB/s" in status.device
            async with asyncio.timeout(30):
                for number in itertools.count():
                    generation = client.generate(
                        PROMPT, max_tokens=2, request_id=f"a-name-of-mine-{number}"
                    )
                    answer = await generation.complete()
                    if answer.usage.cached_tokens:
                        break
    finally:
        await scheduler.stop(1.0)
        await stop_process(worker)
        await stop_process(store)
    recorded = read_trace(file)
    link = [span for span in recorded.spans if span.lane is Lane.LINK_IN]
    assert link
    # By its own clock the link was as slow as it was told to be.
    for span in link:
        assert span.amount <= 20e6 * span.seconds * 1.001
    assert recorded.facts["schedule"] == "pipelined"
    assert "a-name-of-mine" not in file.read_text()

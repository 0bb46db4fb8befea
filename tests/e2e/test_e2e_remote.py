"""Two hosts: a prefix travels from store to store."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from host_pair import NEW_TOKENS, SHAPE, Host, host
from local_stack import serving_worker, start_store, stop_process
from tiny_models import build_tiny, clear_prompt

from splitpoint.errors import FailedPrecondition
from splitpoint.shapes import ArenaLayout
from splitpoint.v1 import types_pb2, worker_pb2
from worker_service.store.client import StoreClient

MODEL = build_tiny("llama")
PROMPT, ANSWER = clear_prompt(MODEL, 150, NEW_TOKENS)  # nine chunks of 16 and a tail
RESIDENT: dict[str, Any] = {
    "residency": types_pb2.RESIDENCY_RESIDENT,
    "method": types_pb2.RESTORE_METHOD_LOAD,
}


@pytest.fixture
async def hosts(folder: Path, tmp_path: Path, shm_folder: Path) -> AsyncIterator[tuple[Host, Host]]:
    async with (
        host(folder, tmp_path, shm_folder, "a") as first,
        host(folder, tmp_path, shm_folder, "b") as second,
    ):
        yield first, second


def source(first: Host, cached: int = 10**6) -> dict[str, Any]:
    return {"source_store_address": first.store_address, "source_cached_tokens": cached}


async def test_a_prefix_is_fetched_and_restored(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    assert (await first.generate(PROMPT))[0] == ANSWER
    tokens, restore = await second.generate(PROMPT, **source(first))
    assert tokens == ANSWER
    # The last token of the prompt is computed; what was fetched holds it all the same.
    assert (restore.cached_tokens, restore.fetched_tokens) == (len(PROMPT) - 1, len(PROMPT))
    assert restore.fetch_seconds > 0
    assert (await first.stats()).remote_read_bytes > 0
    # Now it is there: nothing is fetched again.
    before = (await first.stats()).remote_read_bytes
    tokens, restore = await second.generate(PROMPT, **source(first))
    assert (tokens, restore.fetched_tokens) == (ANSWER, 0)
    assert (await first.stats()).remote_read_bytes == before
    fetched = second.worker.runtime.counters.fetched
    assert fetched.tokens == len(PROMPT)
    assert fetched.seconds > 0
    for each in hosts:
        await each.assert_clean()
    assert (await first.stats()).session_count == 1  # the fetch's is gone


async def test_what_differs_in_a_chunk_is_cut_off(hosts: tuple[Host, Host]) -> None:
    """The source's chunk goes on with other tokens than ours."""
    first, second = hosts
    prompt, answer = clear_prompt(MODEL, 9, NEW_TOKENS, before=PROMPT[:100])
    await first.generate(PROMPT)
    tokens, restore = await second.generate(prompt, **source(first))
    assert tokens == answer
    assert restore.fetched_tokens >= 100
    # And only what is missing: the full chunks that both begin with are there.
    before = (await first.stats()).remote_read_bytes
    tokens, restore = await second.generate(PROMPT, **source(first))
    assert (tokens, restore.cached_tokens) == (ANSWER, len(PROMPT) - 1)
    assert restore.fetched_tokens < 60
    read = (await first.stats()).remote_read_bytes - before
    assert read == 4 * second.worker.engine.cache.layout.chunk_bytes
    await second.assert_clean()


async def test_salts_keep_apart(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    await first.generate(PROMPT, tenant_salt=b"one")
    tokens, restore = await second.generate(PROMPT, tenant_salt=b"two", **source(first))
    assert (tokens, restore.fetched_tokens) == (ANSWER, 0)
    tokens, restore = await second.generate(PROMPT, tenant_salt=b"one", **source(first))
    assert (tokens, restore.fetched_tokens) == (ANSWER, len(PROMPT))


async def test_two_requests_fetch_once(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    await first.generate(PROMPT)
    names = [await second.admit(PROMPT, **source(first)) for _ in range(3)]
    results = await second.results(*names)
    assert list(results.tokens.values()) == [ANSWER] * 3
    assert sorted(r.fetched_tokens for r in results.restores.values()) == [0, 0, len(PROMPT)]
    chunk_bytes = second.worker.engine.cache.layout.chunk_bytes
    assert (await first.stats()).remote_read_bytes == 10 * chunk_bytes
    await second.assert_clean()


async def test_a_flipped_byte_is_recomputed(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    await first.generate(PROMPT)
    arena = first.worker.store.connection.tensors.arena  # type: ignore[union-attr]
    stub_match = await first.match(PROMPT)
    arena.plane(1, "K")[stub_match.chunks[4].slot, 7] ^= 1
    tokens, restore = await second.generate(PROMPT, **source(first))
    assert (tokens, restore.fetched_tokens) == (ANSWER, 0)
    assert (await first.stats()).checksum_failure_count == 1
    for each in hosts:
        await each.assert_clean()


async def test_a_source_that_is_not_there_costs_reuse_only(hosts: tuple[Host, Host]) -> None:
    _, second = hosts
    tokens, restore = await second.generate(
        PROMPT, source_store_address="127.0.0.1:1", source_cached_tokens=99
    )
    assert (tokens, restore.fetched_tokens) == (ANSWER, 0)
    await second.assert_clean()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_source_that_dies_in_the_middle(hosts: tuple[Host, Host], number: int) -> None:
    first, second = hosts
    await first.generate(PROMPT)
    prefixes = second.worker.runtime.prefixes
    assert prefixes is not None
    streams = prefixes.fetcher._streams
    # Strike between two copies: the first one has been made, the stream is open.
    struck = asyncio.Event()
    loop = asyncio.get_running_loop()
    check = streams._check_session
    checks = 0

    def strike(connection: Any) -> None:
        nonlocal checks
        checks += 1
        check(connection)
        if checks == 3:
            first.process.send_signal(number)
            loop.call_soon(struck.set)

    streams._check_session = strike  # type: ignore[method-assign]
    try:
        name = await second.admit(
            PROMPT,
            **source(first),
            plan=types_pb2.Plan(
                residency=types_pb2.RESIDENCY_RESIDENT,
                method=types_pb2.RESTORE_METHOD_LOAD,
                predicted_fetch_seconds=0.1,
            ),
        )
        results = await second.results(name)
        assert struck.is_set()
        assert results.tokens[name] == ANSWER
    finally:
        if number == signal.SIGSTOP:
            first.process.send_signal(signal.SIGCONT)
    await second.assert_clean()


async def test_a_cancelled_request_does_not_wait_for_its_fetch(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    await first.generate(PROMPT)
    first.process.send_signal(signal.SIGSTOP)
    try:
        name = await second.admit(PROMPT, **source(first))
        await asyncio.sleep(0.1)
        cancel = worker_pb2.CancelCommand(request_id=name)
        await second.run.write(worker_pb2.RunRequest(cancel=cancel))
        # A silent source is given up after 10 s.
        async with asyncio.timeout(8):
            results = await second.results(name)
        assert results.finishes[name].reason == types_pb2.FINISH_REASON_CANCELLED
    finally:
        first.process.send_signal(signal.SIGCONT)
    await second.assert_clean()


async def test_a_fetch_cancelled_while_its_own_store_is_slow_leaves_nothing(
    hosts: tuple[Host, Host],
) -> None:
    """What the own store grants after the request is gone is given back all the same."""
    first, second = hosts
    await first.generate(PROMPT)
    for milliseconds in (0, 2, 5, 10, 20, 40):
        name = await second.admit(PROMPT, **source(first), tenant_salt=b"%d" % milliseconds)
        await asyncio.sleep(milliseconds / 1000)
        second.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(0.05)
            cancel = worker_pb2.CancelCommand(request_id=name)
            await second.run.write(worker_pb2.RunRequest(cancel=cancel))
            await asyncio.sleep(0.05)
        finally:
            second.process.send_signal(signal.SIGCONT)
        await second.results(name)
    await second.assert_clean()


async def test_rates_are_measured_and_told(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    prompt = [3 + (7 * i) % 120 for i in range(450)]  # above a mebibyte
    await first.generate(prompt)
    name = await second.admit(prompt, **source(first))
    results = await second.results(name)
    assert results.profile is not None
    assert results.profile.remote_bytes_per_second[first.store_address] > 0


async def test_an_arena_that_is_not_here_is_said(
    folder: Path, tmp_path: Path, shm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, arena = f"unix:{tmp_path}/kv", shm_folder / "s" / "arena"
    process = await start_store(folder, address, arena, SHAPE)
    attach = StoreClient.start

    async def attach_without_arena(client: StoreClient, layout: ArenaLayout) -> None:
        # Only now: a store that misses its arena for a second ends.
        arena.rename(arena.with_name("elsewhere"))
        await attach(client, layout)

    monkeypatch.setattr(StoreClient, "start", attach_without_arena)
    try:
        with pytest.raises(FailedPrecondition, match="a store on its own host"):
            async with serving_worker(folder, "a", f"unix:{tmp_path}/w", address, SHAPE):
                pass
    finally:
        arena.with_name("elsewhere").rename(arena)
        await stop_process(process)

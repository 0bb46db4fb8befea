"""Workers that compute other bits share no chunks: each is asked for by its own keys.

An answer that goes on elsewhere prefers a worker with the same bits. About 1 s.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scheduler_doubles import (
    CHUNK_TOKENS,
    Steps,
    StoreDouble,
    WorkerDouble,
    answer,
    ids_request,
    stack,
)

from splitpoint.keys import chunk_keys, numerics_salt, tenant_salt
from splitpoint.v1 import kvstore_pb2, types_pb2

PROMPT = [*range(3, 3 + 4 * CHUNK_TOKENS), 7]
SALT = tenant_salt(b"k" * 32, "")


class SaltedStore(StoreDouble):
    """Holds tokens under each salt."""

    def __init__(self, tokens: dict[bytes, int]) -> None:
        super().__init__()
        self.tokens = tokens

    async def Match(self, request: Any, context: Any) -> kvstore_pb2.MatchResponse:
        self.cached_tokens = self.tokens.get(request.tenant_salt, 0)
        return await super().Match(request, context)


def worker(name: str, digest: str, store: str = "") -> WorkerDouble:
    double = WorkerDouble(name, kvstore_address=store)
    double.numerics_digest = digest
    return double


async def test_a_store_is_asked_once_for_each_kind_of_its_workers() -> None:
    held = {"": 16, "aa": 48, "bb": 0}
    store = SaltedStore({numerics_salt(SALT, digest): n for digest, n in held.items()})
    address = await store.start()
    digests = ("", "aa", "bb", "aa")
    workers = [worker(str(n), digest, address) for n, digest in enumerate(digests)]
    async with stack(*workers) as running:
        for double, digest in zip(workers, digests, strict=True):
            request = ids_request(PROMPT, 2, worker_id=double.worker_id)
            await running.generate(request)
            [command] = double.admits
            assert command.plan.cached_tokens == held[digest]
            # The worker makes its own salt of it.
            assert command.tenant_salt == SALT
        wanted = [numerics_salt(SALT, digest) for digest in held]
        assert sorted(store.salts) == sorted(wanted * len(workers))
    await store.stop()


async def test_a_store_of_unlike_workers_is_a_source_of_what_alike_ones_left_there() -> None:
    salt, unlike = numerics_salt(SALT, "aa"), numerics_salt(SALT, "bb")
    stores = [
        SaltedStore({unlike: 16}),
        SaltedStore({salt: 64}),
        SaltedStore({SALT: 64}),
        SaltedStore({salt: 48}),
    ]
    addresses = [await store.start() for store in stores]
    digests = ("aa", "aa", "bb", "bb")
    workers = [
        worker(str(n), digest, address)
        for n, (digest, address) in enumerate(zip(digests, addresses, strict=True))
    ]
    async with stack(*workers) as running:
        found = await running.scheduler._find_prefix(SALT, PROMPT)
        assert found.own == {"0": 0, "1": 64, "2": 0, "3": 0}
        sources = {
            name: [(addresses.index(each.address), each.cached_tokens) for each in found]
            for name, found in found.sources.items()
        }
        left = [(0, 16)]
        assert sources == {"0": [(1, 64), (3, 48)], "1": [(3, 48)], "2": left, "3": left}
        assert all(sorted(store.salts) == sorted([salt, unlike]) for store in stores)
    for store in stores:
        await store.stop()


async def test_what_devices_hold_is_compared_by_each_workers_keys() -> None:
    workers = [worker("0", ""), worker("1", "aa")]
    layout_hash = workers[1].layout.layout_hash
    keys = chunk_keys(layout_hash, numerics_salt(SALT, "aa"), PROMPT, CHUNK_TOKENS)
    marks = b"".join(key[:8] for key in keys)
    async with stack(*workers) as running:
        for double in workers:
            double.report(types_pb2.Telemetry(uptime_seconds=1, device_chunk_marks=marks))
        accounts = [running.manager.admission.account(double.worker_id) for double in workers]
        await running.until(lambda: all(account.device_marks for account in accounts))
        for double in workers:
            await running.generate(ids_request(PROMPT, 2, worker_id=double.worker_id))
        tokens = [double.admits[0].plan.device_tokens for double in workers]
        assert tokens == [0, 4 * CHUNK_TOKENS]


@pytest.mark.parametrize("is_free", [True, False])
async def test_an_answer_goes_on_at_an_alike_worker_if_one_is_free(is_free: bool) -> None:
    workers = [worker(str(n), digest) for n, digest in enumerate(("aa", "bb", "aa"))]
    first, unlike, alike = workers
    first.pace = Steps()
    async with stack(*workers) as running:
        call = asyncio.create_task(running.generate(ids_request(PROMPT, 12)))
        await running.until(lambda: first.admits)
        first.pace.allow(7)
        [request] = running.manager.requests.running()
        await running.until(lambda: len(request.output) == 7)
        if not is_free:
            await alike.drain()
            await running.until(lambda: running.manager.admission.account("2").is_closed)
        await first.kill()
        assert (await call).token_ids == answer(PROMPT, 12)
        chosen, other = (alike, unlike) if is_free else (unlike, alike)
        [command] = chosen.admits
        assert len(command.delivered_token_ids) == 7
        assert not other.admits

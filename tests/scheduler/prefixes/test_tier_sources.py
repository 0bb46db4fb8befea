"""What stores say of their tiers reaches the plan, the worker and the client. About 1 s."""

from __future__ import annotations

from typing import Any

from scheduler_doubles import (
    StoreDouble,
    WorkerDouble,
    answer,
    ids_request,
    reasons_of,
    stack,
)

from splitpoint.planning.plan import ReasonKind
from splitpoint.v1 import kvstore_pb2, types_pb2

PROMPT = list(range(5, 105))


class TieredStore(StoreDouble):
    """Holds `tiers` in its arena or in each of these, for those who ask."""

    def __init__(self, cached_tokens: int, tiers: dict[int, int]) -> None:
        super().__init__(cached_tokens)
        self.tiers = tiers

    async def Match(self, request: Any, context: Any) -> kvstore_pb2.MatchResponse:
        found = await super().Match(request, context)
        assert request.asks_tiers
        assert not request.session_id
        for tier, tokens in self.tiers.items():
            found.tiers.add(tier=tier, cached_tokens=tokens)
        return found


async def test_the_tier_that_holds_most_is_named_and_its_rate_with_it() -> None:
    # 9: a tier that only newer stores have.
    held = {types_pb2.TIER_DISK: 48, types_pb2.TIER_POOL: 80, 9: 96}
    store = TieredStore(32, {int(tier): tokens for tier, tokens in held.items()})
    worker = WorkerDouble("0", kvstore_address=await store.start())
    async with stack(worker) as running:
        result = await running.generate(ids_request(PROMPT, 4))
        [command] = worker.admits
        assert not command.source_store_address
        assert (command.source_tier, command.source_cached_tokens) == (types_pb2.TIER_POOL, 80)
        assert (command.plan.fetched_tokens, command.plan.cached_tokens) == (48, 80)
        assert command.plan.fetch_source == "pool"
        why = reasons_of(command.plan)
        assert why[ReasonKind.FETCH][:5] == (48, "pool", "", 1e9, "assumed")
        assert result.token_ids == answer(PROMPT, 4)
        # The double loaded nothing, and says so.
        assert (result.done.plan.fetched_tokens, result.done.plan.fetch_source) == (0, "")
    await store.stop()


async def test_a_worker_whose_tier_holds_the_prefix_gets_the_request() -> None:
    tiered, empty = TieredStore(0, {int(types_pb2.TIER_DISK): 80}), StoreDouble(16)
    addresses = [await store.start() for store in (empty, tiered)]
    workers = [
        WorkerDouble(str(n), kvstore_address=address, capacity_pages=64)
        for n, address in enumerate(addresses)
    ]
    async with stack(*workers) as running:
        result = await running.generate(ids_request(PROMPT, 4))
        assert result.done.worker_id == "1"
        assert workers[1].admits[0].source_tier == types_pb2.TIER_DISK
    for store in (tiered, empty):
        await store.stop()

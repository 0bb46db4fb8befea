"""The planner's choice for a prefix that only a tier holds, beside every other choice, measured.

In each case the disk tier and the link have random emulated rates (`--tier-rate`, `--link-rate`),
drawn around those at which loading and computing take equally long. A worker first measures the
tier by a few loads. Then the planner is asked, and its choice is timed in turns with the others:
to load all of the prefix, half of it or nothing, restored from the arena in each way, or to load
its back while its front is computed. Device and arena are emptied before each run.

A choice is near the best if its time to the first token is at most 10 % longer than the best that
was measured; times are medians of the quieter half of the runs.

    python -m benchmarks.planner_tiers [--cases N] [--first N] [--rounds N] [--seed N] [--json]
        [--output FILE]
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    Timed,
    busy_seconds,
    finish,
    is_quiet,
    median_seconds,
    parser_of,
    random_ids,
    serving,
    tree_seconds,
)
from scheduler_service.placement.footprint import Grant
from scheduler_service.placement.planning import PlanOptions, plan_attempt
from scheduler_service.prefixes.lookup import FetchSource
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.config import parse_size
from splitpoint.costs.fetching import TierEnds, rate_of
from splitpoint.keys import numerics_salt
from splitpoint.planning.plan import RECOMPUTED, ForcedRestore, Plan, Residency, RestoreMethod
from splitpoint.planning.words import headline
from splitpoint.tiers import Tier
from splitpoint.transport.channels import open_channel
from splitpoint.transport.convert import (
    layout_from_proto,
    plan_to_proto,
    profile_from_proto,
    schedule_from_proto,
    shape_from_proto,
)
from splitpoint.v1 import (
    kvstore_pb2,
    kvstore_pb2_grpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from splitpoint_cli.bench.ending import run_until_signal
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.stack.plan import Stack

NEAR_BEST = 1.10
PREFIX_TOKENS = (700, 1700)
NEW_TOKENS = (16, 128)
# Loading from the tier, and over the link, as shares of the time of computing the same tokens.
TIER_SHARES = (0.2, 3.0)
LINK_SHARES = (0.05, 0.5)
CHUNK_TOKENS, STEP_TOKENS = 64, 512
# Loads by which the worker measures the tier.
LOADS = 3
MEMORY = "512MiB"
# Tokens that the device has room for; requests, and the tokens of each, that empty it.
DEVICE_TOKENS, FLUSHES, FLUSH_TOKENS = 2048, 2, 2040
SECONDS = 60.0
DISK = FetchSource("", 0, Tier.DISK)


@dataclass(slots=True)
class Way:
    """One choice: the tier holds this many tokens that are used (0: none), restored by this plan.

    `meeting_tokens`: those that are computed while the rest is loaded; 0: all are loaded first.
    """

    name: str
    used_tokens: int
    plan: Plan
    meeting_tokens: int = 0
    runs: list[Timed[int]] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median_seconds(self.runs)


class Served:
    """A stack with a disk tier, one worker, and a Run stream of our own.

    `last_restore`: what the worker reported of the last request.
    """

    def __init__(self, store: Any, run: Any, facts: WorkerFacts) -> None:
        self.facts = facts
        self.last_restore = worker_pb2.RestoreReport()
        self._store = store
        self._run = run
        self._numbers = itertools.count()
        self._rng = random.Random(0)

    async def _cached_tokens(self, prompt: Sequence[int]) -> int:
        """Return the leading tokens in the arena."""
        salt = numerics_salt(b"", self.facts.numerics_digest)
        found = await self._store.Match(
            kvstore_pb2.MatchRequest(tenant_salt=salt, token_ids=prompt)
        )
        cached: int = found.cached_tokens
        return cached

    async def empty_arena(self, prompt: Sequence[int]) -> None:
        """Evict everything. Raises TimeoutError if leases or late writes keep something."""
        async with asyncio.timeout(SECONDS):
            while True:
                await self._store.Evict(kvstore_pb2.EvictRequest())
                if not await self._cached_tokens(prompt):
                    return
                await asyncio.sleep(0.02)

    async def empty(self, prompt: Sequence[int]) -> None:
        """Leave nothing of a prompt on the device and in the arena."""
        for _ in range(FLUSHES):
            other = random_ids(self._rng, FLUSH_TOKENS)
            await self.run(other, recompute(self.facts, len(other)))
        await self.empty_arena(prompt)

    async def until_on_disk(self, tokens: int) -> None:
        """Wait until the tier holds this many tokens."""
        async with asyncio.timeout(SECONDS):
            while True:
                stats = await self._store.GetStats(kvstore_pb2.GetStatsRequest())
                if stats.tiers[0].chunk_count * self.facts.chunk_tokens >= tokens:
                    return
                await asyncio.sleep(0.05)

    async def run(self, prompt: Sequence[int], way: Way) -> Timed[int]:
        """Return the first token and its time, of a request that runs this way."""
        loaded, meeting_tokens = way.used_tokens, way.meeting_tokens
        name = f"bench-{next(self._numbers)}"
        command = worker_pb2.AdmitCommand(
            request_id=name,
            attempt=1,
            prompt_token_ids=prompt,
            sampling=types_pb2.SamplingParams(max_tokens=1, ignore_eos=True),
            plan=plan_to_proto(way.plan),
        )
        if loaded:
            command.source_tier, command.source_cached_tokens = types_pb2.TIER_DISK, loaded
            command.meeting_tokens = meeting_tokens
        busy, own, began = busy_seconds(), tree_seconds(), time.perf_counter()
        await self._run.write(worker_pb2.RunRequest(admit=command))
        token, took = -1, 0.0
        restore = self.last_restore = worker_pb2.RestoreReport()
        async with asyncio.timeout(SECONDS):
            async for response in self._responses():
                restore = next((r for r in response.restores if r.request_id == name), restore)
                for each in response.tokens:
                    if each.request_id == name:
                        token, took = each.token_ids[0], time.perf_counter() - began
                ended = [each for each in response.finishes if each.request_id == name]
                if any(finish.error_message for finish in ended):
                    raise RuntimeError(f"a request failed: {ended[0].error_message}")
                if ended:
                    break
        foreign = (busy_seconds() - busy) - (tree_seconds() - own)
        self.last_restore = restore
        if restore.fetched_tokens + (restore.recomputed_tokens if meeting_tokens else 0) < loaded:
            raise RuntimeError(f"{loaded:,} tokens were to be loaded, but {restore} came")
        return Timed(token, took, max(0.0, foreign) / took)

    async def _responses(self) -> AsyncIterator[worker_pb2.RunResponse]:
        while True:
            response = await self._run.read()
            if response.HasField("profile"):
                profile = profile_from_proto(response.profile)
                self.facts = replace(self.facts, profile=profile)
            yield response


@asynccontextmanager
async def served(folder: Path, **options: Any) -> AsyncIterator[Served]:
    """Serve the bundled model with a disk tier in `folder`, and these StackOptions."""
    async with AsyncExitStack() as cleanup:
        stack, _ = await cleanup.enter_async_context(
            serving(
                "planner-tiers",
                workers=1,
                page_tokens=str(CHUNK_TOKENS),
                max_batched_tokens=STEP_TOKENS,
                host_memory=MEMORY,
                activations="never",
                tier_disk=str(folder),
                tier_disk_size=MEMORY,
                tier_admission="second-use",
                **{"device_memory": MEMORY, "no_device_prefix_cache": True, **options},
            )
        )
        store = await cleanup.enter_async_context(open_channel(stack.store_address))
        worker = await cleanup.enter_async_context(open_channel(stack.worker_addresses[0]))
        stub: Any = worker_pb2_grpc.WorkerServiceStub(worker)
        run = stub.Run()
        cleanup.callback(run.cancel)
        await run.initial_metadata()
        facts = facts_of(await stub.GetInfo(worker_pb2.GetInfoRequest()), stack)
        yield Served(kvstore_pb2_grpc.KvStoreServiceStub(store), run, facts)


def facts_of(info: worker_pb2.GetInfoResponse, stack: Stack) -> WorkerFacts:
    layout = layout_from_proto(info.layout)
    return WorkerFacts(
        worker_id=info.worker_id,
        address=stack.worker_addresses[0],
        shape=shape_from_proto(info.shape),
        profile=profile_from_proto(info.profile),
        chunk_tokens=layout.chunk_tokens,
        has_activations=layout.has_activations,
        cache_capacity_bytes=info.cache_capacity_bytes,
        page_bytes=info.page_bytes,
        streamed_page_count=info.streamed_page_count,
        max_batch_size=info.max_batch_size,
        kvstore_address=info.kvstore_address,
        slot_bytes=layout.chunk_bytes,
        schedule=schedule_from_proto(info.schedule),
        staging_tokens=info.staging_tokens,
        max_batched_tokens=info.max_batched_tokens,
        encoding=layout.encoding,
        shares_pages=info.shares_pages,
        numerics_digest=info.numerics_digest,
    )


def grant_of(facts: WorkerFacts) -> Grant:
    return Grant(Residency.RESIDENT, facts.cache_capacity_bytes)


def recompute(facts: WorkerFacts, tokens: int) -> Way:
    plan, _ = plan_attempt(facts, grant_of(facts), token_count=tokens, cached_tokens=0)
    return Way("recompute", 0, plan)


def chosen_way(facts: WorkerFacts, tokens: int, on_disk: int) -> Way:
    """Return the planner's choice for a prompt of this many tokens."""
    source = replace(DISK, cached_tokens=on_disk)
    plan, fetched = plan_attempt(
        facts, grant_of(facts), token_count=tokens, cached_tokens=0, sources=[source]
    )
    if fetched is None:
        return Way("recompute", 0, plan)
    used, meeting = fetched.cached_tokens, fetched.meeting_tokens
    return Way(_name(plan, used, meeting), used, plan, meeting)


def other_ways(facts: WorkerFacts, tokens: int, on_disk: int) -> list[Way]:
    """Return every choice: all, half or nothing, each restored in each way; and both ends."""
    half = on_disk // 2 // facts.chunk_tokens * facts.chunk_tokens
    ways = [
        loading(facts, tokens, used, method)
        for used in (on_disk, half)
        for method in (RestoreMethod.LOAD, RestoreMethod.TOKENS)
    ]
    ways.append(recompute(facts, tokens))
    meeting = both_ends(facts, tokens, on_disk)
    return [*ways, meeting] if meeting else ways


def loading(facts: WorkerFacts, tokens: int, used: int, method: RestoreMethod) -> Way:
    """Return the way that loads first, and then restores by this method."""
    plan, _ = plan_attempt(
        facts,
        grant_of(facts),
        token_count=tokens,
        cached_tokens=used,
        options=PlanOptions(ForcedRestore.of(None, method)),
    )
    size = used // facts.chunk_tokens * facts.slot_bytes
    seconds = rate_of(facts.profile, DISK.place).seconds(size)
    plan = _with_fetch(plan, used, seconds)
    return Way(_name(plan, used), used, plan)


def both_ends(facts: WorkerFacts, tokens: int, on_disk: int) -> Way | None:
    """Return the way that loads the back while it computes the front; None if they never meet."""
    chunk_count = on_disk // facts.chunk_tokens
    point = TierEnds(
        facts.shape,
        facts.profile,
        0,
        chunk_count,
        facts.chunk_tokens,
        facts.slot_bytes,
        rate_of(facts.profile, DISK.place).bytes_per_second,
        facts.max_batched_tokens,
    ).meeting_point()
    if point is None:
        return None
    plan, _ = plan_attempt(
        facts,
        grant_of(facts),
        token_count=tokens,
        cached_tokens=on_disk,
        options=PlanOptions(RECOMPUTED),
    )
    plan = _with_fetch(plan, on_disk - point.tokens, point.seconds)
    name = _name(plan, on_disk, point.tokens)
    return Way(name, on_disk, replace(plan, recomputed_tokens=point.tokens), point.tokens)


def _with_fetch(plan: Plan, tokens: int, seconds: float) -> Plan:
    return replace(
        plan,
        fetched_tokens=tokens,
        predicted_fetch_seconds=seconds,
        predicted_ttft_seconds=plan.predicted_ttft_seconds + seconds,
    )


def _name(plan: Plan, used: int, meeting: int = 0) -> str:
    return "load and compute" if meeting else f"load {used:,}, {plan.method.value}"


@dataclass(frozen=True, slots=True)
class Drawn:
    """The random numbers of one case; rates in bytes per second."""

    prompt: Sequence[int]
    prefix_tokens: int
    tier_rate: int
    link_rate: int


def drawn(number: int, seed: int, facts: WorkerFacts) -> Drawn:
    """Draw a case from the seed and its number. `facts`: of a worker without emulation."""
    rng = random.Random(f"{seed} {number}")
    prefix = rng.randrange(*PREFIX_TOKENS) // facts.chunk_tokens * facts.chunk_tokens
    prompt = random_ids(rng, prefix + rng.randrange(*NEW_TOKENS))
    alone = recompute(facts, prefix).plan
    rate = prefix // facts.chunk_tokens * facts.slot_bytes / alone.predicted_ttft_seconds

    def share(low: float, high: float) -> float:
        found: float = low * (high / low) ** rng.random()
        return found

    return Drawn(
        prompt, prefix, round(rate / share(*TIER_SHARES)), round(rate / share(*LINK_SHARES))
    )


async def run_case(number: int, drawn: Drawn, device_bytes: int, rounds: int) -> dict[str, Any]:
    """Measure every choice of one case."""
    with tempfile.TemporaryDirectory(prefix="planner-tiers-") as folder:
        async with served(
            Path(folder) / "tier",
            device_memory=str(device_bytes),
            no_device_prefix_cache=False,
            tier_rate=str(drawn.tier_rate),
            link_rate=str(drawn.link_rate),
        ) as stack:
            prompt, prefix = drawn.prompt, drawn.prefix_tokens
            alone = recompute(stack.facts, len(prompt))
            answer = (await stack.run(prompt, alone)).result
            # A second use sends it to the tier.
            await stack.run(prompt, alone)
            await stack.until_on_disk(prefix)
            for _ in range(LOADS):
                await stack.empty(prompt)
                way = loading(stack.facts, len(prompt), prefix, RestoreMethod.LOAD)
                await stack.run(prompt, way)
            chosen = chosen_way(stack.facts, len(prompt), prefix)
            ways = other_ways(stack.facts, len(prompt), prefix)
            ways = [chosen, *(way for way in ways if way.name != chosen.name)]
            for index in range(rounds):
                for way in ways if index % 2 else reversed(ways):
                    await stack.empty(prompt)
                    way.runs.append(await stack.run(prompt, way))
                    if stack.last_restore.device_tokens:
                        raise RuntimeError("the device had a part of the prompt already")
            wrong = {way.name for way in ways for run in way.runs if run.result != answer}
            if wrong:
                raise RuntimeError(f"another first token came by: {', '.join(sorted(wrong))}")
            measured = rate_of(stack.facts.profile, DISK.place).bytes_per_second
    best = min(ways, key=lambda way: way.median)
    return {
        "number": number,
        "prefix_tokens": prefix,
        "new_tokens": len(prompt) - prefix,
        "tier_rate": drawn.tier_rate,
        "measured_tier_rate": measured,
        "link_rate": drawn.link_rate,
        "chosen": chosen.name,
        "predicted_seconds": chosen.plan.predicted_ttft_seconds,
        "chosen_seconds": chosen.median,
        "best": best.name,
        "best_seconds": best.median,
        "ways": {way.name: way.median for way in ways},
        "predicted": {way.name: way.plan.predicted_ttft_seconds for way in ways},
        "reason": headline(chosen.plan),
        "quiet": all(is_quiet(way.runs) for way in ways),
    }


async def measure(first: int, cases: int, rounds: int, seed: int) -> dict[str, Any]:
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="planner-tiers-") as folder:
        async with served(Path(folder) / "tier", device_memory=MEMORY) as stack:
            facts = stack.facts
    pages = DEVICE_TOKENS // facts.chunk_tokens * facts.page_bytes
    device_bytes = parse_size(MEMORY) - facts.cache_capacity_bytes + pages
    results = []
    for number in progress.track("cases", range(first, first + cases)):
        case = drawn(number, seed, facts)
        results.append(await run_case(number, case, device_bytes, rounds))
        progress.say(_line(results[-1]))
    over = [case["chosen_seconds"] / case["best_seconds"] for case in results]
    errors = [abs(case["predicted_seconds"] / case["chosen_seconds"] - 1) for case in results]
    return {
        "benchmark": "planner_tiers",
        "seed": seed,
        "rounds": rounds,
        "cases": results,
        "within_10_percent_of_best": sum(each <= NEAR_BEST for each in over),
        "worst_over_best": max(over),
        "median_over_best": statistics.median(over),
        "median_error": statistics.median(errors),
        "disturbed": sum(not case["quiet"] for case in results),
    }


def _line(case: Mapping[str, Any]) -> str:
    chosen = case["chosen_seconds"]
    return (
        f"{case['number']:2} {case['prefix_tokens']:5} tokens  tier "
        f"{case['tier_rate'] / 1e6:6.1f} MB/s  link {case['link_rate'] / 1e6:6.1f} MB/s  "
        f"{case['chosen']:20} {chosen * 1e3:7.1f} ms  predicted "
        f"{case['predicted_seconds'] / chosen:.2f} x  best {chosen / case['best_seconds']:.2f} x "
        f"({case['best']}){'' if case['quiet'] else '  disturbed'}"
    )


def show(result: Mapping[str, Any]) -> None:
    for case in result["cases"]:
        print(_line(case))
    print(
        f"{result['within_10_percent_of_best']} of {len(result['cases'])} choices within 10 % of "
        f"the best (worst {result['worst_over_best']:.2f} x), median error of the prediction "
        f"{result['median_error']:.1%}, {result['disturbed']} disturbed"
    )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = run_until_signal(
        measure(arguments.first, arguments.cases, arguments.rounds, arguments.seed)
    )
    finish(arguments, result, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Policies under one mixed load: how full steps are, and how long requests wait.

Starts the real stack with CPU workers of the bundled model and a small device memory, anew for each
policy in each round; every other round goes backwards. Two tenants ask at the same moments and
in the same order under each: mostly short requests, and a few about long documents that the store
has, of which few tokens are new (a high kappa_ratio: they hold much memory and compute little). All
memory is charged for the longest answer, documents are loaded over an emulated link, and prefixes
stay on no device, so that the runs compare.

    python -m benchmarks.scheduling [--policies fifo,utilisation] [--rounds N] [--seconds S]
        [--rate R] [--bound S] [--document-every N] [--json] [--output FILE]

`--document-every 0` asks about no document: then memory and compute grow together, and a policy has
nothing to gain.

Waits are from the arrival at the scheduler to the placement on a worker. Exits with 1 unless, of
the medians over all rounds, utilisation schedules at least 1.5 times the tokens per step that fifo
does, has a mean time to the first token not above fifo's, and keeps the 99th percentile of
its link-bound requests' waits within the bound, which is --policy-aging-seconds of the stack.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import finish, parser_of, random_ids, serving
from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion
from splitpoint.options.scheduler import Policy
from splitpoint.planning.plan import RestoreMethod
from splitpoint.transport.access import Caller, Role
from splitpoint_cli.bench.ending import run_until_signal
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.security.token import add_token
from splitpoint_cli.traces.statistics import quantile

TENANTS = ("one", "two")
WORKERS = 2
# Of each worker: 2,688 tokens of cache beside weights and workspace.
DEVICE_MEMORY = "72MiB"
PAGE_TOKENS = "16"
LINK_RATE = "12MB"
# Documents of each tenant, tokens of each, and what is asked and answered about them.
DOCUMENTS = 3
DOCUMENT_TOKENS = 1536
QUESTION_TOKENS = 16
DOCUMENT_ANSWER_TOKENS = 4
SHORT_TOKENS = (32, 96)
SHORT_ANSWER_TOKENS = (8, 24)
# Workers report their counters about once a second.
_TELEMETRY_SECONDS = 1.5
LEAST_GAIN = 1.5


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: its time, tenant and prompt. `is_document`: the prompt begins with a document."""

    seconds: float
    tenant: str
    prompt: list[int]
    answer_tokens: int
    is_document: bool


@dataclass(frozen=True, slots=True)
class Work:
    """What the workers had done at one moment."""

    steps: int
    tokens: int


@dataclass(slots=True)
class Run:
    """One policy under the load."""

    policy: str
    seconds: float
    tokens_per_step: float
    steps: int
    decisions: dict[str, int]
    done: list[tuple[Ask, Completion]] = field(default_factory=list)


def documents_by_tenant() -> dict[str, list[list[int]]]:
    rng = random.Random("documents")
    return {
        tenant: [random_ids(rng, DOCUMENT_TOKENS) for _ in range(DOCUMENTS)] for tenant in TENANTS
    }


def load_of(seed: int, seconds: float, rate: float, document_every: int) -> list[Ask]:
    """Return the requests of one round: Poisson arrivals, tenants in turn."""
    rng = random.Random(seed)
    documents = documents_by_tenant()
    asks: list[Ask] = []
    now = 0.0
    while (now := now + rng.expovariate(rate)) < seconds:
        tenant = TENANTS[len(asks) % len(TENANTS)]
        if document_every and rng.random() < 1 / document_every:
            prompt = [*rng.choice(documents[tenant]), *random_ids(rng, QUESTION_TOKENS)]
            asks.append(Ask(now, tenant, prompt, DOCUMENT_ANSWER_TOKENS, is_document=True))
        else:
            prompt = random_ids(rng, rng.randint(*SHORT_TOKENS))
            answer = rng.randint(*SHORT_ANSWER_TOKENS)
            asks.append(Ask(now, tenant, prompt, answer, is_document=False))
    return asks


async def work_of(client: AsyncClient) -> Work:
    """Return what all workers have done, by telemetry that is newer than this call."""
    await asyncio.sleep(_TELEMETRY_SECONDS)
    told = [worker.telemetry for worker in await client.list_workers()]
    return Work(
        sum(each.step_count for each in told if each is not None),
        sum(each.scheduled_token_count for each in told if each is not None),
    )


async def send(client: AsyncClient, ask: Ask, began: float) -> tuple[Ask, Completion]:
    await asyncio.sleep(max(0.0, began + ask.seconds - time.monotonic()))
    restore = RestoreMethod.LOAD if ask.is_document else None
    answer = client.generate(
        ask.prompt, max_tokens=ask.answer_tokens, ignore_eos=True, restore=restore
    )
    return ask, await answer.complete()


@asynccontextmanager
async def stack_of(policy: str, bound: float) -> AsyncIterator[dict[str, AsyncClient]]:
    """Run a stack with this policy. Return a client of each tenant, and of an admin by ""."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.toml"
        callers = [Caller(name, Role.CLIENT, name) for name in TENANTS]
        secrets = {caller.name: add_token(tokens, caller) for caller in callers}
        secret = add_token(tokens, Caller("admin", Role.ADMIN))
        async with serving(
            f"scheduling-{policy}",
            token=secret,
            tokens=str(tokens),
            workers=WORKERS,
            threads=1,
            device_memory=DEVICE_MEMORY,
            page_tokens=PAGE_TOKENS,
            host_memory="256MB",
            link_rate=LINK_RATE,
            answer_charge="worst-case",
            no_device_prefix_cache=True,
            queue_capacity=1000,
            policy=policy,
            policy_aging_seconds=bound,
        ) as (_, admin):
            clients = {name: AsyncClient(admin.address, token=secrets[name]) for name in TENANTS}
            try:
                yield {"": admin, **clients}
            finally:
                for client in clients.values():
                    await client.close()


async def run_load(policy: str, clients: Mapping[str, AsyncClient], asks: Sequence[Ask]) -> Run:
    """Send the requests of one round."""
    admin = clients[""]
    before, decisions = await work_of(admin), (await admin.scheduler_status()).decision_counts
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        sent = [group.create_task(send(clients[ask.tenant], ask, began)) for ask in asks]
    seconds = time.monotonic() - began
    after, later = await work_of(admin), (await admin.scheduler_status()).decision_counts
    steps = after.steps - before.steps
    return Run(
        policy,
        seconds,
        (after.tokens - before.tokens) / steps,
        steps,
        {name: count - decisions.get(name, 0) for name, count in later.items()},
        [task.result() for task in sent],
    )


async def run_policy(policy: str, asks: Sequence[Ask], bound: float) -> Run:
    """Run one round on a stack of its own, whose store has the documents that it is about."""
    async with stack_of(policy, bound) as clients:
        if any(ask.is_document for ask in asks):
            for tenant, documents in documents_by_tenant().items():
                for document in documents:
                    await clients[tenant].generate(document, max_tokens=1).complete()
        return await run_load(policy, clients, asks)


def figures_of(run: Run) -> dict[str, Any]:
    """Return what is reported of one run; seconds."""
    waits = {
        kind: [done.queue_seconds for ask, done in run.done if ask.is_document is is_document]
        for kind, is_document in (("document", True), ("short", False))
    }
    firsts = [done.ttft_seconds for _, done in run.done]
    return {
        "policy": run.policy,
        "seconds": run.seconds,
        "steps": run.steps,
        "tokens_per_step": run.tokens_per_step,
        "mean_ttft_seconds": statistics.fmean(firsts),
        "p99_ttft_seconds": quantile(sorted(firsts), 0.99),
        **{
            f"{kind}_wait_{name}_seconds": quantile(sorted(values), share)
            for kind, values in waits.items()
            for name, share in (("p50", 0.5), ("p99", 0.99))
            if values
        },
        "documents_found_cached": sum(
            done.usage.cached_tokens >= DOCUMENT_TOKENS - 1
            for ask, done in run.done
            if ask.is_document
        ),
        "documents": len(waits["document"]),
        "short_requests": len(waits["short"]),
        "mean_wait_by_tenant": {
            tenant: statistics.fmean(d.queue_seconds for a, d in run.done if a.tenant == tenant)
            for tenant in TENANTS
        },
        "decisions": run.decisions,
    }


async def measure(
    policies: Sequence[str],
    rounds: int,
    seconds: float,
    rate: float,
    bound: float,
    document_every: int,
) -> dict[str, Any]:
    runs = []
    for place, policy in enumerate(Progress().rounds("policies", policies, rounds)):
        number = place // len(policies)
        asks = load_of(number, seconds, rate, document_every)
        run = await run_policy(policy, asks, bound)
        runs.append({"round": number, **figures_of(run)})
    return {
        "benchmark": "scheduling",
        "workers": WORKERS,
        "device_memory": DEVICE_MEMORY,
        "link_rate": LINK_RATE,
        "document_tokens": DOCUMENT_TOKENS,
        "requests_per_second": rate,
        "load_seconds": seconds,
        "bound_seconds": bound,
        "document_every": document_every,
        "runs": runs,
        "medians": {policy: medians_of(runs, policy) for policy in policies},
    }


def medians_of(runs: Sequence[Mapping[str, Any]], policy: str) -> dict[str, float]:
    """Return the median over the rounds of each figure that is a number."""
    mine = [run for run in runs if run["policy"] == policy]
    return {
        name: statistics.median(run[name] for run in mine)
        for name, value in mine[0].items()
        if isinstance(value, int | float) and name != "round"
    }


def misses_of(result: Mapping[str, Any]) -> list[str]:
    """Return what utilisation does not reach; empty if fifo was not measured beside it."""
    medians = result["medians"]
    if not {Policy.FIFO, Policy.UTILISATION} <= medians.keys():
        return []
    fifo, ours = medians[Policy.FIFO], medians[Policy.UTILISATION]
    misses = []
    gain = ours["tokens_per_step"] / fifo["tokens_per_step"]
    if gain < LEAST_GAIN:
        misses.append(f"{gain:.2f} x the tokens per step of fifo, not {LEAST_GAIN:g} x")
    if ours["mean_ttft_seconds"] > fifo["mean_ttft_seconds"]:
        misses.append("a later first token than fifo's, on average")
    if ours.get("document_wait_p99_seconds", 0.0) > result["bound_seconds"]:
        misses.append("link-bound requests wait longer than the bound")
    return misses


_COLUMNS = {
    "tokens_per_step": "tokens/step",
    "steps": "steps",
    "mean_ttft_seconds": "TTFT mean",
    "p99_ttft_seconds": "TTFT p99",
    "short_wait_p50_seconds": "short wait p50",
    "short_wait_p99_seconds": "p99",
    "document_wait_p50_seconds": "document wait p50",
    "document_wait_p99_seconds": "p99",
    "seconds": "seconds",
}


def show(result: Mapping[str, Any]) -> None:
    """Print the median of each figure, and under it the range over all rounds."""
    titles = {
        name: title
        for name, title in _COLUMNS.items()
        if all(name in run for run in result["runs"])
    }
    print(f"{'':<12}" + "".join(f"{title:>{len(title) + 8}}" for title in titles.values()))
    for policy, medians in result["medians"].items():
        runs = [run for run in result["runs"] if run["policy"] == policy]
        ranges = [
            (min(run[name] for run in runs), max(run[name] for run in runs)) for name in titles
        ]
        rows = {
            policy: [f"{medians[name]:.2f}" for name in titles],
            "": [f"{least:.2f}-{most:.2f}" for least, most in ranges],
        }
        for label, cells in rows.items():
            widths = [len(title) + 8 for title in titles.values()]
            row = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
            print(f"{label:<12}" + "".join(row))
    for miss in misses_of(result):
        print(f"utilisation misses: {miss}")


def main() -> int:
    parser = parser_of(__doc__)
    names = [policy.value for policy in Policy]
    parser.add_argument(
        "--policies",
        type=lambda text: text.split(","),
        default=names,
        metavar=",".join(names),
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rate", type=float, default=40.0)
    parser.add_argument("--bound", type=float, default=20.0)
    parser.add_argument("--document-every", type=int, default=4, metavar="N")
    arguments = parser.parse_args()
    if unknown := set(arguments.policies) - set(names):
        parser.error(f"no policy is called {', '.join(sorted(unknown))}")
    result = run_until_signal(
        measure(
            arguments.policies,
            arguments.rounds,
            arguments.seconds,
            arguments.rate,
            arguments.bound,
            arguments.document_every,
        )
    )
    finish(arguments, result, show)
    return 1 if arguments.document_every and misses_of(result) else 0


if __name__ == "__main__":
    sys.exit(main())

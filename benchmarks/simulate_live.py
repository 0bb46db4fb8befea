"""The simulator beside the live stack: one CPU worker, three traces, by the same figures.

First the worker's costs are fitted from short loads of known composition (requests alone, several
that decode together, short and long ones). Then each trace runs live, sent by `benchmarks.load`,
and simulated. Throughput and the median time to the first token are compared. Each live run is told
with the processors that other processes used meanwhile; one that was disturbed is repeated, and
the least disturbed one counts.

    python -m benchmarks.simulate_live [--requests N] [--json] [--output FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.harness import busy_seconds, finish, parser_of, serving, tree_seconds
from benchmarks.load import RandomPrompts, Record, Requests, measured, results_of, scheduler
from scheduler_service.policy.settings import PolicySettings
from splitpoint.client import AsyncClient
from splitpoint.costs.profile import Profile
from splitpoint.shapes import ModelShape
from splitpoint_cli.bench.ending import run_until_signal
from splitpoint_cli.bench.harness import Progress, commit, hardware
from splitpoint_cli.planning.sizing import Node
from splitpoint_cli.simulate.costs import Overheads
from splitpoint_cli.simulate.device_types import DeviceType
from splitpoint_cli.simulate.report import results_of as simulated_results_of
from splitpoint_cli.simulate.run import Fleet, Load, simulate
from splitpoint_cli.traces.arrival import Arrival, Trace

MAX_BATCH, STEP_TOKENS, CHUNK_TOKENS = 32, 512, 64
DEVICE_MEMORY = "160MiB"
# (requests at once, prompt tokens, answer tokens)
DECODES = ((1, 64, 96), (4, 64, 96), (12, 64, 96), (24, 64, 96), (4, 1500, 96), (12, 1000, 96))
# Prompt tokens of requests alone.
PREFILLS = (32, 256, 512, 1024, 2000)
REPEATS = 3
# Requests that come while another one decodes, their prompt tokens, and seconds between them.
GUESTS = (25, 32, 0.1)
# Tokens of the answer beside which they come.
GUESTS_HOST = 320
# Processors that others may use beside a run, and runs of a trace until that holds.
MOST_FOREIGN, MOST_RUNS = 0.15, 3
TRACES = (
    Load("mooncake-conversation", rate=1.0, length=1 / 32, output=0.15),
    Load("mooncake-synthetic", rate=1.0, length=1 / 32, output=0.3),
    Load("azure-conversation", rate=0.8, length=0.25, output=0.2),
)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A worker's costs as its clients see them."""

    profile: Profile
    overheads: Overheads


class Stack:
    """Loads on one running stack."""

    def __init__(self, address: str, progress: Progress) -> None:
        self.address = address
        self.progress = progress
        self.seed = 0

    async def quiet_run(self, requests: Requests) -> tuple[list[Record], list[float]]:
        """Return the least disturbed run, and the processors that others used in each run."""
        runs: list[tuple[float, list[Record]]] = []
        while len(runs) < MOST_RUNS and not any(each < MOST_FOREIGN for each, _ in runs):
            busy, own, began = busy_seconds(), tree_seconds(), time.perf_counter()
            # Another seed: other tokens, none of which are cached.
            self.seed += 1
            records = await self.run(replace(requests, seed=self.seed))
            seconds = time.perf_counter() - began
            foreign = busy_seconds() - busy - (tree_seconds() - own)
            runs.append((max(0.0, foreign) / seconds, records))
        return min(runs, key=lambda run: run[0])[1], [each for each, _ in runs]

    async def run(self, requests: Requests, at_once: int | None = None) -> list[Record]:
        found = await measured(scheduler(self.address), requests, at_once, self.progress)
        failed = [each for each in found.records if each.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed, one by {failed[0].message}")
        return found.records

    async def alike(self, count: int, at_once: int, prompt: int, answer: int) -> list[Record]:
        """Send alike requests, none of whose prompts was sent before."""
        self.seed += 1
        source = RandomPrompts(prompt, answer)
        return await self.run(Requests(source, count, 1000 + self.seed), at_once)


async def fit(stack: Stack, shape: ModelShape, profile: Profile) -> tuple[Fitted, dict[str, Any]]:
    """Return the costs that explain loads of known composition, and what these measured."""
    await stack.alike(4, 4, 200, 20)  # whatever is done once
    rows, seconds = [], []
    for count, prompt, answer in DECODES:
        # The faster of two: whatever ran beside it made the other one slower.
        found = [await stack.alike(count, count, prompt, answer) for _ in range(2)]
        rows.append((1.0, count, count * (prompt + answer / 2)))
        seconds.append(min(statistics.median(one.tpot_ms for one in each) for each in found) / 1e3)
    step, row, read = _least_squares(rows, seconds)
    pieces, firsts = [], []
    for prompt in PREFILLS:
        records = await stack.alike(REPEATS, 1, prompt, 2)
        firsts.append(statistics.median(each.ttft_ms for each in records) / 1e3)
        pieces.append((1.0, shape.prefill_flops(prompt)))
    extra = [first - -(-p // STEP_TOKENS) * step for first, p in zip(firsts, PREFILLS, strict=True)]
    request, flop = _least_squares(pieces, extra)
    start = await start_seconds(stack, shape.prefill_flops(GUESTS[1]) * flop)
    head = 2 * shape.vocabulary_size * shape.hidden_size
    products = (shape.prefill_flops_per_token + head) * flop
    fitted = Fitted(
        replace(
            profile,
            prefill_flops_per_second=1 / flop,
            prefill_overhead_seconds=0.0,
            # All of a step's fixed costs are its overhead: they add to its products.
            step_compute_seconds=1e-9,
            memory_seconds_per_byte=read / shape.kv_bytes_per_token,
            description="fitted from loads on the live stack",
        ),
        Overheads(step, max(0.0, row - products), start, max(0.0, request - start)),
    )
    return fitted, {
        "decodes": [
            {"at_once": count, "prompt": prompt, "tpot_ms": 1e3 * each}
            for (count, prompt, _), each in zip(DECODES, seconds, strict=True)
        ],
        "prefills": [
            {"prompt": prompt, "ttft_ms": 1e3 * each}
            for prompt, each in zip(PREFILLS, firsts, strict=True)
        ],
    }


async def start_seconds(stack: Stack, prefill_seconds: float) -> float:
    """Return by how much a request that begins delays one that decodes, besides its prefill.

    The gaps between tokens that nothing disturbed are most of them: their median is subtracted.
    """
    count, prompt, gap = GUESTS
    host = Arrival(0.0, 64, GUESTS_HOST)
    guests = [Arrival(0.3 + gap * index, prompt, 1) for index in range(count)]
    found = []
    for _ in range(3):
        stack.seed += 1
        trace = Trace("guests", (host, *guests))
        records = await stack.run(Requests(trace, seed=stack.seed))
        times = records[0].times
        gaps = [after - before for before, after in pairwise(times)]
        usual = statistics.median(gaps)
        met = sum(times[0] < each.due + gap < times[-1] for each in records[1:])
        found.append(sum(each - usual for each in gaps) / max(1, met) - prefill_seconds)
    return max(0.0, min(found))


def _least_squares(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return factors, none below a small positive one; relative errors count."""
    active = list(range(len(rows[0])))
    weights = 1 / np.array(seconds)
    table = np.array(rows, dtype=float)
    while True:
        found, *_ = np.linalg.lstsq(
            table[:, active] * weights[:, None], np.array(seconds) * weights, rcond=None
        )
        if found.min() > 0 or len(active) == 1:
            break
        del active[int(found.argmin())]
    factors = [1e-12] * len(rows[0])
    for place, factor in zip(active, found, strict=True):
        factors[place] = max(1e-12, float(factor))
    return factors


def simulated(fitted: Fitted, shape: ModelShape, cache_bytes: int, load: Load) -> dict[str, Any]:
    kind = DeviceType("cpu", fitted.profile, 0, cache_bytes=cache_bytes)
    node = Node(
        fitted.profile,
        0,
        max_batch=MAX_BATCH,
        max_batched_tokens=STEP_TOKENS,
        chunk_tokens=CHUNK_TOKENS,
    )
    fleet = Fleet(shape, node, [(kind, 1)], 1, 1 << 30, overheads=fitted.overheads)
    outcome = simulate(fleet, load, PolicySettings())
    return simulated_results_of(outcome, "fifo", {}, {"cpu": kind})


async def compare(stack: Stack, client: AsyncClient, loads: Sequence[Load]) -> dict[str, Any]:
    shape = (await client.get_model()).shape
    (worker,) = await client.list_workers()
    if worker.profile is None:
        raise RuntimeError("the worker has not measured its costs")
    fitted, measurements = await fit(stack, shape, worker.profile)
    runs = []
    for load in loads:
        requests = Requests(load.read(), seed=load.seed)
        records, foreign = await stack.quiet_run(requests)
        live = results_of(records)
        predicted = simulated(fitted, shape, worker.cache_capacity_bytes, load)
        runs.append(
            {
                "load": asdict(load),
                "foreign_processors": foreign,
                "live": live,
                "simulated": predicted,
            }
        )
    return {
        "benchmark": "simulate_live",
        "hardware": hardware(),
        "commit": commit(),
        "model": shape.name,
        "fitted": {
            "overheads": asdict(fitted.overheads),
            "profile": asdict(fitted.profile),
            "from": measurements,
        },
        "runs": runs,
    }


KEYS = (
    *("request_throughput", "output_throughput", "median_ttft_ms", "mean_ttft_ms"),
    *("median_tpot_ms", "median_e2el_ms", "cached_tokens"),
)


def show(result: Mapping[str, Any]) -> None:
    print(f"{result['model']} on {result['hardware']}; fitted: {result['fitted']['overheads']}")
    for run in result["runs"]:
        foreign = ", ".join(f"{each:.2f}" for each in run["foreign_processors"])
        print(f"\n{run['load']['trace']}: live (others used {foreign}), simulated, difference")
        for key in KEYS:
            live, predicted = run["live"][key] or 0, run["simulated"][key] or 0
            off = (predicted - live) / live if live else 0.0
            print(f"  {key:20} {live:12,.2f} {predicted:12,.2f} {off:+8.1%}")


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {
        "workers": 1,
        "threads": 1,
        "device_memory": DEVICE_MEMORY,
        "max_batch": MAX_BATCH,
        "max_batched_tokens": STEP_TOKENS,
    }
    loads = [replace(load, count=arguments.requests) for load in TRACES]
    async with serving("simulate", **options) as (_, client):
        return await compare(Stack(client.address, Progress()), client, loads)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=120)
    arguments = parser.parse_args()
    finish(arguments, run_until_signal(measure(arguments)), show)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Time to the first token of a prefix that only the disk tier holds: three ways to bring it back.

Load all of it first, compute all of it, or compute its front while the store loads its back (both
ends). The tier has an emulated rate (`--tier-rate`), at which loading the prefix takes 0.7, 1.5 or
3 times as long as computing it, as the idle worker's profile predicts. Every run has a prompt of
its own, which was computed before and pushed out of the arena and of the device; the ways take
turns. Each first token must equal that of the run that computed the prompt at first.

    python -m benchmarks.tier_ends [--tokens N] [--rounds N] [--shares N,N] [--json] [--output FILE]
"""

from __future__ import annotations

import enum
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import Timed, finish, is_quiet, median_seconds, parser_of, random_ids
from benchmarks.planner_tiers import DISK, Served, grant_of, served
from scheduler_service.placement.planning import plan_attempt
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.costs.fetching import TierEnds
from splitpoint.planning.plan import Plan
from splitpoint_cli.bench.ending import run_until_signal
from splitpoint_cli.bench.harness import Progress, commit, hardware

SHARES = "0.7,1.5,3"
NEW_TOKENS = 64


class Way(enum.StrEnum):
    LOAD = "load all"
    COMPUTE = "recompute all"
    BOTH_ENDS = "both ends"


@dataclass(slots=True)
class Case:
    """A tier at one rate. `recomputed`: tokens that runs from both ends computed."""

    share: float
    tier_rate: int
    runs: dict[Way, list[Timed[int]]] = field(default_factory=lambda: {way: [] for way in Way})
    recomputed: list[int] = field(default_factory=list)

    def report(self, predicted: Mapping[Way, float]) -> dict[str, Any]:
        medians = {way: median_seconds(runs) for way, runs in self.runs.items()}
        return {
            "load_over_compute": self.share,
            "tier_rate": self.tier_rate,
            "seconds": {way.value: seconds for way, seconds in medians.items()},
            "predicted": {way.value: seconds for way, seconds in predicted.items()},
            "both_ends_over_best_other": medians[Way.BOTH_ENDS]
            / min(medians[Way.LOAD], medians[Way.COMPUTE]),
            "recomputed_tokens": sorted(self.recomputed),
            "quiet": all(is_quiet(runs) for runs in self.runs.values()),
        }


def plan_of(facts: WorkerFacts, way: Way, tokens: int, prefix: int) -> Plan:
    """Return a plan that restores a loaded prefix, or computes everything."""
    cached = 0 if way is Way.COMPUTE else prefix
    plan, _ = plan_attempt(facts, grant_of(facts), token_count=tokens, cached_tokens=cached)
    return plan


def ends_of(facts: WorkerFacts, prefix: int, rate: float) -> TierEnds:
    return TierEnds(
        facts.shape,
        facts.profile,
        0,
        prefix // facts.chunk_tokens,
        facts.chunk_tokens,
        facts.slot_bytes,
        rate,
        facts.max_batched_tokens,
    )


def predictions(facts: WorkerFacts, tokens: int, prefix: int, rate: float) -> dict[Way, float]:
    """Return the planner's seconds to the first token of each way."""
    ends = ends_of(facts, prefix, rate)
    point = ends.meeting_point()
    loaded = plan_of(facts, Way.LOAD, tokens, prefix)
    seconds = {
        Way.LOAD: loaded.predicted_ttft_seconds + ends.load_seconds(ends.chunk_count),
        Way.COMPUTE: plan_of(facts, Way.COMPUTE, tokens, prefix).predicted_ttft_seconds,
    }
    if point is not None:
        prefill = loaded.predicted_ttft_seconds - loaded.predicted_restore_seconds
        restore = loaded.predicted_load_seconds * (prefix - point.tokens) / prefix
        seconds[Way.BOTH_ENDS] = point.seconds + restore + prefill
    return seconds


async def push_out(stack: Served, rng: random.Random, tokens: int) -> None:
    """Fill the pages of the device with other prompts, and empty the arena."""
    facts = stack.facts
    pages = facts.cache_capacity_bytes // facts.page_bytes
    plan = plan_of(facts, Way.COMPUTE, tokens, 0)
    for _ in range(2 * pages * facts.chunk_tokens // tokens):
        await stack.first_token(random_ids(rng, tokens), plan, 0)
    await stack.empty_arena(random_ids(rng, tokens))


async def run_case(
    share: float, rate: int, rng: random.Random, prefix: int, rounds: int
) -> dict[str, Any]:
    case, tokens = Case(share, rate), prefix + NEW_TOKENS
    with tempfile.TemporaryDirectory(prefix="tier-ends-") as folder:
        async with served(
            Path(folder) / "tier",
            tier_rate=str(rate),
            no_device_prefix_cache=False,
            device_memory="90MiB",
        ) as stack:
            predicted = predictions(stack.facts, tokens, prefix, rate)
            for index in range(rounds):
                for way in list(Way) if index % 2 else reversed(Way):
                    prompt = random_ids(rng, tokens)
                    plan = plan_of(stack.facts, Way.COMPUTE, tokens, prefix)
                    held = await stack.tokens_on_disk()
                    answer = (await stack.first_token(prompt, plan, 0)).result
                    # A second use sends it to the tier.
                    await stack.first_token(prompt, plan, 0)
                    await stack.until_on_disk(held + prefix)
                    await push_out(stack, rng, tokens)
                    run = await _run(stack, way, prompt, prefix, rate)
                    if run.result != answer:
                        raise RuntimeError(f"another first token came by {way}")
                    case.runs[way].append(run)
                    if way is Way.BOTH_ENDS:
                        case.recomputed.append(stack.last_restore.recomputed_tokens)
    return case.report(predicted)


async def _run(
    stack: Served, way: Way, prompt: Sequence[int], prefix: int, rate: float
) -> Timed[int]:
    plan = plan_of(stack.facts, way, len(prompt), prefix)
    meeting = 0
    if way is Way.BOTH_ENDS:
        point = ends_of(stack.facts, prefix, rate).meeting_point()
        meeting = prefix // 2 if point is None else point.tokens
    source = replace(DISK, cached_tokens=prefix).cached_tokens if way is not Way.COMPUTE else 0
    run = await stack.first_token(prompt, plan, source, meeting_tokens=meeting)
    if stack.last_restore.device_tokens:
        raise RuntimeError(f"{way}: the device held a part of the prefix: {stack.last_restore}")
    return run


async def measure(tokens: int, rounds: int, shares: Sequence[float], seed: int) -> dict[str, Any]:
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="tier-ends-") as folder:
        async with served(Path(folder) / "tier") as stack:
            facts = stack.facts
    prefix = tokens // facts.chunk_tokens * facts.chunk_tokens
    alone = plan_of(facts, Way.COMPUTE, prefix, 0).predicted_ttft_seconds
    size = prefix // facts.chunk_tokens * facts.slot_bytes
    cases = []
    for share in progress.track("rates", shares):
        rate, rng = round(size / alone / share), random.Random(f"{seed} {share}")
        cases.append(await run_case(share, rate, rng, prefix, rounds))
        progress.say(_line(cases[-1]))
    return {
        "benchmark": "tier_ends",
        "prefix_tokens": prefix,
        "new_tokens": NEW_TOKENS,
        "rounds": rounds,
        "seed": seed,
        "commit": commit(),
        "hardware": hardware(),
        "cases": cases,
    }


def _line(case: Mapping[str, Any]) -> str:
    seconds = case["seconds"]
    ways = "  ".join(f"{way} {value * 1e3:.0f} ms" for way, value in seconds.items())
    return (
        f"tier {case['tier_rate'] / 1e6:6.1f} MB/s  {ways}  both ends over the better other "
        f"{case['both_ends_over_best_other']:.2f}{'' if case['quiet'] else '  disturbed'}"
    )


def show(result: Mapping[str, Any]) -> None:
    for case in result["cases"]:
        print(_line(case))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=1536, help="of the prefix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shares", default=SHARES, help="seconds of loading over computing")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shares = [float(share) for share in arguments.shares.split(",")]
    result = run_until_signal(measure(arguments.tokens, arguments.rounds, shares, arguments.seed))
    finish(arguments, result, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Quality of the planner's choices and predictions of restores, on random cases, each measured.

Of four cases, three are of a multi-head model, whose splits are swept; one has grouped queries,
where no split can pay. In each a worker's profile is measured and refitted by ten restores. Then
the planner is asked, and its choice and every other contender are timed in turns, and the best of
them once more in turns with the choice, so that the best of many noisy medians is not compared with
a single one.

A choice is near the best if it takes at most 5 % longer than the best that was measured.
A prediction's error is its distance from the measured median, as a share of that median.

    python -m benchmarks.planner_cases [--cases N] [--first N] [--seed N] [--json] [--output FILE]
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.harness import (
    Timed,
    finish,
    is_quiet,
    median_seconds,
    parser_of,
    quieter_half,
    timed,
)
from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.costs.profile import Profile
from splitpoint.planning.plan import Plan, PlanInput, RestoreMethod
from splitpoint.planning.planner import plan_request
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import BUILT_IN_SHAPES
from splitpoint_cli.bench.ending import ending_by_signals
from splitpoint_cli.bench.engine import exact_memory
from splitpoint_cli.bench.harness import CHUNK_TOKENS, MAX_BATCHED_TOKENS, Progress
from splitpoint_cli.bench.restore_report import RestoreWorkload
from splitpoint_cli.bench.restore_runs import Restorer
from splitpoint_cli.bench.stored_prefixes import Stored, stored_prefixes
from worker_service.device.cache import TORCH_TYPES, DeviceCache
from worker_service.device.memory import STAGING_PAGES
from worker_service.engine.engine import Engine
from worker_service.lanes.cost_watch import CostWatch
from worker_service.lanes.timeline import Span
from worker_service.model.decoder import Decoder
from worker_service.profiling.profiler import measure
from worker_service.profiling.restore_costs import measure_overheads

# (shape, fewest layers, most layers), by the case's number.
KINDS = (
    ("opt-125m", 3, 8),
    ("opt-125m", 3, 8),
    ("smollm2-135m", 4, 12),
    ("opt-125m", 3, 8),
)
# Around where loading and computing take equally long on one core.
LINK_RATES = (8e7, 8e8)
TOKENS = (320, 1400)
NEAR_BEST = 1.05
Case = dict[str, Any]


REFITS = 10
SWEEP_POINTS = 8
REFIT_TRIES = 2
SWEEP_ROUNDS = 3
FINAL_ROUNDS = 8
FINALISTS = 3
# Pages of the short restores by which a worker measures overheads.
OVERHEAD_CHUNKS = 8
LOAD = "split 0"
Run = Callable[[], list[Span]]


def case_of(number: int, seed: int, threads: int) -> RestoreWorkload:
    """Return case `number`, drawn from the seed and the number alone."""
    rng = random.Random(f"{seed} {number}")
    name, least, most = KINDS[number % len(KINDS)]
    low, high = LINK_RATES
    return RestoreWorkload(
        shape=name,
        dtype="float32",
        prompt=rng.randrange(TOKENS[0], min(TOKENS[1], BUILT_IN_SHAPES[name].context_length - 1)),
        batch=1,
        device="cpu",
        threads=threads,
        repeats=FINAL_ROUNDS,
        seed=rng.randrange(1 << 30),
        link_rate=round(low * (high / low) ** rng.random()),
        layers=rng.randint(least, most),
    )


@dataclass(slots=True)
class Contender:
    """One way to restore the prefix, and its runs."""

    name: str
    run: Run
    runs: list[Timed[list[Span]]] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median_seconds(self.runs)


def run_case(workload: RestoreWorkload) -> dict[str, Any]:
    """Measure one case; seconds are medians of the quieter half of the runs."""
    device = torch.device("cpu")
    torch.set_num_threads(workload.threads)
    model = Decoder.random(
        DecoderConfig.of_shape(workload.model_shape),
        workload.seed,
        device,
        TORCH_TYPES[workload.data_type],
    )
    with stored_prefixes(workload, model, device) as stored:
        restorer = Restorer(stored, workload)
        try:
            at_start = _measured_at_start(model, stored, restorer)
            first = plan_request(model.shape, at_start, plan_input(workload, stored))
            profile = refitted(at_start, workload, stored, restorer)
            plan = plan_request(model.shape, profile, plan_input(workload, stored))
            contenders = _contenders(workload, stored, restorer, plan)
            finalists = _measure(contenders, stored)
        finally:
            restorer.close()
    chosen, load = contenders[0], next(each for each in contenders if each.name == LOAD)
    best = min(finalists, key=lambda each: each.median)
    return {
        "shape": workload.shape,
        "layers": workload.layers,
        "tokens": workload.prompt,
        "link_bytes_per_second": workload.link_rate,
        "split_can_pay": model.shape.rho < 1,
        "method": plan.method.value,
        "split": plan.split_tokens,
        "tile": plan.tile_tokens,
        "predicted_seconds": plan.predicted_restore_seconds,
        "first_predicted_seconds": first.predicted_restore_seconds,
        "chosen": chosen.name,
        "chosen_seconds": chosen.median,
        "best": best.name,
        "best_seconds": best.median,
        "load_seconds": load.median,
        "sweep": {each.name: each.median for each in contenders},
        "quiet": all(is_quiet(each.runs) for each in finalists),
    }


def _measured_at_start(model: Decoder, stored: Stored, restorer: Restorer) -> Profile:
    """Return the profile that a worker on these lanes measures at its start."""
    layout = stored.tensors.layout
    tokens = OVERHEAD_CHUNKS * CHUNK_TOKENS
    memory = exact_memory(
        model.shape, layout, weight_bytes=model.weight_bytes, batch=1, tokens=tokens
    )
    engine = Engine(
        model,
        DeviceCache(layout, memory, stored.device),
        max_batch_size=1,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        lanes=restorer.lanes,
    )
    profile = measure(model, stored.device, "planner_cases", lanes=restorer.lanes)
    return measure_overheads(engine, profile)


def plan_input(workload: RestoreWorkload, stored: Stored) -> PlanInput:
    return PlanInput(
        cached_tokens=workload.prompt,
        new_tokens=1,
        has_activations=bool(stored.tensors.inputs),
        schedule=Schedule.PIPELINED,
        chunk_tokens=CHUNK_TOKENS,
        staging_tokens=STAGING_PAGES * CHUNK_TOKENS,
        prefill_tokens=MAX_BATCHED_TOKENS,
    )


def refitted(
    profile: Profile, workload: RestoreWorkload, stored: Stored, restorer: Restorer
) -> Profile:
    """Return the profile after ten restores, each by the plan of the moment or by another way."""
    watch = CostWatch(profile)
    rng = random.Random(workload.seed)
    for number in range(REFITS + 1):
        plan = plan_request(stored.model.shape, watch.fits, plan_input(workload, stored))
        # Requests are of many lengths and their prefixes come back by every method.
        ways = _contenders(workload, stored, restorer, plan)
        way = ways[0] if number % 2 else rng.choice(ways[1:])
        tries: list[Timed[list[Span]]] = []
        for _ in range(REFIT_TRIES if number else 1):
            stored.pages.poison()
            tries.append(timed(way.run))
        if number:  # the first one warms up
            found = quieter_half(tries)[0]
            watch.restored(found.result)
            watch.took(found.seconds, found.result, Schedule.PIPELINED)
    return watch.fits


def _contenders(
    workload: RestoreWorkload, stored: Stored, restorer: Restorer, plan: Plan
) -> list[Contender]:
    """Return the planner's choice first, then loading, then the other methods."""
    tile = plan.tile_tokens or 4 * CHUNK_TOKENS

    def split(tokens: int) -> Contender:
        return Contender(
            f"split {tokens:,}", lambda: restorer.split(tokens, Schedule.PIPELINED, tile)
        )

    both_ends = Contender("both ends", lambda: restorer.both_ends(plan.recomputed_tokens))
    is_tokens = plan.method is RestoreMethod.TOKENS
    contenders = [both_ends if is_tokens else split(plan.split_tokens), split(0), both_ends]
    if stored.tensors.inputs:
        chunks = workload.prompt / SWEEP_POINTS / CHUNK_TOKENS
        steps = {round(chunks * step) * CHUNK_TOKENS for step in range(1, SWEEP_POINTS)}
        steps = {min(each, workload.prompt) for each in steps} | {workload.prompt}
        contenders += [split(tokens) for tokens in sorted(steps)]
    # A way that was chosen is no contender of itself.
    return contenders[:1] + [each for each in contenders[1:] if each.name != contenders[0].name]


def _measure(contenders: Sequence[Contender], stored: Stored) -> list[Contender]:
    """Time all in turns, then the choice and the best others anew; return these."""
    for contender in contenders:
        contender.run()
    _rounds(contenders, stored, SWEEP_ROUNDS)
    others = sorted(contenders[1:], key=lambda each: each.median)
    finalists = [contenders[0], *others[:FINALISTS]]
    for each in finalists:
        each.runs.clear()
    _rounds(finalists, stored, FINAL_ROUNDS)
    return finalists


def _rounds(contenders: Sequence[Contender], stored: Stored, rounds: int) -> None:
    for number in range(rounds):
        for contender in contenders if number % 2 else reversed(contenders):
            stored.pages.poison()
            contender.runs.append(timed(contender.run))
            # Outside of the time: every run counts only if it is right.
            stored.check(contender.name)


# -- the summary ------------------------------------------------------------------------


def summary(cases: Sequence[Case]) -> Case:
    """Return the shares and errors over all cases, and by kind."""
    groups = {
        "all": list(cases),
        "multi_head_restores": [c for c in cases if c["split_can_pay"]],
        "grouped_query_restores": [c for c in cases if not c["split_can_pay"]],
        # The planner's own quality: elsewhere other processes changed the rates meanwhile.
        "quiet": [c for c in cases if c["quiet"]],
    }
    return {
        name: {
            "cases": len(group),
            "within_5_percent_of_best": statistics.mean(_is_near(c) for c in group),
            "median_over_best": statistics.median(_over_best(c) for c in group),
            "worst_over_best": max(map(_over_best, group)),
            "median_error": statistics.median(_error(c, "predicted_seconds") for c in group),
            "median_error_before_refitting": statistics.median(
                _error(c, "first_predicted_seconds") for c in group
            ),
            "disturbed": sum(not c["quiet"] for c in group),
        }
        for name, group in groups.items()
        if group
    }


def _over_best(case: Case) -> float:
    ratio: float = case["chosen_seconds"] / case["best_seconds"]
    return ratio


def _is_near(case: Case) -> bool:
    return _over_best(case) <= NEAR_BEST


def _error(case: Case, name: str) -> float:
    error: float = abs(case[name] - case["chosen_seconds"]) / case["chosen_seconds"]
    return error


def _line(case: Case) -> str:
    predicted, chosen = case["predicted_seconds"], case["chosen_seconds"]
    return (
        f"{case['number'] + 1:2} {case['shape']:12} x{case['layers']:<2} {case['tokens']:5} tokens "
        f"{case['link_bytes_per_second'] / 1e6:6.0f} MB/s  {case['chosen']:12} "
        f"{chosen * 1e3:8.1f} ms  predicted {predicted / chosen:.2f} x  best "
        f"{_over_best(case):.2f} x ({case['best']}){'' if case['quiet'] else '  disturbed'}"
    )


@ending_by_signals
def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    # Copies have the other core of two.
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    progress, cases = Progress(), []
    numbers = range(arguments.first, arguments.first + arguments.cases)
    for number in progress.track("cases", numbers):
        started = time.perf_counter()
        case = {
            "number": number,
            **run_case(case_of(number, arguments.seed, arguments.threads)),
        }
        case["wall_seconds"] = time.perf_counter() - started
        cases.append(case)
        progress.say(_line(case))
    report = {
        "benchmark": "planner_cases",
        "seed": arguments.seed,
        "threads": arguments.threads,
        "seconds": sum(case["wall_seconds"] for case in cases),
        "summary": summary(cases),
        "cases": cases,
    }
    finish(arguments, report, show)
    return 0


def show(report: Mapping[str, Any]) -> None:
    for name, group in report["summary"].items():
        print(
            f"{name.replace('_', ' ')}: {group['within_5_percent_of_best']:.0%} of "
            f"{group['cases']} cases within 5 % of the best (worst {group['worst_over_best']:.2f} "
            f"x); median error {group['median_error']:.1%}, before refitting "
            f"{group['median_error_before_refitting']:.1%}; {group['disturbed']} disturbed"
        )


if __name__ == "__main__":
    sys.exit(main())

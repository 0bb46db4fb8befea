"""Quality of the planner's choices: random shapes, links and lengths, each measured.

For every case a worker's profile is measured, the planner asked, and what it chose
is timed in turns with a grid of splits (multi-head attention) or with loading
everything and recomputing from both ends (grouped queries, whose activations are
never sent). A case is good when the planner's choice takes at most 5 % longer than
the best that was measured, and for grouped queries at most 3 % longer than loading.

    python -m benchmarks.planner_cases [--cases N] [--seed N] [--json] [--output FILE]
"""

from __future__ import annotations

import io
import random
import statistics
import sys
from typing import Any

import torch
from rich.console import Console

from benchmarks.shared import finish, parser_of
from splitpoint.planning.plan import Plan, PlanInput, RestoreMethod
from splitpoint.planning.planner import plan_request
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import BUILT_IN_SHAPES
from splitpoint_cli.bench.restore.runs import Contender, Restorer, run_rounds
from splitpoint_cli.bench.restore.setup import Stored, stored_prefixes
from splitpoint_cli.bench.restore.workload import (
    CHUNK_TOKENS,
    MAX_BATCHED_TOKENS,
    RestoreWorkload,
)
from splitpoint_cli.bench.shared.ending import ending_by_signals
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.shared.report import commit, hardware
from worker_service.checkpoint.config import DecoderConfig
from worker_service.device.cache import TORCH_TYPES
from worker_service.device.memory import STAGING_PAGES
from worker_service.lanes.timeline import Span
from worker_service.model.decoder import Decoder
from worker_service.profiling.profiler import measure

# (shape, fewest layers, most layers): what two cores compute in seconds. Cases take
# them in turn: three of five can have a split, two have grouped queries and cannot.
SHAPES = (
    ("opt-125m", 4, 12),
    ("smollm2-135m", 6, 16),
    ("opt-125m", 4, 12),
    ("llama-2-7b", 2, 2),
    ("smollm2-135m", 6, 16),
)
# Around where loading and computing take equally long on two cores.
LINK_RATES = (60e6, 1.2e9)
GRID = 8
NEAR_BEST = 1.05
NEAR_LOAD = 1.03


def draw(number: int, rng: random.Random, threads: int, repeats: int) -> RestoreWorkload:
    """Draw case `number`: the shape in turn; layers, tokens and link at random."""
    name, least, most = SHAPES[number % len(SHAPES)]
    low, high = LINK_RATES
    return RestoreWorkload(
        shape=name,
        dtype="float32",
        prompt=rng.randrange(512, min(2000, BUILT_IN_SHAPES[name].context_length - 1)),
        batch=1,
        device="cpu",
        threads=threads,
        repeats=repeats,
        seed=rng.randrange(1 << 30),
        link_rate=round(low * (high / low) ** rng.random()),
        layers=rng.randint(least, most),
    )


def run_case(workload: RestoreWorkload, progress: Progress) -> dict[str, Any]:
    """Measure one case; seconds are medians."""
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
            profile = measure(model, device, "planner_cases", lanes=restorer.lanes)
            plan = plan_request(model.shape, profile, _input(workload, stored))
            contenders = _contenders(workload, stored, restorer, plan)
            run_rounds(contenders, stored, workload.repeats, progress)
        finally:
            restorer.close()
    chosen, *others = [
        statistics.median(timing.seconds for timing in each.timings) for each in contenders
    ]
    best = min(chosen, *others)
    load = others[0]
    rho = model.shape.rho
    good = chosen <= NEAR_BEST * best if rho < 1 else chosen <= NEAR_LOAD * load
    return {
        "shape": workload.shape,
        "layers": workload.layers,
        "tokens": workload.prompt,
        "link_bytes_per_second": workload.link_rate,
        "rho": rho,
        "method": plan.method.value,
        "split": plan.split_tokens,
        "tile": plan.tile_tokens,
        "predicted_seconds": plan.predicted_restore_seconds,
        "chosen_seconds": chosen,
        "best_seconds": best,
        "best": contenders[[chosen, *others].index(best)].name,
        "load_seconds": load,
        "over_best": chosen / best,
        "over_load": chosen / load,
        "good": good,
        "split_can_pay": rho < 1,
    }


def _input(workload: RestoreWorkload, stored: Stored) -> PlanInput:
    return PlanInput(
        cached_tokens=workload.prompt,
        new_tokens=1,
        has_activations=bool(stored.tensors.inputs),
        schedule=Schedule.PIPELINED,
        chunk_tokens=CHUNK_TOKENS,
        staging_tokens=STAGING_PAGES * CHUNK_TOKENS,
        prefill_tokens=MAX_BATCHED_TOKENS,
    )


def _contenders(
    workload: RestoreWorkload, stored: Stored, restorer: Restorer, plan: Plan
) -> list[Contender]:
    """Return the planner's choice first, then loading, then the other methods."""
    tile = plan.tile_tokens or 4 * CHUNK_TOKENS

    def split(tokens: int) -> Contender:
        def run() -> list[Span]:
            return restorer.split(tokens, Schedule.PIPELINED, tile)

        return Contender(f"split {tokens:,}", run, tokens, tile)

    def both_ends() -> Contender:
        return Contender("both ends", lambda: restorer.both_ends(plan.recomputed_tokens))

    tokens_chosen = plan.method is RestoreMethod.TOKENS
    chosen = both_ends() if tokens_chosen else split(plan.split_tokens)
    contenders = [chosen, split(0), both_ends()]
    if stored.tensors.inputs:
        steps = {
            min(round(workload.prompt * step / GRID / CHUNK_TOKENS) * CHUNK_TOKENS, workload.prompt)
            for step in range(1, GRID)
        }
        contenders += [split(tokens) for tokens in sorted(steps | {workload.prompt})]
    return contenders


@ending_by_signals
def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    cases = []
    progress, silent = Progress(), Progress(Console(file=io.StringIO()))
    for number in progress.track("cases", range(arguments.cases)):
        workload = draw(number, rng, arguments.threads, arguments.repeats)
        case = run_case(workload, silent)
        cases.append(case)
        progress.say(
            f"{number + 1:2} {case['shape']:13} x{case['layers']:<2} {case['tokens']:5} tokens "
            f"{case['link_bytes_per_second'] / 1e6:6.0f} MB/s  {case['method']:9} "
            f"l={case['split']:<5} {case['chosen_seconds'] * 1e3:7.1f} ms  "
            f"predicted {case['predicted_seconds'] * 1e3:7.1f}  best {case['over_best']:.2f} x "
            f"({case['best']})  load {case['over_load']:.2f} x"
        )
    with_split = [case for case in cases if case["split_can_pay"]]
    report = {
        "benchmark": "planner_cases",
        "seed": arguments.seed,
        "repeats": arguments.repeats,
        "commit": commit(),
        "hardware": hardware(),
        "good": sum(case["good"] for case in cases),
        "within_5_percent_of_best": sum(case["over_best"] <= NEAR_BEST for case in cases),
        "split_can_pay": len(with_split),
        "split_can_pay_good": sum(case["good"] for case in with_split),
        "cases": cases,
    }
    finish(
        arguments,
        report,
        lambda _: print(
            f"{report['good']} of {len(cases)} cases are good, "
            f"{report['split_can_pay_good']} of the {len(with_split)} in which a split can pay"
        ),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

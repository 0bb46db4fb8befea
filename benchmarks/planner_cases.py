"""Quality of the planner's choices and predictions, on random cases, each measured.

Two kinds of cases take turns. Of four, three are restores of a multi-head model, whose splits are
swept; one is a restore with grouped queries, where no split can pay. In each a worker's profile is
measured and refitted by ten runs, the planner is asked, and its choice is timed in turns with the
others.

A choice is near the best if it takes at most 5 % longer than the best that was measured.
A prediction's error is its distance from the measured median, as a share of that median.

    python -m benchmarks.planner_cases [--cases N] [--seed N] [--resume FILE] [--minutes M]

With `--resume FILE` finished cases are read from the file and each new one is added to it,
so that a run can be ended at any time and continued. `--minutes` ends it after the case in
which the time is over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import planner_restores
from benchmarks.harness import finish, parser_of
from splitpoint.shapes import BUILT_IN_SHAPES
from splitpoint_cli.bench.ending import ending_by_signals
from splitpoint_cli.bench.harness import Progress, commit, hardware
from splitpoint_cli.bench.restore_report import RestoreWorkload

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


def case_of(number: int, seed: int, threads: int) -> partial[Case]:
    """Return the run of case `number`, drawn from the seed and the number alone."""
    rng = random.Random(f"{seed} {number}")
    name, least, most = KINDS[number % len(KINDS)]
    low, high = LINK_RATES
    workload = RestoreWorkload(
        shape=name,
        dtype="float32",
        prompt=rng.randrange(TOKENS[0], min(TOKENS[1], BUILT_IN_SHAPES[name].context_length - 1)),
        batch=1,
        device="cpu",
        threads=threads,
        repeats=planner_restores.FINAL_ROUNDS,
        seed=rng.randrange(1 << 30),
        link_rate=round(low * (high / low) ** rng.random()),
        layers=rng.randint(least, most),
    )
    return partial(planner_restores.run_case, workload)


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


def resumed(path: Path | None, arguments: argparse.Namespace) -> list[Case]:
    """Return the finished cases of the file. Raises ValueError if it is of other cases."""
    if path is None or not path.exists():
        return []
    loaded = json.loads(path.read_text())
    if (loaded["seed"], loaded["threads"]) != (arguments.seed, arguments.threads):
        raise ValueError(f"{path} has cases of another seed or number of threads")
    cases: list[Case] = loaded["cases"]
    return cases


def keep(path: Path | None, arguments: argparse.Namespace, cases: list[Case]) -> None:
    if path is None:
        return
    text = json.dumps({"seed": arguments.seed, "threads": arguments.threads, "cases": cases})
    partial_file = path.with_name(f"{path.name}.{os.getpid()}")
    partial_file.write_text(text)
    partial_file.replace(path)


def _run(arguments: argparse.Namespace) -> list[Case]:
    """Run the missing cases until all are there or the time is over."""
    progress = Progress()
    cases = resumed(arguments.resume, arguments)
    done = {case["number"] for case in cases}
    deadline = time.monotonic() + 60 * arguments.minutes if arguments.minutes else None
    missing = [number for number in range(arguments.cases) if number not in done]
    for number in progress.track("cases", missing):
        if deadline is not None and time.monotonic() > deadline:
            break
        started = time.perf_counter()
        case = {"number": number, **case_of(number, arguments.seed, arguments.threads)()}
        case["wall_seconds"] = time.perf_counter() - started
        cases.append(case)
        keep(arguments.resume, arguments, cases)
        progress.say(_line(case))
    return sorted(cases, key=lambda case: int(case["number"]))[: arguments.cases]


@ending_by_signals
def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    # Copies have the other core of two.
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", type=Path, metavar="FILE")
    parser.add_argument("--minutes", type=float, default=0.0)
    arguments = parser.parse_args()
    cases = _run(arguments)
    if not cases:
        raise SystemExit("no case ended within the time")
    report = {
        "benchmark": "planner_cases",
        "seed": arguments.seed,
        "threads": arguments.threads,
        "commit": commit(),
        "hardware": hardware(),
        "seconds": sum(case["wall_seconds"] for case in cases),
        "summary": summary(cases),
        "cases": cases,
    }
    finish(arguments, report, lambda _: _show(summary(cases)))
    return 0


def _show(found: Case) -> None:
    for name, group in found.items():
        print(
            f"{name.replace('_', ' ')}: {group['within_5_percent_of_best']:.0%} of "
            f"{group['cases']} cases within 5 % of the best (worst {group['worst_over_best']:.2f} "
            f"x); median error {group['median_error']:.1%}, before refitting "
            f"{group['median_error_before_refitting']:.1%}; {group['disturbed']} disturbed"
        )


if __name__ == "__main__":
    sys.exit(main())

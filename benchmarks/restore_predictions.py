"""How well restores are predicted: what plans said beside what workers took, by method and length.

Starts the real stack with one CPU worker, stores prefixes of several lengths, and brings each
back by every method: loaded, rebuilt from activations, half of each, and recomputed from
token ids. Each prediction is the plan's of that very request. Rounds alternate over
everything, so that what the worker learns from one restore counts for the next.

    python -m benchmarks.restore_predictions [--rounds N] [--dtype TYPE] [--json] [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from splitpoint.client import AsyncClient
from splitpoint.client.requests import GenerateOptions
from splitpoint.planning.planner import Residency, RestoreMethod
from splitpoint_cli.bench.decode.report import commit, hardware
from splitpoint_cli.bench.ending import run_until_signal
from splitpoint_cli.report import add_report_arguments, hand_over
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.plan import plan_stack
from splitpoint_cli.stack.runner import StackRunner

LENGTHS = (16, 32, 64, 100, 128, 200, 320, 512, 700, 1000)
# What the figure is about: restores that take less than this.
SHORT_SECONDS = 0.02
VOCABULARY = 4096


@dataclass(frozen=True, slots=True)
class Restore:
    """One restore; seconds. `first`: of the first round, in which shapes are new."""

    method: str
    cached: int
    predicted: float
    measured: float
    first: bool

    @property
    def error(self) -> float:
        """How far the prediction was off, as a share of what was measured."""
        return abs(self.predicted - self.measured) / self.measured


def ways(length: int) -> dict[str, GenerateOptions]:
    common: GenerateOptions = {"max_tokens": 1, "residency": Residency.RESIDENT}
    return {
        "load": {**common, "restore": RestoreMethod.LOAD},
        "half": {**common, "split": length // 2},
        "rebuild": {**common, "split": length},
        "tokens": {**common, "restore": RestoreMethod.TOKENS},
    }


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    stack = plan_stack(
        StackOptions(
            workers=1,
            device="cpu",
            dtype=arguments.dtype,
            device_memory="512MiB",
            host_memory="512MiB",
            activations="always",
            listen="127.0.0.1:0",
            threads=arguments.threads,
            instance=f"predictions-{os.getpid()}",
        )
    )
    runner = StackRunner(stack, quiet=True)
    rng = random.Random(0)
    prefixes = {length: [rng.randrange(2, VOCABULARY) for _ in range(length)] for length in LENGTHS}
    found: list[Restore] = []
    async with runner.running(asyncio.Event()), AsyncClient(runner.address) as client:
        for prefix in prefixes.values():
            await client.generate(prefix, max_tokens=1, ignore_eos=True).complete()
        await asyncio.sleep(1.0)  # chunks are sealed in the background
        for number in range(arguments.rounds):
            for length, prefix in prefixes.items():
                prompt = [*prefix, rng.randrange(2, VOCABULARY)]
                for name, options in ways(length).items():
                    answer = await client.generate(
                        prompt,
                        **options,
                    ).complete()
                    if answer.usage.cached_tokens != length or answer.plan is None:
                        raise RuntimeError(f"{length} tokens were stored, {answer.usage} says")
                    found.append(
                        Restore(
                            name,
                            length,
                            answer.plan.predicted_restore_seconds,
                            answer.restore_seconds,
                            number == 0,
                        )
                    )
    return {
        "benchmark": "restore_predictions",
        "model": stack.name,
        "dtype": stack.shape.data_type.value,
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "median_error_short": median_error(
            [each for each in found if each.measured < SHORT_SECONDS and not each.first]
        ),
        "median_error_first": median_error([each for each in found if each.first]),
        "restores": [asdict(each) for each in found],
        "commit": commit(),
        "hardware": hardware(),
        "seed": 0,
    }


def median_error(restores: Sequence[Restore]) -> float:
    return statistics.median(each.error for each in restores)


def show(result: Mapping[str, Any]) -> None:
    found = [Restore(**each) for each in result["restores"]]
    print(f"{'':>6} " + "".join(f"{name:>22}" for name in ways(1)))
    print(f"{'tokens':>6} " + "".join(f"{'predicted/measured ms':>22}" for _ in ways(1)))
    for length in LENGTHS:
        cells = []
        for name in ways(1):
            mine = [r for r in found if (r.method, r.cached, r.first) == (name, length, False)]
            predicted = statistics.median(each.predicted for each in mine)
            measured = statistics.median(each.measured for each in mine)
            cells.append(f"{1e3 * predicted:.2f} / {1e3 * measured:.2f}")
        print(f"{length:>6} " + "".join(f"{cell:>22}" for cell in cells))
    print(f"median error below 20 ms: {result['median_error_short']:.1%}")
    print(f"median error of first restores: {result['median_error_first']:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    add_report_arguments(parser)
    arguments = parser.parse_args()
    result = run_until_signal(measure(arguments))
    hand_over(
        result,
        lambda: show(result),
        as_json=arguments.json,
        output=arguments.output,
        indent=None,
    )


if __name__ == "__main__":
    main()

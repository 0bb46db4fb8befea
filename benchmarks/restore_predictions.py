"""Predicted and measured times of restores, by method and length.

Starts the real stack with one CPU worker, stores prefixes of several lengths, and brings each
back by every method: loaded, rebuilt from activations, half of each, and recomputed from
token ids. Each prediction is the plan's of that very request. Rounds alternate over
everything, so that what the worker learns from one restore counts for the next.

    python -m benchmarks.restore_predictions [--rounds N] [--dtype TYPE] [--json] [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness import finish, parser_of, random_ids, serving
from splitpoint.client.requests import GenerateOptions
from splitpoint.planning.plan import Residency, RestoreMethod
from splitpoint_cli.bench.ending import run_until_signal
from splitpoint_cli.bench.harness import commit, hardware

LENGTHS = (16, 32, 64, 100, 128, 200, 320, 512, 700, 1000)
# The figure counts restores that take less than this.
SHORT_SECONDS = 0.02


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
        """Return the prediction's error as a share of the measured time."""
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
    rng = random.Random(0)
    prefixes = {length: random_ids(rng, length) for length in LENGTHS}
    found: list[Restore] = []
    async with serving(
        "predictions",
        workers=1,
        dtype=arguments.dtype,
        device_memory="512MiB",
        host_memory="512MiB",
        activations="always",
        threads=arguments.threads,
        # Each prefix is restored again and again.
        no_device_prefix_cache=True,
    ) as (stack, client):
        for prefix in prefixes.values():
            await client.generate(prefix, max_tokens=1, ignore_eos=True).complete()
        await asyncio.sleep(1.0)  # chunks are sealed in the background
        for number in range(arguments.rounds):
            for length, prefix in prefixes.items():
                prompt = [*prefix, *random_ids(rng, 1)]
                for name, options in ways(length).items():
                    answer = await client.generate(prompt, **options).complete()
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
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    result = run_until_signal(measure(arguments))
    finish(arguments, result, show)


if __name__ == "__main__":
    main()

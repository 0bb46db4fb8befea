"""Cost of comparing checksums in a restore: none, a worker's first read, its later reads.

One prefix in a real arena is restored in the three ways in turns, in one process. Hashing
begins with the restore, on the verifier's threads; the clock stops when the pages are filled
and, as `until_compared`, when the outcome of the comparison is there, too. A worker waits for
it at the end of the step that computes the new tokens.

    python -m benchmarks.verification [--shape NAME] [--link-rate RATE] [--rounds N]
        [--json] [--output FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.harness import finish, parser_of
from splitpoint.checkpoint.decoder import DecoderConfig
from splitpoint.config import parse_rate
from splitpoint.options.worker import VERIFY_RATE
from splitpoint.planning.schedule import Schedule
from splitpoint_cli.bench.restore.runs import Restorer
from splitpoint_cli.bench.restore.setup import Stored, stored_prefixes
from splitpoint_cli.bench.restore.workload import RestoreWorkload
from splitpoint_cli.bench.shared.ending import ending_by_signals
from splitpoint_cli.bench.shared.progress import Progress
from worker_service.device.cache import TORCH_TYPES
from worker_service.device.choice import choose_device, describe_device
from worker_service.model.decoder import Decoder
from worker_service.store.verifier import Verifier

NONE, FIRST, LATER = WAYS = ("none", "first read", "later reads")
_TILE_TOKENS = 256


def restore(stored: Stored, restorer: Restorer, verifier: Verifier | None) -> tuple[float, float]:
    """Return seconds until the pages are filled, and until the comparison is done as well."""
    began = time.perf_counter()
    checks = []
    if verifier is not None:
        chunks = [chunk for sequence in stored.sequences for chunk in sequence.chunks]
        checks.append(verifier.begin(stored.tensors, chunks))
    restorer.split(0, Schedule.PIPELINED, _TILE_TOKENS)
    filled = time.perf_counter() - began
    for check in checks:
        if check is not None:
            check.wait()
    return filled, time.perf_counter() - began


def measure(workload: RestoreWorkload, progress: Progress) -> dict[str, object]:
    device = choose_device(workload.device)
    if device.type == "cpu":
        torch.set_num_threads(workload.threads)
    config = DecoderConfig.of_shape(workload.model_shape)
    model = Decoder.random(config, workload.seed, device, TORCH_TYPES[workload.data_type])
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with stored_prefixes(workload, model, device) as stored:
        restorer = Restorer(stored, workload)
        later = Verifier(VERIFY_RATE.default)
        for number in progress.track("rounds", range(workload.repeats + 1)):
            first = Verifier(0.0)  # which has read nothing
            for way, verifier in ((NONE, None), (FIRST, first), (LATER, later)):
                took = restore(stored, restorer, verifier)
                if number:  # the round before warmed up
                    times[way].append(took)
            first.close()
        later.close()
        restorer.close()
        size = len(stored.sequences[0].chunks) * stored.tensors.layout.chunk_bytes
    result: dict[str, object] = {
        "device": describe_device(device),
        "shape": workload.shape,
        "dtype": workload.dtype,
        "cached_tokens": workload.prompt,
        "payload_bytes": size,
        "link_rate": workload.link_rate,
        "rounds": workload.repeats,
        "verify_rate": VERIFY_RATE.default,
    }
    for way in WAYS:
        filled, compared = zip(*times[way], strict=True)
        result[way] = {
            "seconds": round(statistics.median(filled), 5),
            "until_compared": round(statistics.median(compared), 5),
            "ratio": round(_ratio(filled, times[NONE]), 3),
            "ratio_until_compared": round(_ratio(compared, times[NONE]), 3),
        }
    return result


def _ratio(times: tuple[float, ...], base: list[tuple[float, float]]) -> float:
    """Return the median of the rounds' ratios to the restore alone."""
    return statistics.median(mine / alone for mine, (alone, _) in zip(times, base, strict=True))


def show(result: Mapping[str, Any]) -> None:
    print(f"{'compared':<12} {'restored':>10} {'/ none':>7} {'compared':>10} {'/ none':>7}")
    for way in WAYS:
        found = result[way]
        print(
            f"{way:<12} {1e3 * found['seconds']:>7.2f} ms {found['ratio']:>7.3f} "
            f"{1e3 * found['until_compared']:>7.2f} ms {found['ratio_until_compared']:>7.3f}"
        )


@ending_by_signals
def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="opt-125m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt", type=int, default=1984, help="cached tokens")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--link-rate", help="emulate a link of this rate on a CPU")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    rate = arguments.link_rate
    workload = RestoreWorkload(
        shape=arguments.shape,
        dtype=arguments.dtype,
        prompt=arguments.prompt,
        batch=1,
        device=arguments.device,
        threads=arguments.threads,
        repeats=arguments.rounds,
        seed=0,
        link_rate=None if rate is None else parse_rate(rate, field="link-rate"),
    )
    result = measure(workload, Progress())
    finish(arguments, result, show)


if __name__ == "__main__":
    main()

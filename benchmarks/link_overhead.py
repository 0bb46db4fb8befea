"""P_OH over kappa, measured: Figures 5 and 6 of the bottleneck paper, over an emulated link.

Each request has K cached tokens, which the store has, and T new ones; it gets one token. Ways:

    serial         load everything, then prefill: Eq. 3, the paper's baseline
    by layers      a streamed request: each layer's cache is loaded while the layer before computes
    beside others  load, then prefill; one request loads while another one prefills
    planned        as the planner chooses: parts of the prefix are rebuilt or recomputed
    cold           T tokens without a prefix: t_prefill

All are taken in turns, by one engine for each schedule. P_OH = 1 / U - 1 with U = t_prefill / TTFT
(Eq. 7, 8), as the paper measures it; of requests beside others, TTFT is the time for all of them
over their number. Beside it stands what splitpoint/costs/bottleneck.py predicts with the measured
rates of link and device. The link's rate is chosen for a kappa_crit (Eq. 6): of Llama-3.1-70B and
Qwen3-235B-A22B on the paper's machine.

    python -m benchmarks.link_overhead [--rounds N] [--kappa-crit X,X] [--cached K,K] [--new T,T]
        [--shape NAME] [--layers N] [--threads N] [--measured FILE] [--png FILE]
        [--json] [--output FILE]

`--measured FILE` prints the tables of an earlier run, and draws them, instead of measuring.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness import finish, parser_of, table
from splitpoint.config import counted
from splitpoint.costs.bottleneck import Bottleneck
from splitpoint.costs.profile import Profile
from splitpoint.errors import Internal
from splitpoint.planning.plan import Plan, PlanInput, Residency, RestoreMethod
from splitpoint.planning.planner import plan_request
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import DataType, ModelShape
from splitpoint_cli.bench.ending import ending_by_signals
from splitpoint_cli.bench.engine import (
    admission_of,
    make_model,
    outputs_until_idle,
    use_worker_kernels,
)
from splitpoint_cli.bench.harness import (
    CHUNK_TOKENS,
    MAX_BATCHED_TOKENS,
    Progress,
    built_in_shape,
)
from splitpoint_cli.bench.offload_host import OffloadHost
from splitpoint_cli.bench.offload_report import OffloadWorkload
from splitpoint_cli.output import check_picture, new_figure, seconds_text
from splitpoint_cli.top.bars import amount
from worker_service.counters import Counters
from worker_service.engine.engine import Engine
from worker_service.engine.sequence import Admission
from worker_service.lanes.lanes import EmulatedLink
from worker_service.profiling.profiler import measure
from worker_service.profiling.restore_costs import measure_overheads

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLD = "cold"
WAYS = SERIAL, BY_LAYERS, BESIDE, PLANNED = ("serial", "by layers", "beside others", "planned")
# Requests at once of the way "beside others".
AT_ONCE = 2
# kappa_crit with the 15 GB/s that the paper measured: Llama-3.1-70B, Qwen3-235B-A22B.
PAPER_KAPPA_CRIT = (3.26, 1.75)
CACHED, NEW = (64, 128, 256, 512, 1024), (32, 128)
CPU = torch.device("cpu")
# While C is measured, and the prefix is stored.
_FAST_LINK = 1e12

# -- arithmetic ------------------------------------------------------------------------------


def measured_alpha(
    serial: float, overlapped: float, link: float, prefill: float, requests: int = 1
) -> float:
    """Return alpha of Eq. 4, from the seconds of a request with and without overlap.

    `requests`: those at once, whose loads overlap the prefills of others: of n of them, n - 1 can.
    """
    share = (requests - 1) / requests if requests > 1 else 1.0
    return (serial - overlapped) / (share * min(link, prefill))


def crossing(points: Sequence[tuple[float, float]], level: float = 1.0) -> float | None:
    """Return the kappa at which P_OH reaches a level, between neighbours on logarithmic scales.

    `points`: (kappa, P_OH), by kappa. None if no two neighbours have the level between them.
    """
    for (left, low), (right, high) in itertools.pairwise(points):
        if low <= level <= high and low < high:
            if low <= 0:
                return left + (right - left) * (level - low) / (high - low)
            share = math.log(level / low) / math.log(high / low)
            return left * math.exp(share * math.log(right / left))
    return None


def link_rate_for(kappa_crit: float, shape: ModelShape, flops_per_second: float) -> float:
    """Return the link's bytes per second at which a model has this kappa_crit (Eq. 6)."""
    kappa_model = shape.prefill_flops_per_token / shape.kv_bytes_per_token
    return kappa_crit / kappa_model * flops_per_second


# -- runs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """One run, in seconds of one request: to the first token, and busy ones of link and device."""

    seconds: float
    link: float
    device: float
    plan: Plan | None = None


@dataclass(slots=True)
class Asker:
    """Asks the engines of a host for one token each time."""

    host: OffloadHost
    rng: random.Random
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.host.prefill()
        # Leased as long as the host lives: new tokens of requests are evicted, the prefix is not.
        self.host.store.match(("prefix", 0, 0), self.prefix)

    @property
    def prefix(self) -> Sequence[int]:
        return self.host.prompts[0]

    def measure_costs(self) -> Profile:
        """Measure link and device as a worker does at its start; plans are made by them."""
        engine = self.host.engine(Schedule.PIPELINED)
        profile = measure(engine.model, CPU, "link_overhead", lanes=engine.lanes)
        engine.watch_costs(measure_overheads(engine, profile))
        return profile

    def ask(self, way: str, cached: int, new: int) -> Sample:
        engine = self.host.engine(Schedule.SERIAL if way == SERIAL else Schedule.PIPELINED)
        plan = self._plan(engine, cached, new) if way == PLANNED else None
        count = AT_ONCE if way == BESIDE else 1
        requests = [self._admission(way, cached, new, plan) for _ in range(count)]
        matches = [self.host.store.match(each.key, each.prompt) for each in requests]
        if any(match.cached_tokens != cached for match in matches):
            raise Internal(f"the benchmark's store has not {cached} tokens of the prefix")
        counters, left = Counters(), count
        sample: Sample | None = None
        started = time.perf_counter()
        for admission, match in zip(requests, matches, strict=True):
            engine.admit(admission, match)
        for output in outputs_until_idle(engine, self.host.store):
            counters.add(output)
            left -= len(output.tokens)
            if not left and sample is None:
                seconds = time.perf_counter() - started
                link, device = counters.link_in_seconds, counters.compute_seconds
                sample = Sample(seconds / count, link / count, device / count, plan)
        if sample is None:
            raise Internal(f"{way}: no token came")
        return sample

    def _plan(self, engine: Engine, cached: int, new: int) -> Plan:
        """Return the plan of the moment: the engine refits its costs by its own restores."""
        host = self.host
        request = PlanInput(
            cached_tokens=cached,
            new_tokens=new,
            has_activations=host.has_activations,
            schedule=Schedule.PIPELINED,
            chunk_tokens=CHUNK_TOKENS,
            staging_tokens=host.memory.staging_pages * CHUNK_TOKENS,
            prefill_tokens=MAX_BATCHED_TOKENS,
        )
        return plan_request(host.shape, engine.profile, request)

    def _admission(self, way: str, cached: int, new: int, plan: Plan | None) -> Admission:
        """Return a request for one token, with new tokens that no earlier request had."""
        vocabulary = self.host.shape.vocabulary_size
        fresh = (self.rng.randrange(vocabulary) for _ in range(new))
        residency = Residency.STREAMED if way == BY_LAYERS else Residency.RESIDENT
        prompt = [*self.prefix[:cached], *fresh]
        admission = admission_of(f"{way} {next(self.numbers)}", prompt, 1, residency=residency)
        if plan is None:
            return admission
        return replace(
            admission,
            method=plan.method,
            split_tokens=plan.split_tokens,
            recomputed_tokens=plan.recomputed_tokens,
            tile_tokens=plan.tile_tokens,
            predicted_restore_seconds=plan.predicted_restore_seconds,
        )


def measure_all(options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Run the sweep for each kappa_crit."""
    torch.set_num_threads(options.threads)
    shape = replace(built_in_shape(options.shape), data_type=DataType.FLOAT32)
    shape = replace(shape, layer_count=options.layers or shape.layer_count)
    workload = OffloadWorkload(
        shape=options.shape,
        dtype=shape.data_type.value,
        batch=AT_ONCE,
        prompt=max(options.cached),
        new=max(options.new) + 1,
        link_rate=None,
        repeats=options.rounds,
        device="cpu",
        threads=options.threads,
        seed=options.seed,
    )
    use_worker_kernels(CPU, shape.data_type, [shape.head_dim])
    progress.say(f"{shape.name}: random weights")
    model = make_model(shape, options.seed, CPU)
    rng = random.Random(options.seed)
    prefix = tuple(rng.randrange(shape.vocabulary_size) for _ in range(max(options.cached)))
    link = EmulatedLink(_FAST_LINK)
    with closing(OffloadHost(model, workload, link=link, prompts=(prefix,))) as host:
        asker = Asker(host, rng)
        links = []
        for kappa_crit in options.kappa_crit:
            # Anew for each: the device's rate may have changed since the last one.
            link.bytes_per_second = _FAST_LINK
            flops = asker.measure_costs().prefill_flops_per_second
            link.bytes_per_second = link_rate_for(kappa_crit, shape, flops)
            links.append(_sweep(asker, link, options, kappa_crit, progress))
    return {
        "benchmark": "link_overhead",
        "model": shape.name,
        "layers": shape.layer_count,
        "dtype": shape.data_type.value,
        "threads": options.threads,
        "rounds": options.rounds,
        "seed": options.seed,
        "requests_beside_others": AT_ONCE,
        "links": links,
    }


def _sweep(
    asker: Asker,
    link: EmulatedLink,
    options: argparse.Namespace,
    kappa_crit: float,
    progress: Progress,
) -> dict[str, Any]:
    """Measure every K and T over the link as it is."""
    profile, shape = asker.measure_costs(), asker.host.shape
    limits = Bottleneck.of(shape, profile)
    runs: dict[tuple[str, int, int], Callable[[], Sample]] = {}
    for new in options.new:
        runs[COLD, 0, new] = partial(asker.ask, COLD, 0, new)
        for cached, way in itertools.product(options.cached, WAYS):
            runs[way, cached, new] = partial(asker.ask, way, cached, new)
    # Each way with the shortest and the longest prefix: kernels, pages, staging memory.
    ends = {0, min(options.cached), max(options.cached)}
    warming = [run for (_, cached, _), run in runs.items() if cached in ends]
    for run in progress.track("warming up", warming):
        run()
    samples = progress.in_turns(f"kappa_crit {kappa_crit:g}", runs, options.rounds)
    cells = []
    for new, cached in itertools.product(options.new, options.cached):
        mine = {way: samples[way, cached, new] for way in WAYS}
        cells.append(_cell(limits, cached, new, samples[COLD, 0, new], mine))
    return {
        "kappa_crit_asked": kappa_crit,
        "link_rate": link.bytes_per_second,
        "link_bytes_per_second": limits.link_bytes_per_second,
        "flops_per_second": limits.flops_per_second,
        "kv_bytes_per_token": limits.kv_bytes_per_token,
        "flops_per_token": limits.flops_per_token,
        "kappa_crit": limits.kappa_crit,
        "kappa_crit_measured": {
            str(new): {way: _measured_crit(cells, way, new) for way in WAYS} for new in options.new
        },
        "cells": cells,
    }


def _cell(
    limits: Bottleneck,
    cached: int,
    new: int,
    cold: Sequence[Sample],
    samples: Mapping[str, Sequence[Sample]],
) -> dict[str, Any]:
    """Return what `--json` has of one K and T: medians, and P_OH of each round's own cold run."""
    prefill = statistics.median(each.seconds for each in cold)
    serial, link, device = (
        statistics.median(getattr(each, name) for each in samples[SERIAL])
        for name in ("seconds", "link", "device")
    )
    ways: dict[str, Any] = {}
    for way, mine in samples.items():
        overheads = [
            each.seconds / alone.seconds - 1 for each, alone in zip(mine, cold, strict=True)
        ]
        seconds = statistics.median(each.seconds for each in mine)
        busy = statistics.median(each.device for each in mine)
        ways[way] = {
            "ttft_seconds": seconds,
            "runs": [each.seconds for each in mine],
            "link_seconds": statistics.median(each.link for each in mine),
            "device_seconds": busy,
            "device_share": busy / seconds,
            "link_overhead": statistics.median(overheads),
            "link_overhead_least": min(overheads),
            "link_overhead_most": max(overheads),
            "utilisation": 1 / (1 + statistics.median(overheads)),
        }
    for way, requests in ((BY_LAYERS, 1), (BESIDE, AT_ONCE)):
        overlapped = ways[way]["ttft_seconds"]
        ways[way]["alpha"] = measured_alpha(serial, overlapped, link, device, requests)
    plan = samples[PLANNED][-1].plan
    if plan is not None:
        ways[PLANNED] |= {
            "method": plan.method.value,
            "split_tokens": plan.split_tokens,
            "recomputed_tokens": plan.recomputed_tokens,
            "predicted_ttft_seconds": plan.predicted_ttft_seconds,
        }
    return {
        "cached_tokens": cached,
        "new_tokens": new,
        "kappa_ratio": cached / new,
        "prefill_seconds": prefill,
        "prefill_runs": [each.seconds for each in cold],
        "predicted": {
            "link_seconds": limits.link_seconds(cached),
            "prefill_seconds": limits.compute_seconds(new),
            "link_overhead": limits.link_overhead(cached, new),
            "utilisation": limits.utilisation(cached, new),
            "ttft_seconds": limits.ttft(cached, new),
            "overlapped_ttft_seconds": limits.ttft(cached, new, overlap=1),
        },
        "ways": ways,
    }


def _measured_crit(cells: Sequence[Mapping[str, Any]], way: str, new: int) -> float | None:
    """Return the kappa at which P_OH of one way is 1; None if the sweep does not reach it."""
    return crossing(
        sorted(
            (cell["kappa_ratio"], cell["ways"][way]["link_overhead"])
            for cell in cells
            if cell["new_tokens"] == new
        )
    )


# -- tables and pictures -----------------------------------------------------------------------


def show(result: Mapping[str, Any]) -> None:
    """Print a table in Markdown for each link."""
    for link in result["links"]:
        rate = link["link_bytes_per_second"] / 1e6
        flops = link["flops_per_second"] / 1e9
        print(
            f"\nkappa_crit {link['kappa_crit']:.2f}: link {rate:.0f} MB/s, device {flops:.0f} "
            "GFLOP/s\n"
        )
        print("\n".join(table(HEAD, _rows(link))))
        print()
        for new, by_way in link["kappa_crit_measured"].items():
            crossings = ", ".join(f"{way} {amount(kappa)}" for way, kappa in by_way.items())
            print(f"- P_OH = 1, T = {new}: at kappa {crossings}")
    print(f"\n{_setting(result)}; {result['hardware']}, commit {result['commit']}.")


def _setting(result: Mapping[str, Any]) -> str:
    layers, threads, rounds = (
        counted(result[f"{unit}s"], unit) for unit in ("layer", "thread", "round")
    )
    return f"{result['model']}, {layers}, {result['dtype']}, {threads}, medians of {rounds}"


HEAD = (
    *("T", "K", "kappa", "Eq. 8", *(f"P_OH, {way}" for way in WAYS)),
    *("U, serial", "U, planned", "device busy, planned", "alpha, by layers"),
    *("alpha, beside others", "TTFT, serial", "TTFT, planned", "planned"),
)


def _rows(link: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each K and T."""
    for cell in link["cells"]:
        ways = cell["ways"]
        serial, planned = ways[SERIAL], ways[PLANNED]
        yield (
            str(cell["new_tokens"]),
            f"{cell['cached_tokens']:,}",
            f"{cell['kappa_ratio']:g}",
            f"{cell['predicted']['link_overhead']:.2f}",
            *(_overhead_text(ways[way]) for way in WAYS),
            f"{serial['utilisation']:.2f}",
            f"{planned['utilisation']:.2f}",
            f"{planned['device_share']:.0%}",
            f"{ways[BY_LAYERS]['alpha']:.2f}",
            f"{ways[BESIDE]['alpha']:.2f}",
            seconds_text(serial["ttft_seconds"]),
            seconds_text(planned["ttft_seconds"]),
            _plan_text(planned),
        )


def _overhead_text(found: Mapping[str, Any]) -> str:
    least, most = found["link_overhead_least"], found["link_overhead_most"]
    return f"{found['link_overhead']:.2f} ({least:.2f} to {most:.2f})"


def _plan_text(planned: Mapping[str, Any]) -> str:
    match RestoreMethod(planned["method"]):
        case RestoreMethod.TOKENS:
            return f"{planned['recomputed_tokens']:,} from ids"
        case RestoreMethod.LOAD:
            return "all loaded"
        case _:
            return f"{planned['split_tokens']:,} from X"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw P_OH over kappa for each link and T: measured ways, and Eq. 8."""
    figure = new_figure()
    links = result["links"]
    for axes, link in zip(figure.subplots(1, len(links), squeeze=False)[0], links, strict=True):
        _draw_link(axes, link)
    figure.suptitle(_setting(result), fontsize=10)
    figure.savefig(path, format="png")


def _draw_link(axes: Axes, link: Mapping[str, Any]) -> None:
    colours = dict(zip(WAYS, ("tab:red", "tab:orange", "tab:green", "tab:blue"), strict=True))
    news = dict.fromkeys(cell["new_tokens"] for cell in link["cells"])
    marked = zip(news, itertools.cycle("os^v"), strict=False)
    for (new, marker), way in itertools.product(marked, WAYS):
        cells = [cell for cell in link["cells"] if cell["new_tokens"] == new]
        found = [cell["ways"][way] for cell in cells]
        middle = [each["link_overhead"] for each in found]
        axes.errorbar(
            [cell["kappa_ratio"] for cell in cells],
            middle,
            [
                [each["link_overhead"] - each["link_overhead_least"] for each in found],
                [each["link_overhead_most"] - each["link_overhead"] for each in found],
            ],
            label=f"{way}, T = {new}",
            color=colours[way],
            marker=marker,
            linewidth=0.8,
        )
    kappas = sorted(cell["kappa_ratio"] for cell in link["cells"])
    axes.plot(kappas, [each / link["kappa_crit"] for each in kappas], "k--", label="Eq. 8")
    axes.axhline(1, color="black", linewidth=0.5)
    axes.axvline(link["kappa_crit"], color="black", linewidth=0.5, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(f"kappa_crit {link['kappa_crit']:.2f} (dotted)", fontsize=9)
    axes.set_xlabel("kappa: cached tokens for each new one")
    axes.set_ylabel("P_OH")
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=7)


# -- the command ---------------------------------------------------------------------------------


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def read(text: str) -> list[Any]:
        return [kind(each) for each in text.split(",")]

    return read


@ending_by_signals
def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--kappa-crit", type=_numbers(float), default=list(PAPER_KAPPA_CRIT), metavar="X,X"
    )
    parser.add_argument("--cached", type=_numbers(int), default=list(CACHED), metavar="K,K")
    parser.add_argument("--new", type=_numbers(int), default=list(NEW), metavar="T,T")
    parser.add_argument("--shape", default="opt-125m")
    parser.add_argument("--layers", type=int, default=0, help="of the shape; 0: all")
    # Copies have the other core of two.
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measured", type=Path, metavar="FILE", help="print an earlier result")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw P_OH over kappa")
    options = parser.parse_args(arguments)
    if any(cached % CHUNK_TOKENS or cached <= 0 for cached in options.cached):
        parser.error(f"--cached: whole chunks of {CHUNK_TOKENS} tokens")
    if any(not 0 < new <= MAX_BATCHED_TOKENS for new in options.new):
        parser.error(f"--new: 1 to {MAX_BATCHED_TOKENS} tokens, which one step prefills")
    check_picture(options.png)
    if options.measured is not None:
        result = json.loads(options.measured.read_text())
        show(result)
    else:
        result = measure_all(options, Progress())
        finish(options, result, show)
    if options.png is not None:
        draw(result, options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""KVPR's experiments: the paper's figures beside ours, predicted and measured.

Without options: what the planner predicts for the paper's machines, beside the figures
that the paper prints (Tables 1 to 5 and the text of sections 4, A.4 and A.6). `--measure`: the
same three ways to decode, measured with a small shape over an emulated link. `--measured FILE`
prints such a result as tables, and with `--pictures FOLDER` draws it: the share of a step in
which the device computes (Figure 8), the parts of a step (Figure 10), and the predicted split
over the generation (Figure 12). docs/papers/kvpr.md holds all of it.

    python -m benchmarks.kvpr_tables [--measure | --measured FILE [--pictures FOLDER]] [--json]
        [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import finish, parser_of, table
from splitpoint.config import format_size
from splitpoint.costs.profile import BUILT_IN_PROFILES, Profile
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.weight_placement import WeightSizes
from splitpoint.planning.weight_schedule import WeightPiece
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, ModelShape
from splitpoint_cli.bench.ending import ended_by_signals
from splitpoint_cli.bench.harness import Progress, built_in_shape, commit, hardware, thread_count
from splitpoint_cli.bench.offload_costs import BatchCosts
from splitpoint_cli.bench.offload_report import (
    FULL_LOAD,
    KVPR,
    PIPELINED,
    OffloadResults,
    OffloadWorkload,
    StepPart,
    parts_of,
)
from splitpoint_cli.output import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WAYS = (FULL_LOAD, KVPR, PIPELINED)
CHUNK_TOKENS = 64
# X of this many tokens fits the staging memory that a worker takes on such a GPU.
STAGING_TOKENS = 48 * CHUNK_TOKENS

A100 = BUILT_IN_PROFILES["a100-40"]
# Section A.5: 89.2 TFLOPS and 16 GB/s (PCIe 4.0 x8) at their peaks, 448 GB/s of memory;
# assumed to reach the shares of them that the built-in profiles assume.
RTX_5000 = replace(
    A100,
    link_bytes_per_second=12.5e9,
    rebuild_flops_per_second=0.6 * 89.2e12,
    memory_seconds_per_byte=1 / (0.8 * 448e9),
    description="Quadro RTX 5000, PCIe 4 x8: assumed from data sheets, not measured",
)
# Eight batches of 32, of which each layer computes one after the other (section 4.2).
EFFECTIVE_BATCH = 256
PROMPTS, NEW = (256, 512, 1024), (32, 128)

# Section A.6: eight such cards on one AMD EPYC, with eight channels of DDR4-3200 (204.8 GB/s at
# the peak) of which reads are assumed to reach 80 %.
HOST_BYTES_PER_SECOND = 0.8 * 204.8e9
PROCESSES = (1, 2, 4, 8)
# Figure 12 and A.4: split by length, of OPT-6.7B, 64 sequences, prompt 128, 32 new tokens.
SPLITS = {128: 102, 160: 128}


@dataclass(frozen=True, slots=True)
class PaperRow:
    """A row of Table 3 or 4: decode seconds of Accelerate and of KVPR, 64 sequences."""

    shape: str
    prompt: int
    new: int
    full_load: float
    kvpr: float
    note: str = ""


LATENCIES = (
    PaperRow("opt-6.7b", 128, 32, 8.905, 6.651),
    PaperRow("opt-6.7b", 128, 128, 71.327, 45.766, "outlier: 2.0 × the seconds a token of 128/32"),
    PaperRow("opt-6.7b", 256, 32, 26.825, 19.138, "outlier: longer than 512/32"),
    PaperRow("opt-6.7b", 256, 128, 88.354, 61.597),
    PaperRow("opt-6.7b", 512, 32, 24.390, 20.349),
    PaperRow("opt-6.7b", 512, 128, 110.277, 93.932),
    PaperRow("opt-13b", 128, 32, 11.409, 9.148),
    PaperRow("opt-13b", 128, 128, 73.896, 66.119),
    PaperRow("opt-13b", 256, 32, 19.381, 16.654),
    PaperRow("opt-13b", 256, 128, 104.115, 88.492),
    PaperRow("opt-13b", 512, 32, 35.066, 29.215),
    PaperRow("opt-13b", 512, 128, 168.155, 138.377),
)
# Section 4.2: the most by which KVPR's throughput exceeds FlexGen's; the figure's bars have
# no numbers.
SPEEDUPS = {"opt-6.7b": 15.1, "opt-13b": 46.2, "opt-30b": 29.0}
# Table 5: tokens/s of FlexGen and KVPR, OPT-6.7B, weights on the host.
LOW_END = {
    (256, 32): (50.057, 53.976),
    (256, 128): (46.779, 49.860),
    (512, 32): (29.614, 33.666),
    (512, 128): (28.650, 32.277),
    (1024, 32): (15.778, 18.285),
    (1024, 128): (16.194, 18.108),
}
# Table 2: tokens/s of FlexGen, of KVPR with coarse weights and with W_K, W_V first;
# OPT-6.7B, prompt 256, 64 new tokens.
SMALL_BATCHES = {
    1: (1.761, 1.749, 1.774),
    2: (3.488, 3.461, 3.586),
    4: (6.646, 6.766, 6.696),
    8: (12.826, 12.930, 12.986),
    16: (23.795, 23.613, 24.557),
    32: (41.210, 43.462, 43.945),
}
# Table 1: MB of K and V of a layer, ms on the link, and "computation" ms; batch 32, 1,024 tokens.
ONE_LAYER = {
    "opt-6.7b": (512, 15.6, 0.3509),
    "opt-13b": (640, 19.5, 0.4388),
    "opt-30b": (896, 27.3, 0.6143),
}


def shape_of(name: str) -> ModelShape:
    return replace(BUILT_IN_SHAPES[name], data_type=DataType.FLOAT16)


# -- predicted -----------------------------------------------------------------------------


def step_costs(
    shape: ModelShape, profile: Profile, batch: int, cached: int, *, weights_on_host: bool
) -> BatchCosts:
    """Return the costs of a decode step of `batch` sequences whose cache is on the host.

    The device computes each weight and each cached token once: it is bound by reading them
    or by the products.
    """
    sizes = WeightSizes.of(shape)
    layers = shape.layer_count * sizes.layer
    attention = batch * cached * shape.kv_bytes_per_token * profile.memory_seconds_per_byte
    if weights_on_host:
        key_value = shape.layer_count * sizes.pieces[WeightPiece.KEY_VALUE]
        profile = replace(profile, host_weight_bytes=layers, host_kv_weight_bytes=key_value)
    return BatchCosts(
        shape=shape,
        profile=profile,
        batch=batch,
        cached=cached,
        has_activations=True,
        chunk_tokens=CHUNK_TOKENS,
        staging_tokens=STAGING_TOKENS,
        compute_seconds=products_seconds(shape, profile, batch) + attention,
    )


def products_seconds(shape: ModelShape, profile: Profile, batch: int) -> float:
    """Return the seconds of a step's products: of reading the weights, or of computing."""
    sizes = WeightSizes.of(shape)
    matrices = shape.layer_count * sizes.layer + sizes.head
    read = matrices * profile.memory_seconds_per_byte
    return max(read, batch * matrices / shape.data_type.size * 2 / profile.rebuild_flops_per_second)


def step_seconds(costs: BatchCosts) -> dict[str, float]:
    """Return the predicted seconds of a step in each way, each with its own best split."""
    return {
        FULL_LOAD: costs.step_seconds(0),
        KVPR: costs.best(Schedule.COLUMN).step_seconds,
        PIPELINED: costs.best(Schedule.PIPELINED).step_seconds,
    }


def decode_seconds(
    shape: ModelShape,
    profile: Profile,
    batch: int,
    prompt: int,
    new: int,
    *,
    weights_on_host: bool = False,
) -> dict[str, float]:
    """Return the seconds of `new` steps; half way through, a step is as long as on average."""
    costs = step_costs(shape, profile, batch, prompt + new // 2, weights_on_host=weights_on_host)
    return {way: new * seconds for way, seconds in step_seconds(costs).items()}


def one_layer_table() -> list[str]:
    rows = []
    for name, (megabytes, link, computation) in ONE_LAYER.items():
        shape, tokens = shape_of(name), 32 * 1024
        size = tokens * shape.kv_bytes_per_token_layer
        rebuild = tokens * shape.rebuild_flops_per_token_layer / 312e12
        rows.append(
            (
                shape.name,
                f"{size / 2**20:.0f} ({megabytes})",
                # The paper divides its MB by 32 GiB/s.
                f"{1e3 * size / (32 * 2**30):.1f} ({link})",
                f"{1e3 * rebuild:.2f} ({computation})",
                f"{1e3 * size / 1.555e12:.2f}",
            )
        )
    return table(
        ("model", "K,V of a layer, MiB", "link, ms", "rebuild at peak, ms", "reading K,V, ms"), rows
    )


def latency_table() -> list[str]:
    rows = []
    for row in LATENCIES:
        shape = shape_of(row.shape)
        seconds = decode_seconds(shape, A100, 64, row.prompt, row.new)
        rows.append(
            (
                shape.name,
                f"{row.prompt}/{row.new}",
                f"{row.full_load:.1f}",
                f"{row.kvpr:.1f}",
                f"×{row.kvpr / row.full_load:.2f}",
                *predicted(seconds),
                row.note,
            )
        )
    head = ("model", "prompt/new", "Accelerate", "KVPR", "KVPR / Accelerate", *PREDICTED, "")
    return table(head, rows)


def throughput_table() -> list[str]:
    rows = []
    for name, most in SPEEDUPS.items():
        shape = shape_of(name)
        for prompt in PROMPTS:
            for new in NEW:
                if prompt + new > shape.context_length:
                    continue
                seconds = decode_seconds(
                    shape, A100, EFFECTIVE_BATCH, prompt, new, weights_on_host=True
                )
                rates = tokens_per_second(seconds, EFFECTIVE_BATCH, new)
                gain = 100 * (rates[KVPR] / rates[FULL_LOAD] - 1)
                ours = 100 * (rates[PIPELINED] / rates[FULL_LOAD] - 1)
                rows.append(
                    (
                        shape.name,
                        f"{prompt}/{new}",
                        *(f"{rates[way]:.0f}" for way in WAYS),
                        f"{gain:.0f} %",
                        f"{ours:.0f} %",
                        f"up to {most} %",
                    )
                )
    ways = (f"{way}, tokens/s" for way in WAYS)
    head = ("model", "prompt/new", *ways, "KVPR's gain", "our gain", "KVPR's gain in the paper")
    return table(head, rows)


def low_end_table() -> list[str]:
    shape, rows = shape_of("opt-6.7b"), []
    for (prompt, new), (flexgen, kvpr) in LOW_END.items():
        seconds = decode_seconds(
            shape, RTX_5000, EFFECTIVE_BATCH, prompt, new, weights_on_host=True
        )
        rates = tokens_per_second(seconds, EFFECTIVE_BATCH, new)
        paper = f"{flexgen:.1f}", f"{kvpr:.1f}", f"×{kvpr / flexgen:.2f}"
        gain = f"×{rates[KVPR] / rates[FULL_LOAD]:.2f}"
        rows.append((f"{prompt}/{new}", *paper, *(f"{rates[way]:.1f}" for way in WAYS), gain))
    head = ("prompt/new", "FlexGen", "KVPR", "ratio", *WAYS, "ratio predicted")
    return table(head, rows)


def small_batch_table() -> list[str]:
    shape, rows = shape_of("opt-6.7b"), []
    for batch, (flexgen, coarse, fine) in SMALL_BATCHES.items():
        seconds = decode_seconds(shape, A100, batch, 256, 64, weights_on_host=True)
        rates = tokens_per_second(seconds, batch, 64)
        paper = (f"{flexgen:.2f}", f"{coarse:.2f}", f"{fine:.2f}")
        rows.append((str(batch), *paper, *(f"{rates[way]:.2f}" for way in WAYS)))
    head = ("batch", "FlexGen", "KVPR, coarse", "KVPR, W_K W_V first", *WAYS)
    return table(head, rows)


def loop_table() -> list[str]:
    """Return tokens/s of one batch of section 4.2, and of the eight that share the weights."""
    one, prompt, new, rows = EFFECTIVE_BATCH // 8, 512, 32, []
    for name in SPEEDUPS:
        shape = shape_of(name)
        rates = {
            (batch, way): rate
            for batch in (one, EFFECTIVE_BATCH)
            for way, rate in tokens_per_second(
                decode_seconds(shape, A100, batch, prompt, new, weights_on_host=True), batch, new
            ).items()
        }
        for way in (KVPR, PIPELINED):
            alone, loop = rates[one, way], rates[EFFECTIVE_BATCH, way]
            rows.append((shape.name, way, f"{alone:.1f}", f"{loop:.1f}", f"×{loop / alone:.2f}"))
    head = ("model, 512/32", "order", f"one batch of {one}", f"eight of {one}", "gain of the loop")
    return table(head, rows)


def splits_over_generation() -> dict[str, list[int]]:
    """Return the best split by length, for the setting of Figure 12, in both orders."""
    shape = shape_of("opt-6.7b")
    lengths = list(range(min(SPLITS), max(SPLITS) + 1, 8))
    found: dict[str, list[int]] = {"length": lengths, KVPR: [], PIPELINED: []}
    for length in lengths:
        costs = step_costs(shape, A100, 64, length, weights_on_host=False)
        costs = replace(costs, chunk_tokens=1)
        found[KVPR].append(costs.best(Schedule.COLUMN).split_tokens)
        found[PIPELINED].append(costs.best(Schedule.PIPELINED).split_tokens)
    return found


def splits_table() -> list[str]:
    found = splits_over_generation()
    rows = [
        (str(length), str(SPLITS.get(length, "")), str(kvpr), str(ours))
        for length, kvpr, ours in zip(found["length"], found[KVPR], found[PIPELINED], strict=True)
    ]
    return table(("tokens", "the paper's split", KVPR, PIPELINED), rows)


def shared_host_table() -> list[str]:
    """Return tokens/s of each of several processes whose caches share one host's memory.

    A process that attends on the processor reads all K and V there in each step. One that
    streams reads what crosses its own link, at the link's rate or its share of the memory's.
    """
    shape, batch, prompt, new = shape_of("opt-6.7b"), 32, 1024, 32
    cached, alone, rows = prompt + new // 2, dict[str, float](), []
    for count in PROCESSES:
        share = HOST_BYTES_PER_SECOND / count
        rate = min(A100.link_bytes_per_second, share)
        profile = replace(A100, link_bytes_per_second=rate)
        costs = step_costs(shape, profile, batch, cached, weights_on_host=False)
        on_processor = batch * cached * shape.kv_bytes_per_token / share
        seconds = {
            "attention on the processor": products_seconds(shape, A100, batch) + on_processor,
            KVPR: costs.best(Schedule.COLUMN).step_seconds,
            PIPELINED: costs.best(Schedule.PIPELINED).step_seconds,
        }
        rates = {way: batch / each for way, each in seconds.items()}
        alone = alone or rates
        cells = (f"{rate:.0f} (×{rate / alone[way]:.2f})" for way, rate in rates.items())
        rows.append((str(count), *cells))
    return table(("processes", *alone), rows)


PREDICTED = ("full load", "KVPR's order", "pipelined", "KVPR / load", "pipelined / KVPR")


def predicted(seconds: Mapping[str, float]) -> tuple[str, ...]:
    full, kvpr, ours = (seconds[way] for way in WAYS)
    return (
        *(f"{each:.1f}" for each in (full, kvpr, ours)),
        f"×{kvpr / full:.2f}",
        f"×{ours / kvpr:.2f}",
    )


def tokens_per_second(seconds: Mapping[str, float], batch: int, new: int) -> dict[str, float]:
    return {way: batch * new / each for way, each in seconds.items()}


def show_predicted() -> None:
    """Print every table of the paper beside its prediction."""
    for heading, lines in (
        ("Latency: weights on the device, 64 sequences, seconds", latency_table()),
        ("Throughput: weights on the host, 256 sequences", throughput_table()),
        ("Throughput on a small GPU, tokens/s (Table 5)", low_end_table()),
        ("Small batches, weights on the host, tokens/s (Table 2)", small_batch_table()),
        ("Batches in a loop: weights on the host, tokens/s (Algorithm 1)", loop_table()),
        ("One layer, 32 x 1,024 tokens: ours (the paper's Table 1)", one_layer_table()),
        ("The split over the generation, OPT-6.7B, 64 sequences (Figure 12)", splits_table()),
        ("Processes on one host: tokens/s of each, over one alone (A.6)", shared_host_table()),
    ):
        print(f"### {heading}\n")
        print("\n".join(lines), end="\n\n")


# -- measured ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One measured row: `batch` sequences of a scaled shape; weights on either side."""

    batch: int
    prompt: int
    new: int
    weights_on_host: bool
    micro_batch: int | None = None


CASES = (
    *(Case(2, prompt, 32, weights_on_host=False) for prompt in (128, 256, 512)),
    *(Case(4, prompt, 6, weights_on_host=True) for prompt in (128, 256, 512)),
    # One batch, and four of them in a loop (Algorithm 1).
    Case(8, 512, 6, weights_on_host=True),
    Case(32, 512, 6, weights_on_host=True, micro_batch=8),
)


def measure(
    shape: ModelShape, cases: Sequence[Case], link_rate: float, repeats: int
) -> dict[str, Any]:
    """Decode every case in all ways of `bench offload`; medians over the steps."""
    from splitpoint_cli.bench.offload_runs import run_all  # needs torch

    progress, rows = Progress(), []
    for case in cases:
        workload = OffloadWorkload(
            shape=shape.name,
            dtype="float32",
            link_rate=link_rate,
            repeats=repeats,
            device="cpu",
            threads=thread_count(0),
            seed=0,
            **asdict(case),
        )
        rows.append(_row(case, run_all(shape, workload, progress, None)))
    return {
        "benchmark": "kvpr_tables",
        "shape": shape.name,
        "dtype": "float32",
        "link_rate": link_rate,
        "repeats": repeats,
        "hardware": hardware(),
        "commit": commit(),
        "rows": rows,
        "predicted_splits": splits_over_generation(),
    }


def _row(case: Case, results: OffloadResults) -> dict[str, Any]:
    found = results.contenders
    tokens = {found[way].runs[0].tokens for way in WAYS}
    return {
        **asdict(case),
        "step_seconds": {way: round(found[way].step_seconds, 5) for way in WAYS},
        "splits": {way: found[way].split_tokens for way in WAYS},
        "device_bytes": {way: found[way].runs[0].device_bytes for way in WAYS},
        "tokens_per_second": {way: round(case.batch / found[way].step_seconds, 3) for way in WAYS},
        "parts_of_a_step": {way: parts_of(found[way]) for way in WAYS},
        "computing_shares": {
            way: [round(step.computing_share, 4) for step in found[way].runs[-1].steps]
            for way in WAYS
        },
        "equal_tokens": len(tokens) == 1,
    }


def show_measured(result: Mapping[str, Any]) -> None:
    """Print a result of `measure` as a table."""
    rows = []
    for row in result["rows"]:
        seconds, splits = row["step_seconds"], row["splits"]
        rows.append(
            (
                "host" if row["weights_on_host"] else "device",
                str(row["batch"]),
                str(row["prompt"]),
                *(f"{1e3 * seconds[way]:.0f} ms, l = {splits[way]}" for way in WAYS),
                f"×{seconds[KVPR] / seconds[FULL_LOAD]:.2f}",
                f"×{seconds[PIPELINED] / seconds[KVPR]:.2f}",
                "equal" if row["equal_tokens"] else "differ",
            )
        )
    head = ("weights", "batch", "prompt", *WAYS, "KVPR / load", "pipelined / KVPR", "tokens")
    print("\n".join(table(head, rows)), end="\n\n")
    print("\n".join(batches_table(result)))
    print(
        f"\nA decode step, medians: {result['shape']} {result['dtype']}, link emulated at "
        f"{result['link_rate'] / 1e6:g} MB/s, {result['hardware']}, commit {result['commit']}."
    )


def batches_table(result: Mapping[str, Any]) -> list[str]:
    """Return tokens/s and device memory of the cases whose weights cross the link."""
    rows = []
    for row in result["rows"]:
        if row["weights_on_host"]:
            memory, rates = row["device_bytes"], row["tokens_per_second"]
            looped = row["micro_batch"]
            rows.append(
                (
                    f"{row['batch']} x {row['prompt']}",
                    "" if looped is None else f"{row['batch'] // looped} of {looped}",
                    *(f"{rates[way]:.1f}, {format_size(memory[way])}" for way in WAYS),
                )
            )
    return table(("sequences", "batches of KVPR's order", *WAYS), rows)


def draw(result: Mapping[str, Any], folder: Path) -> None:
    """Write the pictures of a result of `measure`. Raises MissingExtra without matplotlib."""
    sides = {"weights on the device": False, "weights on the host": True}
    # The longest case of each side that has one batch of KVPR's order.
    rows = {
        title: max(
            (row for row in result["rows"] if row["weights_on_host"] is on_host),
            key=lambda row: (row["micro_batch"] is None, row["prompt"], row["batch"]),
        )
        for title, on_host in sides.items()
    }
    for name, picture in (
        ("kvpr-utilisation", _utilisation(rows)),
        ("kvpr-breakdown", _breakdown(rows)),
        ("kvpr-splits", _splits(result["predicted_splits"])),
    ):
        picture.savefig(folder / f"{name}.png", format="png")


def _utilisation(rows: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the share of each step in which the device computes, over the steps (Figure 8)."""
    figure = new_figure()
    for axes, (title, row) in zip(figure.subplots(1, len(rows)), rows.items(), strict=True):
        for way, style in zip(WAYS, (":", "--", "-"), strict=True):
            shares = [100 * share for share in row["computing_shares"][way]]
            axes.plot(range(1, len(shares) + 1), shares, style, label=way)
        axes.set_title(_title(title, row), fontsize=10)
        axes.set_xlabel("decode step")
        axes.set_ylabel("device computes, % of the step")
        axes.set_ylim(0, 100)
        axes.grid(linewidth=0.3)
        axes.legend(fontsize=8)
    return figure


def _breakdown(rows: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw what keeps link and device busy in a step, in shares of the step (Figure 10)."""
    figure = new_figure()
    for axes, (title, row) in zip(figure.subplots(1, len(rows)), rows.items(), strict=True):
        names, drawn = list[str](), set[StepPart]()
        for way in WAYS:
            parts, step = row["parts_of_a_step"][way], row["step_seconds"][way]
            for lane in ("link", "device"):
                left, place = 0.0, len(names)
                names.append(f"{way}: {lane}")
                for number, part in enumerate(StepPart):
                    if part.value.startswith("link") is (lane == "link") and part.value in parts:
                        share = 100 * parts[part.value] / step
                        label = None if part in drawn else part.value
                        drawn.add(part)
                        axes.barh(place, share, left=left, color=f"C{number}", label=label)
                        left += share
        axes.set_yticks(range(len(names)), names, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(_title(title, row), fontsize=10)
        axes.set_xlabel("% of the step")
        axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    return figure


def _splits(found: Mapping[str, Sequence[int]]) -> Figure:
    """Draw the predicted split over the length, and the paper's (Figure 12)."""
    figure = new_figure()
    axes = figure.subplots()
    axes.plot(list(SPLITS), list(SPLITS.values()), "k:", label="the paper, first and last step")
    for way, style in ((KVPR, "--"), (PIPELINED, "-")):
        axes.plot(found["length"], found[way], style, label=f"{way}, predicted")
    axes.set_title("OPT-6.7B, 64 sequences, A100 of 40 GB", fontsize=10)
    axes.set_xlabel("tokens of each sequence")
    axes.set_ylabel("split: tokens rebuilt from activations")
    axes.set_ylim(bottom=0)
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=8)
    return figure


def _title(side: str, row: Mapping[str, Any]) -> str:
    return f"{side}: {row['batch']} x {row['prompt']} tokens"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--measure", action="store_true", help="Decode over an emulated link.")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="Print such a result.")
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="Draw the result of --measured."
    )
    parser.add_argument("--shape", default="opt-125m", help="Shape to measure (%(default)s).")
    parser.add_argument(
        "--link-rate", type=float, default=500e6, help="Bytes per second (%(default)s)."
    )
    parser.add_argument("--repeats", type=int, default=1, help="Runs of each way (%(default)s).")
    options: argparse.Namespace = parser.parse_args(arguments)
    if options.pictures is not None and options.measured is None:
        parser.error("--pictures draws the result of --measured")
    if options.measured is not None:
        result = json.loads(options.measured.read_text())
        show_measured(result)
        if options.pictures is not None:
            draw(result, options.pictures)
    elif options.measure:
        with ended_by_signals():
            shape = built_in_shape(options.shape)
            result = measure(shape, CASES, options.link_rate, options.repeats)
        finish(options, result, show_measured)
    else:
        show_predicted()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`splitpoint bottleneck`: whether link or device limits a prefill, and what would help most.

The equations are those of splitpoint/costs/bottleneck.py. docs/papers/bottlenecks.md has what it
prints for the paper's models and machines.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from splitpoint.config import counted, format_size, parse_rate, parse_size
from splitpoint.costs.bottleneck import Bottleneck
from splitpoint.costs.profile import MACHINES, Machine, load_profile
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import Plan, PlanInput
from splitpoint.planning.planner import plan_request
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import Encoding, ModelShape
from splitpoint_cli.models import KNOWN_SHAPES, NamedModel, find_named
from splitpoint_cli.output import (
    AsJson,
    OutputFile,
    check_picture,
    facts_table,
    hand_over,
    new_figure,
    print_table,
    save_picture,
    seconds_text,
    with_exit_codes,
)
from splitpoint_cli.planning.size import restore_words
from splitpoint_cli.top.bars import amount
from splitpoint_cli.traces.arrival import Arrival
from splitpoint_cli.traces.formats import load_trace
from splitpoint_cli.traces.generators import PUBLISHED
from splitpoint_cli.traces.statistics import quantile
from worker_service.device.memory import STAGING_PAGES

CHUNK_TOKENS = 64
# (K, T) of the paper's workloads: ShareGPT's mean (6.4), the others' medians (4.2).
PAPER_WORKLOADS = {"ShareGPT": (11_115, 82), "NarrativeQA": (57_000, 12), "FinQA": (167_000, 23)}
# Usual KV heads of grouped queries, and cached elements of a layer with latent attention.
_GROUPED_HEADS, _LATENT_WIDTH = 8, 576
_QUANTILES = (0.1, 0.5, 0.9, 0.99)
# Ratios of the roofline.
_LEAST_KAPPA, _MOST_KAPPA = 0.1, 1e5


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, as pairs of K cached and T new tokens; T is at least 1."""

    name: str
    requests: Sequence[tuple[int, int]]

    @property
    def cached(self) -> float:
        """Mean of K."""
        return statistics.fmean(cached for cached, _ in self.requests)

    @property
    def new(self) -> float:
        """Mean of T."""
        return statistics.fmean(new for _, new in self.requests)

    def kappas(self) -> list[float]:
        """Return K / T of each request, sorted."""
        return sorted(cached / new for cached, new in self.requests)


def workload_of(name: str, arrivals: Iterable[Arrival], block_tokens: int) -> Workload:
    """Return a trace's requests: leading blocks that an earlier request had are cached."""
    known: set[int] = set()
    requests = []
    for each in arrivals:
        seen = next(
            (place for place, block in enumerate(each.hash_ids) if block not in known),
            len(each.hash_ids),
        )
        known.update(each.hash_ids)
        cached = min(seen * block_tokens, each.input_length - 1)
        requests.append((cached, each.input_length - cached))
    return Workload(name, requests)


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a machine, analysed.

    Attributes:
        weight_bytes: as a worker on the machine holds them.
        memory_bytes: of the device for K and V; None: unknown, or less than the weights.
    """

    shape: ModelShape
    weight_bytes: int
    machine: Machine
    limits: Bottleneck
    memory_bytes: int | None

    def figures(self, workload: Workload) -> dict[str, Any]:
        """Return what `--json` prints of a workload: times in seconds, means of a request."""
        limits, cached, new = self.limits, workload.cached, workload.new
        kappas, ttft = workload.kappas(), limits.ttft(cached, new)
        overlapped = statistics.fmean(limits.ttft(*each, overlap=1) for each in workload.requests)
        memory = self.memory_bytes
        return {
            "name": workload.name,
            "request_count": len(workload.requests),
            "cached_tokens": cached,
            "new_tokens": new,
            "kappa_ratio": {f"p{100 * share:g}": quantile(kappas, share) for share in _QUANTILES},
            "link_bound_share": statistics.fmean(each > limits.kappa_crit for each in kappas),
            "link_seconds": limits.link_seconds(cached),
            "prefill_seconds": limits.compute_seconds(new),
            "ttft_seconds": ttft,
            "overlapped_ttft_seconds": overlapped,
            "utilisation": limits.utilisation(cached, new),
            "link_overhead": limits.link_overhead(cached, new),
            "requests_at_once": memory and limits.requests_at_once(memory, cached, new),
            "scheduled_tokens": memory and limits.scheduled_tokens(memory, cached, new),
            "joules": self._joules(cached, new),
            "help": self._help(cached, new, ttft, overlapped),
        }

    def restore(self, workload: Workload) -> Plan | None:
        """Return the best plan for the mean request; None if it exceeds the model's context."""
        cached, new = round(workload.cached), max(1, round(workload.new))
        if cached + new > self.shape.context_length:
            return None
        return plan_request(
            self.shape,
            self.machine.profile,
            PlanInput(
                cached,
                new,
                has_activations=self.shape.activations_can_pay,
                schedule=Schedule.PIPELINED,
                chunk_tokens=CHUNK_TOKENS,
                staging_tokens=STAGING_PAGES * CHUNK_TOKENS,
            ),
        )

    def _joules(self, cached: float, new: float) -> float | None:
        """Return the energy of the device until the first token; None: its power is unknown."""
        machine, limits = self.machine, self.limits
        if machine.idle_watts is None or machine.prefill_watts is None:
            return None
        idle = machine.idle_watts * limits.link_seconds(cached)
        return idle + machine.prefill_watts * limits.compute_seconds(new)

    def _help(self, cached: float, new: float, ttft: float, overlapped: float) -> dict[str, float]:
        """Return by which factor each change brings the first token earlier, the best one first."""
        limits, shape, profile = self.limits, self.shape, self.machine.profile
        token, link = limits.kv_bytes_per_token, limits.link_bytes_per_second
        rates = {
            "twice the lanes, or the next PCIe generation": 2 * link,
            "NVLink-C2C": MACHINES["gh200"].profile.link_bytes_per_second,
        }
        if profile.memory_seconds_per_byte:
            rates["unified HBM"] = 1 / profile.memory_seconds_per_byte
        sizes: dict[str, float] = {}
        if shape.latent_width is None:
            sizes["grouped queries"] = token * _GROUPED_HEADS / shape.kv_head_count
            sizes["latent attention"] = shape.layer_count * _LATENT_WIDTH * shape.data_type.size
        for encoding in (Encoding.INT8, Encoding.INT4):
            stored = shape.stored_kv_bytes_per_token(encoding) / shape.kv_bytes_per_token
            sizes[f"{encoding.value} cache"] = token * stored
        after = {
            name: replace(limits, link_bytes_per_second=rate).ttft(cached, new)
            for name, rate in rates.items()
        }
        after |= {
            name: replace(limits, kv_bytes_per_token=size).ttft(cached, new)
            for name, size in sizes.items()
        }
        after["other requests compute meanwhile"] = overlapped
        gains = {name: ttft / seconds for name, seconds in after.items() if seconds < 0.999 * ttft}
        return dict(sorted(gains.items(), key=lambda each: -each[1]))


def case_of(
    model: NamedModel,
    machine: Machine,
    *,
    kv_memory_bytes: int | None = None,
    has_embeddings: bool = False,
) -> Case:
    """Return the analysis. `has_embeddings`: F_pf counts the embedding and the head."""
    shape = model.shape
    flops = shape.prefill_flops_per_token
    if has_embeddings:
        flops += 2 * shape.embedding_parameters
    limits = Bottleneck(
        flops,
        shape.least_kv_bytes_per_token,
        machine.profile.link_bytes_per_second,
        machine.profile.prefill_flops_per_second,
    )
    weights = model.weight_sizes(is_gpu=machine.profile.is_of_gpu).total
    memory = kv_memory_bytes
    if memory is None and machine.memory_bytes > weights:
        memory = machine.memory_bytes - weights
    return Case(shape, weights, machine, limits, memory)


@with_exit_codes
def bottleneck(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Checkpoint folder, a hub name that was downloaded before, or one of "
            f"{', '.join(KNOWN_SHAPES)}; may be given more than once; absent: all of these.",
            metavar="DIR|SHAPE",
        ),
    ] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(
            help=f"JSON file with measured costs, or one of {', '.join(MACHINES)}; may be given "
            "more than once; absent: all of these.",
            metavar="NAME|FILE",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="Requests: a file (JSON lines or CSV), or a made one of "
            f"{', '.join(PUBLISHED)}; leading blocks that were seen before are cached. Absent: "
            "the paper's means and medians.",
            metavar="FILE|NAME",
        ),
    ] = None,
    cached: Annotated[
        int | None, typer.Option(help="Cached tokens (K) of one request, with --new.", min=0)
    ] = None,
    new: Annotated[
        int | None, typer.Option(help="New prompt tokens (T) of one request.", min=1)
    ] = None,
    link_rate: Annotated[
        str | None,
        typer.Option(
            help="Bytes per second of the link; absent: what copies reach.", metavar="RATE"
        ),
    ] = None,
    tflops: Annotated[
        float | None,
        typer.Option(
            help="TFLOP per second of the device; absent: half of its dense 16-bit peak, as "
            "prefills reach.",
            min=1e-6,
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Bytes of device memory for K and V; absent: what weights leave of it.",
            metavar="SIZE",
        ),
    ] = None,
    embeddings: Annotated[
        bool,
        typer.Option(
            "--embeddings",
            help="Count embedding and head in F_pf = 2 N, as the paper does; a prefill computes "
            "neither for each token.",
        ),
    ] = False,
    dtype: Annotated[str, typer.Option(help="Element type of the model.")] = "auto",
    png: Annotated[
        Path | None, typer.Option(help="Draw the rooflines over kappa.", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Print whether the link or the device limits a prefill, and what would help. Needs no GPU."""
    check_picture(png)
    workloads = _workloads(trace, cached, new)
    memory = None if kv_memory is None else parse_size(kv_memory, field="kv_memory")
    if memory == 0:
        raise InvalidArgument("--kv-memory: K and V need some memory, not 0", field="kv_memory")
    machines = [_machine(name, link_rate, tflops) for name in machine or MACHINES]
    models = [find_named(name, dtype) for name in model or KNOWN_SHAPES]
    if model and cached is not None:
        _check_context((each.shape for each in models), workloads[0])
    cases = [
        case_of(one, each, kv_memory_bytes=memory, has_embeddings=embeddings)
        for one in models
        for each in machines
    ]
    if png is not None:
        draw_rooflines(cases, workloads, png)
    hand_over(
        {"cases": [report_of(case, workloads) for case in cases]},
        lambda: _show(cases, machines, workloads),
        as_json=as_json,
        output=output,
    )


def _machine(name: str, link_rate: str | None, tflops: float | None) -> Machine:
    """Return a machine by name, or of measured costs, with other rates if they are given."""
    found = MACHINES.get(name.lower()) or Machine(Path(name).stem, load_profile(name), 0)
    profile = found.profile
    if link_rate is not None:
        profile = replace(profile, link_bytes_per_second=parse_rate(link_rate, field="link_rate"))
    if tflops is not None:
        rate = tflops * 1e12
        profile = replace(profile, prefill_flops_per_second=rate, rebuild_flops_per_second=rate)
    return replace(found, profile=profile)


def _workloads(trace: str | None, cached: int | None, new: int | None) -> list[Workload]:
    if (cached is None) != (new is None) or (trace is not None and cached is not None):
        raise InvalidArgument("give --trace, or --cached and --new", field="cached")
    if trace is not None:
        found = load_trace(trace)
        return [workload_of(Path(trace).stem, found.arrivals, found.block_tokens)]
    if cached is not None and new is not None:
        return [Workload("the request", [(cached, new)])]
    return [Workload(name, [request]) for name, request in PAPER_WORKLOADS.items()]


def _check_context(shapes: Iterable[ModelShape], request: Workload) -> None:
    """Raise InvalidArgument for one request that a model cannot have."""
    [(cached, new)] = request.requests
    for shape in shapes:
        if cached + new > shape.context_length:
            raise InvalidArgument(
                f"{counted(cached + new, 'token')} (--cached and --new) are over {shape.name}'s "
                f"context of {shape.context_length:,}",
                field="cached",
            )


def report_of(case: Case, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Return the object of one model on one machine that `--json` prints."""
    limits = case.limits
    return {
        "model": case.shape.name,
        "machine": case.machine.name,
        **dataclasses.asdict(limits),
        "kappa_model": limits.kappa_model,
        "kappa_hardware": limits.kappa_hardware,
        "kappa_crit": limits.kappa_crit,
        "kv_memory_bytes": case.memory_bytes,
        "workloads": [case.figures(each) for each in workloads],
    }


def _show(
    cases: Sequence[Case], machines: Sequence[Machine], workloads: Sequence[Workload]
) -> None:
    if len(cases) > 1:
        print_table(_comparison(cases, machines))
        return
    [case] = cases
    figures = [case.figures(workload) for workload in workloads]
    plans = [case.restore(workload) for workload in workloads]
    print_table(facts_table(_facts(case)))
    beyond = f"beyond the context of {case.shape.context_length:,}"
    restored = [beyond if plan is None else restore_words(plan) for plan in plans]
    for table in (_workload_table(figures), _help_table(figures, restored)):
        print()
        print_table(table)


def _comparison(cases: Sequence[Case], machines: Sequence[Machine]) -> Table:
    """Return kappa_crit of each model on each machine."""
    table = Table("model", "B_kv, KB", "F_pf, GFLOP", "kappa_M, MFLOP/B", box=box.MARKDOWN)
    for machine in machines:
        table.add_column(machine.name)
    hardware = (f"{1e6 * case.limits.kappa_hardware:.4g}" for case in cases[: len(machines)])
    table.add_row("kappa_HW, KB/GFLOP", "", "", "", *hardware)
    for start in range(0, len(cases), len(machines)):
        row = cases[start : start + len(machines)]
        limits = row[0].limits
        table.add_row(
            row[0].shape.name,
            f"{limits.kv_bytes_per_token / 1e3:.1f}",
            f"{limits.flops_per_token / 1e9:.1f}",
            f"{limits.kappa_model / 1e6:.3f}",
            *(amount(case.limits.kappa_crit) for case in row),
        )
    return table


def _facts(case: Case) -> Iterator[tuple[str, str]]:
    shape, limits = case.shape, case.limits
    weights = format_size(case.weight_bytes)
    yield "model", f"{shape.name}, {shape.data_type.value}, weights {weights}"
    yield "machine", case.machine.profile.description or case.machine.name
    stored = ""
    if shape.latent_width is not None:
        times = shape.kv_bytes_per_token / limits.kv_bytes_per_token
        stored = f"; this version caches K and V of every head, {times:.0f} times as much"
    yield "B_kv", f"{limits.kv_bytes_per_token / 1e3:,.1f} KB a token{stored}"
    yield "F_pf", f"{limits.flops_per_token / 1e9:,.1f} GFLOP a token"
    yield "link BW", f"{limits.link_bytes_per_second / 1e9:,.1f} GB/s"
    yield "device C", f"{limits.flops_per_second / 1e12:,.0f} TFLOP/s"
    yield "kappa_M", f"{limits.kappa_model / 1e6:.3f} MFLOP a byte"
    yield "kappa_HW", f"{1e6 * limits.kappa_hardware:.3g} KB a GFLOP"
    yield "kappa_crit", f"{amount(limits.kappa_crit)} times as many cached as new tokens"
    memory = case.memory_bytes
    if memory is not None:
        words = format_size(memory)
    else:
        why = "weights exceed it" if case.machine.memory_bytes else "not in the file"
        words = f"{why}: give --kv-memory"
    yield "memory for K, V", words


def _workload_table(figures: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        *("requests", "K", "T", "K / T", "link-bound", "load", "prefill", "first token"),
        *("overlapped", "U", "P_OH", "N_max", "T_sched", "J"),
    )
    table = Table("mean of", *columns, box=box.MARKDOWN)
    for found in figures:
        kappas, at_once = found["kappa_ratio"], found["requests_at_once"]
        ratio = ", ".join(f"{name} {amount(value)}" for name, value in kappas.items())
        table.add_row(
            found["name"],
            f"{found['request_count']:,}",
            amount(found["cached_tokens"]),
            amount(found["new_tokens"]),
            ratio if found["request_count"] > 1 else amount(kappas["p50"]),
            f"{found['link_bound_share']:.0%}",
            seconds_text(found["link_seconds"]),
            seconds_text(found["prefill_seconds"]),
            seconds_text(found["ttft_seconds"]),
            seconds_text(found["overlapped_ttft_seconds"]),
            f"{found['utilisation']:.3f}",
            amount(found["link_overhead"]),
            amount(None if at_once is None else int(at_once)),
            amount(found["scheduled_tokens"]),
            amount(found["joules"]),
        )
    return table


def _help_table(figures: Sequence[Mapping[str, Any]], restored: Sequence[str]) -> Table:
    """Return by which factor each change brings the first token earlier, the best one first.

    `restored`: how long this version takes for each workload.
    """
    table = Table("what helps", *(found["name"] for found in figures), box=box.MARKDOWN)
    for name in dict.fromkeys(name for found in figures for name in found["help"]):
        factors = (found["help"].get(name) for found in figures)
        table.add_row(name, *("–" if each is None else f"× {each:.3g}" for each in factors))
    table.add_row("restored by this version in", *restored)
    return table


def draw_rooflines(cases: Sequence[Case], workloads: Sequence[Workload], path: Path) -> None:
    """Draw attainable FLOP per second over kappa, and the workloads' medians (Figures 4 and 7)."""
    figure = new_figure()
    axes = figure.subplots()
    for case in cases:
        limits, label = case.limits, f"{case.shape.name} on {case.machine.name}"
        kappas = sorted((_LEAST_KAPPA, _MOST_KAPPA, limits.kappa_crit))
        [line] = axes.loglog(
            kappas, [limits.attainable_flops(each) for each in kappas], label=label
        )
        axes.axvline(limits.kappa_crit, color=line.get_color(), linewidth=0.5, linestyle=":")
    for workload in workloads:
        median = quantile(workload.kappas(), 0.5)
        if median:
            axes.axvline(median, color="black", linewidth=0.8)
            axes.annotate(workload.name, (median, axes.get_ylim()[0]), rotation=90, fontsize=8)
    axes.set_xlabel("kappa: cached tokens for each new one; dotted: kappa_crit")
    axes.set_ylabel("FLOP/s")
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=8)
    save_picture(figure, path)

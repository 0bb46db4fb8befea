"""Results of `bench offload`, as JSON and as a table; runs nothing, needs no torch.

A step is one token for each sequence.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from splitpoint.config import format_size
from splitpoint.costs.profile import Profile
from splitpoint_cli.bench.harness import (
    agreeing_share,
    commit,
    hardware,
    ratio_lines,
    report_table,
)
from splitpoint_cli.output import seconds_text

FULL_LOAD = "full load"
SEQUENTIAL = "sequential split"
KVPR = "KVPR's order"
PIPELINED = "pipelined split"
COARSE = "coarse weights"
RESIDENT = "resident"
ENCODED = "pipelined split, "  # and the encoding
# Once the link's rate has changed: what counts as recovered (Done-when of the refit).
RECOVERED_ERROR = 0.15


@dataclass(frozen=True, slots=True)
class OffloadWorkload:
    """The work of each contender: decode `new` tokens of `batch` stored prompts.

    `link_rate`: bytes per second of an emulated link, None: the device's own.
    `changed_link_factor`: what the rate is multiplied with in the run that follows it.
    `kv_encodings`: of further stores, from which the pipelined split is decoded, too.
    """

    shape: str
    dtype: str
    batch: int
    prompt: int
    new: int
    link_rate: float | None
    repeats: int
    device: str
    threads: int
    seed: int
    sweep: bool = False
    changed_link_factor: float | None = None
    weights_on_host: bool = False
    kv_encodings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One token for each sequence. Seconds; `link_*` of what came towards the device.

    `predicted_seconds` is what the engine expected before the step; None: nothing.
    """

    seconds: float
    predicted_seconds: float | None = None
    link_bytes: int = 0
    link_seconds: float = 0.0

    @property
    def error(self) -> float | None:
        """|predicted - measured| / measured."""
        if self.predicted_seconds is None:
            return None
        return abs(self.predicted_seconds - self.seconds) / self.seconds


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """One decode of all sequences, from the last one's first new token to the last token.

    `device_bytes`: weights, workspace (staging included) and the most pages in use;
    None: not counted.
    """

    steps: tuple[Step, ...]
    tokens: tuple[tuple[int, ...], ...]
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Contender:
    """Runs of one way to decode; `split_tokens` None: it has no split."""

    split_tokens: int | None
    runs: tuple[DecodeRun, ...]

    @property
    def step_seconds(self) -> float:
        """Median over the steps of all runs."""
        return statistics.median(step.seconds for run in self.runs for step in run.steps)

    @property
    def step_count(self) -> int:
        return len(self.runs[0].steps)

    def decode_seconds(self, steps: int | None = None) -> float:
        """Median of the runs, over their first steps; None: over all of them."""
        return statistics.median(
            sum(step.seconds for step in run.steps[:steps]) for run in self.runs
        )

    def over(self, other: Contender) -> float:
        """Return its decode seconds over the other's, for the steps that both have."""
        steps = min(self.step_count, other.step_count)
        return self.decode_seconds(steps) / other.decode_seconds(steps)


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bound of a step: the link's time for its bytes, the device's time for its work.

    `compute_from` names the source of the device's time.
    """

    split_tokens: int
    link_seconds: float
    compute_seconds: float
    compute_from: str

    @property
    def seconds(self) -> float:
        return max(self.link_seconds, self.compute_seconds)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """Step times with every sequence split here: measured, predicted, and the bound."""

    split_tokens: int
    seconds: float
    kvpr_seconds: float
    sequential_seconds: float
    predicted_seconds: float
    bound_seconds: float


@dataclass(frozen=True, slots=True)
class LinkChange:
    """A run in which the link's rate changed after `changed_at` steps."""

    factor: float
    changed_at: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class OffloadResults:
    """Everything measured. `skipped` names what was not, and why."""

    profile: Profile
    reason: str
    bound: Bound
    contenders: Mapping[str, Contender]
    sweep: tuple[SweepPoint, ...] = ()
    change: LinkChange | None = None
    peers: tuple[str, ...] = ()
    # Why steps carry no prediction; empty: they do.
    unpredicted: str = ""
    pinning: str = ""
    # Of the CPU, as a worker's; empty on a GPU.
    kernels: str = ""
    skipped: tuple[str, ...] = field(default=())


def steps_to_recover(change: LinkChange, limit: float = RECOVERED_ERROR) -> int | None:
    """Return the steps after the change until predictions hold again; None if they never do.

    They hold from the first step on whose own error, and the median of it and all
    later ones, is below the limit.
    """
    errors = [step.error for step in change.steps[change.changed_at :]]
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return None
    for count, error in enumerate(known):
        if error < limit and statistics.median(known[count:]) < limit:
            return count
    return None


def report_of(workload: OffloadWorkload, results: OffloadResults) -> dict[str, Any]:
    """Return the JSON object: what was measured, on what, and how it compares."""
    contenders = results.contenders
    reference = contenders.get(RESIDENT)
    report: dict[str, Any] = {
        "benchmark": "offload",
        **asdict(workload),
        "kv_encodings": list(workload.kv_encodings),
        "hardware": hardware(),
        "commit": commit(),
        "store": "in this process: a real arena, store and seals, without gRPC",
        "pinning": results.pinning,
        "kernels": results.kernels,
        "profile": asdict(results.profile),
        "reason": results.reason,
        "contenders": {
            name: _contender(workload, each, reference) for name, each in contenders.items()
        },
        "prediction": _prediction(results),
        "skipped": list(results.skipped),
    }
    report["bound"] = _bound(results.bound)
    report["ratios"] = _ratios(results)
    report["link"] = _link(results)
    if results.sweep:
        report["sweep_points"] = [asdict(point) for point in results.sweep]
        best = min(results.sweep, key=lambda point: point.seconds)
        report["best_swept_split"] = best.split_tokens
    if results.change is not None:
        report["link_change"] = _change(results.change)
    return report


def table_of(report: Mapping[str, Any]) -> Table:
    rate = report["link_rate"]
    link = f", link {rate / 1e6:g} MB/s emulated" if rate else ""
    table = report_table(
        f"{report['shape']} {report['dtype']}: {report['batch']} sequences, prompt "
        f"{report['prompt']}, {report['new']} new, cache on the host, {report['device']}{link}",
        *("contender", "split", "a step", "tokens/s", "memory", "equal tokens"),
    )
    for name, facts in report["contenders"].items():
        split, share = facts["split_tokens"], facts["agreeing_token_share"]
        memory = facts["device_bytes"]
        table.add_row(
            name,
            "" if split is None else str(split),
            seconds_text(facts["step_seconds"]),
            f"{facts['tokens_per_second']:.1f}",
            "" if memory is None else format_size(memory),
            "" if share is None else f"{100 * share:.1f} %",
        )
    bound = report["bound"]
    table.add_row("max(link, compute)", str(bound["split_tokens"]), seconds_text(bound["seconds"]))
    lines = ratio_lines(report["ratios"])
    error = report["prediction"]["median_error"]
    if error is None:
        lines.append(f"no prediction error: {report['prediction']['missing']}")
    else:
        lines.append(f"prediction error, median: {100 * error:.1f} %")
    if "link_change" in report:
        steps = report["link_change"]["steps_to_recover"]
        lines.append(f"steps until predictions held again after the change: {steps}")
    table.caption = "\n".join([*lines, *report["skipped"]])
    return table


def _contender(
    workload: OffloadWorkload, contender: Contender, reference: Contender | None
) -> dict[str, Any]:
    runs = contender.runs
    seconds = contender.decode_seconds()
    return {
        "split_tokens": contender.split_tokens,
        "step_seconds": _rounded(contender.step_seconds),
        "steps": contender.step_count,
        "decode_seconds": _rounded(seconds),
        "decode_seconds_of_runs": [
            _rounded(sum(step.seconds for step in run.steps)) for run in runs
        ],
        "tokens_per_second": round(workload.batch * contender.step_count / seconds, 3),
        "device_bytes": runs[0].device_bytes,
        "step_seconds_of_last_run": [_rounded(step.seconds) for step in runs[-1].steps],
        "agreeing_token_share": (
            None
            if reference is None
            else round(agreeing_share(runs[0].tokens, reference.runs[0].tokens), 4)
        ),
    }


def _bound(bound: Bound) -> dict[str, Any]:
    return {
        "split_tokens": bound.split_tokens,
        "seconds": _rounded(bound.seconds),
        "link_seconds": _rounded(bound.link_seconds),
        "compute_seconds": _rounded(bound.compute_seconds),
        "compute_from": bound.compute_from,
    }


def _ratios(results: OffloadResults) -> dict[str, float]:
    contenders = results.contenders
    ours = contenders[PIPELINED]
    ratios = {
        "pipelined_over_full_load": ours.over(contenders[FULL_LOAD]),
        "sequential_over_pipelined": contenders[SEQUENTIAL].over(ours),
        "kvpr_order_over_pipelined": contenders[KVPR].over(ours),
        "pipelined_step_over_bound": ours.step_seconds / results.bound.seconds,
    }
    if COARSE in contenders:
        ratios["fine_over_coarse_weights"] = ours.over(contenders[COARSE])
    for name, contender in contenders.items():
        if name.startswith(ENCODED):
            encoding = name.removeprefix(ENCODED)
            ratios[f"{encoding}_step_over_native"] = contender.step_seconds / ours.step_seconds
    peers = [ours.over(contenders[name]) for name in results.peers]
    if peers:
        ratios["pipelined_over_fastest_peer"] = max(peers)
    return {name: round(value, 3) for name, value in ratios.items()}


def _prediction(results: OffloadResults) -> dict[str, Any]:
    """Return the prediction error over all steps of the pipelined contender."""
    steps = [step for run in results.contenders[PIPELINED].runs for step in run.steps]
    errors = [step.error for step in steps if step.error is not None]
    return {
        "median_error": round(statistics.median(errors), 4) if errors else None,
        "predicted_steps": len(errors),
        "missing": "" if errors else results.unpredicted,
    }


def _link(results: OffloadResults) -> dict[str, Any]:
    """Return the link's efficiency at l = 0: bytes over the measured rate, over their time."""
    steps = [step for run in results.contenders[FULL_LOAD].runs for step in run.steps]
    moved = sum(step.link_bytes for step in steps)
    if not moved:
        return {"efficiency": None, "missing": "the engine's steps move nothing on lanes"}
    rate = results.profile.link_bytes_per_second
    return {
        "bytes_per_step": moved // len(steps),
        "bytes_per_second": round(rate),
        "efficiency": round(moved / rate / sum(step.seconds for step in steps), 4),
        "busy_share": round(
            sum(step.link_seconds for step in steps) / sum(step.seconds for step in steps), 4
        ),
    }


def _change(change: LinkChange) -> dict[str, Any]:
    return {
        "factor": change.factor,
        "changed_at_step": change.changed_at,
        "steps_after": len(change.steps) - change.changed_at,
        "steps_to_recover": steps_to_recover(change),
        "step_seconds": [_rounded(step.seconds) for step in change.steps],
        "predicted_seconds": [
            None if step.predicted_seconds is None else _rounded(step.predicted_seconds)
            for step in change.steps
        ],
    }


def _rounded(seconds: float) -> float:
    return round(seconds, 6)

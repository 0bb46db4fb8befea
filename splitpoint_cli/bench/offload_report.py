"""The workload and the results of `bench offload`, as JSON and as a table; needs no torch.

One kind of sample serves both forms: loading in several orders, and drafts (`--speculate`) and
selections (`--select`) beside full load. A step is one token for each sequence.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from rich.table import Table

from splitpoint.config import counted, format_size
from splitpoint.costs.profile import Profile
from splitpoint.selection import UNUSED, Selection, SelectionUsage
from splitpoint.speculation import DraftMethod
from splitpoint_cli.bench.harness import (
    Column,
    Line,
    agreeing_share,
    contender_table,
    json_report,
    ratio_lines,
    sweep_picture,
    text_of,
)
from splitpoint_cli.output import seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL_LOAD = "full load"
SEQUENTIAL = "sequential split"
KVPR = "KVPR's order"
PIPELINED = "pipelined split"
COARSE = "coarse weights"
RESIDENT = "resident"
ENCODED = "pipelined split, "  # and the encoding
PEER = "transformers "  # and its cache and attention implementation


@dataclass(frozen=True, slots=True)
class OffloadWorkload:
    """The work of each contender: decode `new` tokens of `batch` stored prompts.

    Attributes:
        shape: a built-in shape or a checkpoint, as the user named it.
        link_rate: bytes per second of an emulated link; None: the device's own.
        micro_batch: sequences of which KVPR's order holds a layer at once; None: all.
        kv_encodings: of further stores, from which the pipelined split is decoded, too, or
            selections that do not verify.
        speculate: method of the drafts that are measured; None: none.
        draft_tokens: most drafts of a sequence in a step; None: the worker decides.
        compared: what steps read, or what drafts attend besides what the device has.
        lengths: tokens of the prompts of the second form, each measured by itself.
        layers, kv_heads: of the model, in place of its own; None: its own.
        text: files that a checkpoint's prompts are cut from; empty: files that the bundled model
            has not seen.
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
    weights_on_host: bool = False
    micro_batch: int | None = None
    kv_encodings: tuple[str, ...] = ()
    speculate: DraftMethod | None = None
    draft_tokens: int | None = None
    compared: tuple[Selection, ...] = ()
    lengths: tuple[int, ...] = ()
    layers: int | None = None
    kv_heads: int | None = None
    text: tuple[str, ...] = ()

    @property
    def drafts(self) -> DraftMethod:
        """What drafts: as asked for, or for selections that verify."""
        if self.speculate is None and any(each.verify for each in self.compared):
            return DraftMethod.SELF
        return self.speculate or DraftMethod.OFF

    def json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "kv_encodings": list(self.kv_encodings),
            "speculate": self.speculate and self.speculate.value,
            "compared": [str(each) for each in self.compared],
            "lengths": list(self.lengths),
            "text": list(self.text),
        }


class StepPart(StrEnum):
    """Parts of a step, by what is busy: the link with three kinds of bytes, or the device.

    ATTENTION: writing the new K and V, too. PRODUCTS: the projections and the MLP.
    """

    LINK_KEYS = "link: K and V"
    LINK_INPUTS = "link: X"
    LINK_WEIGHTS = "link: weights"
    REBUILD = "rebuild"
    ATTENTION = "attention"
    PRODUCTS = "projections and MLP"


@dataclass(frozen=True, slots=True)
class Step:
    """One token for each sequence, or several with drafts.

    Attributes:
        seconds: wall-clock time.
        predicted_seconds: what the engine expected before the step; None: nothing.
        link_bytes, link_seconds: of what came towards the device. On a GPU, which alone knows how
            many selected rows were missing, rows count as if all of them had been.
        token_count: tokens that all sequences got.
        selected: what it read by selection.
        parts: seconds of the link and of computing by StepPart, which overlap; empty if nothing
            streamed.
    """

    seconds: float
    predicted_seconds: float | None = None
    link_bytes: int = 0
    link_seconds: float = 0.0
    token_count: int = 0
    selected: SelectionUsage = UNUSED
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def computing_share(self) -> float:
        """Share of the step in which the device computes, without the head and sampling."""
        computing = (StepPart.REBUILD, StepPart.ATTENTION, StepPart.PRODUCTS)
        return sum(self.parts.get(part, 0.0) for part in computing) / self.seconds

    @property
    def error(self) -> float | None:
        """|predicted - measured| / measured."""
        if self.predicted_seconds is None:
            return None
        return abs(self.predicted_seconds - self.seconds) / self.seconds


@dataclass(frozen=True, slots=True)
class OffloadSample:
    """One decode of all sequences, from the last one's first new token to the last token.

    Attributes:
        steps: with a selection without the first ones, which build screens and fill rows.
        tokens: all tokens of each sequence.
        device_bytes: weights, workspace (staging included) and the most pages in use; None: not
            counted.
        token_count: tokens of all sequences, those of steps that are left out, too.
        pull_count: decode steps of the single sequences: a streamed one reads its cache once.
        drafted, accepted: drafts that steps verified, and those that were right.
    """

    steps: tuple[Step, ...]
    tokens: tuple[tuple[int, ...], ...]
    device_bytes: int | None = None
    token_count: int = 0
    pull_count: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def seconds(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def median_step(self) -> float:
        return statistics.median(step.seconds for step in self.steps)

    @property
    def link_bytes(self) -> int:
        return sum(step.link_bytes for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        return sum(step.token_count for step in self.steps) / self.seconds


Runs = Sequence[OffloadSample]


@dataclass(frozen=True, slots=True)
class Contender:
    """Runs of one way to decode; `split_tokens` None: it has no split."""

    split_tokens: int | None
    runs: Runs

    @property
    def steps(self) -> list[Step]:
        """The steps of all runs."""
        return [step for run in self.runs for step in run.steps]

    @property
    def step_seconds(self) -> float:
        """Median over the steps of all runs."""
        return statistics.median(step.seconds for step in self.steps)

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
class SweepPoint:
    """Step times with every sequence split here: measured, predicted, and the bound."""

    split_tokens: int
    seconds: float
    kvpr_seconds: float
    sequential_seconds: float
    predicted_seconds: float
    bound_seconds: float


@dataclass(frozen=True, slots=True)
class OffloadResults:
    """All orders of loading.

    Attributes:
        reason: why the planner chose the pipelined split.
        bound: seconds of link and device in a step of that split; the greater is its lower bound.
        skipped: what was not measured, and why.
        kernels: of the CPU, as a worker's; empty on a GPU.
    """

    profile: Profile
    reason: str
    bound: tuple[float, float]
    contenders: Mapping[str, Contender]
    sweep: tuple[SweepPoint, ...] = ()
    pinning: str = ""
    kernels: str = ""
    skipped: tuple[str, ...] = field(default=())


# -- loading ------------------------------------------------------------------------------


def report_of(workload: OffloadWorkload, results: OffloadResults) -> dict[str, Any]:
    """Return the JSON object: what was measured, on what, and how it compares."""
    contenders = results.contenders
    link_seconds, compute_seconds = results.bound
    reference = contenders.get(RESIDENT)
    report: dict[str, Any] = {
        "store": "in this process: a real arena, store and seals, without gRPC",
        "pinning": results.pinning,
        "kernels": results.kernels,
        "profile": asdict(results.profile),
        "reason": results.reason,
        "contenders": {
            name: _contender(workload.batch, each, reference) for name, each in contenders.items()
        },
        "prediction": _prediction(results),
        "skipped": list(results.skipped),
        "bound": {
            "split_tokens": contenders[PIPELINED].split_tokens,
            "seconds": _rounded(max(results.bound)),
            "link_seconds": _rounded(link_seconds),
            "compute_seconds": _rounded(compute_seconds),
            "compute_from": "the resident decode, and the profile's rebuild",
        },
        "ratios": _ratios(results),
        "link": _link(results),
    }
    if results.sweep:
        report["sweep_points"] = [asdict(point) for point in results.sweep]
        best = min(results.sweep, key=lambda point: point.seconds)
        report["best_swept_split"] = best.split_tokens
    return json_report("offload", workload.json(), report)


def _contender(batch: int, contender: Contender, reference: Contender | None) -> dict[str, Any]:
    runs, seconds = contender.runs, contender.decode_seconds()
    return {
        "split_tokens": contender.split_tokens,
        "step_seconds": _rounded(contender.step_seconds),
        "steps": contender.step_count,
        "decode_seconds": _rounded(seconds),
        "decode_seconds_of_runs": [_rounded(run.seconds) for run in runs],
        "tokens_per_second": round(batch * contender.step_count / seconds, 3),
        "device_bytes": runs[0].device_bytes,
        "step_seconds_of_last_run": [_rounded(step.seconds) for step in runs[-1].steps],
        "parts_of_a_step": parts_of(contender),
        "computing_share_of_last_run": [round(step.computing_share, 4) for step in runs[-1].steps],
        "agreeing_token_share": reference and _agreeing(runs[:1], reference.runs[:1]),
    }


def parts_of(contender: Contender) -> dict[str, float]:
    """Return the mean seconds of each part of a step; empty if nothing streamed."""
    steps = contender.steps
    return {
        part.value: _rounded(sum(step.parts.get(part, 0.0) for step in steps) / len(steps))
        for part in StepPart
        if any(part in step.parts for step in steps)
    }


def _ratios(results: OffloadResults) -> dict[str, float]:
    contenders = results.contenders
    ours = contenders[PIPELINED]
    ratios = {
        "pipelined_over_full_load": ours.over(contenders[FULL_LOAD]),
        "sequential_over_pipelined": contenders[SEQUENTIAL].over(ours),
        "kvpr_order_over_pipelined": contenders[KVPR].over(ours),
        "pipelined_step_over_bound": ours.step_seconds / max(results.bound),
    }
    if COARSE in contenders:
        ratios["fine_over_coarse_weights"] = ours.over(contenders[COARSE])
    for name, contender in contenders.items():
        if name.startswith(ENCODED):
            encoding = name.removeprefix(ENCODED)
            ratios[f"{encoding}_step_over_native"] = contender.step_seconds / ours.step_seconds
    peers = [ours.over(each) for name, each in contenders.items() if name.startswith(PEER)]
    if peers:
        ratios["pipelined_over_fastest_peer"] = max(peers)
    return {name: round(value, 3) for name, value in ratios.items()}


def _prediction(results: OffloadResults) -> dict[str, Any]:
    """Return the prediction error over all steps of the pipelined contender."""
    steps = results.contenders[PIPELINED].steps
    errors = [step.error for step in steps if step.error is not None]
    return {
        "median_error": round(statistics.median(errors), 4) if errors else None,
        "predicted_steps": len(errors),
        "missing": "" if errors else "no step of the pipelined split was predicted",
    }


def _link(results: OffloadResults) -> dict[str, Any]:
    """Return the link's efficiency at l = 0: bytes over the measured rate, over their time."""
    steps = results.contenders[FULL_LOAD].steps
    moved = sum(step.link_bytes for step in steps)
    seconds = sum(step.seconds for step in steps)
    if not moved:
        return {"efficiency": None, "missing": "the engine's steps move nothing on lanes"}
    rate = results.profile.link_bytes_per_second
    return {
        "bytes_per_step": moved // len(steps),
        "bytes_per_second": round(rate),
        "efficiency": round(moved / rate / seconds, 4),
        "busy_share": round(sum(step.link_seconds for step in steps) / seconds, 4),
    }


# -- drafts and selections ----------------------------------------------------------------


def compared_report_of(
    workload: OffloadWorkload,
    lengths: Mapping[int, Mapping[str, Runs]],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the JSON object of drafts and selections, by cached tokens and contender.

    `facts`: of the model.
    """
    results = [
        {
            "cached": cached,
            "contenders": {name: _compared(each, runs[FULL_LOAD]) for name, each in runs.items()},
        }
        for cached, runs in lengths.items()
    ]
    return json_report("offload", workload.json(), {**facts, "results": results})


def _compared(runs: Runs, full: Runs) -> dict[str, Any]:
    """Return a contender's medians; a ratio is that of a round's runs, which met one machine."""
    steps = [step for run in runs for step in run.steps]
    tokens, moved = sum(step.token_count for step in steps), sum(run.link_bytes for run in runs)
    pulls, drafted, accepted = (
        sum(getattr(run, name) for run in runs) for name in ("pull_count", "drafted", "accepted")
    )
    selected = sum((step.selected for step in steps), UNUSED)
    rows = selected.fetched_row_count + selected.reused_row_count
    pairs = [*zip(runs, full, strict=True)]
    faster = [one.tokens_per_second / other.tokens_per_second for one, other in pairs]
    steps_over = [one.median_step / other.median_step for one, other in pairs]
    pulled = sum(run.token_count for run in runs)
    return {
        "tokens_per_second": round(statistics.median(run.tokens_per_second for run in runs), 3),
        "tokens_per_second_of_runs": [round(run.tokens_per_second, 3) for run in runs],
        "over_full_load": round(statistics.median(faster), 3),
        "step_seconds": _rounded(statistics.median(run.median_step for run in runs)),
        "step_over_full_load": round(statistics.median(steps_over), 4),
        "link_bytes_per_token": round(moved / tokens, 1),
        "link_bytes_per_step": round(moved / len(steps), 1),
        "tokens_per_pull": round(pulled / pulls, 4) if pulls else None,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": round(accepted / drafted, 4) if drafted else None,
        "read_share": round(selected.read_ratio, 4) if selected.step_count else None,
        "fetched_share": round(selected.fetched_row_count / rows, 4) if rows else None,
        "agreeing_token_share": _agreeing(runs, full),
        "device_bytes": max(run.device_bytes or 0 for run in runs),
    }


# -- shown --------------------------------------------------------------------------------

_COLUMNS = (
    Column("split", lambda each: text_of(each.get("split_tokens"), str)),
    Column("a step", lambda each: text_of(each.get("step_seconds"), seconds_text)),
    Column("of full load", lambda each: text_of(each.get("step_over_full_load"), "{:.3f}".format)),
    Column("over full load", lambda each: text_of(each.get("over_full_load"), "{:.2f}".format)),
    Column("tokens/s", lambda each: text_of(each.get("tokens_per_second"), "{:.1f}".format)),
    # A cache on the device is not pulled over the link.
    Column(
        "tokens a pull",
        lambda each: text_of(
            each.get("tokens_per_pull") if each.get("link_bytes_per_token") else None,
            "{:.2f}".format,
        ),
    ),
    Column("link a token", lambda each: _size(each.get("link_bytes_per_token"))),
    Column("link a step", lambda each: _size(each.get("link_bytes_per_step"))),
    Column("read", lambda each: _percent(each.get("read_share"))),
    Column("accepted", lambda each: _percent(each.get("acceptance"))),
    Column("memory", lambda each: _size(each.get("device_bytes"))),
    Column("equal tokens", lambda each: _percent(each.get("agreeing_token_share"))),
)


def table_of(report: Mapping[str, Any]) -> Table:
    """Return the contenders of any of the forms."""
    contenders = report.get("contenders")
    if contenders is None:
        contenders = {
            f"{length['cached']:,} {name}": facts
            for length in report["results"]
            for name, facts in length["contenders"].items()
        }
    bound = report.get("bound")
    if bound is not None:
        limit = {"split_tokens": bound["split_tokens"], "step_seconds": bound["seconds"]}
        contenders = {**contenders, "max(link, compute)": limit}
    return contender_table(_title(report), "contender", _COLUMNS, contenders, _caption(report))


def picture_of(report: Mapping[str, Any]) -> Figure:
    """Draw a report that has a sweep. Raises MissingExtra without matplotlib."""
    points, contenders = report["sweep_points"], report["contenders"]
    splits = [point["split_tokens"] for point in points]
    chosen = contenders[PIPELINED]["split_tokens"]
    highest = max(point["sequential_seconds"] for point in points)
    lines = [
        Line(label, style, splits, [point[key] for point in points])
        for key, label, style in (
            ("sequential_seconds", "in turn (serial twin), measured", "s:"),
            ("kvpr_seconds", "KVPR's order, measured", "^-."),
            ("seconds", "pipelined, measured", "o-"),
            ("predicted_seconds", "predicted by the planner", "--"),
            ("bound_seconds", "max(link, compute)", "-"),
        )
    ]
    lines.append(Line(f"the planner's l = {chosen}", ":", [chosen] * 2, [0, highest], "k"))
    steps = {name: each["step_seconds"] for name, each in contenders.items()}
    return sweep_picture(f"a decode step: {_title(report)}", lines, steps)


def _title(report: Mapping[str, Any]) -> str:
    rate = report["link_rate"]
    link = f", link {rate / 1e6:g} MB/s emulated" if rate else ""
    heads = ""
    if "query_heads" in report:
        averaged = " (averaged)" if report["heads_are_averaged"] else ""
        heads = f", {report['query_heads']}/{report['kv_heads']} heads{averaged}"
        heads += f", {report['layers']} layers, {report['weights']} weights"
    cached = "" if report["lengths"] else f", prompt {report['prompt']}"
    return (
        f"{report['shape']} {report['dtype']}{heads}: {counted(report['batch'], 'sequence')}"
        f"{cached}, {report['new']} new, cache on the host, {report['device']}{link}"
    )


def _caption(report: Mapping[str, Any]) -> Iterable[str]:
    yield from ratio_lines(report.get("ratios", {}))
    if "prediction" in report:
        error, missing = (report["prediction"][name] for name in ("median_error", "missing"))
        yield (
            f"no prediction error: {missing}"
            if error is None
            else f"prediction error, median: {100 * error:.1f} %"
        )
    yield from report.get("skipped", ())


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _size(count: float | None) -> str:
    return format_size(round(count)) if count else ""


def _agreeing(runs: Runs, reference: Runs) -> float:
    mine, theirs = ([text for run in each for text in run.tokens] for each in (runs, reference))
    return round(agreeing_share(mine, theirs), 4)


def _rounded(seconds: float) -> float:
    return round(seconds, 6)

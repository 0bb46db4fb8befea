"""Results of `bench offload --select`, as JSON and as a table; runs nothing, needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitpoint.config import counted, format_size
from splitpoint.residency.selecting import SelectedStep
from splitpoint.selection import Selection
from splitpoint.shapes import ModelShape
from splitpoint_cli.bench.harness import agreeing_share, commit, hardware, report_table
from splitpoint_cli.bench.offload.report import FULL_LOAD, RESIDENT, OffloadWorkload

SELECTED = "selected"
# Rows that are on the device are forgotten after each step, and all are fetched anew.
ANEW = "selected, all anew"


@dataclass(frozen=True, slots=True)
class SelectWorkload:
    """The work of each contender: decode `new` tokens after prompts that the store has.

    Attributes:
        shape: a built-in shape, whose weights are random, or a checkpoint, read with its own.
        lengths: tokens of the prompts; each is measured for itself.
        layers, kv_heads: of the model, in place of its own; None: its own.
        text: files that a checkpoint's prompts are cut from; empty: files that the bundled model
            has not seen.
    """

    shape: str
    dtype: str
    batch: int
    lengths: tuple[int, ...]
    new: int
    link_rate: float | None
    repeats: int
    device: str
    threads: int
    seed: int
    select: Selection
    layers: int | None = None
    kv_heads: int | None = None
    text: tuple[str, ...] = ()

    def as_offload(self, shape: str, prompt: int) -> OffloadWorkload:
        """Return the workload of one host."""
        return OffloadWorkload(
            shape=shape,
            dtype=self.dtype,
            batch=self.batch,
            prompt=prompt,
            new=self.new,
            link_rate=self.link_rate,
            repeats=self.repeats,
            device=self.device,
            threads=self.threads,
            seed=self.seed,
        )


@dataclass(frozen=True, slots=True)
class RowSums:
    """Rows of one KV head in one layer, of some steps.

    Attributes:
        chosen: rows that the steps wanted; fetched: those of them that crossed the link.
        read: rows that attention read; visible: stored tokens.
        link_bytes: of the fetched rows.
    """

    chosen: int = 0
    fetched: int = 0
    read: int = 0
    visible: int = 0
    link_bytes: int = 0

    def plus(self, other: RowSums) -> RowSums:
        return RowSums(
            self.chosen + other.chosen,
            self.fetched + other.fetched,
            self.read + other.read,
            self.visible + other.visible,
            self.link_bytes + other.link_bytes,
        )


@dataclass(frozen=True, slots=True)
class SelectRun:
    """One decode of a batch; the first steps, which build screens and fill rows, are left out.

    Attributes:
        step_seconds, link_bytes: of each step; bytes that came towards the device. On a GPU, which
            alone knows how many rows were missing, rows count as if all of them had been.
        expected_bytes: of the tiles and rows that the steps chose to read, by their numbers. None
            on a GPU: they are not those of `link_bytes`.
        overlap: of the rows that a step chose, the share that the one before chose, too; None:
            not seen.
        tokens: all tokens of each sequence.
    """

    step_seconds: tuple[float, ...]
    link_bytes: tuple[int, ...]
    expected_bytes: int | None
    rows: RowSums
    overlap: float | None
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LengthResults:
    """Everything measured at one length.

    Attributes:
        predicted: by the cost model, without the rows that are on the device already.
    """

    cached: int
    runs: Mapping[str, tuple[SelectRun, ...]]
    predicted: SelectedStep


@dataclass(frozen=True, slots=True)
class SelectResults:
    """Everything measured. `kernels`: of the CPU, as a worker's; empty on a GPU."""

    shape: ModelShape
    lengths: tuple[LengthResults, ...]
    files: tuple[str, ...]
    kernels: str = ""


def select_report_of(workload: SelectWorkload, results: SelectResults) -> dict[str, Any]:
    """Return the JSON object: what was measured, on what, and how it compares."""
    shape = results.shape
    return {
        "benchmark": "offload",
        **asdict(workload),
        "select": str(workload.select),
        "lengths": list(workload.lengths),
        "text": list(results.files),
        "weights": "checkpoint" if results.files else "random",
        "layers": shape.layer_count,
        "full_layers": workload.select.exact_layers,
        "kv_heads": shape.kv_head_count,
        "query_heads": shape.query_head_count,
        "kv_bytes_per_token": shape.kv_bytes_per_token,
        "kernels": results.kernels,
        "hardware": hardware(),
        "commit": commit(),
        "results": [_length(each, workload.link_rate) for each in results.lengths],
    }


def select_table_of(report: Mapping[str, Any]) -> Table:
    rate = report["link_rate"]
    link = f", link {rate / 1e6:g} MB/s emulated" if rate else ""
    table = report_table(
        f"{report['shape']} {report['dtype']}, {report['layers']} layers, "
        f"{report['query_heads']}/{report['kv_heads']} heads, {report['weights']} weights: "
        f"{counted(report['batch'], 'sequence')}, {report['select']}, {report['device']}{link}",
        *("cached, contender", "step", "of full load", "link a step", "read", "equal tokens"),
    )
    for length in report["results"]:
        for name, facts in length["contenders"].items():
            read = facts["read_share"]
            table.add_row(
                f"{length['cached']:,} {name}",
                f"{1e3 * facts['step_seconds']:.1f} ms",
                f"{facts['step_over_full_load']:.3f}",
                "" if name == RESIDENT else format_size(round(facts["link_bytes_per_step"])),
                "" if read is None else f"{100 * read:.1f} %",
                f"{100 * facts['agreeing_token_share']:.1f} %",
            )
    table.caption = "\n".join(_caption(length) for length in report["results"])
    return table


def _caption(length: Mapping[str, Any]) -> str:
    difference = length["fetching_differences"]
    return (
        f"{length['cached']:,} cached: {length['speed_up']:.2f} times as fast as full load; "
        f"adjacent steps share {100 * difference['overlap']:.0f} % of the chosen rows; "
        f"fetching differences saves {100 * difference['saved_rows_share']:.0f} % of the rows"
    )


def _length(results: LengthResults, link_rate: float | None) -> dict[str, Any]:
    full = results.runs[FULL_LOAD]
    contenders = {name: _contender(runs, full) for name, runs in results.runs.items()}
    selected, anew = (contenders[name] for name in (SELECTED, ANEW))
    overlaps = [run.overlap for run in results.runs[ANEW] if run.overlap is not None]
    overlap = statistics.fmean(overlaps)
    rows = [run.rows for run in results.runs[SELECTED]]
    fetched, chosen = (sum(getattr(each, name) for each in rows) for name in ("fetched", "chosen"))
    steps = sum(len(run.step_seconds) for run in results.runs[SELECTED])
    anew_rows = [run.rows for run in results.runs[ANEW]]
    row_bytes = sum(each.link_bytes for each in anew_rows) / sum(each.fetched for each in anew_rows)
    saved_bytes = anew["link_bytes_per_step"] - selected["link_bytes_per_step"]
    runs = [run for each in results.runs.values() for run in each]
    expected = [run.expected_bytes for run in runs]
    carried = [sum(run.link_bytes) for run in runs]
    return {
        "cached": results.cached,
        "contenders": contenders,
        "speed_up": round(full_over(contenders), 3),
        # None: see SelectRun.
        "link_bytes_are_those_chosen": None if None in expected else carried == expected,
        "predicted_step_seconds": asdict(results.predicted),
        "fetching_differences": {
            "overlap": round(overlap, 4),
            "saved_rows_share": round(1 - fetched / chosen, 4),
            # Of rows that the step before did not choose, and what was measured: rows of earlier
            # steps are there, too.
            "predicted_row_bytes_per_step": round((1 - overlap) * chosen * row_bytes / steps),
            "row_bytes_per_step": round(sum(each.link_bytes for each in rows) / steps),
            "predicted_saved_seconds_per_step": (
                None if link_rate is None else round(saved_bytes / link_rate, 6)
            ),
            "saved_seconds_per_step": round(anew["step_seconds"] - selected["step_seconds"], 6),
        },
    }


def full_over(contenders: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the step of full load over the selected one: medians of medians."""
    return float(contenders[FULL_LOAD]["step_seconds"] / contenders[SELECTED]["step_seconds"])


def _contender(runs: Sequence[SelectRun], full: Sequence[SelectRun]) -> dict[str, Any]:
    steps = [statistics.median(run.step_seconds) for run in runs]
    of_full = [statistics.median(run.step_seconds) for run in full]
    ratios = [one / other for one, other in zip(steps, of_full, strict=True)]
    rows = RowSums()
    for run in runs:
        rows = rows.plus(run.rows)
    link_bytes = [size for run in runs for size in run.link_bytes]
    return {
        "step_seconds": round(statistics.median(steps), 6),
        "step_over_full_load": round(statistics.median(ratios), 4),
        "step_seconds_of_runs": [round(each, 6) for each in steps],
        "link_bytes_per_step": round(statistics.fmean(link_bytes), 1),
        "read_share": round(rows.read / rows.visible, 4) if rows.visible else None,
        "chosen_share": round(rows.chosen / rows.visible, 4) if rows.visible else None,
        "fetched_share": round(rows.fetched / rows.visible, 4) if rows.visible else None,
        "agreeing_token_share": round(
            agreeing_share(
                [text for run in runs for text in run.tokens],
                [text for run in full for text in run.tokens],
            ),
            4,
        ),
    }

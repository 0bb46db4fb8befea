"""Results of `bench offload --speculate`, as JSON and as a table; runs nothing, needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitpoint.config import format_size
from splitpoint.selection import FULL, Selection
from splitpoint.speculation import DraftMethod
from splitpoint_cli.bench.harness import (
    agreeing_share,
    commit,
    hardware,
    ratio_lines,
    report_table,
)
from splitpoint_cli.bench.offload.report import RESIDENT, OffloadWorkload

PLAIN_STREAMING = "plain streaming"


@dataclass(frozen=True, slots=True)
class DraftWorkload:
    """The work of each contender: decode `new` tokens after prompts that the store has.

    Attributes:
        shape: the checkpoint, as the user named it.
        draft_tokens: most drafts of a sequence in a step; None: the worker decides.
        kv_heads: KV heads after averaging in groups; None: the checkpoint's own.
        select: what drafts attend besides what the device has; FULL: nothing.
        text: files that prompts are cut from; empty: files that the bundled model has not seen.
        repeats: rounds; each has its own prompts, the same for all contenders.
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
    method: DraftMethod
    draft_tokens: int | None
    kv_heads: int | None
    select: Selection = FULL
    text: tuple[str, ...] = ()

    def as_offload(self, shape: str) -> OffloadWorkload:
        """Return the workload of one host."""
        return OffloadWorkload(
            shape=shape,
            dtype=self.dtype,
            batch=self.batch,
            prompt=self.prompt,
            new=self.new,
            link_rate=self.link_rate,
            repeats=self.repeats,
            device=self.device,
            threads=self.threads,
            seed=0,
        )


@dataclass(frozen=True, slots=True)
class DraftRun:
    """One decode of a batch, from when each sequence has its first token to the last token.

    Attributes:
        token_count: tokens of all sequences in that time.
        pull_count: decode steps of the single sequences: a streamed one reads its cache once.
        link_bytes: bytes that came towards the device.
        drafted, accepted: drafts that steps verified, and those that were right.
        tokens: all tokens of each sequence.
    """

    seconds: float
    token_count: int
    pull_count: int
    link_bytes: int
    drafted: int
    accepted: int
    tokens: tuple[tuple[int, ...], ...]

    @property
    def link_bytes_per_token(self) -> float:
        return self.link_bytes / self.token_count

    @property
    def tokens_per_second(self) -> float:
        return self.token_count / self.seconds


@dataclass(frozen=True, slots=True)
class DraftResults:
    """Everything measured.

    Attributes:
        runs: of each contender, one in each round.
        window_tokens, sink_tokens: what streamed sequences keep on the device for drafts.
        files: the names of the files that prompts were cut from.
        checkpoint_kv_head_count: KV heads of a layer before any were averaged.
        kernels: of the CPU, as a worker's; empty on a GPU.
    """

    runs: Mapping[str, tuple[DraftRun, ...]]
    window_tokens: int
    sink_tokens: int
    kv_head_count: int
    checkpoint_kv_head_count: int
    query_head_count: int
    kv_bytes_per_token: int
    files: tuple[str, ...]
    kernels: str = ""


def drafts_report_of(workload: DraftWorkload, results: DraftResults) -> dict[str, Any]:
    """Return the JSON object: what was measured, on what, and how it compares."""
    plain = results.runs[PLAIN_STREAMING]
    return {
        "benchmark": "offload",
        **{name: value for name, value in asdict(workload).items() if name != "method"},
        "speculate": workload.method.value,
        "select": None if workload.select.is_full else str(workload.select),
        "text": list(results.files),
        "kv_heads": results.kv_head_count,
        "query_heads": results.query_head_count,
        "heads_are_averaged": results.kv_head_count < results.checkpoint_kv_head_count,
        "kv_bytes_per_token": results.kv_bytes_per_token,
        "window_tokens": results.window_tokens,
        "sink_tokens": results.sink_tokens,
        "kernels": results.kernels,
        "hardware": hardware(),
        "commit": commit(),
        "contenders": {name: _contender(runs, plain) for name, runs in results.runs.items()},
        "ratios": _ratios(results.runs[workload.method.value], plain),
    }


def drafts_table_of(report: Mapping[str, Any]) -> Table:
    rate = report["link_rate"]
    link = f", link {rate / 1e6:g} MB/s emulated" if rate else ""
    averaged = " (averaged)" if report["heads_are_averaged"] else ""
    selects = f", drafts by {report['select']}" if report["select"] else ""
    table = report_table(
        f"{report['shape']} {report['dtype']}, {report['query_heads']}/{report['kv_heads']} heads"
        f"{averaged}: {report['batch']} sequences, {report['prompt']} cached, {report['new']} new, "
        f"{report['device']}{link}{selects}",
        *("contender", "tokens/s", "tokens a pull", "link a token", "accepted", "equal tokens"),
    )
    for name, facts in report["contenders"].items():
        acceptance, equal = facts["acceptance"], facts["agreeing_token_share"]
        is_resident = name == RESIDENT
        table.add_row(
            name,
            f"{facts['tokens_per_second']:.1f}",
            "" if is_resident else f"{facts['tokens_per_pull']:.2f}",
            "" if is_resident else format_size(round(facts["link_bytes_per_token"])),
            "" if acceptance is None else f"{100 * acceptance:.0f} %",
            f"{100 * equal:.1f} %",
        )
    table.caption = "\n".join(ratio_lines(report["ratios"]))
    return table


def _contender(runs: tuple[DraftRun, ...], plain: tuple[DraftRun, ...]) -> dict[str, Any]:
    tokens, pulls = sum(run.token_count for run in runs), sum(run.pull_count for run in runs)
    drafted = sum(run.drafted for run in runs)
    mine = [text for run in runs for text in run.tokens]
    reference = [text for run in plain for text in run.tokens]
    return {
        "tokens_per_second": round(statistics.median(run.tokens_per_second for run in runs), 3),
        "tokens_per_pull": round(tokens / pulls, 4),
        "link_bytes_per_token": round(sum(run.link_bytes for run in runs) / tokens, 1),
        "acceptance": round(sum(run.accepted for run in runs) / drafted, 4) if drafted else None,
        "drafted": drafted,
        "accepted": sum(run.accepted for run in runs),
        "tokens": tokens,
        "pulls": pulls,
        "seconds_of_runs": [round(run.seconds, 6) for run in runs],
        "tokens_per_pull_of_runs": [round(run.token_count / run.pull_count, 3) for run in runs],
        "agreeing_token_share": round(agreeing_share(mine, reference), 4),
    }


def _ratios(drafted: tuple[DraftRun, ...], plain: tuple[DraftRun, ...]) -> dict[str, float]:
    """Return the ratios to plain streaming: medians over the rounds."""
    pairs = list(zip(drafted, plain, strict=True))
    ratios = {
        "tokens_per_second_over_plain": [
            one.tokens_per_second / other.tokens_per_second for one, other in pairs
        ],
        "link_bytes_per_token_over_plain": [
            one.link_bytes_per_token / other.link_bytes_per_token
            for one, other in pairs
            if other.link_bytes
        ],
    }
    return {name: round(statistics.median(each), 3) for name, each in ratios.items() if each}

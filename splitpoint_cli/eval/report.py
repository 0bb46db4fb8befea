"""Results of `splitpoint eval`, as JSON and as a table; runs nothing, needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitpoint.config import counted
from splitpoint_cli.bench.harness import commit, hardware, report_table
from splitpoint_cli.eval.workload import EvalWorkload

# Below this share of right answers, a task says nothing about the selections.
_SOLVED = 0.5


@dataclass(frozen=True, slots=True)
class Texts:
    """What was read: files by package, windows of them, and the tasks of each kind."""

    files: Mapping[str, Sequence[str]]
    windows: int
    far_tokens: int
    tasks: int


@dataclass(frozen=True, slots=True)
class Answers:
    """The tokens that a kind of tasks asks for.

    Attributes:
        right: share that is the greedy choice.
        logprob: mean log-probability.
    """

    tokens: int
    right: float
    logprob: float


@dataclass(frozen=True, slots=True)
class SelectionResult:
    """One selection over all texts and tasks.

    Attributes:
        interval: 95 % interval of the perplexity over that of full attention, minus 1.
        agreement: share of the greedy choices that are those of full attention.
        far_right: share of the tokens still right that need distant ones; None without any.
        read_ratio: tokens read over visible ones, all layers.
        screened_ratio: the same, of the layers that select.
        device_ratio: bytes that the screens keep over those of K and V, of these layers, in the
            checkpoint's element type.
        recall, held_weight, overlap: see SelectionCounts.
        recalls: recall of each text; two selections are compared text by text.
        evicted: share of the tokens of these layers that left a bounded pool.
        seconds: of reading the texts.
    """

    selection: str
    method: str
    perplexity: float
    interval: tuple[float, float]
    agreement: float
    far_right: float | None
    read_ratio: float
    screened_ratio: float
    device_ratio: float
    recall: float
    recalls: tuple[float, ...]
    held_weight: float
    overlap: float
    evicted: float
    needle: Answers | None
    extraction: Answers | None
    seconds: float


def report_of(
    workload: EvalWorkload, texts: Texts, results: Sequence[SelectionResult]
) -> dict[str, Any]:
    """Return the JSON object; the first result is that of `full`."""
    full = results[0]
    return {
        "benchmark": "eval",
        "model": workload.model_name,
        "dtype": "float32",
        "tokens": workload.tokens,
        "prompt_tokens": workload.prompt,
        "guess": workload.guess,
        "norm": workload.norm,
        "kv_heads": workload.kv_heads,
        "seed": workload.seed,
        "threads": workload.threads,
        "hardware": hardware(),
        "commit": commit(),
        **asdict(texts),
        "selections": [
            {
                **_rounded(asdict(result)),
                "perplexity_over_full": round(result.perplexity / full.perplexity - 1, 6),
            }
            for result in results
        ],
    }


def _rounded(result: dict[str, Any]) -> dict[str, Any]:
    return {
        name: round(value, 6)
        if isinstance(value, float)
        else _rounded(value)
        if isinstance(value, dict)
        else [round(each, 6) for each in value]
        if isinstance(value, tuple)
        else value
        for name, value in result.items()
    }


def table_of(report: Mapping[str, Any]) -> Table:
    """Return a row for each selection."""
    has_pools = any(each["evicted"] for each in report["selections"])
    heads = report["kv_heads"]
    pooled = "" if heads is None else f", averaged to {counted(heads, 'KV head')}"
    table = report_table(
        f"{report['model']} {report['dtype']}{pooled}: {counted(report['windows'], 'text')} of "
        f"{counted(report['tokens'], 'token')}, "
        f"the first {report['prompt_tokens']:,} computed exactly",
        *("selection", "KV read", "on device", "perplexity", "over full", "95 % interval", "agree"),
        *("recall", "overlap", "far", "needle", "fields"),
        *(("evicted",) if has_pools else ()),
    )
    for each in report["selections"]:
        low, high = each["interval"]
        table.add_row(
            each["selection"],
            f"{each['screened_ratio']:.1%}",
            f"{each['device_ratio']:.1%}",
            f"{each['perplexity']:.3f}",
            f"{each['perplexity_over_full']:+.2%}",
            f"{low:+.1%} to {high:+.1%}",
            f"{each['agreement']:.1%}",
            f"{each['recall']:.1%}",
            f"{each['overlap']:.1%}",
            _share(each["far_right"]),
            *(_share(each[kind] and each[kind]["right"]) for kind in ("needle", "extraction")),
            *((f"{each['evicted']:.1%}",) if has_pools else ()),
        )
    table.caption = "\n".join(_caption(report))
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _caption(report: Mapping[str, Any]) -> list[str]:
    full = report["selections"][0]
    lines = [
        "KV read, on device: of the layers that select; tokens read over visible ones, and bytes "
        "that screens keep over those of K and V",
        "95 % interval of over full: texts drawn anew in blocks of tokens; evicted: tokens that "
        "left a bounded pool",
        "recall: of the tokens with the largest weights; overlap: tokens that the step before "
        f"read, too; far: of {counted(report['far_tokens'], 'token')} that nearby ones do not tell",
        f"screened by: {report['guess']} input; {report['hardware']}",
    ]
    unsolved = [
        f"{kind} {full[kind]['right']:.0%}"
        for kind in ("needle", "extraction")
        if full[kind] is not None and full[kind]["right"] < _SOLVED
    ]
    if unsolved:
        lines.append(
            f"this model itself does not solve {', '.join(unsolved)}: these columns compare guesses"
        )
    return lines

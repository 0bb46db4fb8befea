"""Results of `bench decode`, as JSON and as a table; runs nothing, needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitpoint_cli.bench.shared.report import agreeing_share, commit, hardware, report_table

OURS = "splitpoint"
DEFAULT_ATTENTION = "sdpa"


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of each contender: `batch` prompts of `prompt` tokens, `new` greedy tokens each."""

    shape: str
    dtype: str
    batch: int
    prompt: int
    new: int
    repeats: int
    device: str
    threads: int
    seed: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run: times in seconds, and the tokens of each sequence.

    `first_token_seconds` is when the last sequence had its first token;
    `tokens_before` counts all tokens there were by then.
    """

    seconds: float
    first_token_seconds: float
    tokens_before: int
    tokens: tuple[tuple[int, ...], ...]

    @property
    def token_count(self) -> int:
        return sum(len(each) for each in self.tokens)

    @property
    def tokens_per_second(self) -> float:
        return self.token_count / self.seconds

    @property
    def decode_tokens_per_second(self) -> float:
        return (self.token_count - self.tokens_before) / (self.seconds - self.first_token_seconds)


def report_of(workload: Workload, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return the JSON object: what was measured, on what, and how it compares."""
    contenders: dict[str, dict[str, Any]] = {
        name: {
            "tokens_per_second": _median(run.tokens_per_second for run in each),
            "decode_tokens_per_second": _median(run.decode_tokens_per_second for run in each),
            "first_token_seconds": _median(run.first_token_seconds for run in each),
            "seconds": [round(run.seconds, 3) for run in each],
        }
        for name, each in runs.items()
    }
    peers = [name for name in contenders if name != OURS]
    # transformers picks SDPA by itself, although eager attention may be faster.
    usual = [name for name in peers if name.endswith(DEFAULT_ATTENTION)]
    fastest = _fastest(contenders, peers, "tokens_per_second")

    def ratio(key: str, among: list[str]) -> float | None:
        if not among:
            return None
        peer = contenders[_fastest(contenders, among, key)]
        return round(float(contenders[OURS][key]) / float(peer[key]), 3)

    return {
        "benchmark": "decode",
        **asdict(workload),
        "hardware": hardware(),
        "commit": commit(),
        "contenders": contenders,
        "fastest_peer": fastest,
        "ratio": ratio("tokens_per_second", peers),
        "decode_ratio": ratio("decode_tokens_per_second", peers),
        "ratio_to_default_attention": ratio("tokens_per_second", usual),
        "agreeing_token_share": round(
            agreeing_share(runs[OURS][0].tokens, runs[fastest][0].tokens), 4
        ),
        "tokens_agree": runs[OURS][0].tokens == runs[fastest][0].tokens,
    }


def table_of(report: Mapping[str, Any]) -> Table:
    table = report_table(
        f"{report['shape']} {report['dtype']}: {report['batch']} sequences, prompt "
        f"{report['prompt']}, {report['new']} new, {report['device']}, {report['threads']} threads",
        *("contender", "tokens/s", "decode tokens/s", "first tokens after"),
    )
    for name, facts in report["contenders"].items():
        table.add_row(
            name,
            f"{facts['tokens_per_second']:.1f}",
            f"{facts['decode_tokens_per_second']:.1f}",
            f"{facts['first_token_seconds']:.2f} s",
        )
    table.caption = (
        f"{report['ratio']:.2f} x {report['fastest_peer']} in all, "
        f"{report['decode_ratio']:.2f} x the fastest in decode; equal tokens: "
        f"{100 * report['agreeing_token_share']:.1f} %"
    )
    return table


def _fastest(contenders: Mapping[str, Mapping[str, Any]], among: list[str], key: str) -> str:
    return max(among, key=lambda name: float(contenders[name][key]))


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)

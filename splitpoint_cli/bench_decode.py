"""`splitpoint bench decode`: our worker against transformers' generate, same weights, one process.

This file is the command and the report; what is run is in decode_runs.py,
which is imported (with torch) only once the benchmark starts.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.shapes import BUILT_IN_SHAPES, DataType
from splitpoint_cli.output import err, out

if TYPE_CHECKING:
    from splitpoint_cli.decode_runs import Run

OURS = "splitpoint"
DEFAULT_ATTENTION = "sdpa"


@dataclass(frozen=True, slots=True)
class Workload:
    """What every contender does: `batch` prompts of `prompt` tokens, `new` greedy tokens each."""

    shape: str
    dtype: str
    batch: int
    prompt: int
    new: int
    repeats: int
    device: str
    threads: int
    seed: int


def decode(
    shape: Annotated[
        str, typer.Option(help="A built-in shape; its weights are random.", metavar="SHAPE")
    ] = "opt-125m",
    dtype: Annotated[
        str, typer.Option(help="Element type.", metavar="float32|bfloat16|float16")
    ] = "float32",
    batch: Annotated[int, typer.Option(help="Sequences at once.", min=1)] = 8,
    prompt: Annotated[int, typer.Option(help="Prompt tokens of each.", min=1)] = 512,
    new: Annotated[int, typer.Option(help="New tokens of each.", min=2)] = 128,
    repeats: Annotated[int, typer.Option(help="Timed runs of each contender.", min=1)] = 5,
    device: Annotated[
        str, typer.Option(help="Where all contenders run.", metavar="cpu|cuda|cuda:N")
    ] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads; 0: one per core.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of weights and prompts.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the JSON here.", metavar="FILE")
    ] = None,
) -> None:
    """Our worker, in process, against transformers' generate with both of its caches.

    Each of transformers' caches runs with both of its attention implementations, and
    the fastest of the four counts. Runs alternate; figures are medians. The last line
    is JSON.
    """
    if shape.lower() not in BUILT_IN_SHAPES:
        raise InvalidArgument(f"no shape is called {shape!r}", field="shape")
    if dtype not in {known.value for known in DataType}:
        raise InvalidArgument(f"no data type is called {dtype!r}", field="dtype")
    workload = Workload(
        shape=shape.lower(),
        dtype=dtype,
        batch=batch,
        prompt=prompt,
        new=new,
        repeats=repeats,
        device=device,
        threads=threads or len(os.sched_getaffinity(0)),
        seed=seed,
    )
    try:
        from splitpoint_cli.decode_runs import run_all
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"the benchmark needs {error.name}: install splitpoint[dev]", reason="NO_PEER"
        ) from error
    runs = run_all(workload, lambda line: err.print(line))
    report = report_of(workload, runs)
    out.print(table_of(report))
    text = json.dumps(report)
    if json_file is not None:
        json_file.write_text(text + "\n")
    print(text)


def report_of(workload: Workload, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """The JSON object: what was measured, on what, and how it compares."""
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
    # transformers picks SDPA by itself; that eager attention may be faster, one must know.
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
        "agreeing_token_share": round(_agreement(runs[OURS][0], runs[fastest][0]), 4),
        "tokens_agree": runs[OURS][0].tokens == runs[fastest][0].tokens,
    }


def table_of(report: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"{report['shape']} {report['dtype']}: {report['batch']} sequences, prompt "
        f"{report['prompt']}, {report['new']} new, {report['device']}, {report['threads']} threads"
    )
    table.add_column("contender")
    for heading in ("tokens/s", "decode tokens/s", "first tokens after"):
        table.add_column(heading, justify="right")
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


def hardware() -> str:
    """The processor and its cores, for people."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """Of the source tree; "unknown" when this is not one."""
    answer = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def _agreement(ours: Run, theirs: Run) -> float:
    """Share of tokens before the first difference of each sequence."""
    agreeing = total = 0
    for mine, other in zip(ours.tokens, theirs.tokens, strict=True):
        total += len(other)
        for left, right in zip(mine, other, strict=True):
            if left != right:
                break
            agreeing += 1
    return agreeing / total

"""Parts of all benchmarks' reports: the machine, tables, and the output of the result."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from splitpoint_cli.output import hand_over, print_table


def hardware() -> str:
    """Return the processor and its cores, for people."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str:
    """Return the commit of the source tree; "unknown" without one, or without git."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return "unknown"
    return answer.stdout.strip() if answer.returncode == 0 else "unknown"


def report_table(title: str, first: str, *others: str) -> Table:
    """Return an empty table: a column of names, then columns of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", title=title)
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table


def ratio_lines(ratios: Mapping[str, float]) -> list[str]:
    return [f"{name.replace('_', ' ')}: {value}" for name, value in ratios.items()]


def agreeing_share(mine: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens before each sequence's first difference.

    Of sequences of different lengths only the common part counts.
    """
    agreeing = total = 0
    for ours, theirs in zip(mine, reference, strict=True):
        pairs = list(zip(ours, theirs, strict=False))
        total += len(pairs)
        differing = (index for index, (one, other) in enumerate(pairs) if one != other)
        agreeing += next(differing, len(pairs))
    return agreeing / total


def hand_over_report(
    report: Mapping[str, Any],
    table_of: Callable[[Mapping[str, Any]], Table],
    *,
    as_json: bool,
    output: Path | None,
) -> None:
    """Write the report to `output`, if any; print it as one line of JSON or as a table."""
    hand_over(
        report,
        lambda: print_table(table_of(report)),
        as_json=as_json,
        output=output,
        indent=None,
    )

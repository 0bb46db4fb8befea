"""`splitpoint doctor`: what would keep `splitpoint up` from starting, or make it slow.

Starts nothing. Its options are those of `up`. The checks are in
`splitpoint_cli.checks`; here is the report.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from splitpoint_cli.options import configurable
from splitpoint_cli.output import AsJson, OutputFile, hand_over, out
from splitpoint_cli.stack.options import StackOptions

if TYPE_CHECKING:
    from splitpoint_cli.checks.finding import Finding


# Verdict: its sign, the same where a terminal knows no more than ASCII, its colour.
_SIGNS = {
    "ok": ("✓", "ok", "green"),
    "note": ("·", "note", "cyan"),
    "warning": ("!", "!", "yellow"),
    "problem": ("✗", "X", "bold red"),
}
_NAME_WIDTH = 18


@configurable
def doctor(
    options: StackOptions,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Check this host for a stack with these options, and say what to do about each finding.

    Starts nothing and changes nothing. Give it the options that `splitpoint up` is to get.
    Exit codes: 0 no problem, notes and warnings included; 1 a problem: the stack would not
    start, or something that was asked for would not work.
    """
    from splitpoint_cli.doctor.checklist import examine

    # Warnings of the shared code are findings here, and would be shown twice.
    logging.getLogger().addHandler(logging.NullHandler())
    findings = tuple(examine(options))
    hand_over(
        findings_json(findings),
        lambda: print_findings(out, findings),
        as_json=as_json,
        output=output,
    )
    if has_problem(findings):
        raise typer.Exit(1)


def has_problem(findings: Sequence[Finding]) -> bool:
    return any(finding.verdict == "problem" for finding in findings)


def findings_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Return the object that `--json` prints."""
    return {
        "ok": not has_problem(findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print a line for each finding, its advice below it, and a summary."""
    is_plain = console.encoding.lower() not in ("utf-8", "utf8")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, min_width=_NAME_WIDTH, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        fancy, ascii_sign, style = _SIGNS[finding.verdict]
        # Not parsed as markup: paths may hold brackets.
        told = Text(finding.found)
        if finding.advice:
            told.append(f"\n{'->' if is_plain else '→'} {finding.advice}", style=style)
        table.add_row(Text(ascii_sign if is_plain else fancy, style=style), finding.name, told)
    # Wrapped at the terminal's width, unlike the lines of other commands.
    console.print(table, soft_wrap=False)
    console.print(Text(summary(findings), style="bold"))


def summary(findings: Sequence[Finding]) -> str:
    """Return how many checks there were, and their results."""
    counts = Counter(finding.verdict.value for finding in findings)
    parts = [
        f"{counts[verdict]} {verdict}{'s' if counts[verdict] > 1 else ''}"
        for verdict in ("problem", "warning", "note")
        if counts[verdict]
    ]
    return f"{len(findings)} checks: {', '.join(parts) or 'all is well'}"

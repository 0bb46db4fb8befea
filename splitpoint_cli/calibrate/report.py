"""The table of `splitpoint calibrate`: how each layer's factors came out, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from splitpoint.config import counted
from splitpoint_cli.bench.shared.report import report_table
from splitpoint_cli.output import duration_text

_MIB = 1 << 20


def mean_of(layers: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean of one figure over the layers."""
    return sum(float(layer[name]) for layer in layers) / len(layers)


def table_of(report: Mapping[str, Any]) -> Table:
    """Return one row per layer, and their mean."""
    layers = report["layers"]
    table = report_table(
        f"{report['screen']} for {report['model']}: {counted(report['tokens'], 'token')}, rank "
        f"{report['rank']}",
        "layer",
        *("loss at start", "loss at end", "epochs"),
        *("recall, closed form", "recall", "weight, closed form", "weight", "int8 ranks"),
    )
    for layer in layers:
        losses = layer["losses"]
        table.add_row(
            str(layer["layer"]),
            *((f"{losses[0]:.4g}", f"{min(losses):.4g}") if losses else ("-", "-")),
            str(len(losses) - 1) if losses else "-",
            *(f"{layer[name]:.3f}" for name in _SHARES),
            f"{layer['int8_agreement']:.4f}",
        )
    table.add_row(
        *("mean", "", "", ""),
        *(f"{mean_of(layers, name):.3f}" for name in _SHARES),
        f"{mean_of(layers, 'int8_agreement'):.4f}",
    )
    table.caption = (
        "recall, weight: of a query's true top tenth of the tokens, and of its attention, in the "
        "guessed top tenth; int8 ranks: Spearman correlation with unrounded scores\n"
        f"{duration_text(report['seconds'])}, {report['peak_memory_bytes'] / _MIB:,.0f} MiB at "
        f"most; {report['path']}"
    )
    return table


_SHARES = ("closed_recall", "recall", "closed_weight", "weight")

"""MAPLE's Table 1 and roofline beside ours, computed: docs/papers/maple.md holds them.

    python -m benchmarks.maple_tables [--json] [--output FILE]

128 sequences of 8,192 tokens, of which a step reads a quarter. SparQ keeps K twice and reads 2 of
128 columns of one copy over the link to rank all tokens, as the paper's figures imply. Low-rank
keys lie on the device. The device is the built-in A100: rates assumed from data sheets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import finish, parser_of, table
from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.residency.selecting import kept_bytes, wanted_rows
from splitpoint.selection import Selection
from splitpoint.shapes import BUILT_IN_SHAPES, ModelShape

TOKENS = 128 * 8192
READ = 0.25
SPARQ_SHARE = 1 / 64
PROFILE = BUILT_IN_PROFILES["a100-80"]
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class TableRow:
    """One method for one model.

    Attributes:
        footprint, load: bytes of the cache in all memories, and over the link in a step.
        screened: bytes that a step reads to rank all tokens; on_device: where they lie.
        flop_per_byte: FLOP for each of them.
        paper: footprint and load that the paper prints, GB; empty: none.
    """

    name: str
    footprint: float
    load: float
    screened: float = 0.0
    on_device: bool = False
    flop_per_byte: float = 1.0
    paper: tuple[str, str] = ("", "")

    @property
    def bandwidth(self) -> float:
        """Bytes per second at which it ranks."""
        if self.on_device:
            return 1 / PROFILE.memory_seconds_per_byte
        return PROFILE.link_bytes_per_second


def rows_of(shape: ModelShape, paper: Sequence[tuple[str, str]]) -> Iterator[TableRow]:
    """Yield the paper's three methods, and ours at the default and the paper's width."""
    dense = float(TOKENS * shape.kv_bytes_per_token)
    read = wanted_rows(Selection.parsed(f"maple:{READ}"), TOKENS) / TOKENS * dense
    sparq = dense / 2 * SPARQ_SHARE
    yield TableRow("dense", dense, dense, paper=paper[0])
    yield TableRow("SparQ", 1.5 * dense, read + sparq, sparq, paper=paper[1])
    # A quarter of the hidden size in int8, for all heads together.
    kept = float(TOKENS * shape.layer_count * shape.hidden_size // 4)
    yield TableRow("MAPLE", dense + kept, read, kept, True, 2.0, paper[2])
    for text in ("maple:0.25,columns=32", "maple:0.25"):
        kept = float(TOKENS * shape.layer_count * kept_bytes(shape, Selection.parsed(text)))
        # Scales are read, too, and multiplied once a row.
        yield TableRow(f"ours, `{text}`", dense + kept, read, kept, True, 2.0)


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    papers = {
        "llama-2-7b": (("512", "512"), ("768", "132"), ("543", "128")),
        "llama-2-13b": (("1000", "1000"), ("1500", "256.25"), ("1062.5", "250")),
    }
    for name, paper in papers.items():
        shape = BUILT_IN_SHAPES[name]
        dense = TOKENS * shape.kv_bytes_per_token
        for row in rows_of(shape, paper):
            footprint, load = (
                f"{size / _GIB:,.1f}" + (f" ({printed})" if printed else "")
                for size, printed in zip((row.footprint, row.load), row.paper, strict=True)
            )
            ranked = ("-", "-")
            if row.screened:
                attainable = min(
                    PROFILE.rebuild_flops_per_second, row.flop_per_byte * row.bandwidth
                )
                ranked = (
                    f"{attainable / 1e12:.3g}",
                    f"{1e3 * row.screened / row.bandwidth:,.0f}",
                )
            yield (
                *(shape.name, row.name, footprint, f"+{100 * (row.footprint / dense - 1):.1f} %"),
                *(load, f"−{100 * (1 - row.load / dense):.1f} %", *ranked),
            )


def show(result: Mapping[str, Any]) -> None:
    print("\n".join(table(result["head"], result["rows"])))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser_of(__doc__).parse_args(arguments)
    head = ("model", "method", "footprint, GiB", "overhead", "load a step, GiB", "reduction")
    ranking = ("TFLOP/s of ranking, at most", "ranking, ms")
    finish(options, {"head": [*head, *ranking], "rows": [*rows()]}, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())

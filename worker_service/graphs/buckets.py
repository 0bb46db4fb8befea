"""The few sizes to which a decoding step is padded, so that few graphs serve all steps. Pure.

A graph has fixed grids: a number of query rows, and one of attention's spans (span_attention.py).
Both are rounded up. A padding span has no pages, and a padding row attends a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from worker_service.device.upload import ALIGNMENT
from worker_service.kernels.units import unit_count, units_per_page
from worker_service.model.span_attention import units_per_span

# Rows are powers of two up to this many, and multiples of it above.
_ROW_STEP = 8
# Above, a step is a quarter of the power of two below: at most a quarter of the rows is padding.
_STEPS_PER_DOUBLING = 4
# Sequences of up to this many spans (1,024 tokens) share the graphs of their number of rows.
_LEAST_SPANS_PER_ROW = 4
_ROW_TABLES = 8
_TABLES_PER_WINDOW = 6


@dataclass(frozen=True, slots=True, order=True)
class GraphKey:
    """The size of a graph: query rows, and spans of a layer without a window."""

    rows: int
    spans: int


def row_bucket(count: int) -> int:
    """Return the rows of the smallest graph for `count` (at least 1): 1, 2, 4, 8, 16, 24, 32, 40.

    Counts above 32 are rounded up to a quarter of the power of two below them.
    """
    if count <= _ROW_STEP:
        return 1 << (count - 1).bit_length()
    step = max(_ROW_STEP, (1 << (count.bit_length() - 1)) // _STEPS_PER_DOUBLING)
    return -(-count // step) * step


def span_bucket(spans: int, rows: int) -> int:
    """Return the spans of the smallest graph of `rows` for so many spans: a power of two."""
    return 1 << (max(spans, _LEAST_SPANS_PER_ROW * rows, 1) - 1).bit_length()


def span_count(lengths: Iterable[int], chunk_tokens: int) -> int:
    """Return the spans of queries that see so many tokens each, in pages of `chunk_tokens`."""
    per_span = units_per_span(chunk_tokens)
    return sum(-(-unit_count(length, chunk_tokens) // per_span) for length in lengths)


def spans_by_window(
    key: GraphKey, windows: Iterable[int | None], chunk_tokens: int
) -> dict[int | None, int]:
    """Return the padded spans of the layers of each window.

    A query sees at most `ceil((window - 1) / chunk_tokens) + 1` pages of a window.
    """
    spans: dict[int | None, int] = {}
    for window in set(windows):
        spans[window] = key.spans
        if window is not None:
            pages = -(-(window - 1) // chunk_tokens) + 1
            widest = -(-pages * units_per_page(chunk_tokens) // units_per_span(chunk_tokens))
            spans[window] = min(key.spans, key.rows * widest)
    return spans


def table_bytes(key: GraphKey, spans: Mapping[int | None, int], chunk_tokens: int) -> int:
    """Return the bytes of a step's padded tables, each one aligned."""
    size = _ROW_TABLES * (8 * key.rows + ALIGNMENT)
    for count in spans.values():
        entries = 3 * count * units_per_span(chunk_tokens) + 2 * count + key.rows + 2
        size += 4 * entries + _TABLES_PER_WINDOW * ALIGNMENT
    return size

"""Counts of rows at which a product of torch computes equal bits, in use by this process.

torch's and oneDNN's kernels add in an order that depends on how many rows there are, at few of them
above all. Where results must not depend on it, rows are computed in blocks of counts that agree,
padded with zeros (profiling/agreeing_rows.py finds them). Panels need none of this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

# Padding that costs less than another block, which reads the weights again.
_PADDING = 0.25

# Ascending counts by (out_features, in_features).
RowCounts = Mapping[tuple[int, int], Sequence[int]]

_in_use: dict[tuple[int, int], Sequence[int]] = {}


def in_use() -> RowCounts:
    """Return the counts of all shapes in use."""
    return dict(_in_use)


def use_row_counts(counts: RowCounts) -> None:
    """Compute products with matrices of these shapes at these counts only, from now on."""
    _in_use.clear()
    _in_use.update(counts)


def row_counts(out_features: int, in_features: int) -> Sequence[int] | None:
    """Return the counts for this shape; None if any will do."""
    return _in_use.get((out_features, in_features)) if _in_use else None


def blocks(count: int, counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the rows of each block, and the count to which it is padded, one of `counts`.

    No rows are one block, too.
    """
    if not count:
        yield 0, counts[0]
    while count:
        above = next((each for each in counts if each >= count), None)
        below = next((each for each in reversed(counts) if each <= count), None)
        if above is not None and (below is None or above <= (1 + _PADDING) * count):
            yield count, above
            return
        size = below or counts[0]
        yield size, size
        count -= size

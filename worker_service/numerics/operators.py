"""One operator under test: its rows are computed with different rows beside them.

This module knows neither models nor attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

# Rows of one call. Kernels change at powers of two and at the sizes of their blocks.
COUNTS = (1, 2, 3, 5, 8, 16, 17, 33, 64, 512)
# Rows that are compared: one more, so that a call with 512 of them is another call.
MOST_ROWS = COUNTS[-1] + 1
# Rows that are also computed in the opposite order.
_REVERSED = 17
# Where the rows of a call begin: spread over all rows.
_STRIDE = 38
# Rows of the calls of one count in all, unless one call has more.
_FEW_ROWS = 16

Result = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """A function of rows, each result of which should depend on its own row alone.

    Attributes:
        name: for people, such as "linear gate [2816, 1024]".
        inputs: tensors with equally many rows, dimension 0; at most MOST_ROWS.
        call: takes equally many rows of each, and returns as many in each of its results.
        is_ordered: it takes neighbours in their order only.
        most_calls: with the same few rows; fewer where a call is expensive.
    """

    name: str
    inputs: tuple[torch.Tensor, ...]
    call: Callable[..., Result]
    is_ordered: bool = False
    most_calls: int = 8

    @property
    def row_count(self) -> int:
        return len(self.inputs[0])


def first_difference(operators: Iterable[Operator]) -> str | None:
    """Return the first operator that is not invariant, and how that shows; None if all are."""
    for operator in operators:
        found = difference(operator)
        if found is not None:
            return f"{operator.name} {found}"
    return None


def difference(operator: Operator) -> str | None:
    """Return how results of the operator depend on other rows; None if no bit of them does."""
    count = operator.row_count
    whole = _called(operator, operator.inputs)
    for rows in _parts(count, operator.most_calls):
        part = _called(operator, tuple(each[rows] for each in operator.inputs))
        place = _first_unequal(part, tuple(each[rows] for each in whole))
        if place is not None:
            size = rows.stop - rows.start
            return f"computes row {rows.start + place} of {count} otherwise in a call of {size}"
    if operator.is_ordered:
        return None
    rows = slice(0, min(count, _REVERSED))
    part = _called(operator, tuple(each[rows].flip(0) for each in operator.inputs))
    place = _first_unequal(part, tuple(each[rows].flip(0) for each in whole))
    if place is not None:
        return f"computes row {rows.stop - 1 - place} otherwise if the rows are reversed"
    return None


def _parts(count: int, most_calls: int) -> Iterator[slice]:
    """Yield the rows of each call: of every count below the whole, at changing places.

    Few rows are computed in several calls: rounding to a half-precision type hides most
    differences.
    """
    for index, size in enumerate(COUNTS):
        calls = max(1, min(most_calls, _FEW_ROWS // size)) if size < count else 0
        for call in range(calls):
            first = (1 + index * _STRIDE + call * size) % (count - size + 1)
            yield slice(first, first + size)


def _called(operator: Operator, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    result = operator.call(*inputs)
    # Some operators return views of memory that the next call overwrites.
    return tuple(
        each.clone() for each in ((result,) if isinstance(result, torch.Tensor) else result)
    )


def _first_unequal(
    found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]
) -> int | None:
    """Return the first row in which any bit differs; None if all are equal."""
    for mine, theirs in zip(found, expected, strict=True):
        unequal = (_bits(mine) != _bits(theirs)).flatten(1).any(dim=1)
        if bool(unequal.any()):
            return int(unequal.to(torch.uint8).argmax())
    return None


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element: NaN equals itself, and 0 differs from -0."""
    return values.contiguous().unsqueeze(-1).view(torch.uint8)

"""Records that a screen keeps: equal ones, one behind the other, with a row of each field.

They lie in memory of their own, or in given blocks; a block holds as many as fit, field by field.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from splitpoint.errors import ResourceExhausted

# One record or several of each field: `[T, ...]`.
Fields = tuple[torch.Tensor, ...]


class Records:
    """Growing records. Without given blocks memory doubles when it is full."""

    def __init__(self, blocks: Sequence[torch.Tensor] | None = None) -> None:
        """`blocks`: bytes, `[n]` each, all of one size; None: memory of its own.

        Fields come in the order of their element sizes, largest first, so that each is aligned.
        """
        self._given = blocks
        # Fields `[records of the block, ...]` of the blocks in use.
        self._blocks: list[Fields] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """Bytes of the records so far."""
        if not self._blocks:
            return 0
        return self._count * sum(field[0].nbytes for field in self._blocks[0])

    def append(self, *fields: torch.Tensor) -> None:
        """Add records, as one `[T, ...]` of each field.

        Raises ResourceExhausted if the given blocks are full.
        """
        done, count = 0, len(fields[0])
        while done < count:
            block, first = self._place(fields)
            last = min(count - done, len(block[0]) - first)
            for kept, field in zip(block, fields, strict=True):
                kept[first : first + last] = field[done : done + last]
            done += last
            self._count += last

    def field(self, number: int) -> torch.Tensor:
        """Return a field of all records, `[S, ...]`."""
        return self.part(number, 0, self._count)

    def part(self, number: int, first: int, last: int) -> torch.Tensor:
        """Return a field of records [first, last), a copy if they lie in several blocks."""
        if first >= last:
            return torch.empty(0)
        size = len(self._blocks[0][0])
        pieces = [
            self._blocks[index][number][max(0, first - index * size) : last - index * size]
            for index in range(first // size, -(-last // size))
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def keep(self, places: torch.Tensor) -> None:
        """Leave out all records but these, of fields `[T, n_kv, ...]`; order and number change.

        Args:
            places: int64 `[n_kv, n]`: each head keeps its own parts of records.
        """
        fields = []
        for number in range(len(self._blocks[0])):
            field = self.field(number)
            index = places.t().view(*reversed(places.shape), *(1,) * (field.dim() - 2))
            fields.append(field.gather(0, index.expand(-1, -1, *field.shape[2:])))
        self._blocks, self._count = [], 0
        self.append(*fields)

    def overwrite(self, places: npt.NDArray[np.int64], *fields: torch.Tensor) -> None:
        """Write the parts of record t, of fields `[T, n_kv, ...]`, over others.

        Args:
            places: `[n_kv, T]`: the record whose part each head's goes to.
        """
        size = len(self._blocks[0][0])
        for number, block in enumerate(self._blocks):
            heads, sources = np.nonzero(places // size == number)
            targets = places[heads, sources] % size
            index = [torch.from_numpy(each) for each in (targets, heads, sources)]
            target, head, source = (each.to(block[0].device) for each in index)
            for kept, field in zip(block, fields, strict=True):
                kept[target, head] = field[source, head]

    def _place(self, like: Fields) -> tuple[Fields, int]:
        """Return a block with room, and its first free record."""
        if self._given is None:
            return self._own(like), self._count
        full = sum(len(block[0]) for block in self._blocks)
        if self._count == full:
            if len(self._blocks) == len(self._given):
                raise ResourceExhausted("the pages of a screen are full", reason="NO_PAGE")
            self._blocks.append(_cut(self._given[len(self._blocks)], like))
            return self._blocks[-1], 0
        return self._blocks[-1], self._count - full + len(self._blocks[-1][0])

    def _own(self, like: Fields) -> Fields:
        """Return memory with room for one record more at least, with all there are."""
        if not self._blocks or self._count == len(self._blocks[0][0]):
            room = max(len(like[0]), 2 * self._count)
            larger = tuple(field.new_empty((room, *field.shape[1:])) for field in like)
            if self._blocks:
                for kept, field in zip(larger, self._blocks[0], strict=True):
                    kept[: self._count] = field
            self._blocks = [larger]
        return self._blocks[0]


def _cut(block: torch.Tensor, like: Fields) -> Fields:
    """Return views of a block's bytes for as many records as fit."""
    sizes = [field.element_size() * math.prod(field.shape[1:]) for field in like]
    room = len(block) // sum(sizes)
    cut, first = [], 0
    for field, size in zip(like, sizes, strict=True):
        of_field = block[first : first + room * size].view(field.dtype)
        cut.append(of_field.view(room, *field.shape[1:]))
        first += room * size
    return tuple(cut)

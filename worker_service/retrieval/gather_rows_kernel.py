"""The Triton kernel that copies single rows by index; imported only where Triton is wanted.

It reads host memory that the driver registered, through its own address. It copies words and knows
no planes.
"""

from __future__ import annotations

import triton
import triton.language as tl


# A number that differs from step to step must not select another compiled kernel.
@triton.jit(do_not_specialize=["sources", "targets", "count", "groups"])
def gather_rows_by_index(
    target,
    source,
    sources,
    targets,
    count,
    groups,
    row_words: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Do `target[targets[i]] = source[sources[i]]` for rows of `row_words` words each.

    Where `targets[i]` is below 0, neither is touched: what is on the device already must not
    cross the link. A fixed number of programs copies groups of rows in turn, since a transfer must
    leave most of the device to the computation beside it.
    """
    number = tl.program_id(0)
    programs = tl.num_programs(0)
    words = tl.arange(0, block)
    while number < groups:
        index = number * rows + tl.arange(0, rows)
        inside = index < count
        # int64: a plane is larger than 2**31 words.
        place = tl.load(targets + index, mask=inside, other=-1).to(tl.int64)
        row = tl.load(sources + index, mask=inside, other=0).to(tl.int64)
        copied = (inside & (place >= 0))[:, None] & (words < row_words)[None, :]
        moved = tl.load(source + row[:, None] * row_words + words[None, :], mask=copied)
        tl.store(target + place[:, None] * row_words + words[None, :], moved, mask=copied)
        number += programs
